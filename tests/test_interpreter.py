"""Runs ``tests/interpreter``, which needs a process of its own, and asserts that all of it passed."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_of_the_interpreted_kernels_passes():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # its report would go over this run's
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(TESTS / "interpreter")]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    output = done.stdout[-20000:] + done.stderr[-2000:]
    collected = re.search(r"^collected (\d+) items$", done.stdout, re.MULTILINE)
    assert collected, output
    assert int(collected[1]) > 0
    assert re.search(rf"^=+ {collected[1]} passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE), output
    assert done.returncode == 0, output


def test_the_interpreted_tests_refuse_a_process_that_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", str(TESTS / "interpreter")]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1 python -m pytest tests/interpreter" in done.stdout + done.stderr
