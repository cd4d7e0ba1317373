"""What only a GPU can show of the Triton kernels: ``pytest -m gpu``. Imports torch and pytest alone.

The kernels' maths, layouts and offsets are proved without a GPU too (tests/interpreter, tests/test_machine_code.py);
here the same is asked of the hardware, and what belongs to it: its autocast, graphs, streams and memory.
"""

import shutil
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from oracle import ROUNDINGS, assert_near, layouts, oracle

import qknorm
from qknorm import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

EPS = 1e-6
DIMS = (1, 7, 64, 80, 96, 112, 128, 256, 512, 1000, 1536, 3072, 5120, 8192)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def dtypes(device) -> tuple[torch.dtype, ...]:
    """What this GPU's kernels take."""
    every = (torch.bfloat16, torch.float16, torch.float32)
    return tuple(dtype for dtype in every if ops.triton_obstacle(device, dtype, 128) is None)


def make(shape, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(shape, generator=g)).to(dtype).to(device)
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=g)).to(dtype).to(device)
    dy = torch.randn(shape, generator=g).to(dtype).to(device)
    return x, weight, dy


def gradients(x, weight, dy, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = qknorm.rms_norm(x, weight, EPS, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between ``actual`` and the float64 ``exact`` rounded to its dtype."""
    bits = {2: torch.int16, 4: torch.int32}[actual.itemsize]

    def ordered(t: torch.Tensor) -> torch.Tensor:
        i = t.contiguous().view(bits).long()
        return torch.where(i < 0, -(i & (2 ** (8 * t.itemsize - 1) - 1)), i)

    return (ordered(actual) - ordered(exact.to(actual.dtype))).abs()


def test_the_kernels_are_what_runs_here(device, dtypes):
    assert dtypes
    for dtype in dtypes:
        assert qknorm.backend_for(torch.ones(2, 64, dtype=dtype, device=device)) == "triton"
    assert qknorm.backend_for(torch.ones(2, 64, dtype=torch.float64, device=device)) == "torch"


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dim", DIMS)
def test_forward_is_within_one_ulp_of_float64_in_every_dtype(device, dtypes, dim, rounding):
    for dtype in dtypes:
        for weight_dtype in dtypes:
            x, weight, _ = make((3, 37, 4, dim), dtype, device)
            weight = weight.to(weight_dtype)
            y = qknorm.rms_norm(x, weight, EPS, rounding=rounding)
            exact = oracle(x, weight, EPS, rounding=rounding)
            if rounding == "once":
                # In float32 the rounding of rstd and of both products shows, as it does in torch's own kernel.
                assert ulps(y, exact).max() <= (3 if dtype is torch.float32 else 1)
            else:  # a value beside a tie may be rounded to the other side before the weight, in the coarsest dtype
                assert_near(y, exact, 2, (dtype, weight_dtype))


def test_forward_is_as_close_to_float64_as_torchs_own_kernel(device, dtypes):
    for dtype in dtypes:
        x, weight, _ = make((2, 1024, 24, 128), dtype, device)
        exact = oracle(x, weight, EPS)
        ours = qknorm.rms_norm(x, weight, EPS)
        theirs = torch.nn.functional.rms_norm(x.float(), (128,), weight.float(), EPS).to(dtype)
        wrong, theirs_wrong = (int((ulps(y, exact) > 0).sum()) for y in (ours, theirs))
        assert wrong <= 1.1 * theirs_wrong + 10


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dim", DIMS[1:])  # of one element dx is nothing but what cancels
def test_both_gradients_are_those_of_float64(device, dtypes, dim, rounding):
    for dtype in dtypes:
        x, weight, dy = make((2, 19, 5, dim), dtype, device)
        _, dx, dw = gradients(x, weight, dy, rounding=rounding)
        leaves = x.double().requires_grad_(), weight.double().requires_grad_()
        steps = oracle(x, weight, EPS, rounding=rounding)
        n = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + EPS)
        used = n if rounding == "once" else n + (n.detach().float().to(dtype).double() - n.detach())
        wanted = torch.autograd.grad(used * leaves[1], leaves, dy.double())
        assert steps.shape == x.shape
        through = (torch.float32,) if rounding == "once" else (torch.float32, dtype)
        assert_near(dx, wanted[0], 2, (torch.float32,))
        assert_near(dw, wanted[1], 2, through)


@pytest.mark.parametrize("dim", [64, 80, 128, 1536])
def test_every_layout_of_x_and_dy_gives_the_bits_of_the_dense_one(device, dtypes, dim):
    for dtype in dtypes:
        _, weight, _ = make((2, 9, 6, dim), dtype, device)
        views = {name: _moved(t, device) for name, t in layouts((2, 9, 6, dim), dtype).items()}
        gradients_in = {name: _moved(t, device) for name, t in layouts((2, 9, 6, dim), dtype, seed=1).items()}
        expected = gradients(views["dense"], weight, gradients_in["dense"])
        for name, x in views.items():
            for dy_name, dy in gradients_in.items():
                for actual, wanted in zip(gradients(x, weight, dy), expected, strict=True):
                    assert actual.is_contiguous()
                    if name == "dense" and dy_name == "dense":
                        assert torch.equal(actual, wanted)
                    else:  # other tiles sum in another order
                        assert_near(actual, wanted.double(), 2, (torch.float32,))


def _moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same view of a copy of the whole storage, on the device."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def test_a_strided_input_is_not_copied(device, dtypes):
    fused = torch.randn(1, 4096, 3 * 24 * 128, device=device).to(dtypes[0])
    x = fused[..., 24 * 128 : 48 * 128].unflatten(-1, (24, 128))
    weight = torch.ones(128, dtype=dtypes[0], device=device)
    qknorm.rms_norm(x, weight, EPS)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = qknorm.rms_norm(x, weight, EPS)
    assert torch.cuda.max_memory_allocated() - before <= y.numel() * y.itemsize + 2**20


def test_q_and_k_in_one_launch_have_the_values_of_two(device, dtypes):
    for dtype in dtypes:
        q, q_weight, dq = make((2, 33, 24, 128), dtype, device)
        k, k_weight, dk = make((2, 17, 8, 128), dtype, device, seed=1)
        leaves = [t.detach().requires_grad_() for t in (q, k, q_weight, k_weight)]
        y = qknorm.qk_rms_norm(*leaves, EPS)
        both = [*y, *torch.autograd.grad(y, leaves, (dq, dk))]
        (qy, qx, qw), (ky, kx, kw) = gradients(q, q_weight, dq), gradients(k, k_weight, dk)
        for actual, wanted in zip(both, (qy, ky, qx, kx, qw, kw), strict=True):
            assert_near(actual, wanted.double(), 1, (torch.float32,))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_norm_and_rope_are_those_of_plain_torch(device, dtypes, dim, interleaved):
    for dtype in dtypes:
        streams = []
        for length in (33, 7):
            q, q_weight, _ = make((2, length, 24, dim), dtype, device, length)
            k, k_weight, _ = make((2, length, 8, dim), dtype, device, length + 1)
            streams.append([t.detach().requires_grad_() for t in (q, k, q_weight, k_weight)])
        angle = torch.randn(40, dim // 2, device=device)
        results = []
        for backend in ("auto", "torch"):
            y = qknorm.qk_rms_norm_rope(
                *streams[0],
                angle.cos(),
                angle.sin(),
                EPS,
                interleaved=interleaved,
                context=tuple(streams[1]),
                backend=backend,
            )
            dy = [torch.randn(t.shape, generator=torch.Generator().manual_seed(9)).to(t) for t in y]
            results.append((*y, *torch.autograd.grad(y, streams[0] + streams[1], dy)))
        for actual, wanted in zip(*results, strict=True):
            assert actual.dtype is dtype
            assert_near(actual, wanted.double(), 2, (torch.float32,))


def test_results_are_the_same_bits_from_run_to_run(device, dtypes):
    x, weight, dy = make((2, 4096, 24, 128), dtypes[0], device)
    first = gradients(x, weight, dy)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x, weight, dy), first, strict=True))


def test_nan_and_inf_stay_in_their_row_and_large_halves_do_not_overflow(device, dtypes):
    for dtype in dtypes:
        x, weight, _ = make((64, 128), dtype, device)
        clean = qknorm.rms_norm(x, weight, EPS)
        x[3, 5], x[7, 0] = float("nan"), float("inf")
        y = qknorm.rms_norm(x, weight, EPS)
        others = [i for i in range(64) if i not in (3, 7)]
        assert torch.equal(y[others], clean[others])
        assert y[3].isnan().all()
    large = torch.full((4, 128), 65504.0, dtype=torch.float16, device=device)
    assert torch.equal(qknorm.rms_norm(large, None, EPS), torch.ones_like(large))


def test_empty_inputs_have_empty_outputs_and_a_zero_weight_gradient(device, dtypes):
    x, weight, dy = make((0, 24, 128), dtypes[0], device)
    y, dx, dw = gradients(x, weight, dy)
    assert (y.shape, dx.shape) == (x.shape, x.shape)
    assert torch.equal(dw, torch.zeros_like(weight))


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"no GPU with {gib} GiB free, {free:.0f} are")


def test_more_than_2_to_the_31_elements(device, dtypes):
    needs_memory(24)
    rows = 2**31 // 128 + 3
    x = torch.zeros(rows, 128, dtype=dtypes[0], device=device)
    x[0], x[-1], x[rows // 2] = 1.0, 2.0, 3.0
    weight = torch.ones(128, dtype=dtypes[0], device=device)
    y = qknorm.rms_norm(x, weight, EPS)
    for row in (0, rows // 2, -1):
        assert_near(y[row], torch.ones(128, dtype=torch.float64, device=device))
    assert not y[1 : rows // 2].any()
    rstd = ops.launch_forward(x, weight, EPS, False, "once")[1]
    del y
    dx, dw = ops.launch_backward(torch.ones_like(x), x, weight, rstd, False, "once", 3)
    assert_near(dw, torch.full((128,), 3.0, dtype=torch.float64, device=device))
    assert dx[-1].isfinite().all()


def test_strides_that_pass_2_to_the_31(device, dtypes):
    needs_memory(16)
    whole = torch.zeros(2**31 + 2**20, dtype=dtypes[0], device=device)
    x = whole.as_strided((2, 3, 4, 128), (2**31, 512, 128, 1))
    x.copy_(torch.randn(x.shape, device=device))
    weight = torch.ones(128, dtype=dtypes[0], device=device)
    assert torch.equal(qknorm.rms_norm(x, weight, EPS), qknorm.rms_norm(x.contiguous(), weight, EPS))


def test_another_device_than_the_current_one(dtypes):
    if torch.cuda.device_count() < 2:
        pytest.skip("no GPU beside the first")
    x, weight, dy = make((2, 33, 24, 128), dtypes[0], torch.device("cuda", 1))
    with torch.cuda.device(0):
        results = gradients(x, weight, dy)
    assert all(t.device == x.device for t in results)
    assert_near(results[0], oracle(x, weight, EPS), 1)


def test_a_graph_replays_with_new_values(device, dtypes):
    x, weight, dy = make((1, 512, 24, 128), dtypes[0], device)
    gradients(x, weight, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(x, weight, dy)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for actual, wanted in zip(captured, gradients(x, weight, dy), strict=True):
        assert torch.equal(actual, wanted)


def test_a_graph_can_be_captured_without_a_call_before():
    script = """
        import torch, qknorm
        dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
        x = torch.randn(1, 512, 24, 128, device="cuda").to(dtype)
        weight = torch.ones(128, device="cuda", dtype=dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = qknorm.rms_norm(x, weight, 1e-6)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, qknorm.rms_norm(x, weight, 1e-6))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_call_waits_for_its_own_stream(device, dtypes):
    x, weight, _ = make((1, 1024, 24, 128), dtypes[0], device)
    expected = qknorm.rms_norm(x * 2, weight, EPS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y = qknorm.rms_norm(x * 2, weight, EPS)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, expected)


def test_threads_share_the_kernels(device, dtypes):
    x, weight, _ = make((1, 64, 24, 128), dtypes[0], device)
    expected = qknorm.rms_norm(x, weight, EPS)
    wrong = []

    def call():
        for length in range(1, 64):
            if not torch.equal(qknorm.rms_norm(x[:, :length], weight, EPS), expected[:, :length]):
                wrong.append(length)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_under_the_real_autocast_the_output_has_the_inputs_dtype(device, dtypes):
    x, weight, dy = make((1, 64, 24, 128), dtypes[0], device)
    plain = gradients(x, weight.float(), dy)
    for dtype in (*dtypes, None):
        with torch.autocast("cuda", dtype=dtype or dtypes[0], enabled=dtype is not None):
            cast = gradients(x, weight.float(), dy)
        assert [t.dtype for t in cast] == [x.dtype, x.dtype, torch.float32]
        assert all(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))


def test_the_torch_backend_runs_no_kernel_of_ours(device, dtypes, monkeypatch):
    x, weight, dy = make((1, 64, 24, 128), dtypes[0], device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = gradients(x, weight, dy, backend="torch")
        torch.cuda.synchronize()
    assert not any(
        "_kernel" in e.key and e.key.split("_")[0] in ("forward", "backward") for e in profile.key_averages()
    )
    assert_near(results[0], oracle(x, weight, EPS), 1)


def test_compiled_opaque_is_eager_bit_for_bit_and_decomposed_within_an_ulp(device, dtypes):
    x, weight, dy = make((1, 256, 24, 128), dtypes[0], device)
    eager = gradients(x, weight, dy)
    opaque = torch.compile(lambda *args: gradients(*args, backend="triton"), fullgraph=True)(x, weight, dy)
    assert all(torch.equal(a, b) for a, b in zip(opaque, eager, strict=True))
    fused = torch.compile(gradients, fullgraph=True)(x, weight, dy)
    for actual, wanted in zip(fused, eager, strict=True):
        assert_near(actual, wanted.double(), 2, (torch.float32,))


def test_the_memory_of_a_call_is_never_written_past(tmp_path):
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("no GPU tool compute-sanitizer on this machine")
    script = tmp_path / "calls.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
            import torch, qknorm
            dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
            for dim in (7, 80, 128, 1536):
                for shape in ((3, 5, dim), (1, 30, dim), (1, dim)):
                    for dtype_ in (dtype, torch.float32):
                        x = torch.randn(shape, device="cuda", dtype=dtype_, requires_grad=True)
                        w = torch.ones(dim, device="cuda", dtype=dtype_, requires_grad=True)
                        qknorm.rms_norm(x, w, 1e-6).backward(torch.ones_like(x))
            """
        )
    )
    run = subprocess.run([tool, "--error-exitcode", "9", sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout
