"""The maths of the norm, once, in plain torch: CPU path, decomposition for compilers and oracle are this file.

Imports torch alone and nothing of ours. Shapes: ``x`` is [..., D], ``weight`` is [D], ``rstd`` is [...].
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# One block of the CPU path: large enough to feed every thread, small enough that its float32 copies stay in cache.
BLOCK_ELEMENTS = 8192 * 128

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
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    scratch: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Forward of the norm: ``y`` in ``dtype`` or ``x.dtype``, and ``rstd`` in the accumulation dtype.

    With ``straight_through`` it is differentiable any number of times in every autograd mode, and rounding steps hand
    gradients on unchanged, as ``rms_norm_backward`` does. Without autograd, ``out`` takes y, and ``scratch`` (two
    tensors like x in the accumulation dtype) takes what lies between. Source: https://arxiv.org/abs/1910.07467, with
    the rounding steps of the classes named in ``adapters.py``.
    """
    acc = accumulate_dtype(x)
    x_acc = _cast(x, acc, scratch[0])
    rstd = _rstd(x_acc, eps, scratch[1])
    y = torch.mul(x_acc, rstd, out=scratch[1])
    if weight is not None:
        rounded_to = _rounding_dtype(x, weight, rounding)
        y = _rounded(y, rounded_to, straight_through)
        # The last step writes to its destination where no cast lies between.
        target = None if rounded_to or weight.dtype is torch.float64 else out if x.dtype is acc else scratch[1]
        y = torch.mul(y, _factor(weight, unit_offset), out=target)
        product_dtype = torch.promote_types(rounded_to, weight.dtype) if rounded_to else None
        if straight_through:
            y = _rounded(y, product_dtype, True)
        if bias is not None:
            y = y + bias
            if straight_through:
                y = _rounded(y, torch.promote_types(product_dtype or acc, bias.dtype), True)
    if out is None:
        y = y.to(dtype or x.dtype).contiguous()
    elif y is not out:
        y = out.copy_(y)
    return y, rstd.squeeze(-1).contiguous()


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
    out: Tensor | None = None,
    scratch: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm``: ``dx`` in ``x.dtype`` and ``dw`` in ``dw_dtype`` or ``weight.dtype``.

    ``mask`` has bit 1 for dx and bit 2 for dw; a gradient that is not wanted is an empty tensor. ``rstd=None``
    recomputes it from ``x`` and ``eps``, which keeps the result differentiable with respect to ``x``. ``out`` takes dx;
    ``scratch`` is three tensors; both as in ``rms_norm``.
    """
    acc = accumulate_dtype(x)
    x_acc, dy_acc = _cast(x, acc, scratch[0]), _cast(dy, acc, scratch[1])
    rstd_acc = _rstd(x_acc, eps) if rstd is None else rstd.unsqueeze(-1)
    n = torch.mul(x_acc, rstd_acc, out=scratch[0])
    dx = x.new_empty(0)
    dw = x.new_empty(0)
    if mask & 2 and weight is not None:
        n_used = _rounded(n, _rounding_dtype(x, weight, rounding), straight_through).to(acc)
        dw = torch.mul(dy_acc, n_used, out=scratch[2])
        dw = dw.sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else dw.clone()  # scratch is written over below
        dw = dw.to(dw_dtype or weight.dtype).contiguous()
    if mask & 1:
        g = dy_acc
        if weight is not None:
            g = torch.mul(g, _factor(weight, unit_offset).to(acc), out=scratch[1])
        mean = torch.mul(g, n, out=scratch[2]).mean(-1, keepdim=True)
        dx = torch.sub(g, torch.mul(n, mean, out=scratch[2]), out=scratch[2])
        dx = torch.mul(dx, rstd_acc, out=out if x.dtype is acc else scratch[2])
        if out is None:
            dx = dx.to(x.dtype).contiguous()
        elif dx is not out:
            dx = out.copy_(dx)
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
    rstd = _rstd(x_acc, eps)
    n = x_acc * rstd
    y_tangent = torch.zeros_like(n)
    if x_tangent is not None:
        t = x_tangent.to(acc)
        y_tangent = (t - n * (n * t).mean(-1, keepdim=True)) * rstd
        if weight is not None:
            y_tangent = y_tangent * _factor(weight, unit_offset)
    if weight is not None and weight_tangent is not None:
        y_tangent = y_tangent + _rounded(n, _rounding_dtype(x, weight, rounding), True) * weight_tangent
    return y_tangent.to(x.dtype)


def rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    eps: float,
    unit_offset: bool = False,
    rounding: str = "once",
    interleaved: bool = True,
    round_before_rope: bool = False,
    *,
    straight_through: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``x`` [B, S, H, D] and its rotation: ``y`` in ``x.dtype``, and ``rstd`` [B, S, H].

    cos and sin are as in ``qknorm.qk_rms_norm_rope``. Between norm and rotation nothing is rounded but what
    ``rounding`` says, unless ``round_before_rope``. Source: https://arxiv.org/abs/2104.09864
    """
    acc = accumulate_dtype(x)
    n, rstd = rms_norm(x, weight, eps, unit_offset, rounding, straight_through=straight_through, dtype=acc)
    if round_before_rope:
        n = _rounded(n, x.dtype, straight_through).to(acc)
    return _rotate(n, cos, sin, interleaved).to(x.dtype).contiguous(), rstd


def rms_norm_rope_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    eps: float = 0.0,
    unit_offset: bool = False,
    rounding: str = "once",
    interleaved: bool = True,
    mask: int = 3,
    *,
    straight_through: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm_rope``: dy is rotated back, then ``rms_norm_backward``."""
    rotated_back = _rotate(dy.to(accumulate_dtype(x)), cos, sin, interleaved, back=True)
    return rms_norm_backward(
        rotated_back, x, weight, rstd, eps, unit_offset, rounding, mask, straight_through=straight_through
    )


def _rotate(n: Tensor, cos: Tensor, sin: Tensor | None, interleaved: bool, back: bool = False) -> Tensor:
    """[B, S, H, D] rotated by tables [S, R], [S, D / 2] or [B, S, ...], or complex ones; columns from R on stay."""
    if sin is None:
        cos, sin = cos.real, cos.imag
        rotary, shared = 2 * cos.shape[-1], True
    else:
        shared = 2 * cos.shape[-1] == n.shape[-1]
        rotary = n.shape[-1] if shared else cos.shape[-1]
    cos, sin = (t.to(n.dtype) for t in (cos, sin))
    if shared:
        spread = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
        cos, sin = spread(cos), spread(sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one for all heads
    turned, rest = n[..., :rotary], n[..., rotary:]
    if back:
        turned = turned * cos - _quarter_turn(turned * sin, interleaved)
    else:
        turned = turned * cos + _quarter_turn(turned, interleaved) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _quarter_turn(t: Tensor, interleaved: bool) -> Tensor:
    """(a, b) to (-b, a) in every pair of columns that rotate into each other."""
    if interleaved:
        a, b = t.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([-b, a], -1).flatten(-2)
    a, b = t.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rms_norm_in_blocks(
    x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool = False, rounding: str = "once"
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` over blocks of rows that stay in cache: the same bits, no float32 copy of x."""
    if x.numel() <= BLOCK_ELEMENTS:
        return rms_norm(x, weight, eps, unit_offset, rounding)
    acc = accumulate_dtype(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=acc, device=x.device)
    if weight is not None and rounding == "once":
        weight, unit_offset = _factor(weight, unit_offset).to(torch.promote_types(acc, weight.dtype)), False
    memory = _scratch_memory(x, 2)
    for index in _blocks(x.shape):
        block = x[index]
        scratch = [m[: block.numel()].view(block.shape) for m in memory]
        _, rstd_block = rms_norm(block, weight, eps, unit_offset, rounding, out=y[index], scratch=scratch)
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
    dw = torch.zeros(x.shape[-1] if wants_dw else 0, dtype=accumulate_dtype(x), device=x.device)
    memory = _scratch_memory(x, 3)
    for index in _blocks(x.shape):
        block = x[index]
        _, dw_block = rms_norm_backward(
            dy[index],
            block,
            weight,
            rstd[index],
            0.0,
            unit_offset,
            rounding,
            mask,
            dw_dtype=dw.dtype,
            out=dx[index] if mask & 1 else None,
            scratch=[m[: block.numel()].view(block.shape) for m in memory],
        )
        if wants_dw:
            dw += dw_block
    return dx, dw.to(weight.dtype) if wants_dw and weight is not None else x.new_empty(0)


def _scratch_memory(x: Tensor, count: int) -> list[Tensor]:
    # Written over by every block: memory that is fresh for each would cost a page fault every 4 KiB.
    size = max(BLOCK_ELEMENTS, x.shape[-1])
    return list(torch.empty(count, size, dtype=accumulate_dtype(x), device=x.device))


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


def _rstd(x_acc: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Reciprocal root mean square of every row, [..., 1]; ``out`` takes the squares."""
    return torch.rsqrt(torch.pow(x_acc, 2, out=out).mean(-1, keepdim=True) + eps)


def _factor(weight: Tensor, unit_offset: bool) -> Tensor:
    return weight + 1.0 if unit_offset else weight


def _cast(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype) if out is None else out.copy_(x)


def _rounded(t: Tensor, dtype: torch.dtype | None, straight_through: bool) -> Tensor:
    if dtype is None:
        return t
    if straight_through:
        # Autograd through a cast rounds the gradient; this has the cast's value and the gradient of the identity.
        return t + (t.to(dtype).to(t.dtype) - t).detach()
    return t.to(dtype)
