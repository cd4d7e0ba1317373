"""What a cover of layouts and options does not meet: special values, far strides, and what is kept between calls."""

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest
import torch
from judge import check, counted, poisoned
from operands import LAYOUTS, fill, make_dy, make_weight, make_x
from qknorm_kernels import launch
from qknorm_kernels import rms_norm as kernels
from torch import Tensor

from qknorm import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def run(x: Tensor, dy: Tensor, weight: Tensor | None, eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = kernels.forward(x, weight, eps, False, "once")
    return y, *kernels.backward(dy, x, weight, rstd, False, "once", 3)


@pytest.mark.parametrize("dim", [64, 112])  # 112: a chunk that is not full
@pytest.mark.parametrize("layout", ["flat rows", "fused qkv chunk", "odd pitch"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_nan_and_inf_stay_in_their_row(dtype, layout, dim):
    x, weight = make_x(layout, (1, 3, 4, dim), dtype), make_weight(dim, dtype)
    dy = make_dy("dense", x)
    clean = run(x, dy, weight)
    rows, dy_rows = [r for t in x.flatten(0, -3) for r in t] if x.dim() > 2 else list(x), dy.view(-1, dim)
    bad = torch.zeros(len(rows), dtype=torch.bool)
    bad[[2, 5, 7]] = True
    rows[2][-1] = float("nan")
    rows[5][3] = float("inf")
    dy_rows[7, 0] = float("nan")
    y, dx, _ = (t.view(-1, dim) for t in run(x, dy, weight))
    clean_y, clean_dx = (t.view(-1, dim) for t in clean[:2])
    assert torch.equal(dx[~bad], clean_dx[~bad])
    bad[7] = False
    assert torch.equal(y[~bad], clean_y[~bad])
    assert y[2].isnan().all()
    assert y[5].isnan().any()
    assert dx[2].isnan().all()
    assert dx[5].isnan().any()
    assert dx[7].isnan().all()


def test_fp16_rows_at_the_edge_of_their_range_do_not_overflow():
    for layout in ("flat rows", "fused qkv chunk"):
        x = make_x(layout, (1, 2, 3, 128), FP16)
        x.copy_(torch.where(x > 0, 65504.0, -65504.0))
        dy = torch.ones(x.shape, dtype=FP16)
        y, dx, dw = run(x, dy, torch.ones(128, dtype=FP16))
        assert torch.equal(y, x.sign())
        assert dx.isfinite().all()
        assert torch.equal(dw, x.sign().reshape(-1, 128).sum(0))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e4])
def test_eps_is_added_to_the_mean_square(eps):
    for scale in (1e-4, 100.0):
        x = fill(torch.empty(3, 64), 0, scale)
        check(x, make_dy("dense", x), make_weight(64, FP32), eps)


def test_a_row_of_zeros_is_zero_and_its_gradient_finite():
    x = torch.zeros(3, 64, dtype=FP16)
    y, dx, dw = run(x, make_dy("dense", x), make_weight(64, FP16))
    assert torch.equal(y, x)
    assert torch.equal(dw, torch.zeros(64, dtype=FP16))
    assert dx.isfinite().all()


def test_float32_is_as_close_to_the_oracle_as_torch_is():
    x, weight = fill(torch.empty(6, 5120), 0, 3.0), make_weight(5120, FP32)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
    y, _ = kernels.forward(x, weight, EPS, False, "once")
    ours, torchs = ((t.double() / exact - 1).abs().mean() for t in (y, reference.rms_norm(x, weight, EPS)[0]))
    assert ours <= 1.1 * torchs


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_run_is_repeated_bit_for_bit(dtype):
    x, weight = make_x("fused qkv chunk", (2, 3, 3, 64), dtype), make_weight(64, dtype)
    dy = make_dy("transposed", x)
    first = run(x, dy, weight)
    kernels._plans.clear()
    for a, b in zip(first, run(x, dy, weight), strict=True):
        assert torch.equal(a, b)


def test_the_weight_gradient_is_summed_in_float32_and_rounded_once():
    for layout in ("flat rows", "transposed", "six dimensions"):
        x = make_x(layout, (1, 4, 3, 8), FP16)
        x.fill_(1.0)
        dy = torch.full(x.shape, 2.0**-4, dtype=FP16)
        dy.view(-1, 8)[0] = 256.0  # beside it, half precision has no room for a sixteenth
        dw = run(x, dy, torch.ones(8, dtype=FP16), 0.0)[2]
        assert torch.equal(dw, torch.full((8,), 256 + (dy.numel() // 8 - 1) / 16, dtype=FP16))


def test_the_weight_gradient_does_not_depend_on_how_programs_share_the_rows(monkeypatch):
    x, weight = make_x("fused qkv chunk", (2, 3, 5, 64), FP32), make_weight(64, FP32)
    dy = make_dy("dense", x)
    expected = (dy.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)).sum((0, 1, 2))
    for most in (1, 4, 6):
        monkeypatch.setattr(launch, "programs", lambda tokens, *_, most=most: min(tokens, most))
        kernels._plans.clear()
        torch.testing.assert_close(run(x, dy, weight)[2], expected.float(), rtol=2e-6, atol=2e-5)


def test_more_partial_sums_than_a_round_of_the_reduction_are_all_counted(monkeypatch):
    monkeypatch.setattr(kernels, "_REDUCE_ROWS", 4)
    monkeypatch.setattr(kernels, "_REDUCE_COLUMNS", 16)
    monkeypatch.setattr(launch, "programs", lambda tokens, *_: tokens)
    x = make_x("fused qkv chunk", (1, 9, 2, 40), FP16)
    check(x, make_dy("dense", x), make_weight(40, FP16))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("last stride two", "six dimensions")])
def test_a_last_stride_of_one_costs_one_launch_and_no_copy(layout):
    x, weight = make_x(layout, (2, 2, 3, 64), FP16), make_weight(64, FP16)
    with counted() as launches, poisoned(copies=False):
        y, rstd = kernels.forward(x, weight, EPS, False, "once")
        kernels.backward(y, x, weight, rstd, False, "once", 3)
    assert launches == ["forward", "backward", "reduce"]


def test_another_last_stride_is_copied_and_then_normed():
    x = make_x("last stride two", (2, 2, 3, 64), FP16)
    with counted() as launches, pytest.raises(AssertionError, match="copied"), poisoned(copies=False):
        kernels.forward(x, None, EPS, False, "once")
    assert not launches


def test_what_is_not_wanted_is_neither_allocated_nor_written():
    x, weight = make_x("dense", (1, 2, 3, 64), FP16), make_weight(64, FP16)
    assert kernels.forward(x, weight, EPS, False, "once", save=False)[1] is None
    rstd = torch.ones(1, 2, 3)
    for mask, w in ((1, weight), (2, weight), (1, None), (2, None)):
        with counted() as launches, poisoned() as memory:
            dx, dw = kernels.backward(x, x, w, rstd, False, "once", mask)
        assert (dx.numel() > 0) == bool(mask & 1)
        assert (dw.numel() > 0) == (mask == 2 and w is not None)
        wants_dw = mask == 2 and w is not None
        assert launches == (["backward"] if mask & 1 else []) + (["backward", "reduce"] if wants_dw else [])
        assert max(size for _, size in memory.blocks.values()) <= 6 * 64 * 4


@pytest.mark.parametrize("shape", [(0, 64), (0,), (2, 0, 3, 64), (3, 0)])
def test_nothing_in_gives_nothing_and_a_weight_gradient_of_zeros(shape):
    x, weight = torch.empty(shape, dtype=FP16), torch.ones(shape[-1], dtype=FP16)
    with counted() as launches, poisoned():
        y, rstd = kernels.forward(x, weight, EPS, False, "once")
        dx, dw = kernels.backward(x, x, weight, rstd, False, "once", 3)
    assert not launches
    assert (y.shape, rstd.shape, dx.shape) == (x.shape, x.shape[:-1], x.shape)
    assert torch.equal(dw, torch.zeros_like(weight))


def test_a_weight_of_one_element_may_have_any_stride():
    x, weight = fill(torch.empty(3, 1), 0), torch.full((3,), 1.5)[::3]
    check(x, make_dy("dense", x), weight)


def test_an_rstd_of_any_layout_is_read_by_its_strides():
    x, weight = make_x("dense", (1, 3, 4, 64), FP32), make_weight(64, FP32)
    dy = make_dy("dense", x)
    _, rstd = kernels.forward(x, weight, EPS, False, "once")
    given = rstd.transpose(1, 2).contiguous().transpose(1, 2)
    expected = kernels.backward(dy, x, weight, rstd, False, "once", 3)
    for a, b in zip(kernels.backward(dy, x, weight, given, False, "once", 3), expected, strict=True):
        assert torch.equal(a, b)


# Views of a file of 13 GB that is nearly all hole: what overflows 32 bits reads zeros, 2^32 elements too early. The
# interpreter takes integers by their value, not by their annotation: a row stride is long where it is past 2^31.
_FAR, _FARTHER = 2**30, 2**31 + 64
FAR_STRIDES = {
    "flat rows": ((3, 64), (_FARTHER, 1)),
    "token stride times tokens": ((5, 2, 64), (_FAR, 64, 1)),
    "batch stride times batches": ((5, 2, 2, 64), (_FAR, 512, 128, 1)),
    "batch stride": ((2, 2, 2, 64), (_FARTHER, 512, 128, 1)),
    "token stride": ((2, 2, 64), (_FARTHER, 128, 1)),
    "row stride": ((2, 3, 64), (128, _FARTHER, 1)),
    "row stride past a tile": ((2, 2, 64), (128, _FARTHER, 1)),
}


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("far") / "memory"
    elements = 2**31 + 2**32 + 2**16
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=2 * elements)
    # A function: pytest shows the arguments of a test that fails, and a storage shows its every byte.
    yield lambda *where: torch.empty(0, dtype=FP16).set_(storage, *where)
    path.unlink()


@pytest.mark.parametrize("which", ["x", "dy", "both"])
@pytest.mark.parametrize("name", FAR_STRIDES)
def test_offsets_beyond_32_bits_reach_their_elements(name, which, far, monkeypatch):
    shape, strides = FAR_STRIDES[name]
    if "tile" in name:
        tile = launch.tile
        monkeypatch.setattr(launch, "tile", lambda *where: dataclasses.replace(tile(*where), rows=1, groups=1, batch=1))
    x, dy = (fill(torch.empty(shape, dtype=FP16), seed) for seed in (0, 1))
    views = []
    for i, t in enumerate((x, dy)):
        view = far(2**31 + 4096 * i, shape, strides)
        if which in ("both", ("x", "dy")[i]):
            assert sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= 2**31
            views.append(view.copy_(t))
        else:
            views.append(t)
    weight = make_weight(64, FP16)
    y, rstd = kernels.forward(views[0], weight, EPS, False, "once")
    dx, dw = kernels.backward(views[1], views[0], weight, rstd, False, "once", 3)
    expected_y, expected_rstd = reference.rms_norm(x, weight, EPS)
    expected_dx, expected_dw = reference.rms_norm_backward(dy, x, weight, expected_rstd)
    torch.testing.assert_close(y, expected_y, rtol=2**-10, atol=0)
    torch.testing.assert_close(dx, expected_dx, rtol=2**-10, atol=1e-5)
    torch.testing.assert_close(dw, expected_dw, rtol=2**-10, atol=1e-5)


def test_a_plan_serves_other_tensors_and_another_eps():
    plans = []
    for seed, eps in enumerate((1e-6, 1.0)):
        x = make_x("fused qkv chunk", (1, 2, 3, 64), FP16, seed)
        check(x, make_dy("strided", x, seed + 1), make_weight(64, FP16, seed=seed + 2), eps)
        plans.append(dict(kernels._plans))
    assert plans[0] == plans[1]


def test_a_plan_for_aligned_tensors_is_not_taken_for_others():
    with counted() as launches:
        for x_at, dy_at, weight_at in ((16, 16, 16), (17, 16, 16), (16, 16, 17), (16, 17, 16), (16, 16, 16)):
            x, dy, weight = (
                fill(torch.empty(256, dtype=BF16)[start : start + count].view(shape), seed)
                for seed, (start, count, shape) in enumerate(
                    ((x_at, 128, (2, 64)), (dy_at, 128, (2, 64)), (weight_at, 64, (64,)))
                )
            )
            check(x, dy, weight, mask=1)
    assert launches.count("forward") == launches.count("backward") == 5


def test_a_plan_keeps_no_tensor_alive():
    x, weight = make_x("dense", (1, 2, 3, 64), FP16), make_weight(64, FP16)
    y, rstd = kernels.forward(x, weight, EPS, False, "once")
    dx, dw = kernels.backward(y, x, weight, rstd, False, "once", 3)
    pairs = kernels.forward_pair((x, x), (weight, weight), EPS, False, "once")
    gradients = kernels.backward_pair((y, y), (x, x), (weight, weight), (rstd, rstd), False, "once", (3, 3))
    alive = [weakref.ref(t) for t in (x, weight, y, rstd, dx, dw, *pairs[0], *pairs[1], *gradients[0], *gradients[1])]
    assert len(kernels._plans) == 4
    del x, weight, y, rstd, dx, dw, pairs, gradients
    gc.collect()
    assert not [each for each in alive if each() is not None]


def test_lengths_that_never_repeat_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_PLANS", 3)
    for tokens in (*range(1, 6), 1, 4):
        x = fill(torch.empty(tokens, 8), tokens)
        y, _ = kernels.forward(x, None, EPS, False, "once")
        torch.testing.assert_close(y, reference.rms_norm(x, None, EPS)[0])
        assert len(kernels._plans) <= 3
