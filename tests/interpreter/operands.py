"""Inputs in the layouts that models hand over. What lies between and around their elements is NaN."""

from collections.abc import Callable

import torch
from torch import Tensor

NAN = float("nan")


def _full(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def _at(offset: int) -> Callable[..., Tensor]:
    def view(b: int, s: int, h: int, d: int, dtype: torch.dtype) -> Tensor:
        count = b * s * h * d
        return _full(count + offset + 16, dtype=dtype)[offset : offset + count].view(b, s, h, d)

    return view


# Views of memory full of NaN, from batch, sequence, heads and head dim.
LAYOUTS: dict[str, Callable[[int, int, int, int, torch.dtype], Tensor]] = {
    "dense": lambda b, s, h, d, dtype: _full(b, s, h, d, dtype=dtype),
    "flat rows": lambda b, s, h, d, dtype: _full(b * s * h, d, dtype=dtype),
    "fused qkv chunk": lambda b, s, h, d, dtype: _full(b, s, 3 * h * d + 16, dtype=dtype)[
        ..., h * d : 2 * h * d
    ].unflatten(-1, (h, d)),
    "bfl permute": lambda b, s, h, d, dtype: _full(b, s, 3, h, d, dtype=dtype).permute(2, 0, 3, 1, 4)[1],
    "transposed": lambda b, s, h, d, dtype: _full(b, s, h, d, dtype=dtype).transpose(1, 2),
    "sliced rows": lambda b, s, h, d, dtype: _full(b, s + 2, h + 1, d, dtype=dtype)[:, 1:-1, 1:],
    "padded rows": lambda b, s, h, d, dtype: _full(b, s, h, d + 16, dtype=dtype)[..., :d],
    "odd pitch": lambda b, s, h, d, dtype: _full(b, s, h, d + 1, dtype=dtype)[..., :d],
    "storage offset": _at(16),
    "unaligned by one element": _at(1),
    "six dimensions": lambda b, s, h, d, dtype: _full(2 * b, s + 1, 3, h + 1, 3, d, dtype=dtype)[::2, 1:, 1:, :-1, :2],
    "size-1 dimensions": lambda b, s, h, d, dtype: _full(b, 3, s, h, 3, d, dtype=dtype)[:, 1:2, :, :, 2:],
    "expanded": lambda b, s, h, d, dtype: _full(b, 1, h, d, dtype=dtype).expand(b, s, h, d),
    "last stride two": lambda b, s, h, d, dtype: _full(b, s, h, 2 * d, dtype=dtype)[..., ::2],
    "one dimension": lambda b, s, h, d, dtype: _full(d, dtype=dtype) if b * s * h else _full(0, d, dtype=dtype),
}

# Gradients of a shape; expanded ones are what reductions hand back.
GRADIENTS: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    "dense": lambda shape, dtype: _full(*shape, dtype=dtype),
    "transposed": lambda shape, dtype: _reversed(_full(*reversed(shape[:-1]), shape[-1], dtype=dtype)),
    "strided": lambda shape, dtype: _full(*(size + 1 for size in shape[:-1]), shape[-1] + 16, dtype=dtype)[
        tuple(slice(size) for size in shape)
    ],
    "unaligned": lambda shape, dtype: _full(*(size + 1 for size in shape), dtype=dtype)[
        tuple(slice(1, None) for _ in shape)
    ],
    "expanded": lambda shape, dtype: _full(shape[-1], dtype=dtype).expand(shape),
    "one value": lambda shape, dtype: _full(1, dtype=dtype).expand(shape),
    "last stride two": lambda shape, dtype: _full(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2],
}

WEIGHTS: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    "dense": lambda d, dtype: _full(d, dtype=dtype),
    "strided": lambda d, dtype: _full(2 * d, dtype=dtype)[::2],
    "unaligned": lambda d, dtype: _full(d + 1, dtype=dtype)[1:],
}


def _reversed(t: Tensor) -> Tensor:
    return t.permute(*reversed(range(t.dim() - 1)), -1)


def fill(view: Tensor, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """The view, normally distributed; elements that share memory get one value."""
    own = view
    for i, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[i] > 1:
            own = own.narrow(i, 0, 1)
    values = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    own.copy_(values * scale + mean)
    return view


def make_x(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return fill(LAYOUTS[layout](*shape, dtype), seed, 3.0)


def make_dy(layout: str, x: Tensor, seed: int = 1) -> Tensor:
    return fill(GRADIENTS[layout](tuple(x.shape), x.dtype), seed)


def make_weight(dim: int, dtype: torch.dtype | None, layout: str = "dense", seed: int = 2) -> Tensor | None:
    return None if dtype is None else fill(WEIGHTS[layout](dim, dtype), seed, 0.3, 1.0)
