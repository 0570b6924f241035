"""What all tests share: a skip needs an allowed reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reference import Reference

ALLOWED_SKIPS = (
    "needs a CUDA device",
    "needs two processors",
    "the layout of shared memory is the ring's alone",
)
"""What a skip's reason may begin with: things that a machine can lack, not things that are left to do."""


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """What transformers makes of the twenty prompts, computed once in each run that asks for it."""
    # Imported here: most runs of a few tests need neither torch nor transformers.
    from reference import default_references

    return default_references()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip for any other reason fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "?"
        if not reason.startswith(ALLOWED_SKIPS):
            reporter.write_line(f"skipped without an allowed reason: {report.nodeid}: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
