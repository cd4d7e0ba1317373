"""The torch path against eager ``torch.nn.RMSNorm``, on the CPU, side by side in one run.

    python -m qknorm_benchmarks.torch_path [--csv PATH]

Times of a CPU say little about a GPU: what is printed is ratios, each beside the goal that it is held to. Every result
is compared with the rival's, bit for bit, before it is timed.
"""

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import qknorm

SHAPE = (1, 4608, 24, 128)  # Flux at 1024 px: 4096 image and 512 text tokens
GOALS = {
    (torch.bfloat16, "forward"): 0.10,
    (torch.bfloat16, "forward + backward"): 0.15,
    (torch.float32, "forward"): 0.45,
    (torch.float32, "forward + backward"): 0.30,
}


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, interleaved: what slows the machine for a while slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def rows(rounds: int) -> list[dict[str, object]]:
    """One row for each dtype and direction: both medians, their ratio and the goal."""
    result = []
    for dtype in (torch.bfloat16, torch.float32):
        old = torch.nn.RMSNorm(SHAPE[-1], dtype=dtype)
        with torch.no_grad():
            old.weight.uniform_(0.5, 1.5)
        new = qknorm.QKRMSNorm.from_norm(old)
        x = torch.randn(SHAPE).to(dtype)
        leaf, dy = x.clone().requires_grad_(), torch.randn(SHAPE).to(dtype)
        with torch.no_grad():
            if not torch.equal(new(x), old(x)):
                raise SystemExit(f"the norms differ in {dtype}: nothing to compare")

        def forward(norm: torch.nn.Module, x: torch.Tensor = x) -> None:
            with torch.no_grad():
                norm(x)

        def both(norm: torch.nn.Module, x: torch.Tensor = leaf, dy: torch.Tensor = dy) -> None:
            torch.autograd.grad(norm(x), (x, norm.weight), dy)

        for name, call in (("forward", forward), ("forward + backward", both)):
            times = medians({"torch": partial(call, old), "qknorm": partial(call, new)}, rounds)
            torch_ms, qknorm_ms = (statistics.median(times[rival]) for rival in ("torch", "qknorm"))
            result.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "direction": name,
                    "shape": "x".join(map(str, SHAPE)),
                    "nn.RMSNorm ms": round(torch_ms, 2),
                    "qknorm ms": round(qknorm_ms, 2),
                    "ratio": round(qknorm_ms / torch_ms, 3),
                    "goal": GOALS[dtype, name],
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "cpu": cpu_name(),
                }
            )
    return result


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each rival (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--csv", type=Path, help="write the rows there, too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    result = rows(args.rounds)
    for row in result:
        print("{dtype:9} {direction:19} {ratio:6.3f} of nn.RMSNorm (goal: at most {goal})".format(**row))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, result[0].keys())
            writer.writeheader()
            writer.writerows(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
