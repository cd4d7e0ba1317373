"""``rms_norm`` and ``qk_rms_norm`` against the float64 oracle and the contract of their dtypes, layouts and errors."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, HALF, ROUNDINGS, assert_near, layouts, oracle
from torch._subclasses.fake_tensor import FakeTensorMode

import qknorm
from qknorm import reference
from qknorm.autocast import emulate_cuda_autocast

PAIRS = list(itertools.product(DTYPES, (*DTYPES, None)))
EPS = 1e-6


def make(shape: tuple[int, ...], x_dtype: torch.dtype, w_dtype: torch.dtype | None, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(shape, generator=g, dtype=torch.float64)).to(x_dtype)
    w = None if w_dtype is None else (1 + 0.3 * torch.randn(shape[-1], generator=g, dtype=torch.float64)).to(w_dtype)
    return x, w


def gradients(x, w, dy, **options):
    """(y, dx, dw) of a call on leaves of its own."""
    x = x.detach().requires_grad_()
    w = None if w is None else w.detach().requires_grad_()
    y = qknorm.rms_norm(x, w, EPS, **options)
    # Not y.backward(): that would lay dx out like its leaf.
    grads = torch.autograd.grad(y, (x,) if w is None else (x, w), dy)
    return y.detach(), grads[0], None if w is None else grads[1]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_forward_and_both_gradients_are_those_of_the_formula_in_float64(x_dtype, w_dtype, rounding, unit_offset):
    x, w = make((3, 5, 4, 80), x_dtype, w_dtype)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x_dtype)
    y, dx, dw = gradients(x, w, dy, unit_offset=unit_offset, rounding=rounding)

    leaves = [x.detach().requires_grad_()] + ([] if w is None else [w.detach().requires_grad_()])
    # The oracle's own leaf is x, so its gradient is rounded to x's dtype once, at the end, as ours is.
    expected = oracle(leaves[0], leaves[1] if w is not None else None, EPS, unit_offset, rounding)
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    # A value rounded before the weight may fall to the other side of a tie: one step more.
    acc = torch.float64 if x_dtype is torch.float64 else torch.float32
    through = (acc,) if rounding == "once" or x_dtype is torch.float64 else (acc, x_dtype, w_dtype)
    assert_near(y, expected.detach(), 2, through)
    assert_near(dx, wanted[0], 1, (acc,))
    assert y.dtype == dx.dtype == x_dtype
    if w is not None:
        assert dw.dtype == w_dtype
        assert_near(dw, wanted[1], 2, through)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_autocast_changes_no_bit_and_no_dtype(x_dtype, w_dtype, autocast_dtype):
    x, w = make((2, 3, 64), x_dtype, w_dtype)
    dy = torch.randn(x.shape).to(x_dtype)
    plain = gradients(x, w, dy)
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=autocast_dtype):
        inside = gradients(x, w, dy)
        with torch.autocast("cpu", enabled=False):
            nested = gradients(x, w, dy)
    for a, b, c in zip(plain, inside, nested, strict=True):
        if a is not None:
            assert a.dtype == b.dtype == c.dtype
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16, torch.float32, None])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_the_real_cuda_autocast_leaves_the_dtype_alone(x_dtype, w_dtype, autocast_dtype):
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 5, 3, 64, dtype=x_dtype, device="cuda")
        w = None if w_dtype is None else torch.empty(64, dtype=w_dtype, device="cuda")
        rstd = torch.empty(2, 5, 3, device="cuda")
        with torch.autocast("cpu", enabled=False):
            torch.set_autocast_enabled("cuda", autocast_dtype is not None)
            torch.set_autocast_dtype("cuda", autocast_dtype or torch.float16)
            try:
                y = qknorm.rms_norm(x, w)
                dx, dw = torch.ops.qknorm.rms_norm_backward(y, x, w, rstd, EPS)
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.set_autocast_dtype("cuda", torch.float16)
    assert y.dtype == dx.dtype == x_dtype
    assert w is None or dw.dtype == w_dtype


def test_backward_under_another_autocast_gives_the_same_gradients():
    x, w = make((2, 3, 64), torch.bfloat16, torch.float32)
    dy = torch.randn(x.shape).bfloat16()
    _, dx, dw = gradients(x, w, dy)
    x.requires_grad_()
    w.requires_grad_()
    with emulate_cuda_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = qknorm.rms_norm(x, w, EPS)
        with torch.autocast("cpu", dtype=torch.float16):
            y.backward(dy)
    assert torch.equal(x.grad, dx)
    assert torch.equal(w.grad, dw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_the_epsilon_of_torch(dtype):
    x, w = make((4, 64), dtype, dtype)
    x = x * 1e-4  # so small that eps decides
    module = torch.nn.RMSNorm(64, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(w)
    assert_near(qknorm.rms_norm(x, w), module(x).double())
    expected = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    assert torch.equal(qknorm.rms_norm(x, w), qknorm.rms_norm(x, w, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 64, 80, 96, 112, 128, 1536, 5120, 8192])
def test_any_head_dim_and_any_row_count(dim, dtype):
    for rows in (0, 1, 3):
        x, w = make((rows, dim), dtype, dtype)
        dy = torch.randn(x.shape).to(dtype)
        y, dx, dw = gradients(x, w, dy)
        x64 = x.double().requires_grad_()
        w64 = w.double().requires_grad_()
        expected = oracle(x64, w64, EPS)
        wanted = torch.autograd.grad(expected, (x64, w64), dy.double())
        assert_near(y, expected.detach())
        # With one element the gradient is a difference of two equal numbers.
        assert (dx.double() - wanted[0]).abs().max().item() < 1e-2 if dim == 1 and rows else True
        if dim > 1:
            assert_near(dx, wanted[0])
        assert_near(dw, wanted[1])


@pytest.mark.parametrize("ndim", range(1, 7))
def test_inputs_of_one_to_six_dimensions(ndim):
    x, w = make((*(2,) * (ndim - 1), 16), torch.float32, torch.float32)
    y, dx, dw = gradients(x, w, torch.ones_like(x))
    flat = gradients(x.reshape(-1, 16), w, torch.ones(x.numel() // 16, 16))
    assert torch.equal(y, flat[0].view(x.shape))
    assert torch.equal(dx, flat[1].view(x.shape))
    assert_near(dw, flat[2].double())


@pytest.mark.parametrize("block", [64, 1000, 10**9])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_of_input_and_gradient_do_not_change_the_result(dtype, rounding, block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    shape = (2, 9, 3, 32)
    _, w = make(shape, dtype, dtype)
    dense_dy = layouts(shape, dtype, seed=1)["dense"]
    y0, dx0, dw0 = gradients(layouts(shape, dtype)["dense"], w, dense_dy, rounding=rounding)
    for name, x in layouts(shape, dtype).items():
        gradient_layouts = {**layouts(shape, dtype, seed=1)}
        for dy_name, dy in gradient_layouts.items():
            y, dx, dw = gradients(x, w, dy, rounding=rounding)
            where = f"{name}, {dy_name}"
            assert y.is_contiguous(), where
            assert dx.is_contiguous(), where
            if name == "last stride not one":
                assert_near(y, y0.double(), steps=2)
                assert_near(dx, dx0.double(), steps=2)
            else:
                assert torch.equal(y, y0), where
                if dy_name != "last stride not one":
                    assert torch.equal(dx, dx0), where
            assert_near(dw, dw0.double(), steps=2)


def test_an_expanded_gradient_is_taken_as_it_is():
    x, w = make((4, 6, 32), torch.bfloat16, torch.bfloat16)
    dy = torch.randn(32).bfloat16().expand(x.shape)
    for a, b in zip(gradients(x, w, dy), gradients(x, w, dy.contiguous()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_blocks_of_rows_give_the_bits_of_the_whole(dtype, rounding, monkeypatch):
    x, w = make((3, 50, 4, 24), dtype, torch.bfloat16)
    dy = torch.randn(x.shape).to(dtype)
    whole = gradients(x, w, dy, rounding=rounding, unit_offset=True)
    for block in (1, 24, 500, 24 * 50 * 4 + 1):
        monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
        blocked = gradients(x, w, dy, rounding=rounding, unit_offset=True)
        assert torch.equal(blocked[0], whole[0])
        assert torch.equal(blocked[1], whole[1])
        assert_near(blocked[2], whole[2].double(), steps=2)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dim=st.integers(1, 70),
    x_dtype=st.sampled_from(DTYPES),
    w_dtype=st.sampled_from((*DTYPES, None)),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    rounding=st.sampled_from(ROUNDINGS),
    unit_offset=st.booleans(),
    block=st.integers(1, 400),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_any_shape_and_strides_agree_with_the_oracle(
    shape, dim, x_dtype, w_dtype, order, step, rounding, unit_offset, block, seed
):
    permutation = list(range(len(shape)))
    order.shuffle(permutation)
    base, w = make((*(shape[i] * step for i in permutation), dim), x_dtype, w_dtype, seed)
    inverse = [permutation.index(i) for i in range(len(shape))]
    x = base.permute(*inverse, -1)[tuple(slice(None, None, step) for _ in shape)]
    assert x.shape == (*shape, dim)
    dy = torch.randn(x.permute(*reversed(range(x.dim()))).shape).to(x_dtype).permute(*reversed(range(x.dim())))
    original, reference.BLOCK_ELEMENTS = reference.BLOCK_ELEMENTS, block
    try:
        y, dx, dw = gradients(x, w, dy, unit_offset=unit_offset, rounding=rounding)
    finally:
        reference.BLOCK_ELEMENTS = original
    x64 = x.detach().requires_grad_()
    w64 = None if w is None else w.detach().requires_grad_()
    expected = oracle(x64, w64, EPS, unit_offset, rounding)
    leaves = [x64] + ([] if w is None else [w64])
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    assert_near(y, expected.detach(), steps=2)
    assert y.is_contiguous()
    assert dx.is_contiguous()
    assert dx.shape == x.shape
    if x.numel() == 0:
        return
    # Gradients are sums of terms that may cancel: the bound is taken at the scale of the terms.
    acc_eps = torch.finfo(reference.accumulate_dtype(x)).eps
    rounds = rounding != "once" and x_dtype is not torch.float64
    step_eps = max([acc_eps, *(torch.finfo(d).eps for d in (x_dtype, w_dtype) if rounds and d in HALF)])
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    factor = 1.0 if w is None else (w + 1 if unit_offset else w).double().abs().max().item()
    terms = (dy.double().abs() * rstd).max().item() * factor * dim
    assert (dx.double() - wanted[0].double()).abs().max().item() <= (8 * acc_eps + torch.finfo(x_dtype).eps) * terms
    if w is not None:
        assert dw.dtype == w_dtype
        terms = dy.double().abs().max().item() * dim**0.5 * (x.numel() // dim)
        bound = (8 * acc_eps + step_eps + torch.finfo(w_dtype).eps) * terms
        assert (dw.double() - wanted[1].double()).abs().max().item() <= bound


def test_nan_and_inf_stay_in_their_row():
    x, w = make((6, 64), torch.bfloat16, torch.bfloat16)
    clean = qknorm.rms_norm(x, w)
    x[2, 5] = float("nan")
    x[4, 7] = float("inf")
    y, dx, _ = gradients(x, w, torch.ones_like(x))
    others = [0, 1, 3, 5]
    assert torch.equal(y[others], clean[others])
    assert dx[others].isfinite().all()
    assert y[2].isnan().all()
    assert y[4].isnan().any()


def test_fp16_rows_at_the_edge_of_their_range_do_not_overflow():
    x = torch.full((3, 128), 65504.0, dtype=torch.float16)
    y, dx, dw = gradients(x, torch.ones(128, dtype=torch.float16), torch.ones_like(x))
    assert torch.equal(y, torch.ones_like(y))
    assert dx.isfinite().all()
    assert dw.isfinite().all()


def test_nothing_is_written_in_place_and_the_result_is_fresh():
    for dtype in DTYPES:
        x, _ = make((4, 32), dtype, None)
        before = x.clone()
        y, dx, _ = gradients(x, None, dy := torch.randn(x.shape).to(dtype))
        dy_before = dy.clone()
        assert torch.equal(x, before)
        assert torch.equal(dy, dy_before)
        assert len({t.untyped_storage().data_ptr() for t in (x, y, dx, dy)}) == 4


def test_saved_for_backward_are_x_and_weight_themselves_and_four_bytes_a_row():
    x, w = make((2, 3, 5, 64), torch.bfloat16, torch.bfloat16)
    x.requires_grad_()
    w.requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qknorm.rms_norm(x, w, EPS)
    own = [t for t in saved if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert len(saved) == 3
    assert [(t.dtype, t.numel()) for t in own] == [(torch.float32, 2 * 3 * 5)]


def test_without_a_gradient_nothing_is_saved():
    x, w = make((2, 64), torch.bfloat16, torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert not qknorm.rms_norm(x, w).requires_grad
        with torch.no_grad():
            qknorm.rms_norm(x, w.requires_grad_())
    assert not saved


def test_a_frozen_weight_costs_no_weight_gradient(monkeypatch):
    masks = []
    original = reference.rms_norm_backward_in_blocks

    def spy(*args):
        masks.append(args[-1])
        return original(*args)

    monkeypatch.setattr(reference, "rms_norm_backward_in_blocks", spy)
    x, w = make((4, 64), torch.bfloat16, torch.bfloat16)
    x.requires_grad_()
    qknorm.rms_norm(x, w).sum().backward()
    qknorm.rms_norm(x, w.requires_grad_()).sum().backward()
    qknorm.rms_norm(x.detach(), w).sum().backward()
    assert masks == [1, 3, 2]
    assert reference.rms_norm_backward(x, x, w, torch.ones(4), mask=1)[1].numel() == 0
    assert reference.rms_norm_backward(x, x, w, torch.ones(4), mask=2)[0].numel() == 0


def test_gradients_are_equal_bit_for_bit_from_run_to_run():
    x, w = make((4096, 128), torch.bfloat16, torch.bfloat16)
    x = x.repeat(3, 1)
    dy = torch.randn(x.shape).bfloat16()
    first = gradients(x, w, dy)
    for _ in range(3):
        for a, b in zip(first, gradients(x, w, dy), strict=True):
            assert torch.equal(a, b)


def test_weight_gradient_of_many_rows_is_summed_in_float32_and_rounded_once():
    rows = 3 * reference.BLOCK_ELEMENTS // 64
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    _, _, dw = gradients(x, torch.ones(64, dtype=torch.bfloat16), torch.full_like(x, 2**-12))
    assert torch.equal(dw, torch.full((64,), rows * 2.0**-12).bfloat16())


def test_peak_memory_of_a_call_is_its_output_and_a_few_megabytes():
    code = """
        import torch, qknorm
        def megabytes(key):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024
        mb = 200
        x = torch.randn(1 << 20).bfloat16().repeat(mb // 2).view(-1, 128).requires_grad_()
        w = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
        dy = x.detach().clone()
        small = torch.ones(16384, 128, dtype=torch.bfloat16, requires_grad=True)
        qknorm.rms_norm(small, w).backward(torch.ones_like(small))
        open("/proc/self/clear_refs", "w").write("5")  # the peak is what is in use now
        start = megabytes("VmRSS")
        y = qknorm.rms_norm(x, w)
        forward = megabytes("VmHWM") - start
        torch.autograd.grad(y, (x, w), dy)
        print(forward, megabytes("VmHWM") - start)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    forward, both = map(float, out.stdout.split())
    rstd = 200 / 64
    assert 180 < forward < 200 + rstd + 24  # the lower bounds show that the output was seen
    assert 380 < both < 400 + rstd + 24


def test_q_and_k_may_differ_in_all_but_dtype_device_and_head_dim():
    q, qw = make((2, 7, 4, 64), torch.bfloat16, torch.bfloat16)
    k, _ = make((2, 3, 2, 64), torch.bfloat16, None, seed=1)
    kw = torch.rand(64)
    for k_weight in (kw, None):
        new_q, new_k = qknorm.qk_rms_norm(q, k, qw, k_weight, EPS, unit_offset=True, rounding="input")
        assert torch.equal(new_q, qknorm.rms_norm(q, qw, EPS, unit_offset=True, rounding="input"))
        assert torch.equal(new_k, qknorm.rms_norm(k, k_weight, EPS, unit_offset=True, rounding="input"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: qknorm.rms_norm(torch.ones(3, 4, dtype=torch.int64)), TypeError, r"x must be .*but is torch.int64"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4, dtype=torch.complex64)), TypeError, r"x must be .*complex64"),
        (lambda: qknorm.rms_norm(torch.tensor(1.0)), ValueError, "x must have at least one dimension"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), torch.ones(3)), ValueError, r"weight must have shape \[4\].*\[3\]"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), torch.ones(3, 4)), ValueError, r"weight must have shape \[4\]"),
        (
            lambda: qknorm.rms_norm(torch.ones(3, 4), torch.ones(8, dtype=torch.uint8)),
            TypeError,
            r"weight must be .*uint8.*dequantise",
        ),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), torch.ones(4, device="meta")), ValueError, "weight must be on cpu"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), rounding="twice"), ValueError, "rounding must be one of.*'twice'"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), backend="cuda"), ValueError, "backend must be one of.*'cuda'"),
        (lambda: qknorm.rms_norm(torch.ones(3, 4), backend="triton"), RuntimeError, "backend='triton'.*cpu"),
        (lambda: qknorm.backend_for(torch.ones(1), "triton"), RuntimeError, "use backend='auto' or 'torch'"),
        (
            lambda: qknorm.qk_rms_norm(torch.ones(2, 4), torch.ones(2, 4).half(), None, None),
            TypeError,
            "q and k must have one dtype, but q has torch.float32 and k has torch.float16",
        ),
        (
            lambda: qknorm.qk_rms_norm(torch.ones(2, 4), torch.ones(2, 8), None, None),
            ValueError,
            "q and k must have one last dimension",
        ),
    ],
)
def test_bad_input_is_named_with_what_came_and_what_was_wanted(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_backend_of_a_cpu_tensor_is_torch():
    assert qknorm.backend_for(torch.ones(1)) == "torch"
    assert qknorm.backend_for(torch.ones(1), "torch") == "torch"
