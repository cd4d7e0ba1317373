"""The maths of the norm, once, in plain torch: CPU path, decomposition for compilers and oracle are this file.

Imports torch alone and nothing of ours. Shapes: ``x`` is [..., D], ``weight`` is [D], ``rstd`` is [...].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# One block of the CPU path: large enough to feed every thread, small enough that its float32 copies stay in cache.
BLOCK_ELEMENTS = 4096 * 128

HALF_DTYPES = (torch.float16, torch.bfloat16)


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and products: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def default_eps(x: Tensor) -> float:
    """What ``eps=None`` stands for, as in ``torch.nn.RMSNorm``: the machine epsilon of the accumulation dtype."""
    return torch.finfo(accumulate_dtype(x)).eps


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    unit_offset: bool = False,
    rounding: str = "once",
    *,
    bias: Tensor | None = None,
    straight_through: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward of the norm: ``y`` in ``x.dtype`` and ``rstd`` in the accumulation dtype.

    With ``straight_through`` it is differentiable any number of times in every autograd mode, and rounding steps hand
    gradients on unchanged, as ``rms_norm_backward`` does. Source: https://arxiv.org/abs/1910.07467, with the rounding
    steps of the classes named in ``adapters.py``.
    """
    acc = accumulate_dtype(x)
    x_acc = x.to(acc)
    rstd = torch.rsqrt(x_acc.pow(2).mean(-1, keepdim=True) + eps)
    y = x_acc * rstd
    if weight is not None:
        y = _rounded(y, _rounding_dtype(x, weight, rounding), straight_through)
        y = y * (weight + 1.0 if unit_offset else weight)
        if straight_through:
            y = _rounded(y, _product_dtype(x, weight, rounding), True)
        if bias is not None:
            y = y + bias
            if straight_through:
                y = _rounded(y, torch.promote_types(_product_dtype(x, weight, rounding) or acc, bias.dtype), True)
    return y.to(x.dtype).contiguous(), rstd.squeeze(-1).contiguous()


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    eps: float = 0.0,
    unit_offset: bool = False,
    rounding: str = "once",
    mask: int = 3,
    *,
    straight_through: bool = False,
    dw_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm``: ``dx`` in ``x.dtype`` and ``dw`` in ``dw_dtype`` or ``weight.dtype``.

    ``mask`` has bit 1 for dx and bit 2 for dw; a gradient that is not wanted is an empty tensor. ``rstd=None``
    recomputes it from ``x`` and ``eps``, which keeps the result differentiable with respect to ``x``.
    """
    acc = accumulate_dtype(x)
    x_acc, dy_acc = x.to(acc), dy.to(acc)
    if rstd is None:
        rstd_acc = torch.rsqrt(x_acc.pow(2).mean(-1, keepdim=True) + eps)
    else:
        rstd_acc = rstd.unsqueeze(-1)
    n = x_acc * rstd_acc
    dx = x.new_empty(0)
    dw = x.new_empty(0)
    if mask & 2 and weight is not None:
        factor = _rounded(n, _rounding_dtype(x, weight, rounding), straight_through).to(acc)
        dw = dy_acc * factor
        if x.dim() > 1:
            dw = dw.sum(tuple(range(x.dim() - 1)))
        dw = dw.to(dw_dtype or weight.dtype).contiguous()
    if mask & 1:
        g = dy_acc
        if weight is not None:
            g = g * (weight + 1.0 if unit_offset else weight).to(acc)
        dx = ((g - n * (g * n).mean(-1, keepdim=True)) * rstd_acc).to(x.dtype).contiguous()
    return dx, dw


def rms_norm_jvp(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    rounding: str,
    x_tangent: Tensor | None,
    weight_tangent: Tensor | None,
) -> Tensor:
    """Tangent of ``rms_norm``'s ``y`` for tangents of ``x`` and ``weight`` (None: zero), differentiable itself."""
    acc = accumulate_dtype(x)
    x_acc = x.to(acc)
    rstd = torch.rsqrt(x_acc.pow(2).mean(-1, keepdim=True) + eps)
    n = x_acc * rstd
    y_tangent = torch.zeros_like(n)
    if x_tangent is not None:
        t = x_tangent.to(acc)
        y_tangent = (t - n * (n * t).mean(-1, keepdim=True)) * rstd
        if weight is not None:
            y_tangent = y_tangent * (weight + 1.0 if unit_offset else weight)
    if weight is not None and weight_tangent is not None:
        y_tangent = y_tangent + _rounded(n, _rounding_dtype(x, weight, rounding), True) * weight_tangent
    return y_tangent.to(x.dtype)


def rms_norm_in_blocks(
    x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool = False, rounding: str = "once"
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` over blocks of rows that stay in cache: the same bits, a tenth of the time, no float32 copy of x."""
    if x.numel() <= BLOCK_ELEMENTS:
        return rms_norm(x, weight, eps, unit_offset, rounding)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=accumulate_dtype(x), device=x.device)
    for index in _blocks(x.shape):
        y_block, rstd_block = rms_norm(x[index], weight, eps, unit_offset, rounding)
        y[index].copy_(y_block)
        rstd[index].copy_(rstd_block)
    return y, rstd


def rms_norm_backward_in_blocks(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    unit_offset: bool = False,
    rounding: str = "once",
    mask: int = 3,
) -> tuple[Tensor, Tensor]:
    """``rms_norm_backward`` over blocks of rows; ``dw`` is summed block by block, in order: it is deterministic."""
    if x.numel() <= BLOCK_ELEMENTS:
        return rms_norm_backward(dy, x, weight, rstd, 0.0, unit_offset, rounding, mask)
    wants_dw = bool(mask & 2) and weight is not None
    dx = torch.empty(x.shape if mask & 1 else 0, dtype=x.dtype, device=x.device)
    dw_acc = torch.zeros(x.shape[-1] if wants_dw else 0, dtype=accumulate_dtype(x), device=x.device)
    for index in _blocks(x.shape):
        dx_block, dw_block = rms_norm_backward(
            dy[index], x[index], weight, rstd[index], 0.0, unit_offset, rounding, mask, dw_dtype=dw_acc.dtype
        )
        if mask & 1:
            dx[index].copy_(dx_block)
        if wants_dw:
            dw_acc += dw_block
    return dx, dw_acc.to(weight.dtype) if wants_dw and weight is not None else x.new_empty(0)


def _blocks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Indices into a tensor of ``shape`` that together cover it once, each of about ``BLOCK_ELEMENTS`` elements."""
    inner = shape[1:].numel()
    if len(shape) == 1:
        yield ()
    elif inner > BLOCK_ELEMENTS and len(shape) > 2:
        for i in range(shape[0]):
            for index in _blocks(shape[1:]):
                yield (i, *index)
    else:
        step = max(1, BLOCK_ELEMENTS // max(1, inner))
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)


def _rounding_dtype(x: Tensor, weight: Tensor, rounding: str) -> torch.dtype | None:
    """The dtype that the normed value takes before it meets the weight; None where it stays as it is."""
    if x.dtype is torch.float64 or rounding == "once":
        return None
    if rounding == "weight":
        return weight.dtype if weight.dtype in HALF_DTYPES else None
    return x.dtype


def _product_dtype(x: Tensor, weight: Tensor, rounding: str) -> torch.dtype | None:
    """The dtype that the product of normed value and weight is rounded to; None where it stays as it is."""
    rounded = _rounding_dtype(x, weight, rounding)
    return None if rounded is None else torch.promote_types(rounded, weight.dtype)


def _rounded(t: Tensor, dtype: torch.dtype | None, straight_through: bool) -> Tensor:
    if dtype is None:
        return t
    if straight_through:
        # Autograd through a cast rounds the gradient; this has the cast's value and the gradient of the identity.
        return t + (t.to(dtype).to(t.dtype) - t).detach()
    return t.to(dtype)
