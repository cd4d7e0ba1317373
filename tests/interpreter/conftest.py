"""Kernels under Triton's interpreter, which is chosen when triton is imported: a process of their own."""

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("these tests interpret the kernels: TRITON_INTERPRET=1 python -m pytest tests/interpreter")

from qknorm_kernels import rms_norm as kernels


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full products in place of pairwise covers (hours)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = metafunc.module.cases(metafunc.config.getoption("--full"))
        metafunc.parametrize("case", cases, ids=[" ".join(map(str, case.values())) for case in cases])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No plan of another test, and one thread: on tensors this small a second one only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels._plans.clear()
    yield
    kernels._plans.clear()
    torch.set_num_threads(before)
