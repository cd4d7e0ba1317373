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


def qk_rms_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    eps: float | None = None,
    *,
    interleaved: bool = True,
    sequence_dim: int = 1,
    round_before_rope: bool = False,
    context: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
    unit_offset: bool = False,
    rounding: str = "once",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``qk_rms_norm`` and the rotary position embedding of both: one launch a direction for each stream.

    Args:
        q, k: [B, S, H, D] (``sequence_dim=1``) or [B, H, S, D] (2), of one dtype, device, B, S and D; H may differ.
        q_weight, k_weight: [D] or None.
        cos, sin: float32 [S, R], or [S, D / 2] where one value stands for two columns and R is D; or [B, S, ...], one
            for each batch. R is at most D and even, columns from R on are not rotated. ``sin=None``: cos is complex64
            [S, R / 2]. With ``context`` S is that of the joint sequence.
        interleaved: columns 2i and 2i + 1 rotate into each other (Flux); else i and i + R / 2 (NeoX, CogView4).
        round_before_rope: round the normed value to the dtype of q first, as norm and rotation in two steps of half
            precision do. By default nothing is rounded in between: what a model computes under CUDA autocast.
        context: the text stream, (q, k, q_weight, k_weight) of other S and own weights, written in front of q and k.

    Returns:
        q and k, joint where there is a context, in their dtype, fresh and contiguous.

    The other arguments and the errors are those of ``rms_norm``. cos and sin get no gradient.

    Source: https://arxiv.org/abs/2104.09864
    """
    streams = [(q, k, q_weight, k_weight)] if context is None else [context, (q, k, q_weight, k_weight)]
    _check_rope(streams, cos, sin, sequence_dim, context is not None)
    check_options(rounding, backend)
    if eps is None:
        eps = reference.default_eps(q)
    options = ops.RopeOptions(eps, unit_offset, rounding, interleaved, round_before_rope, sequence_dim)
    tensors = [t for stream in streams for t in stream]
    if torch.compiler.is_compiling() or not ops.is_plain(cos, sin, *tensors):
        with torch.autocast(q.device.type, enabled=False):
            return ops.composite_rope(streams, cos, sin, options)
    if backend == "triton":
        backend_for(q, backend)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return ops.EagerQKNormRope.apply(cos, sin, options, backend, *tensors)
    return ops.launch_rope_forward(streams, cos, sin, options, backend, save=False)[:2]


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
    if type(x) not in ops.PLAIN_TYPES and not torch.compiler.is_compiling() and ops.sharding() is not None:
        ops.sharding().check_last_dim(x, name)
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


def _check_rope(
    streams: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    cos: Tensor,
    sin: Tensor | None,
    sequence_dim: int,
    joint: bool,
) -> None:
    """Raise TypeError or ValueError where the arguments of ``qk_rms_norm_rope`` are not what it takes."""
    if sequence_dim not in (1, 2):
        raise ValueError(f"sequence_dim must be 1 for [B, S, H, D] or 2 for [B, H, S, D], but is {sequence_dim}")
    heads_dim = 3 - sequence_dim
    first = streams[-1][0]
    length = 0
    for i, (q, k, q_weight, k_weight) in enumerate(streams):
        prefix = "context " if joint and i == 0 else ""
        for name, x, weight in ((f"{prefix}q", q, q_weight), (f"{prefix}k", k, k_weight)):
            check_tensors(x, weight, name)
            if x.dim() != 4:
                raise ValueError(f"{name} must have four dimensions, but is {_shape(x)}")
            if x.dtype is not first.dtype or x.device != first.device:
                raise TypeError(f"{name} must be {first.dtype} on {first.device}, as q, but is {x.dtype} on {x.device}")
            if (x.shape[0], x.shape[-1]) != (first.shape[0], first.shape[-1]):
                raise ValueError(
                    f"{name} must have the batch and last dimension of q, {_shape(first)}, but is {_shape(x)}"
                )
        if q.shape[sequence_dim] != k.shape[sequence_dim]:
            raise ValueError(f"{prefix}q and k must have one sequence length, but are {_shape(q)} and {_shape(k)}")
        if joint and q.shape[heads_dim] != first.shape[heads_dim]:
            raise ValueError(f"{prefix}q must have as many heads as q, {_shape(first)}, but is {_shape(q)}")
        if joint and k.shape[heads_dim] != streams[-1][1].shape[heads_dim]:
            raise ValueError(f"{prefix}k must have as many heads as k, but is {_shape(k)}")
        length += q.shape[sequence_dim]
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        wanted = torch.complex64 if sin is None else torch.float32
        if table.dtype is not wanted:
            raise TypeError(
                f"{name} must be {wanted}{' where sin is None' if sin is None else ''}, but is {table.dtype}"
            )
        if table.device != first.device:
            raise ValueError(f"{name} must be on {first.device}, the device of q, but is on {table.device}")
        columns = table.shape[-1] * (2 if sin is None else 1) if table.dim() else 0
        if table.dim() not in (2, 3) or table.shape[-2] != length or columns > first.shape[-1] or columns % 2:
            wanted_shape = (
                f"[{length}, R] with R even and at most {first.shape[-1]}, or [{first.shape[0]}, {length}, R]"
            )
            raise ValueError(f"{name} must be {wanted_shape}, but is {_shape(table)}")
        if table.dim() == 3 and table.shape[0] not in (1, first.shape[0]):
            raise ValueError(f"{name} must have a batch of 1 or {first.shape[0]}, as q, but is {_shape(table)}")
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} gets no gradient, but requires one; detach it")
    if sin is not None and cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have one shape, but are {_shape(cos)} and {_shape(sin)}")


def check_options(rounding: str, backend: str) -> None:
    """Raise ValueError where ``rounding`` or ``backend`` is not a known one."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, but is {rounding!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, but is {backend!r}")


def _shape(t: Tensor) -> str:
    return str(list(t.shape))
