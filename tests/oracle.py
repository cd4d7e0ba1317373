"""What the norm should compute, in float64, and how far each dtype may be from it. Shared by the tests."""

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROUNDINGS = ("once", "weight", "input")

# Relative to the largest magnitude compared: a unit in the last place of the dtype where a value is rounded once, with
# room for float32 sums; a gradient of a weight is a sum over rows.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6, torch.float64: 1e-13}


def oracle(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool = False, rounding: str = "once") -> Tensor:
    """The forward in float64, differentiable; rounding steps hand gradients on unchanged."""
    x64 = x.double()
    y = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y
    factor = weight + 1 if unit_offset else weight
    steps: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    if x.dtype is not torch.float64:
        if rounding == "weight" and weight.dtype in HALF:
            steps = (weight.dtype, weight.dtype)
        elif rounding == "input":
            steps = (x.dtype, torch.promote_types(x.dtype, weight.dtype))
    return _rounded(_rounded(y, steps[0]) * factor.double(), steps[1])


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype is None else t + (t.detach().float().to(dtype).double() - t.detach())


def assert_near(
    actual: Tensor, expected: Tensor, steps: float = 1.0, through: tuple[torch.dtype | None, ...] = ()
) -> None:
    """``actual`` is within ``steps`` tolerances of its dtype from the float64 ``expected``.

    ``through`` names further dtypes that the computation rounds to on its way: the coarsest decides.
    """
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max().item()
    scale = max(expected.abs().max().item(), 1e-30)
    tolerance = max(TOLERANCE[dtype] for dtype in (actual.dtype, *through) if dtype is not None)
    assert error <= steps * tolerance * scale, f"off by {error:.3g} at scale {scale:.3g}"


def layouts(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of one 4-D shape (B, S, H, D) and the same values, in the layouts that models hand to a q/k norm."""
    b, s, h, d = shape
    base = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    fused = torch.zeros(b, s, 3 * h * d + 8, dtype=dtype)
    fused[..., h * d : 2 * h * d] = base.reshape(b, s, h * d)
    bfl = torch.zeros(b, s, 3, h, d, dtype=dtype)
    bfl[:, :, 1] = base
    offset = torch.zeros(base.numel() + 5, dtype=dtype)
    offset[5:] = base.reshape(-1)
    return {
        "dense": base.clone(),
        "fused qkv chunk": fused[..., h * d : 2 * h * d].unflatten(-1, (h, d)),
        "bfl permute": bfl.permute(2, 0, 3, 1, 4)[1].transpose(1, 2),
        "transposed": base.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced rows": torch.cat([base, base], dim=1)[:, :s],
        "storage offset": offset[5:].view(shape),
        "last stride not one": base.transpose(-1, -2).contiguous().transpose(-1, -2),
    }
