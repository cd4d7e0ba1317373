"""Packaging.

``kernels/`` has no ``__init__.py``: one would shadow Hugging Face's ``kernels`` package for whoever works here.
"""

from pathlib import Path

from setuptools import setup

DIFFUSERS = ["diffusers>=0.42.1", "transformers", "accelerate"]
TRITON = [
    "triton>=3.6; sys_platform == 'linux'",
    "triton-windows>=3.6; sys_platform == 'win32'",
]
CLI = ["rich>=13", "matplotlib>=3.8"]
TEST = [
    *DIFFUSERS,
    *CLI,
    *TRITON,
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "peft>=0.17",
    "kernels>=0.11",
    "expecttest",
    "onnxscript>=0.5",
]

setup(
    name="qknorm",
    version="0.1.0",
    description="Dtype-preserving q/k normalisation for diffusion transformers",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["qknorm", "qknorm.processors", "qknorm_kernels", "qknorm_benchmarks"],
    package_dir={"qknorm_kernels": "kernels/qknorm_kernels", "qknorm_benchmarks": "kernels/benchmarks"},
    package_data={"qknorm": ["py.typed"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "diffusers": DIFFUSERS,
        "triton": TRITON,
        "flash-attn": ["flash-attn>=2.6.3,<3"],
        # A pre-release, so what it compiles with is pinned. quack-kernels imports triton without asking for it.
        "flash-attn-4": [
            "flash-attn-4==4.0.0b36",
            "nvidia-cutlass-dsl==4.8.1",
            "quack-kernels==0.6.5",
            "apache-tvm-ffi==0.1.15.post2",
            "torch-c-dlpack-ext==0.1.5",
            *TRITON,
        ],
        "demo": [*DIFFUSERS, *CLI],
        "test": TEST,
        "dev": [*TEST, "ruff>=0.14", "mypy>=1.18", "pre-commit>=4", "build>=1.2"],
    },
    entry_points={"console_scripts": ["qknorm = qknorm.cli:main"]},
)
