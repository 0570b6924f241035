"""A model hub on this machine: the few calls that downloading a repository makes."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class FakeHub:
    """Serves ``directory`` as the repository ``repository`` at revision "main"; everything else is unknown."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.repository = repository
        self.paths: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                hub.paths.append(self.path)
                path = self.path.partition("?")[0]
                if path in (f"/api/models/{repository}", f"/api/models/{repository}/revision/main"):
                    names = [{"rfilename": file.name} for file in sorted(directory.iterdir())]
                    self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": names}).encode(), with_body)
                elif path == f"/api/models/{repository}/tree/{COMMIT}":
                    entries = [
                        {
                            "type": "file",
                            "path": file.name,
                            "size": file.stat().st_size,
                            "oid": _digest(file.read_bytes()),
                        }
                        for file in sorted(directory.iterdir())
                    ]
                    self._send(json.dumps(entries).encode(), with_body)
                elif path.startswith(prefix := f"/{repository}/resolve/{COMMIT}/"):
                    self._send((directory / path.removeprefix(prefix)).read_bytes(), with_body)
                else:
                    known = f"/{repository}/" in path or path.startswith(f"/api/models/{repository}/")
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def _send(self, content: bytes, with_body: bool) -> None:
                self.send_response(200)
                self.send_header("ETag", f'"{_digest(content)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
