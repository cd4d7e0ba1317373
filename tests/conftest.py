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
