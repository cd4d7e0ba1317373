"""Fixtures that several test files use."""

from collections.abc import Callable, Iterator

import pytest

from qknorm import adapters, register_norm


@pytest.fixture
def registered() -> Iterator[Callable[[type, adapters.Adapter], None]]:
    """``register_norm`` for one test."""
    before = dict(adapters._REGISTERED)
    yield register_norm
    adapters._REGISTERED.clear()
    adapters._REGISTERED.update(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test is a failure, unless it waits for a GPU: what is not run proves nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in skipped]
    if any("no GPU" not in reason for reason in reasons) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
