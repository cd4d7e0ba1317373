"""Fixtures that several test files use."""

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from qknorm import adapters, register_norm

# On a machine with a GPU and little else, `pytest -m gpu` must collect: the other files import these at their top.
if any(importlib.util.find_spec(name) is None for name in ("diffusers", "hypothesis", "peft")):
    collect_ignore_glob = ["test_[!g]*.py", "walk_*.py"]

# Several processes of pytest-xdist with all threads each would wait for one another.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of small tensors: on a busy machine a second thread costs milliseconds an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
