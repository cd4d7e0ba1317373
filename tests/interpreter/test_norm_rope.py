"""The fused norm and RoPE kernels against float64 and against the torch path, on tiny tensors."""

import itertools

import pytest
import torch
from qknorm_kernels import qk_norm_rope

from qknorm import reference

EPS = 1e-6
# Relative to the largest magnitude; the interpreter truncates float32 to bfloat16, a unit in the last place more.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}


def angles(length, rotary, batch=None):
    shape = (length, rotary // 2) if batch is None else (batch, length, rotary // 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def tables(angle, kind, interleaved):
    if kind == "complex":
        return torch.polar(torch.ones_like(angle), angle), None
    cos, sin = angle.cos(), angle.sin()
    if kind == "repeated":
        spread = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
        cos, sin = spread(cos), spread(sin)
    return cos, sin


def rows(shape, dtype, layout, seed):
    """[B, S, H, D]: dense, a chunk of a fused projection with NaN around it, or heads before the sequence."""
    b, s, h, d = shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if layout == "fused":
        whole = torch.full((b, s, 3 * h * d + 16), float("nan"), dtype=dtype)
        whole[..., h * d : 2 * h * d] = values.flatten(2)
        return whole[..., h * d : 2 * h * d].unflatten(-1, (h, d))
    if layout == "unaligned":
        whole = torch.full((values.numel() + 1,), float("nan"), dtype=dtype)
        whole[1:] = values.flatten()
        return whole[1:].view(shape)
    return values.transpose(1, 2).contiguous().transpose(1, 2) if layout == "heads first" else values


def near(actual, expected, dtype):
    scale = max(1.0, expected.abs().max().item())
    error = (actual.double() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype] * scale, f"off by {error:.3g} at scale {scale:.3g}"


def check(
    shape, k_heads, dtype, *, rotary=None, interleaved=True, kind="repeated", layout="fused", batch=None, **options
):
    b, s, _, d = shape
    cos, sin = tables(angles(s, rotary or d, batch), kind, interleaved)
    xs = rows(shape, dtype, layout, 0), rows((b, s, k_heads, d), dtype, "dense" if layout == "fused" else layout, 1)
    g = torch.Generator().manual_seed(2)
    weights = [(1 + 0.3 * torch.randn(d, generator=g)).to(options.pop("weight_dtype", dtype)) for _ in xs]
    unit_offset, rounding = options.get("unit_offset", False), options.get("rounding", "once")
    before = options.get("round_before_rope", False)
    ys = [torch.full(x.shape, float("nan"), dtype=dtype) for x in xs]
    operands = tuple((x, w, y) for x, w, y in zip(xs, weights, ys, strict=True))
    rstds = qk_norm_rope.forward(operands, cos, sin, EPS, unit_offset, rounding, interleaved, before)
    dys = [rows(x.shape, dtype, layout, 3 + i) for i, x in enumerate(xs)]
    dxs = [torch.full(x.shape, float("nan"), dtype=dtype) for x in xs]
    operands = tuple((x, dy, w, r, dx, True) for x, dy, w, r, dx in zip(xs, dys, weights, rstds, dxs, strict=True))
    dws = qk_norm_rope.backward(operands, cos, sin, unit_offset, rounding, interleaved)
    for x, w, y, r, dy, dx, dw in zip(xs, weights, ys, rstds, dys, dxs, dws, strict=True):
        tables64 = [
            None if t is None else t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (cos, sin)
        ]
        rounded = rounding != "once" or before
        torch_y, torch_r = reference.rms_norm_rope(x, w, cos, sin, EPS, unit_offset, rounding, interleaved, before)
        torch_dx, torch_dw = reference.rms_norm_rope_backward(
            dy, x, w, torch_r, cos, sin, EPS, unit_offset, rounding, interleaved
        )
        torch.testing.assert_close(r, torch_r)
        for actual, expected in ((y, torch_y), (dx, torch_dx), (dw, torch_dw)):
            assert actual.dtype is expected.dtype
            near(actual, expected.double(), dtype)
        if not rounded:  # without rounding steps the torch path in float64 is the oracle
            exact, _ = reference.rms_norm_rope(
                x.double(), (w + 1 if unit_offset else w).double(), *tables64, EPS, False, "once", interleaved
            )
            near(y, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("interleaved", "kind"), itertools.product((True, False), ("repeated", "shared", "complex")))
def test_every_table_and_pairing_in_every_dtype(interleaved, kind, dtype):
    check((2, 2, 3, 64), 2, dtype, interleaved=interleaved, kind=kind)


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("interleaved", [True, False])
def test_every_head_dim(dim, interleaved):
    check((1, 2, 3, dim), 3, torch.float32, interleaved=interleaved)


@pytest.mark.parametrize("layout", ["dense", "fused", "unaligned", "heads first"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_layout_of_q_k_and_the_gradient(layout, dtype):
    check((2, 2, 3, 64), 3, dtype, layout=layout)


@pytest.mark.parametrize(
    ("rotary", "interleaved", "kind"),
    [(32, True, "repeated"), (96, True, "complex"), (64, False, "complex"), (64, True, "complex")],
)
def test_columns_beyond_the_rotary_dimension_are_normed_and_not_rotated(rotary, interleaved, kind):
    check((1, 2, 2, 128), 2, torch.float32, rotary=rotary, interleaved=interleaved, kind=kind)


def test_tables_of_each_batch():
    check((2, 2, 2, 64), 2, torch.float32, batch=2)
    check((2, 2, 2, 64), 2, torch.float16, batch=2, interleaved=False, kind="shared")


@pytest.mark.parametrize("rounding", ["once", "weight", "input"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_every_rounding_step(rounding, before, weight_dtype):
    options = {"rounding": rounding, "round_before_rope": before, "unit_offset": True, "weight_dtype": weight_dtype}
    check((1, 2, 3, 64), 3, torch.float16, **options)


def test_more_heads_than_a_tile_holds_and_more_tokens_than_programs():
    check((1, 2, 50, 64), 10, torch.float32)
    check((1, 19, 1, 64), 1, torch.float32)


def test_what_no_chunk_divides_is_left_to_torch():
    assert qk_norm_rope.takes(128, 128, 2, True)
    assert qk_norm_rope.takes(96, 96, 2, True)
    assert qk_norm_rope.takes(96, 96, 4, False)
    assert not qk_norm_rope.takes(96, 96, 2, False)  # 48 elements a lane: backward would spill
    assert not qk_norm_rope.takes(100, 100, 2, True)
    assert not qk_norm_rope.takes(128, 12, 2, True)
    assert not qk_norm_rope.takes(128, 16, 2, False)
