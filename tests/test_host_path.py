"""The way from a call to the launch of the Triton kernels, on the CPU: a fake driver stands in for CUDA's."""

import contextlib
import gc
import threading
import warnings
import weakref

import pytest
import torch

import qknorm
from qknorm import ops

pytest.importorskip("triton")
host_cost = pytest.importorskip("qknorm_benchmarks.host_cost")


@pytest.fixture
def launches(monkeypatch):
    """The kernels that were launched, by name, newest last; the module of kernels is its attribute ``kernels``."""
    with host_cost.fake_gpu() as kernels:
        kernels._plans.clear()
        names = Launches()
        names.kernels = kernels
        compile_ = kernels._compile

        def recording(kernel, *arguments):
            names.plans += 1
            start = compile_(kernel, *arguments)
            return lambda *head: (names.append(kernel.__name__), start(*head))[1]

        monkeypatch.setattr(kernels, "_compile", recording)
        yield names


class Launches(list):
    kernels = None
    plans = 0


def operands(shape=(1, 4, 2, 64), dtype=torch.bfloat16, requires_grad=False):
    x = torch.randn(shape).to(dtype).requires_grad_(requires_grad)
    weight = torch.rand(shape[-1]).to(dtype).requires_grad_(requires_grad)
    return x, weight


def test_a_forward_without_grad_is_one_launch_and_one_allocation(launches):
    x, weight = operands()
    y = qknorm.rms_norm(x, weight, 1e-6)
    assert launches == ["forward_kernel"]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert host_cost.allocations(lambda: qknorm.rms_norm(x, weight, 1e-6)) == 1


def test_a_training_step_is_a_forward_a_backward_and_one_reduction(launches):
    x, weight = operands(requires_grad=True)
    qknorm.rms_norm(x, weight, 1e-6).sum().backward()
    assert launches == ["forward_kernel", "backward_kernel", "reduce_kernel"]
    assert x.grad.dtype is x.dtype
    assert weight.grad.shape == weight.shape


def test_a_frozen_weight_costs_no_reduction(launches):
    x, weight = operands(requires_grad=True)
    qknorm.rms_norm(x, weight.detach(), 1e-6).backward(torch.ones_like(x))
    assert launches == ["forward_kernel", "backward_kernel"]


def test_q_and_k_are_one_launch_a_direction_with_other_head_and_token_counts(launches):
    q, q_weight = operands((2, 6, 8, 64), requires_grad=True)
    k, k_weight = operands((2, 5, 4, 64), requires_grad=True)
    y = qknorm.qk_rms_norm(q, k, q_weight, k_weight, 1e-6)
    torch.autograd.backward(y, [torch.ones_like(each) for each in y])
    assert launches == ["forward_kernel", "backward_kernel", "reduce_kernel"]
    assert all(t.grad.shape == t.shape for t in (q, k, q_weight, k_weight))


def test_q_and_k_that_cannot_share_a_launch_take_two(launches):
    q, weight = operands()
    qknorm.qk_rms_norm(q, q.clone(), weight, weight.float(), 1e-6)
    assert launches == ["forward_kernel", "forward_kernel"]


def test_a_pair_of_which_one_output_is_unused_still_gets_its_gradient(launches):
    q, weight = operands(requires_grad=True)
    k = q.detach().clone().requires_grad_()
    qknorm.qk_rms_norm(q, k, weight, weight, 1e-6)[1].backward(torch.ones_like(k))
    assert q.grad is None
    assert k.grad is not None
    assert launches == ["forward_kernel", "backward_kernel", "reduce_kernel"]


def test_double_backward_takes_the_composite_maths_from_x(launches):
    q, weight = operands(dtype=torch.float32, requires_grad=True)
    (dq,) = torch.autograd.grad(qknorm.rms_norm(q, weight, 1e-6).sum(), q, create_graph=True)
    assert dq.grad_fn is not None
    assert launches == ["forward_kernel"]


def test_a_call_seen_before_looks_nothing_up_in_triton(launches):
    x, weight = operands()
    for _ in range(5):
        qknorm.rms_norm(x, weight, 1e-6)
    assert launches.plans == 1
    assert launches == ["forward_kernel"] * 5


def test_row_counts_do_not_compile_anew(launches, monkeypatch):
    compiled = []
    kernel = launches.kernels.forward_kernel
    do_compile = kernel._do_compile
    monkeypatch.setattr(kernel, "_do_compile", lambda *args: (compiled.append(args[0]), do_compile(*args))[1])
    kernel.device_caches.clear()
    for length in range(3, 40, 4):
        fused = torch.randn(2, length, 3 * 24 * 64).bfloat16()
        qknorm.rms_norm(fused[..., : 24 * 64].unflatten(-1, (24, 64)), torch.ones(64).bfloat16(), 1e-6)
    assert launches.plans == 10
    assert len(compiled) == 1


def test_plans_keep_no_tensor_alive(launches):
    x, weight = operands(requires_grad=True)
    y = qknorm.rms_norm(x, weight, 1e-6)
    y.backward(torch.ones_like(y))
    q, k = (x.detach().clone().requires_grad_() for _ in range(2))
    torch.autograd.backward(qknorm.qk_rms_norm(q, k, weight, weight, 1e-6), (torch.ones_like(q),) * 2)
    alive = [weakref.ref(t) for t in (x, weight, y, q, k)]
    del x, weight, y, q, k
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    assert len(launches.kernels._plans) == 4


def test_plans_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(launches.kernels, "_MOST_PLANS", 4)
    weight = torch.ones(64)
    for length in range(1, 12):
        qknorm.rms_norm(torch.randn(length, 64), weight, 1e-6)
    assert len(launches.kernels._plans) <= 4
    assert len(launches) == 11


def test_alignment_weight_dtype_and_options_have_plans_of_their_own(launches):
    x, weight = operands((8, 64))
    shifted = torch.empty(8 * 64 + 1, dtype=x.dtype)[1:].view(8, 64)
    for call in (
        lambda: qknorm.rms_norm(x, weight, 1e-6),
        lambda: qknorm.rms_norm(shifted, weight, 1e-6),
        lambda: qknorm.rms_norm(x, weight.float(), 1e-6),
        lambda: qknorm.rms_norm(x, None, 1e-6),
        lambda: qknorm.rms_norm(x, weight, 1e-6, unit_offset=True),
        lambda: qknorm.rms_norm(x, weight, 1e-6, rounding="input"),
    ):
        call()
    assert launches.plans == 6


def test_a_profilers_hook_sees_the_launch(launches):
    triton = pytest.importorskip("triton")
    seen = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    x, weight = operands()
    launcher = host_cost._Launcher
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "launch", None, raising=False)
            patch.setattr(
                launcher,
                "__call__",
                lambda self, gx, gy, gz, stream, function, packed, metadata, enter, *_: enter(metadata),
            )
            qknorm.rms_norm(x, weight, 1e-6)
    finally:
        hook.calls.clear()
    assert seen == ["forward_kernel"]


def test_a_tensor_on_another_device_is_launched_there(launches, monkeypatch):
    entered = []
    current = [7]

    @contextlib.contextmanager
    def on_device(index):
        entered.append(index)
        current[0] = index
        yield
        current[0] = 7

    monkeypatch.setattr(host_cost.FakeDriver, "get_current_device", lambda self: current[0])
    monkeypatch.setattr(launches.kernels, "_on_device", on_device)
    x, weight = operands()
    qknorm.rms_norm(x, weight, 1e-6)
    assert entered == [-1, -1]  # compiled there, launched there
    assert current == [7]


def test_threads_may_share_the_plans(launches):
    x, weight = operands()
    failures = []

    def call():
        try:
            for length in range(1, 30):
                qknorm.rms_norm(x.expand(length, *x.shape[1:]), weight, 1e-6)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.bfloat16, (9, 0), None),
        (torch.bfloat16, (8, 0), None),
        (torch.bfloat16, (7, 5), r"bfloat16 takes compute capability 8\.0, and cuda:0 has 7\.5"),
        (torch.float16, (7, 5), None),
        (torch.float32, (7, 5), None),
        (torch.float16, (7, 0), r"float16 takes compute capability 7\.5"),
        (torch.float64, (9, 0), "float64 is computed in plain torch"),
    ],
)
def test_what_a_gpu_takes_is_decided_by_dtype_and_capability(monkeypatch, dtype, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = ops.triton_obstacle(torch.device("cuda", 0), dtype, 128)
    assert (found is None) == (reason is None)
    if reason:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


def test_a_row_too_long_or_triton_missing_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    assert ops.triton_obstacle(device, torch.bfloat16, 8192) is None
    assert "at most 8192" in ops.triton_obstacle(device, torch.bfloat16, 8193)
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in ops.triton_obstacle(device, torch.bfloat16, 128)


def test_falling_back_on_an_accelerator_warns_once_for_each_reason_and_never_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    ops._kernels.cache_clear()
    ops.warn_once.cache_clear()
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="plain torch.*capability") as caught:
        found = [ops._kernels(device, torch.float16, dim) for dim in (64, 64, 128)]
    assert found == [None] * 3
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.kernels_for(torch.ones(2, 64)) is None
        assert ops.kernels_for(torch.ones(2, 64, device="meta")) is None
    ops._kernels.cache_clear()


def test_backend_torch_never_takes_the_kernels():
    x = torch.ones(2, 64)
    assert qknorm.backend_for(x, "torch") == "torch"
    assert ops.kernels_for(x, "torch") is None
