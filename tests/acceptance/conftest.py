"""flash-attn-4 reads its target when it is imported: a Hopper GPU, which nobody needs to have."""

import importlib.metadata
import os

import pytest

os.environ |= {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    # What these tests count are compilations, and a kernel that comes from a disk is none.
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    "CUTE_DSL_DISABLE_FILE_CACHING": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flash_attn_4: needs flash-attn-4, and no GPU")
    # flash-attn-4 says all three of its own code, when it is imported or compiles for a fake tensor.
    for theirs in ":Argument aux_data", ":Accessing the data pointer of FakeTensor", "::DeprecationWarning":
        config.addinivalue_line("filterwarnings", f"ignore{theirs}")
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        message = 'flash-attn-4 is not installed: pip install -e ".[diffusers,flash-attn-4]" pytest'
        raise pytest.UsageError(message) from None
