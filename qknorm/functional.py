"""``rms_norm`` and ``qk_rms_norm``: check the arguments, choose the implementation, call it.

Imports torch, ``reference`` and ``ops``.
"""

import torch
from torch import Tensor

from . import ops, reference

ROUNDINGS = ("once", "weight", "input")
BACKENDS = ("auto", "triton", "torch")
_WANTED = "bfloat16, float16, float32 or float64"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    unit_offset: bool = False,
    rounding: str = "once",
    backend: str = "auto",
) -> Tensor:
    """Root mean square norm over the last dimension, in the dtype of ``x`` under any autocast and any weight dtype.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64, 1-D or more, any strides.
        weight: [D], any of these dtypes, on the device of ``x``; None for no weight.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for float64 input).
        unit_offset: multiply by ``1 + weight`` (the sum taken in the weight's dtype), for zero-centred weights.
        rounding: where the class that is mirrored rounds. "once": only at the end (``torch.nn.RMSNorm``). "weight": to
            a half-precision weight's dtype before and after the scale (diffusers ``RMSNorm``). "input": to ``x.dtype``
            before the scale (BFL, llama). Float64 input is never rounded.
        backend: "torch", "triton", or "auto", see ``backend_for``.

    Returns:
        [..., D], ``x.dtype``, fresh and contiguous. Sums and products are taken in float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what was wanted.
        RuntimeError: ``backend="triton"`` where it cannot run.

    Source: https://arxiv.org/abs/1910.07467
    """
    check_tensors(x, weight)
    check_options(rounding, backend)
    if eps is None:
        eps = reference.default_eps(x)
    if torch.compiler.is_compiling() or not ops.is_plain(x, weight):
        return _dispatched(x, weight, eps, unit_offset, rounding, backend)
    if backend == "triton":
        backend_for(x, backend)
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return ops.EagerRMSNorm.apply(x, weight, eps, unit_offset, rounding, backend)
    return ops.launch_forward(x, weight, eps, unit_offset, rounding, backend, save=False)[0]


def qk_rms_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float | None = None,
    *,
    unit_offset: bool = False,
    rounding: str = "once",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of query and key, each with its own shape, strides, head count and weight.

    Args:
        q, k: [..., D], of the same dtype, device and D; the rest of their shapes may differ (text streams, GQA).
        q_weight, k_weight: [D] or None.

    The other arguments, the result and the errors are those of ``rms_norm``.
    """
    if q.dtype is not k.dtype or q.device != k.device:
        what = "dtype" if q.dtype is not k.dtype else "device"
        raise TypeError(
            f"q and k must have one {what}, but q has {getattr(q, what)} and k has {getattr(k, what)}; "
            "cast or move one of them, or call rms_norm twice"
        )
    if q.shape[-1:] != k.shape[-1:]:
        raise ValueError(f"q and k must have one last dimension, but q is {_shape(q)} and k is {_shape(k)}")
    if not torch.compiler.is_compiling() and ops.is_plain(q, k, q_weight, k_weight):
        kernels = ops.kernels_for(q, backend)
        if kernels is not None:
            check_tensors(q, q_weight, "q")
            check_tensors(k, k_weight, "k")
            check_options(rounding, backend)
            if eps is None:
                eps = reference.default_eps(q)
            if torch.is_grad_enabled() and (
                q.requires_grad
                or k.requires_grad
                or (q_weight is not None and q_weight.requires_grad)
                or (k_weight is not None and k_weight.requires_grad)
            ):
                return ops.EagerQKRMSNorm.apply(q, k, q_weight, k_weight, eps, unit_offset, rounding)
            results = kernels.forward_pair((q, k), (q_weight, k_weight), eps, unit_offset, rounding, False)
            return results[0][0], results[1][0]
    return (
        rms_norm(q, q_weight, eps, unit_offset=unit_offset, rounding=rounding, backend=backend),
        rms_norm(k, k_weight, eps, unit_offset=unit_offset, rounding=rounding, backend=backend),
    )


def backend_for(x: Tensor, backend: str = "auto") -> str:
    """Which implementation a tensor takes: "triton" or "torch".

    "auto" is Triton's kernels where they can run: bfloat16, float16 or float32 on a CUDA or ROCm GPU (bfloat16 from
    compute capability 8.0, the others from 7.5), with triton installed and a last dimension of at most 8192. Elsewhere
    it is plain torch, with a warning, once for each reason, for a tensor on an accelerator. ``torch.compile`` fuses the
    norm with its neighbours instead, unless ``backend="triton"``.

    Raises:
        RuntimeError: ``backend="triton"`` where it cannot run; the message says why.
    """
    check_options("once", backend)
    if backend == "torch":
        return "torch"
    obstacle = ops.triton_obstacle(x.device, x.dtype, x.shape[-1] if x.dim() else 1)
    if obstacle is not None and backend == "triton":
        raise RuntimeError(f"backend='triton' cannot run: {obstacle}; use backend='auto' or 'torch'")
    return "torch" if obstacle else "triton"


def _dispatched(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, rounding: str, backend: str) -> Tensor:
    """The routes that are not plain eager: composite torch for exporters, the operator for everything else."""
    compiling = torch.compiler.is_compiling()
    plain_torch = backend == "torch" and not x.is_cpu  # the operator's own implementation may be the Triton kernels
    if torch.onnx.is_in_onnx_export() or (not compiling and (ops.needs_composite() or plain_torch)):
        return ops.composite(x, weight, eps, unit_offset, rounding)[0]
    op = torch.ops.qknorm.rms_norm_opaque if backend == "triton" else torch.ops.qknorm.rms_norm
    return op(x, weight, eps, unit_offset, rounding, ops.REVISION)[0]


def check_tensors(x: Tensor, weight: Tensor | None, name: str = "x") -> None:
    """Raise TypeError or ValueError where ``x`` and ``weight`` are not what ``rms_norm`` takes."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be {_WANTED}, but is {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, but is a scalar tensor")
    if weight is None:
        return
    weight_name = "weight" if name == "x" else f"{name}_weight"
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{weight_name} must be {_WANTED}, but is {weight.dtype} "
            f"({type(weight).__name__} of shape {_shape(weight)}); dequantise a quantised weight first"
        )
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} must have shape [{x.shape[-1]}], {name}'s last dimension, but has {_shape(weight)}"
        )
    if weight.device != x.device:
        raise ValueError(f"{weight_name} must be on {x.device}, the device of {name}, but is on {weight.device}")


def check_options(rounding: str, backend: str) -> None:
    """Raise ValueError where ``rounding`` or ``backend`` is not a known one."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, but is {rounding!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, but is {backend!r}")


def _shape(t: Tensor) -> str:
    return str(list(t.shape))
