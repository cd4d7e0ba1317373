"""Several processes: DDP, FSDP2, tensor and sequence parallelism, on two ranks of gloo.

One pair of processes serves the whole file: each test sends it a function, which both ranks run. Nothing in here knows
the backend: with NCCL it would be the same code on other devices.
"""

import datetime
import functools
import multiprocessing
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from oracle import TOLERANCE, assert_near
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from qknorm import QKRMSNorm, qk_rms_norm, replace_qk_norms, rms_norm, tiny

RANKS = 2
LIMIT = 120  # seconds that one check may take
GRACE = 5  # seconds that a rank may go on after another failed: it may be waiting for that one for ever
EPS = 1e-6
BF16 = torch.bfloat16


# The pair of processes


def serve(rank: int, store: str, pipe: Any) -> None:
    """Run what comes through the pipe, and answer with the traceback, or None."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    pipe.send(None)
    while True:
        function, args = pipe.recv()
        try:
            torch.manual_seed(0)
            function(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


class Pair:
    """Two ranks, started when first needed and again after a failure, which may leave one of them in a collective."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.starts = folder, 0
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        self.wait(LIMIT)

    def start(self) -> None:
        self.starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            store = str(self.folder / f"store{self.starts}")
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.wait(LIMIT)

    def wait(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        waiting, failures = dict(enumerate(self.pipes)), []
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(waiting.values(), max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                del waiting[rank]
                try:
                    failure = pipe.recv()
                except EOFError:
                    failure = f"it ended with exit code {self.processes[rank].exitcode}"
                if failure:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        failures += [f"rank {rank} did not finish in time" for rank in waiting]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.stop()


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_the_failure_of_one_rank_fails_the_test_with_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GRACE", 0.5)
    pair = Pair(tmp_path)
    with pytest.raises(pytest.fail.Exception) as failure:
        pair(fail_on_one_rank)
    assert "rank 1: Traceback" in str(failure.value)
    assert 'raise ValueError("only here")' in str(failure.value)
    assert "rank 0 did not finish in time" in str(failure.value)
    assert not pair.processes


# The operators on DTensors


@functools.cache  # torch 2.13 cannot compile over a mesh where an equal one came before: its caches mix up the two
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def leaf(t: Tensor | None, on: DeviceMesh, *placements: Any, grad: bool = True) -> DTensor | None:
    return None if t is None else distribute_tensor(t, on, placements).requires_grad_(grad)


def counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rsplit(".", 1)[-1]: n for op, n in mode.get_comm_counts().items() if n}


def gradients(
    x: Tensor, weight: Tensor | None, dy: Tensor, *, wants_dx: bool = True, wants_dw: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What one process computes: y, dx, dw."""
    x = x.clone().requires_grad_(wants_dx)
    weight = None if weight is None else weight.clone().requires_grad_(wants_dw)
    y = rms_norm(x, weight, EPS, **options)
    y.backward(dy)
    return y.detach(), x.grad, None if weight is None else weight.grad


def same(sharded: DTensor, whole: Tensor) -> None:
    """Bit for bit."""
    assert sharded.dtype is whole.dtype
    assert torch.equal(sharded.full_tensor(), whole)


def near(dw: DTensor, whole: Tensor) -> None:
    """A sum over the rows, of which each process rounds its part."""
    assert dw.dtype is whole.dtype
    assert_near(dw.full_tensor(), whole.double(), steps=4)


SPLITS = {"batch": 0, "sequence": 1, "heads": 2}


def check_split(dim: int, weight: str, dtype: torch.dtype, heads: int) -> None:
    on = mesh()
    q, k, dq, dk = torch.randn(4, 2, 6, heads, 8).to(dtype)
    q_weight, k_weight = torch.randn(2, 8) if weight != "none" else (None, None)
    trained = weight == "trained"
    sharded = [leaf(t, on, Shard(dim)) for t in (q, k)]
    weights = [leaf(t, on, Replicate(), grad=trained) for t in (q_weight, k_weight)]
    with torch.autocast("cpu", BF16, enabled=dtype is BF16), CommDebugMode() as forward:
        results = qk_rms_norm(*sharded, *weights, EPS)
    incoming = [distribute_tensor(t, on, [Shard(dim)]) for t in (dq, dk)]
    with CommDebugMode() as backward:
        torch.autograd.backward(results, incoming)
    assert counts(forward) == {}
    assert counts(backward) == ({"all_reduce": 2} if trained else {})
    for x, w, dy, x_sharded, w_sharded, y in zip(
        (q, k), (q_weight, k_weight), (dq, dk), sharded, weights, results, strict=True
    ):
        whole, dx, dw = gradients(x, w, dy)
        assert y.placements == x_sharded.grad.placements == (Shard(dim),)
        same(y, whole)
        same(x_sharded.grad, dx)
        if trained:
            assert w_sharded.grad.placements == (Replicate(),)
            near(w_sharded.grad, dw)
        else:
            assert w_sharded is None or w_sharded.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("weight", ["trained", "frozen", "none"])
@pytest.mark.parametrize("split", SPLITS)
def test_split_q_and_k_gather_nothing_keep_their_placement_and_reduce_dw_once(ranks, split, weight, dtype):
    ranks(check_split, SPLITS[split], weight, dtype, 4)


def test_heads_that_do_not_divide_by_the_processes_gather_nothing(ranks):
    ranks(check_split, 2, "trained", torch.float32, 3)


def check_opaque() -> None:
    on = mesh()
    x, dy = torch.randn(2, 2, 6, 4, 8)
    weight = torch.randn(8)
    x_sharded, w_sharded = leaf(x, on, Shard(2)), leaf(weight, on, Replicate())
    with CommDebugMode() as forward:
        y, rstd = torch.ops.qknorm.rms_norm_opaque(x_sharded, w_sharded, EPS)
    y.backward(distribute_tensor(dy, on, [Shard(2)]))
    whole, dx, dw = gradients(x, weight, dy)
    assert counts(forward) == {}
    assert y.placements == rstd.placements == (Shard(2),)
    same(y, whole)
    same(x_sharded.grad, dx)
    near(w_sharded.grad, dw)
    same(rstd, torch.ops.qknorm.rms_norm(x, weight, EPS)[1])


def test_the_opaque_operators_have_the_same_rules(ranks):
    ranks(check_opaque)


def check_two_dimensional_mesh(shape: tuple[int, int]) -> None:
    on = init_device_mesh("cpu", shape)
    x, dy = torch.randn(2, 2, 6, 4, 8)
    weight = torch.randn(8)
    split = (Shard(1), Shard(2))
    x_sharded, w_sharded = leaf(x, on, *split), leaf(weight, on, Replicate(), Replicate())
    with CommDebugMode() as forward:
        y = rms_norm(x_sharded, w_sharded, EPS)
    y.backward(distribute_tensor(dy, on, split))
    whole, dx, dw = gradients(x, weight, dy)
    assert counts(forward) == {}
    assert y.placements == split
    same(y, whole)
    same(x_sharded.grad, dx)
    near(w_sharded.grad, dw)


@pytest.mark.parametrize("shape", [(1, RANKS), (RANKS, 1)])
def test_sequence_and_heads_may_be_split_over_two_dimensions_of_a_mesh(ranks, shape):
    ranks(check_two_dimensional_mesh, shape)


def check_strided_split() -> None:
    on = mesh()
    rows = torch.randn(8, 8)
    weight = torch.randn(8)
    split = _StridedShard(0, split_factor=2)
    mine = rows.view(2, RANKS, 2, 8)[:, dist.get_rank()].reshape(4, 8).requires_grad_()
    x = DTensor.from_local(mine, on, [split], run_check=False, shape=rows.shape, stride=rows.stride())
    w = leaf(weight, on, Replicate())
    with CommDebugMode() as forward:
        y = rms_norm(x, w, EPS)
    assert counts(forward) == {}
    assert y.placements == (split,)
    assert torch.equal(y.to_local(), rms_norm(mine, weight, EPS))
    y.backward(DTensor.from_local(torch.ones(4, 8), on, [split], run_check=False, shape=(8, 8), stride=(8, 1)))
    _, _, dw = gradients(rows, weight, torch.ones(8, 8))
    near(w.grad, dw)


def test_rows_that_are_split_in_strides_as_flattening_leaves_them_gather_nothing(ranks):
    ranks(check_strided_split)


def check_pending_sum() -> None:
    on = mesh()
    parts = torch.randn(RANKS, 4, 8)
    x = DTensor.from_local(parts[dist.get_rank()], on, [Partial()])
    same(rms_norm(x, None, EPS), rms_norm(parts.sum(0), None, EPS))


def test_a_sum_that_is_still_pending_is_finished_before_the_norm(ranks):
    ranks(check_pending_sum)


def check_split_weight() -> None:
    on = mesh()
    x, dy = torch.randn(2, 4, 6, 8)
    weight = torch.randn(8)
    x_sharded, w_sharded = leaf(x, on, Shard(0)), leaf(weight, on, Shard(0))
    with CommDebugMode() as forward:
        y = rms_norm(x_sharded, w_sharded, EPS)
    incoming = distribute_tensor(dy, on, [Shard(0)])
    with CommDebugMode() as backward:
        y.backward(incoming)
    whole, dx, dw = gradients(x, weight, dy)
    assert counts(forward) == {"all_gather_into_tensor": 1}  # of the weight
    assert counts(backward) == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    assert y.placements == w_sharded.grad.placements == (Shard(0),)
    same(y, whole)
    same(x_sharded.grad, dx)
    near(w_sharded.grad, dw)


def test_a_split_weight_is_gathered_alone_and_its_gradient_is_split_as_it_is(ranks):
    ranks(check_split_weight)


def check_other_placement_of_dy() -> None:
    on = mesh()
    x = torch.randn(2, 6, 4, 8)
    weight = torch.randn(8)
    x_sharded, w_sharded = leaf(x, on, Shard(2)), leaf(weight, on, Replicate())
    for placement in (Replicate(), Shard(1), Shard(3)):
        rms_norm(x_sharded, w_sharded, EPS).backward(distribute_tensor(torch.ones_like(x), on, [placement]))
        _, dx, dw = gradients(x, weight, torch.ones_like(x))
        same(x_sharded.grad, dx)
        near(w_sharded.grad, dw)
        x_sharded.grad = w_sharded.grad = None


def test_a_gradient_may_come_in_with_another_placement_than_x(ranks):
    ranks(check_other_placement_of_dy)


def check_cache() -> None:
    on = mesh()
    x, dy = torch.randn(2, 2, 6, 4, 8)
    weight = torch.randn(8)
    for wants_dx, wants_dw in ((True, False), (True, True), (False, True)) * 2:
        x_sharded = leaf(x, on, Shard(2), grad=wants_dx)
        w_sharded = leaf(weight, on, Replicate(), grad=wants_dw)
        rms_norm(x_sharded, w_sharded, EPS).backward(distribute_tensor(dy, on, [Shard(2)]))
        _, dx, dw = gradients(x, weight, dy, wants_dx=wants_dx, wants_dw=wants_dw)
        assert (x_sharded.grad is None) == (dx is None)
        assert (w_sharded.grad is None) == (dw is None)
        if dx is not None:
            same(x_sharded.grad, dx)
        if dw is not None:
            near(w_sharded.grad, dw)
    rstd = torch.ops.qknorm.rms_norm(leaf(x, on, Shard(2)), None, EPS)[1]
    args = leaf(dy, on, Shard(2)), leaf(x, on, Shard(2)), leaf(weight, on, Replicate()), rstd, EPS
    with torch.no_grad():
        for mask in (1, 3, 2, 1, 0, 3):
            dx, dw = torch.ops.qknorm.rms_norm_backward(*args, mask=mask)
            assert dx.shape == (x.shape if mask & 1 else (0,))
            assert dw.shape == (weight.shape if mask & 2 else (0,))
            assert dx.placements == ((Shard(2),) if mask & 1 else (Replicate(),))
            assert dw.placements == ((Partial(),) if mask & 2 else (Replicate(),))


def test_a_frozen_weight_is_never_served_the_cached_sharding_of_a_trained_one_nor_the_reverse(ranks):
    ranks(check_cache)


def check_split_last_dim() -> None:
    on = mesh()
    norm = QKRMSNorm(32, eps=EPS)
    norm.weight = nn.Parameter(leaf(torch.ones(32), on, Replicate()))
    q = distribute_tensor(torch.randn(2, 6, 4, 8), on, [Shard(2)])
    across_heads = q.flatten(2)
    assert across_heads.placements == (Shard(2),)
    message = (
        r"x is sharded along its last dimension, which the norm sums over: it is \[2, 6, 32\] with placements "
        r"\(Shard\(dim=2\),\); redistribute it before the norm"
    )
    calls = {
        ValueError: (norm, lambda x: rms_norm(x, None, EPS), lambda x: rms_norm(x, norm.weight, EPS, backend="torch")),
        RuntimeError: (
            lambda x: torch.ops.qknorm.rms_norm(x, norm.weight, EPS),
            lambda x: torch.ops.qknorm.rms_norm_opaque(x, None, EPS),
        ),
    }
    with pytest.raises(RuntimeError, match=message):
        torch.compile(norm, backend="aot_eager", fullgraph=True)(across_heads)
    q_k = distribute_tensor(torch.randn(2, 6, 32), on, [Shard(1)]), across_heads
    with CommDebugMode() as mode:
        for error, functions in calls.items():
            for function in functions:
                with pytest.raises(error, match=message):
                    function(across_heads)
        with pytest.raises(ValueError, match="x is sharded along its last dimension"):
            qk_rms_norm(*q_k, None, None, EPS)
    assert counts(mode) == {}
    same(norm(across_heads.redistribute(on, [Replicate()])), rms_norm(across_heads.full_tensor(), None, EPS))


def test_a_norm_across_heads_on_a_split_of_the_heads_is_an_error_that_says_so(ranks):
    ranks(check_split_last_dim)


def check_bad_input() -> None:
    on = mesh()
    x = leaf(torch.randn(2, 6, 4, 8), on, Shard(2))
    with pytest.raises(ValueError, match=r"weight must have shape \[8\], x's last dimension, but has \[4\]"):
        rms_norm(x, leaf(torch.ones(4), on, Replicate()))
    with pytest.raises(TypeError, match=r"x must be bfloat16, .* but is torch.int64"):
        rms_norm(distribute_tensor(torch.ones(2, 8, dtype=torch.int64), on, [Shard(0)]))
    with pytest.raises(TypeError, match=r"weight must be .*, but is torch.int64 \(DTensor of shape \[8\]\)"):
        rms_norm(x, distribute_tensor(torch.ones(8, dtype=torch.int64), on, [Replicate()]))
    with pytest.raises(RuntimeError, match=r"qknorm.rms_norm.default:? got mixed torch.Tensor and DTensor"):
        rms_norm(x, torch.ones(8))
    with pytest.raises(RuntimeError, match=r"qknorm.rms_norm.default:? got mixed torch.Tensor and DTensor"):
        rms_norm(torch.ones(2, 8), leaf(torch.ones(8), on, Shard(0)))


def test_bad_dtensors_get_the_errors_of_plain_tensors_with_their_whole_shapes(ranks):
    ranks(check_bad_input)


def check_compiled(backend: str) -> None:
    on = mesh()
    x, dy = torch.randn(2, 2, 6, 4, 8)
    weight = torch.randn(8)
    collectives: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        collectives.append([name for name in called if "c10d" in name and "wait_tensor" not in name])
        return make_boxed_func(graph)

    compiler = "inductor" if backend == "inductor" else aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(lambda x, w: rms_norm(x, w, EPS), backend=compiler, fullgraph=True)
    for trained in (True, False):
        x_sharded, w_sharded = leaf(x, on, Shard(2)), leaf(weight, on, Replicate(), grad=trained)
        y = compiled(x_sharded, w_sharded)
        y.backward(distribute_tensor(dy, on, [Shard(2)]))
        whole, dx, dw = gradients(x, weight, dy)
        assert y.placements == x_sharded.grad.placements == (Shard(2),)
        assert_near(y.full_tensor(), whole.double())
        assert_near(x_sharded.grad.full_tensor(), dx.double(), steps=4)
        if trained:
            assert w_sharded.grad.placements == (Replicate(),)
            near(w_sharded.grad, dw)
    if backend != "inductor":
        assert collectives == [[], ["_c10d_functional.all_reduce.default"], [], []]


@pytest.mark.parametrize("backend", ["aot_autograd", "inductor"])
def test_split_heads_work_compiled_in_one_graph_and_gather_nothing(ranks, backend):
    ranks(check_compiled, backend)


FIRST_USES = {
    "the operator, in inference mode": "with torch.inference_mode(): y = forward(x(), w(), 1e-6)[0]",
    "the backward operator": "backward(x(), x(), w(), r(), 1e-6, mask=1); y = backward(x(), x(), w(), r(), 1e-6)[0]",
    "the function": "y = qknorm.rms_norm(x(), w(), 1e-6)",
    "compiled code": "y = torch.compile(qknorm.rms_norm, backend='aot_eager', fullgraph=True)(x(), w(), 1e-6)",
}


@pytest.mark.parametrize("use", FIRST_USES)
def test_the_rules_are_in_time_for_whatever_is_called_first(use):
    code = f"""
import sys, torch, qknorm
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
from torch.distributed.tensor import Shard, Replicate, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = lambda: distribute_tensor(torch.ones(2, 4, 8), mesh, [Shard(1)])
r = lambda: distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
w = lambda: distribute_tensor(torch.ones(8), mesh, [Replicate()])
forward, backward = torch.ops.qknorm.rms_norm, torch.ops.qknorm.rms_norm_backward
{FIRST_USES[use]}
assert y.placements == (Shard(1),) and y.shape == (2, 4, 8)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


# Tensor parallelism, as torch's own styles lay it out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(8, EPS), nn.RMSNorm(8, EPS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (self.to_q, self.to_k, self.to_v))
        q, k, v = (t.transpose(1, 2) for t in (self.norm_q(q), self.norm_k(k), v))
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def settle(model: nn.Module) -> list[str]:
    """Replace the norms and move their weights off one; their parameters' names."""
    report = replace_qk_norms(model)
    assert len(report) > 0
    norms = [name for name, module in model.named_modules() if isinstance(module, QKRMSNorm)]
    for name in norms:
        nn.init.uniform_(model.get_submodule(name).weight, 0.5, 1.5)
    return [f"{name}.weight" for name in norms]


def two_steps(model: nn.Module, step: Callable[[], Tensor], lr: float) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(2):
        optimizer.zero_grad()
        step().backward()
        optimizer.step()


def whole(t: Tensor) -> Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def assert_same_training(
    sharded: nn.Module, alone: nn.Module, before: dict[str, Tensor], norms: list[str], frozen: bool, tolerance: float
) -> None:
    """Every parameter moved as it does in one process, relative to the move; norms not at all where frozen."""
    for name, p in alone.named_parameters():
        moved = whole(sharded.get_parameter(name)) - before[name]
        expected = p.detach() - before[name]
        if name in norms and frozen:
            assert not moved.any()
            assert sharded.get_parameter(name).grad is None
            continue
        assert expected.abs().max() > 0 or name not in norms
        error, rounding = (moved - expected).norm(), 1e-7 * before[name].norm()  # of the parameter itself
        assert error <= tolerance * expected.norm() + rounding, f"{name}: {error} of {expected.norm()}"


def check_tensor_parallel(frozen: bool) -> None:
    alone, sharded = Attention(), Attention()
    norms = settle(alone)
    settle(sharded)
    sharded.load_state_dict(alone.state_dict())
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    x = torch.randn(2, 6, 32)
    plan = dict.fromkeys(("to_q", "to_k", "to_v"), ColwiseParallel())
    plan |= dict.fromkeys(("norm_q", "norm_k"), SequenceParallel(sequence_dim=2, use_local_output=True))
    parallelize_module(sharded, mesh(), plan | {"to_out": RowwiseParallel()})
    for model in (alone, sharded):  # not before: SequenceParallel makes new parameters, which all require gradients
        for name in norms:
            model.get_parameter(name).requires_grad_(not frozen)
    with CommDebugMode() as mode, torch.no_grad():
        y = sharded(x)
    assert torch.allclose(y, alone(x), atol=1e-6)
    assert counts(mode) == {"all_reduce": 1}  # of to_out's result
    for model in (alone, sharded):
        two_steps(model, lambda model=model: model(x).square().mean(), lr=1.0)
    assert_same_training(sharded, alone, before, norms, frozen, 1e-5)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_tensor_parallel_attention_trains_as_one_process_does(ranks, frozen):
    ranks(check_tensor_parallel, frozen)


# DDP and FSDP2 on a real model


def flux(frozen: bool) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    model, inputs = tiny.build("FluxTransformer2DModel")
    norms = settle(model)
    for name in norms:
        model.get_parameter(name).requires_grad_(not frozen)
    return model, inputs, norms


def mine(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """This process's part of the batch; positions are no part of it."""
    return {
        name: t if name.endswith("_ids") else t.chunk(RANKS)[dist.get_rank()].contiguous() for name, t in inputs.items()
    }


def loss(model: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs)[0].float().square().mean()


def train_both(sharded: nn.Module, alone: nn.Module, inputs: dict[str, Tensor], cast: torch.dtype | None) -> None:
    def step() -> Tensor:
        if cast is None:
            return loss(alone, inputs)
        # As FSDP2 does: parameters and inputs in half precision, the gradients of the parameters in float32.
        parameters = {name: p.to(cast) for name, p in alone.named_parameters()}
        half = {name: t.to(cast) for name, t in inputs.items()}
        return loss(lambda **kwargs: torch.func.functional_call(alone, parameters, kwargs=kwargs), half)

    two_steps(alone, step, lr=0.02)
    two_steps(sharded, lambda: loss(sharded, mine(inputs)), lr=0.02)


def check_ddp(frozen: bool) -> None:
    alone, inputs, norms = flux(frozen)
    model = flux(frozen)[0]
    model.load_state_dict(alone.state_dict())
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    train_both(nn.parallel.DistributedDataParallel(model), alone, inputs, None)
    assert_same_training(model, alone, before, norms, frozen, 1e-4)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_replaced_flux_trains_under_ddp_as_in_one_process(ranks, frozen):
    ranks(check_ddp, frozen)


def check_fsdp(frozen: bool, reshard: bool, param_dtype: torch.dtype | None) -> None:
    alone, inputs, norms = flux(frozen)
    model = flux(frozen)[0]
    model.load_state_dict(alone.state_dict())
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks, model):
        fully_shard(block, mesh=mesh(), reshard_after_forward=reshard, mp_policy=policy)
    assert all(isinstance(model.get_parameter(name), DTensor) for name in norms)
    seen = set()

    def see(norm: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        seen.add((type(norm.weight), norm.weight.dtype, args[0].dtype, y.dtype))

    for norm in model.modules():
        if isinstance(norm, QKRMSNorm):
            norm.register_forward_hook(see)
    train_both(model, alone, inputs, param_dtype)
    dtype = param_dtype or torch.float32
    assert seen == {(nn.Parameter, dtype, dtype, dtype)}
    # In half precision both round each activation, in batches of other sizes.
    tolerance = 1e-4 if param_dtype is None else 8 * TOLERANCE[param_dtype]
    assert_same_training(model, alone, before, norms, frozen, tolerance)


@pytest.mark.parametrize("param_dtype", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_replaced_flux_trains_under_fsdp2_as_in_one_process(ranks, frozen, reshard, param_dtype):
    ranks(check_fsdp, frozen, reshard, param_dtype)
