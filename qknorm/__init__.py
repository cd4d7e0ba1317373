"""Dtype-preserving q/k normalisation for diffusion transformers."""

from .adapters import register_norm
from .audit import audit_qk_dtypes
from .autocast import emulate_cuda_autocast
from .functional import backend_for, qk_rms_norm, qk_rms_norm_rope, rms_norm
from .module import QKRMSNorm
from .processors import fuse_qk_norm_rope, unfuse_qk_norm_rope
from .replace import find_qk_norms, replace_qk_norms, restore_qk_norms

__all__ = [
    "QKRMSNorm",
    "audit_qk_dtypes",
    "backend_for",
    "emulate_cuda_autocast",
    "find_qk_norms",
    "fuse_qk_norm_rope",
    "qk_rms_norm",
    "qk_rms_norm_rope",
    "register_norm",
    "replace_qk_norms",
    "restore_qk_norms",
    "rms_norm",
    "unfuse_qk_norm_rope",
]
