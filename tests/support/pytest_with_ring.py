"""Run pytest with another build of the extension: ``python -P pytest_with_ring.py EXTENSION ARGUMENTS...``.

EXTENSION is a file, or ``none`` for a machine on which it could not be built.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


class WithoutRings:
    """Leaves out what asks for a ring by name."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if _wants_ring(item)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _wants_ring(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("transport") == "ring" or "ring_workshop" in item.fixturenames


def main() -> int:
    extension, *arguments = sys.argv[1:]
    plugins: list[object] = []
    sys.path.insert(0, str(Path(__file__).parent))
    if extension == "none":
        sys.modules["ringserve.shm._ring"] = None  # type: ignore[assignment]  # how an import is made to fail
        plugins.append(WithoutRings())
    else:
        from ring_builds import load

        module = load("ringserve.shm._ring", Path(extension))
        sys.modules["ringserve.shm._ring"] = module
        sys.modules["ringserve.shm"]._ring = module  # type: ignore[attr-defined]  # as the import system does
    return int(pytest.main(arguments, plugins))


if __name__ == "__main__":
    sys.exit(main())
