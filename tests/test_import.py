"""What importing the package loads, and what its folders do to others."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import qknorm

ROOT = Path(__file__).parent.parent


def run(code: str, **kwargs: object) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, **kwargs
    ).stdout.strip()


def test_import_loads_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import qknorm; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = set(eval(run(code)))
    assert "qknorm" in loaded
    assert loaded <= {"qknorm", "typing", "dataclasses", "collections"} | set(sys.stdlib_module_names)
    code = "import sys, qknorm; print([m for m in ('triton', 'diffusers', 'flash_attn', 'torch._inductor.lowering', "
    code += "'torch.distributed.tensor', 'rich', 'matplotlib', 'qknorm_kernels') if m in sys.modules])"
    assert run(code) == run("import sys, torch; print([m for m in ('triton',) if m in sys.modules])")


def test_every_public_name_is_documented():
    for name in qknorm.__all__:
        assert getattr(qknorm, name).__doc__, name


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_the_kernels_folder_does_not_shadow_the_kernels_package(library, tmp_path):
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import kernels; from kernels import get_kernel; print(kernels.__file__)"
    kernels = Path(run(code, cwd=ROOT))
    assert ROOT not in kernels.parents
    code = f"import {library}.utils.import_utils as u; print(u._is_package_available('kernels'))"
    assert run(code, cwd=ROOT) == run(code, cwd=tmp_path)
    assert "True" in run(code, cwd=ROOT)


def test_the_inner_packages_are_importable_under_their_own_names():
    for name in ("qknorm_kernels", "qknorm_benchmarks"):
        assert importlib.import_module(name).__doc__


def test_the_package_is_typed():
    assert (Path(qknorm.__file__).parent / "py.typed").exists()
