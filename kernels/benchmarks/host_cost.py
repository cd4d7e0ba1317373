"""What a call costs the host: Python, look-ups and allocations, on tiny tensors, with the launch itself stubbed.

    python -m qknorm_benchmarks.host_cost [--csv PATH]

No GPU is needed. A fake driver stands in for CUDA's: kernels are compiled for sm_90 and "launched" by Triton's own
launcher, of which only the C function at the end (argument unpacking and ``cuLaunchKernelEx``) does nothing. Tensors
lie on the CPU. So the figures are ratios of host time, side by side in one run, and say nothing of a GPU's.

Rivals: four plain ATen calls, two casts, one operation and a cast back, which is what CUDA's autocast makes of a norm
followed by ``.to(dtype)`` (on a CPU ``F.rms_norm`` itself is eight operations, so ``torch.native_layer_norm`` without
weight stands in for it); and for training ``nn.RMSNorm`` under ``torch.autocast("cpu")`` followed by ``.to(dtype)``.
"""

import argparse
import contextlib
import csv
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

import qknorm
from qknorm import ops

SHAPE = (1, 4, 2, 64)
GOALS = {
    "forward, no grad": 1.0,  # of four ATen calls
    "forward + backward": 0.65,  # of nn.RMSNorm under autocast, and the cast
    "q and k, no grad": 0.6,  # of two single calls
    "q and k, forward + backward": 0.6,
}


class _Launcher(CudaLauncher):
    """Triton's launcher with nothing behind it: its Python runs, its C function does not."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.num_ctas = 1
        self.gsan_enabled = False
        self.arg_annotations = self.kernel_signature = None
        self.launch = _nothing
        for name in ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"):
            setattr(self, name, getattr(metadata, name))
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl


def _nothing(*_: Any) -> None:
    return None


class FakeDriver:
    """The part of a CUDA driver that compiling and launching ask for; device -1, the CPU's, is an sm_90."""

    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
            unload_module=_nothing,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )
        self.allocate_default_profile_scratch = _nothing

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0


@contextlib.contextmanager
def fake_gpu() -> Any:
    """Within it, plain tensors on the CPU take the eager path of the Triton kernels, up to the launch."""
    from qknorm_kernels import rms_norm

    driver, saved = triton.runtime.driver, (ops.kernels_for, rms_norm._on_device)
    active = driver._active
    driver.set_active(FakeDriver())
    ops.kernels_for = lambda x, backend="auto": rms_norm  # type: ignore[assignment]
    rms_norm._on_device = lambda index: contextlib.nullcontext()
    try:
        yield rms_norm
    finally:
        ops.kernels_for, rms_norm._on_device = saved
        rms_norm._plans.clear()
        for kernel in (rms_norm.forward_kernel, rms_norm.backward_kernel, rms_norm.reduce_kernel):
            kernel.device_caches.clear()
        gc.collect()  # a compiled kernel asks the driver that loaded it to unload it
        driver._active = active


def microseconds(calls: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, float]:
    """Median microseconds of every call, interleaved, each round the mean of ``repeat`` calls."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def frames(call: Callable[[], object]) -> int:
    """Python frames that a call enters."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 1  # the call itself


def allocations(call: Callable[[], object]) -> int:
    """Tensors that a call allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::empty", "aten::empty_strided"))


def launched(kernels: Any, call: Callable[[], object]) -> list[int]:
    """Arguments of every kernel that a call launches, constants apart."""
    counts: list[int] = []
    compile_ = kernels._compile

    def counting(kernel: Any, head: tuple[Any, ...], tail: tuple[Any, ...], *rest: Any) -> Any:
        start = compile_(kernel, head, tail, *rest)
        arguments = (*head, *tail)
        given = sum(not p.is_constexpr and a is not None for p, a in zip(kernel.params, arguments, strict=True))
        return lambda *args: (counts.append(given), start(*args))[1]

    kernels._plans.clear()
    kernels._compile = counting
    try:
        call()
    finally:
        kernels._compile = compile_
        kernels._plans.clear()
    return counts


def rows(rounds: int, repeat: int) -> list[dict[str, object]]:
    """One row for each kind of call."""
    x, k, dy = (torch.randn(SHAPE).bfloat16() for _ in range(3))
    norm = torch.nn.RMSNorm(SHAPE[-1], dtype=torch.bfloat16)
    new = qknorm.QKRMSNorm.from_norm(norm)
    weight = norm.weight.detach()
    q_leaf, k_leaf = x.clone().requires_grad_(), k.clone().requires_grad_()
    leaf_weight = weight.clone().requires_grad_()

    def four_calls() -> Tensor:
        wide, _ = x.to(torch.float32), weight.to(torch.float32)
        return torch.native_layer_norm(wide, SHAPE[-1:], None, None, 1e-6)[0].to(torch.bfloat16)

    def autocast_forward_backward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(q_leaf).to(torch.bfloat16)
        torch.autograd.grad(y, (q_leaf, norm.weight), dy)

    def single() -> Tensor:
        return qknorm.rms_norm(x, weight, 1e-6)

    def two_singles() -> None:
        qknorm.rms_norm(x, weight, 1e-6)
        qknorm.rms_norm(k, weight, 1e-6)

    def pair() -> None:
        qknorm.qk_rms_norm(x, k, weight, weight, 1e-6)

    def forward_backward() -> None:
        torch.autograd.grad(new(q_leaf), (q_leaf, new.weight), dy)

    def two_forward_backwards() -> None:
        y = qknorm.rms_norm(q_leaf, leaf_weight, 1e-6), qknorm.rms_norm(k_leaf, leaf_weight, 1e-6)
        torch.autograd.grad(y, (q_leaf, k_leaf, leaf_weight), (dy, dy))

    def pair_forward_backward() -> None:
        y = qknorm.qk_rms_norm(q_leaf, k_leaf, leaf_weight, leaf_weight, 1e-6)
        torch.autograd.grad(y, (q_leaf, k_leaf, leaf_weight), (dy, dy))

    with fake_gpu() as kernels:
        stub = kernels_stub(kernels, x, weight)
        cases = {
            "forward, no grad": (single, four_calls, "four ATen calls"),
            "forward + backward": (forward_backward, autocast_forward_backward, "nn.RMSNorm, autocast, .to"),
            "q and k, no grad": (pair, two_singles, "two single calls"),
            "q and k, forward + backward": (pair_forward_backward, two_forward_backwards, "two single calls"),
        }
        result = []
        for name, (ours, rival, rival_name) in cases.items():
            with torch.no_grad() if "no grad" in name else contextlib.nullcontext():
                launches = launched(kernels, ours)
                times = microseconds({"ours": ours, "rival": rival, "stub": stub}, rounds, repeat)
                result.append(
                    {
                        "call": name,
                        "us": round(times["ours"], 2),
                        "rival": rival_name,
                        "rival us": round(times["rival"], 2),
                        "ratio": round(times["ours"] / times["rival"], 3),
                        "goal": GOALS[name],
                        "launcher us": round(times["stub"] * len(launches), 2),
                        "kernel arguments": "+".join(map(str, launches)),
                        "allocations": allocations(ours),
                        "frames": frames(ours),
                        "threads": torch.get_num_threads(),
                        "torch": torch.__version__,
                        "triton": triton.__version__,
                        "python": platform.python_version(),
                    }
                )
    return result


def kernels_stub(kernels: Any, x: Tensor, weight: Tensor) -> Callable[[], object]:
    """Triton's launcher alone, with the C function stubbed: the share of a call that is not ours."""
    launcher = _Launcher(None, _Metadata())
    arguments = (x, weight, x, None, *(None,) * 4, 1e-6, *range(30))
    return lambda: launcher(1, 1, 1, 0, 0, b"", None, None, None, *arguments)


class _Metadata:
    launch_cooperative_grid = launch_pdl = False

    def __getattr__(self, name: str) -> int:
        return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds (default: 25)")
    parser.add_argument("--repeat", type=int, default=400, help="calls a round (default: 400)")
    parser.add_argument("--csv", type=Path, help="write the rows there, too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = rows(args.rounds, args.repeat)
    print("host time on tiny tensors, the C function of Triton's launcher stubbed; ratios, no GPU involved")
    for row in result:
        print(
            "{call:28} {us:7.2f} us, {ratio:5.2f} of {rival} (goal: at most {goal}); of it {launcher us} us Triton's "
            "launcher; kernel arguments {kernel arguments}, allocations {allocations}, frames {frames}".format(**row)
        )
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, result[0].keys())
            writer.writeheader()
            writer.writerows(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
