"""Compiles the kernels for a named target with no GPU, and reports on the machine code.

    python -m qknorm_kernels.compile [--arch 90 ...] [--all] [--liger] [--csv PATH] [--markdown]

By default: q and k in one launch, bfloat16, 24 heads, dims 64 and 128, every rounding, forward and backward, with and
without RoPE, and the reduction, for sm_90. ``--all`` adds other heads, dtypes, dims and layouts on sm_90, and every
other target. What is compiled is what is launched for tensors of these shapes: its launches are recorded, none is made
here.

All figures are counts of instructions and bytes, not times; they depend on the versions of Triton and ptxas.
"""

import argparse
import contextlib
import csv
import datetime
import importlib
import linecache
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import qk_norm_rope, rms_norm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDINGS = ("once", "weight", "input")
TABLES = ("repeated", "shared", "complex")  # of cosines and sines: [S, D], [S, D / 2], complex64 [S, D / 2]
TOKENS = 4608  # Flux at 1024 px


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor holds at once; ``reserved`` bytes of shared memory go to each block."""

    warps: int
    blocks: int
    shared: int
    reserved: int = 1024
    registers: int = 65536


# CUDA C++ Programming Guide, table "Technical specifications per compute capability".
LIMITS = {
    "75": Limits(32, 16, 64 << 10, 0),
    "80": Limits(64, 32, 164 << 10),
    "86": Limits(48, 16, 100 << 10),
    "89": Limits(48, 24, 100 << 10),
    "90": Limits(64, 32, 228 << 10),
    "100": Limits(64, 32, 228 << 10),
    "120": Limits(48, 24, 100 << 10),
}
ARCHS = (*LIMITS, "gfx942")


@dataclass(frozen=True)
class Case:
    """Tensors of a call. ``layout``: a key of ``LAYOUTS``; two ``heads``: q and k in one launch."""

    kernel: str = "forward"  # or backward, reduce, rope forward, rope backward
    dim: int = 128
    heads: tuple[int, ...] = (24,)
    dtype: str = "bf16"
    weight: str | None = "bf16"
    rounding: str = "once"
    layout: str = "qkv"
    save: bool = True  # rstd
    double_eps: bool = False  # as Inductor passes a Python float
    interleaved: bool = True
    table: str = "repeated"  # of TABLES
    rounded: bool = False  # before the rotation


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for and not made."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @cached_property
    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(self.kernel.arg_names, self.arguments, strict=False)), **self.options}


def target(arch: str) -> GPUTarget:
    """The target called 75, 80, ... or gfx942."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch), 32)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _qkv(heads: tuple[int, ...], dim: int, dtype: torch.dtype, batch: int = 1, skip: int = 0) -> list[Tensor]:
    fused = _empty(batch, TOKENS + skip, (sum(heads) + heads[-1]) * dim, dtype=dtype)[:, skip:]
    starts = [sum(heads[:i]) * dim for i in range(len(heads))]
    return [fused[..., s : s + h * dim].unflatten(-1, (h, dim)) for s, h in zip(starts, heads, strict=True)]


def _heads_first(heads: tuple[int, ...], dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [x.transpose(1, 2) for x in _qkv(heads, dim, dtype)]


def _unaligned(heads: tuple[int, ...], dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [_empty(TOKENS * h * dim + 1, dtype=dtype)[1:].view(1, TOKENS, h, dim) for h in heads]


# q alone, or q and k, as models hand them over.
LAYOUTS: dict[str, Callable[[tuple[int, ...], int, torch.dtype], list[Tensor]]] = {
    "qkv": _qkv,  # views of a fused projection
    "batched": lambda heads, dim, dtype: _qkv(heads, dim, dtype, batch=2, skip=512),  # the image tokens of it
    "heads first": _heads_first,  # Black Forest Labs' "B L (K H D) -> K B H L D"
    "flat": lambda heads, dim, dtype: [_empty(1, TOKENS, h, dim, dtype=dtype) for h in heads],
    "flat, a tail": lambda heads, dim, dtype: [_empty(TOKENS * h + 1, dim, dtype=dtype) for h in heads],
    "unaligned": _unaligned,
}


def _no_gpu(at: GPUTarget) -> Any:
    return SimpleNamespace(
        get_current_target=lambda: at, get_current_device=lambda: at, get_current_stream=lambda device: 0
    )


@contextlib.contextmanager
def _driver(at: GPUTarget) -> Iterator[None]:
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_no_gpu(at))
    try:
        yield
    finally:
        driver._active = before


def recorded(call: Callable[[], object]) -> list[Launch]:
    """The launches that ``call`` asks Triton for, of which none is compiled or made."""
    launches: list[Launch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches.append(Launch(kernel, arguments, options, grid))
        return SimpleNamespace(run=None, function=None, packed_metadata=None)

    run, on_device = triton.JITFunction.run, rms_norm._on_device
    triton.JITFunction.run = record
    rms_norm._on_device = lambda index: contextlib.nullcontext()
    try:
        with _driver(target("90")):
            call()
    finally:
        triton.JITFunction.run, rms_norm._on_device = run, on_device
    return launches


def launch_of(case: Case) -> Launch:
    """What ``rms_norm`` launches for the case; raises where that is no single launch."""
    if not isinstance(rms_norm.forward_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    if case.kernel.startswith("rope"):
        return _rope_launch_of(case)
    dtype = DTYPES[case.dtype]
    operands: list[tuple[Any, ...]] = []
    for x in LAYOUTS[case.layout](case.heads, case.dim, dtype):
        weight = None if case.weight is None else _empty(case.dim, dtype=DTYPES[case.weight])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = _empty(*x.shape[:-1], dtype=torch.float32) if case.save else None
        if case.kernel == "forward":
            operands.append((x, weight, out, rstd))
        else:
            dw = None if weight is None else torch.empty_like(weight)
            operands.append((x, torch.empty_like(out), weight, rstd, out, dw))
    plan = rms_norm._plan_forward if case.kernel == "forward" else rms_norm._plan_backward
    launches = recorded(lambda: plan(tuple(operands), False, case.rounding))
    for launch in launches:
        if launch.kernel.__name__ == f"{case.kernel}_kernel":
            return launch
    raise ValueError(f"{case} is not one launch of the {case.kernel} kernel")


def _rope_launch_of(case: Case) -> Launch:
    backward = case.kernel == "rope backward"
    tensors: list[tuple[Any, ...]] = []
    for x in LAYOUTS[case.layout](case.heads, case.dim, DTYPES[case.dtype]):
        weight = None if case.weight is None else _empty(case.dim, dtype=DTYPES[case.weight])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = _empty(*x.shape[:-1], dtype=torch.float32) if case.save else None
        tensors.append((x, torch.empty_like(out), weight, rstd, out) if backward else (x, weight, out, rstd))
    columns = case.dim // 2 if case.table == "shared" else case.dim
    tables = (*(_empty(x.shape[1], columns, dtype=torch.float32) for _ in "cs"), case.table == "complex")
    options = (False, case.rounding, case.interleaved)
    if backward:
        results = tuple(None if t[2] is None else torch.empty_like(t[2]) for t in tensors)
        launches = recorded(lambda: qk_norm_rope._plan_backward(tuple(tensors), *tables, results, *options))
    else:
        launches = recorded(lambda: qk_norm_rope._plan_forward(tuple(tensors), *tables, *options, case.rounded))
    return launches[0]


def compiled(launch: Launch, at: GPUTarget, double_eps: bool = False) -> dict[str, Any]:
    """Every stage of the launch's kernel, compiled as Triton's own look-up would."""
    kernel = launch.kernel
    with _driver(at):
        *_, backend, bind = kernel.device_caches[at]
        del kernel.device_caches[at]
        bound, specialization, options = bind(*launch.arguments, **launch.options)
        options, signature, constants, attributes = kernel._pack_args(
            backend, launch.options, bound, specialization, options
        )
        if double_eps:
            signature = {**signature, "eps": "fp64"}
        source = ASTSource(kernel, signature, constants, attributes)
        with triton.knobs.compilation.scope():
            # What lies in Triton's cache may come from a file of another place or age, and names its lines.
            triton.knobs.compilation.always_compile = True
            return triton.compile(source, target=at, options=options.__dict__).asm


@dataclass(frozen=True)
class Instruction:
    """A machine instruction, and the line of the kernel's own body that it comes from."""

    text: str
    source: str

    @cached_property
    def name(self) -> str:
        """With its suffixes, without its predicate."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]

    @cached_property
    def access(self) -> tuple[str, int] | None:
        """("load" or "store", bits a lane) of an access to global memory."""
        if match := re.match(r"(LDG|STG)\b(.*)", self.name):
            bits = re.findall(r"\.[US]?(8|16|64|128|256)\b", match[2])
            return "load" if match[1] == "LDG" else "store", int(bits[-1]) if bits else 32
        if match := re.match(r"(?:global|buffer|flat)_(load|store)_(\w+)", self.name):
            bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "b128": 128, "b64": 64, "b32": 32}
            return match[1], bits.get(match[2], 8 if "byte" in match[2] else 16)
        return None

    @property
    def of_tensor(self) -> bool:
        """Whether an access is of x, y, dy or dx: all but rstd, the weight, the sums of its gradient, cos and sin."""
        others = r"rstd|\bd?w_|weight|partial|cos|sin|table"
        return self.access is not None and not re.search(others, self.source, re.IGNORECASE)

    @property
    def is_float64(self) -> bool:
        return bool(re.search(r"^D(ADD|MUL|FMA|SETP|MNMX)\b|\.F64|64H\b|_f64", self.name))

    @property
    def is_barrier(self) -> bool:
        return self.name.startswith(("BAR.", "s_barrier"))


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel."""

    at: GPUTarget
    instructions: list[Instruction]
    loop: list[Instruction]  # what a persistent kernel repeats; where nothing is repeated, all of it
    registers: int
    spills: int  # instructions that spill or fill (AMD: registers spilled)
    shared: int
    warps: int

    @property
    def threads(self) -> int:
        return self.warps * self.at.warp_size

    def accesses(self, kind: str) -> dict[int, int]:
        """How many accesses of x, y, dy, dx of each width the loop has: {bits: count}."""
        widths: dict[int, int] = {}
        for instruction in self.loop:
            if instruction.of_tensor and instruction.access[0] == kind:
                bits = instruction.access[1]
                widths[bits] = widths.get(bits, 0) + 1
        return widths

    def bytes(self, kind: str) -> int:
        """Bytes of x, y, dy, dx that one turn of the loop asks for, masked lanes included."""
        return sum(bits // 8 * count for bits, count in self.accesses(kind).items()) * self.threads

    def float64(self, loop: bool = False) -> int:
        return sum(i.is_float64 for i in (self.loop if loop else self.instructions))

    def barriers(self) -> int:
        """Barriers in the loop."""
        return sum(i.is_barrier for i in self.loop)

    def bytes_in_flight(self) -> int:
        """Bytes of loads that one warp has in flight at most: an instruction that needs one waits for it."""
        pending: list[tuple[set[int], int]] = []
        most = 0
        for instruction in (*self.loop, *self.loop):
            touched = set(map(int, re.findall(r"\bR(\d+)", instruction.text)))
            first, _, rest = instruction.text.partition(",")
            loads = instruction.access is not None and instruction.access[0] == "load"
            needed = set(map(int, re.findall(r"\bR(\d+)", rest))) if loads else touched
            done = [i for i, (registers, _) in enumerate(pending) if registers & needed]
            if done:
                pending = pending[done[-1] + 1 :]
            if loads:
                bits = instruction.access[1]
                start = int(re.search(r"\bR(\d+)", first)[1])
                pending.append((set(range(start, start + max(1, bits // 32))), bits // 8 * self.at.warp_size))
            most = max(most, sum(size for _, size in pending))
        return most

    def occupancy(self) -> tuple[int, str]:
        """Warps that fit a multiprocessor at once, and what bounds them."""
        limits = LIMITS[str(self.at.arch)]
        by_registers = limits.registers // 4 // (math.ceil(self.registers / 8) * 8 * 32) * 4 // self.warps
        used = self.shared + limits.reserved
        bounds = {
            "warps": limits.warps // self.warps,
            "blocks": limits.blocks,
            "registers": by_registers,
            "shared memory": limits.shared // used if used else limits.blocks,
        }
        bound = min(bounds, key=lambda name: bounds[name])
        return bounds[bound] * self.warps, bound


def _loop(instructions: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    best: tuple[int, int] | None = None
    for i, instruction in enumerate(instructions):
        match = re.search(r"(?:\bBRA\b|s_c?branch).*?(\.L\w+)", instruction.text)
        start = labels.get(match[1], i) if match else i
        if start < i and (best is None or i - start > best[1] - best[0]):
            best = start, i
    return instructions if best is None else instructions[best[0] : best[1] + 1]


def _run_tool(name: str, *arguments: str) -> str:
    tool = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def code(launch: Launch, at: GPUTarget, double_eps: bool = False) -> Code:
    """The launch's kernel as the target executes it."""
    asm = compiled(launch, at, double_eps)
    warps = launch.options.get("num_warps", 4)
    return _sass(asm["cubin"], at, warps) if at.backend == "cuda" else _amdgcn(asm["amdgcn"], at, warps)


def _sass(cubin: bytes, at: GPUTarget, warps: int) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        listing = _run_tool("nvdisasm", "-c", "-gi", "-ndf", str(path))
        usage = _run_tool("cuobjdump", "-res-usage", str(path))
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    source = ""
    for line in listing.splitlines():
        if match := re.match(r'\s*//## File "([^"]*)", line (\d+)$', line):
            source = linecache.getline(match[1], int(match[2]))
        elif match := re.match(r"\s*(\.L\w+):", line):
            labels[match[1]] = len(instructions)
        elif (match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)) and "NOP" not in match[1]:
            instructions.append(Instruction(match[1], source))
    # What follows the last exit is padding.
    end = max((i for i, instruction in enumerate(instructions) if "EXIT" in instruction.text), default=-1)
    if instructions and re.search(r"\bBRA\b", instructions[-1].text) and end == len(instructions) - 2:
        instructions.pop()
    registers, shared = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "SHARED"))
    spills = sum(i.name.startswith(("LDL", "STL")) for i in instructions)
    return Code(at, instructions, _loop(instructions, labels), registers, spills, shared, warps)


def _amdgcn(listing: str, at: GPUTarget, warps: int) -> Code:
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    files: dict[str, str] = {}
    source = ""
    for line in listing.splitlines():
        if match := re.match(r'\s*\.file\s+(\d+)\s+"(.*?)"(?:\s+"(.*?)")?', line):
            files[match[1]] = str(Path(match[2], match[3] or ""))
        elif match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = files.get(match[1], ""), match[2]
            for name, number in re.findall(r"@\[ (\S+?):(\d+):", line):  # where a function was inlined, outermost last
                place = next((file for file in files.values() if file.endswith(name)), ""), number
            source = linecache.getline(place[0], int(place[1]))
        elif match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.match(r"\s+([a-z]+_\w+.*?)\s*(?:;.*)?$", line):
            instructions.append(Instruction(match[1], source))
    found = (
        re.search(rf"\.{name}:\s+(\d+)", listing)[1]
        for name in ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
    )
    registers, spills, shared = map(int, found)
    return Code(at, instructions, _loop(instructions, labels), registers, spills, shared, warps)


@dataclass(frozen=True)
class Work:
    """What a turn of a kernel's loop is meant to do, and how the kernel is laid out for it."""

    elements: float  # a turn; those that exist, on average over tiles
    padded: int  # with those that are masked
    tensors: tuple[int, int]  # read, written
    itemsize: int
    rstd: float  # bytes of it an element, and of cos and sin
    tile: str
    warps_launched: int | None  # a multiprocessor, where the grid is sized by it
    notes: dict[str, Any] = field(default_factory=dict)


def work(launch: Launch) -> Work:
    """Of one of our own launches."""
    named = launch.named
    dim, grid = named["DIM"], launch.grid
    if launch.kernel.__name__ == "reduce_kernel":
        elements = named["ROWS"] * named["COLUMNS"]
        tile = f"{named['ROWS']} x {named['COLUMNS']}"
        return Work(elements, elements, (1, 0), 4, 0, tile, None)
    height = named["ROWS"] * named["GROUPS"]
    width = triton.next_power_of_2(triton.cdiv(dim, named["CHUNKS"])) * named["CHUNKS"]
    rows = float(height) if named.get("FLAT") else (named["rows"] + (named["rows2"] or 0)) / grid[0]
    backward = launch.kernel.__name__ == "backward_kernel"
    rope = "ROTARY" in named
    tables = sum(named[name].shape[-1] * 4 for name in ("cos", "sin")) / (grid[0] * rows * dim) if rope else 0
    reads = 2 if backward else 1
    writes = named["dx"] is not None if backward else 1
    return Work(
        rows * dim,
        height * width,
        (reads, int(writes)),
        named["x"].itemsize,
        (4 / dim if named["rstd"] is not None else 0) + tables,
        f"{named['ROWS']} x {named['GROUPS']} x {named['CHUNKS']}",
        math.prod(grid) * launch.options["num_warps"],  # a device that is not there has one multiprocessor
    )


def _widths(widths: dict[int, int]) -> str:
    return "+".join(str(bits) for bits in sorted(widths, reverse=True)) or "-"


def figures(machine: Code, task: Work) -> dict[str, Any]:
    """The columns that come from the machine code."""
    cuda = machine.at.backend == "cuda"
    read, written = machine.bytes("load") / task.padded, machine.bytes("store") / task.padded
    # ptxas may unroll the loop; what is written tells how often.
    least_written, least_read = task.tensors[1] * task.itemsize, task.tensors[0] * task.itemsize
    turns = max(1, round(written / least_written if least_written else read / least_read))
    row: dict[str, Any] = {
        "registers": machine.registers,
        "spills": machine.spills,
        "shared bytes": machine.shared,
        "occupancy": "-",
        "bound by": "-",
        "warps an SM": "-",
        "KiB loaded an SM": "-",
        "KiB in flight an SM": "-",
        "load bits": _widths(machine.accesses("load")),
        "store bits": _widths(machine.accesses("store")),
        "bytes an element": round((read + written) / turns + task.rstd, 3),
        "at least": round(least_read + least_written + task.rstd, 3),
        "float64": machine.float64(),
        "float64 in loop": machine.float64(loop=True),
        "barriers in loop": machine.barriers(),
        "instructions an element": "-",
        "whole program": "-",
    }
    if cuda:
        fit, bound = machine.occupancy()
        warps = fit if task.warps_launched is None else min(fit, task.warps_launched)
        flying = machine.bytes_in_flight()
        loaded = machine.bytes("load") / machine.warps
        row |= {
            "occupancy": round(fit / LIMITS[str(machine.at.arch)].warps, 3),
            "bound by": bound,
            "warps an SM": warps,
            "KiB loaded an SM": round(warps * loaded / 1024, 1),
            "KiB in flight an SM": round(warps * flying / 1024, 1),
            "instructions an element": round(instructions(machine, task), 2),
            "whole program": round(len(machine.instructions) * machine.threads / (task.elements * turns), 2),
        }
    return row


def instructions(machine: Code, task: Work) -> float:
    """Thread instructions executed in the loop for each element."""
    written = machine.bytes("store") or machine.bytes("load")
    ideal = task.padded * task.itemsize * (task.tensors[1] or task.tensors[0])
    return len(machine.loop) * machine.threads / (task.elements * max(1, round(written / ideal)))


def report(case: Case, arch: str) -> dict[str, Any]:
    """A row of the table."""
    launch = launch_of(case)
    task = work(launch)
    eps = ", float64 eps" if case.double_eps else ""
    rope = ""
    if case.kernel.startswith("rope"):
        rope = f"{'interleaved' if case.interleaved else 'half-split'}, {case.table}{', rounded' * case.rounded}"
    return {
        "kernel": case.kernel + ("" if case.save else ", no rstd"),
        "target": arch if arch.startswith("gfx") else f"sm_{arch}",
        "x": case.dtype,
        "weight": case.weight or "none",
        "dim": case.dim,
        "heads": "+".join(map(str, case.heads)),
        "rounding": case.rounding + eps,
        "rope": rope,
        "layout": case.layout,
        "launch": "q and k" if len(case.heads) == 2 else "single",
        "tile": task.tile,
        "warps": launch.options["num_warps"],
        **figures(code(launch, target(arch), case.double_eps), task),
    }


def cases(full: bool) -> list[Case]:
    """The default ones, or all of them."""
    both = ("forward", "backward")
    heads = (24, 30, 32, 48) if full else (24,)
    result = [
        Case(kernel, dim, (count, count), rounding=rounding)
        for count in heads
        for dim in (64, 128)
        for kernel in both
        for rounding in ROUNDINGS
    ]
    result += [Case("reduce", 128, (24, 24))]
    result += [
        Case(kernel, dim, (24, 24), rounding=rounding, rounded=rounded, interleaved=interleaved)
        for dim in (64, 128)
        for interleaved in (True, False)
        for kernel, rounding, rounded in (
            ("rope forward", "once", False),
            ("rope forward", "once", True),
            ("rope forward", "weight", True),
            ("rope backward", "once", False),
            ("rope backward", "weight", False),  # what is rounded after the weight is nothing to a gradient
        )
    ]
    if full:
        single = [Case(kernel, dim, (24,)) for kernel in both for dim in (64, 128)]
        mixed = [
            Case(kernel, dim, (24, 24), dtype, weight, rounding)
            for dtype, weight in (("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("bf16", None))
            for rounding in (ROUNDINGS if (dtype, weight) == ("bf16", "fp32") else ("once",))
            for dim in (64, 128)
            for kernel in both
        ]
        wide = [
            Case(kernel, dim, (1,) if dim > 256 else (24,), layout="flat")
            for dim in (80, 96, 112, 256, 512, 1536, 3072, 5120, 8192)
            for kernel in both
        ]
        layouts = [
            Case(kernel, dim, heads, layout=layout)
            for layout, heads in (
                ("qkv", (25, 25)),
                ("qkv", (24, 8)),
                ("batched", (24, 24)),
                ("heads first", (24, 24)),
                ("flat, a tail", (24,)),
                ("unaligned", (24, 24)),
            )
            for dim in (64, 128)
            for kernel in both
        ]
        other = [
            *(Case("forward", dim, (24, 24), save=False) for dim in (64, 128)),
            *(Case("forward", dim, (24, 24), double_eps=True) for dim in (64, 128)),
            *(Case("reduce", dim, (1,), layout="flat") for dim in (3072,)),
            Case("reduce", 128, (24, 24), "fp32", "fp32"),
        ]
        ropes = ("rope forward", "rope backward")
        other += [
            *(Case(kernel, dim, (count, count)) for kernel in ropes for dim in (64, 128) for count in (30, 32, 48)),
            *(
                Case(kernel, dim, (24, 24), table=table)
                for kernel in ropes
                for dim in (64, 128)
                for table in TABLES[1:]
            ),
            *(
                Case(kernel, dim, (24, 24), dtype, weight)
                for dtype, weight in (("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("bf16", None))
                for dim in (64, 128)
                for kernel in ropes
            ),
            *(
                Case(kernel, dim, (24, 24), interleaved=interleaved)
                for kernel in ropes
                for dim, interleaved in ((96, True), (256, True), (256, False), (512, True), (512, False))
            ),
            *(
                Case(kernel, 128, heads, layout=layout)
                for layout, heads in (
                    ("qkv", (25, 25)),
                    ("qkv", (24, 8)),
                    ("batched", (24, 24)),
                    ("heads first", (24, 24)),
                )
                for kernel in ropes
            ),
            *(Case("rope forward", dim, (24, 24), save=False) for dim in (64, 128)),
        ]
        result += single + mixed + wide + layouts + other
    return result


def _core(arch: str) -> list[Case]:
    """What is compiled for the targets that ``--all`` does not go through in full."""
    dtypes = ("fp16", "fp32") if arch == "75" else ("bf16", "fp16", "fp32")
    return [
        *(
            Case(kernel, dim, (24, 24), dtype, dtype)
            for dtype in dtypes
            for dim in (64, 128)
            for kernel in ("forward", "backward")
        ),
        *(Case(kernel, 3072, (1,), dtypes[0], dtypes[0], layout="flat") for kernel in ("forward", "backward")),
        Case("reduce", 128, (24, 24), dtypes[0], dtypes[0]),
        *(
            Case(kernel, dim, (24, 24), dtypes[0], dtypes[0], interleaved=interleaved)
            for dim in (64, 128)
            for kernel in ("rope forward", "rope backward")
            for interleaved in (True, False)
        ),
    ]


def liger_rows(arch: str) -> Iterator[dict[str, Any]]:
    """Liger's kernels with the settings that its own launcher chooses, on contiguous rows: it copies any others."""
    try:
        liger = importlib.import_module("liger_kernel.ops.rms_norm")
    except ImportError as error:
        raise SystemExit(f"--liger needs Liger's kernels (pip install --no-deps liger-kernel): {error}") from error
    modes = {"once": "gemma", "input": "llama"}
    # Up to 32768 rows it takes one kernel, above it another.
    for dim, rows in ((64, 1), (128, 1), (64, TOKENS), (128, TOKENS)):
        for rounding, mode in modes.items():
            x = _empty(rows * 24, dim, dtype=torch.bfloat16)
            weight, rstd = _empty(dim, dtype=torch.bfloat16), _empty(rows * 24, dtype=torch.float32)
            block, warps = liger.calculate_settings(dim)

            def forward(x=x, weight=weight, mode=mode) -> None:
                liger.rms_norm_forward(x, weight, 1e-6, 0.0, mode, None)

            def backward(x=x, weight=weight, rstd=rstd, block=block, warps=warps, mode=mode) -> None:
                mode = liger._str_to_casting_mode[mode]
                liger.rms_norm_backward(x, x, weight, rstd, 0.0, mode, block, warps, False, None)

            for name, call in (("forward", forward), ("backward", backward)):
                (launch,) = recorded(call)
                high = launch.named.get("BLOCK_ROW", 1)
                tensors = (2 if name == "backward" else 1, 1)
                task = Work(high * dim, high * launch.named["BLOCK_SIZE"], tensors, 2, 4 / dim, f"{high} x 1 x 1", None)
                yield {
                    "kernel": f"Liger {name}",
                    "target": f"sm_{arch}",
                    "x": "bf16",
                    "weight": "bf16",
                    "dim": dim,
                    "heads": "24",
                    "rounding": rounding,
                    "rope": "",
                    "layout": "flat, few rows" if rows == 1 else "flat",
                    "launch": "single",
                    "tile": task.tile,
                    "warps": launch.options["num_warps"],
                    **figures(code(launch, target(arch)), task),
                }


def rows(archs: Iterable[str], full: bool, liger: bool) -> Iterator[dict[str, Any]]:
    """The table, row by row."""
    versions = {"triton": triton.__version__, "date": datetime.date.today().isoformat()}
    for arch in archs:
        if not full:
            wanted = _core(arch) if arch == "75" else cases(False)
        else:
            wanted = cases(True) if arch == "90" else _core(arch)
        for case in wanted:
            yield {**report(case, arch), **versions}
        if liger and arch in LIMITS:
            for row in liger_rows(arch):
                yield {**row, **versions}


# Heads of columns on the screen; a column not named here is in the CSV alone.
_SCREEN = {
    "kernel": "kernel",
    "target": "target",
    "x": "x",
    "weight": "weight",
    "dim": "dim",
    "heads": "heads",
    "rounding": "rounding",
    "rope": "RoPE",
    "layout": "layout",
    "tile": "tile",
    "warps": "warps",
    "registers": "regs",
    "spills": "spills",
    "shared bytes": "smem",
    "occupancy": "occ.",
    "KiB loaded an SM": "KiB/SM",
    "KiB in flight an SM": "in flight",
    "load bits": "load",
    "store bits": "store",
    "bytes an element": "B/el",
    "at least": "least",
    "float64": "f64",
    "barriers in loop": "bar.",
    "instructions an element": "instr/el",
    "whole program": "whole",
}


def _print(table: list[dict[str, Any]], markdown: bool) -> None:
    cells = [[str(row[name]) for name in _SCREEN] for row in table]
    heads = list(_SCREEN.values())
    if not markdown and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.table import Table

            drawn = Table(*heads, caption="counts, not times")
            for line in cells:
                drawn.add_row(*line)
            return Console().print(drawn)
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    mark = ("| ", " | ", " |") if markdown else ("", "  ", "")
    lines = [heads, *([["-" * width for width in widths]] if markdown else []), *cells]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print((mark[0] + mark[1].join(padded) + mark[2]).rstrip())
    return None


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, help="targets (default: 90; with --all: every one)")
    parser.add_argument("--all", action="store_true", help="every case; takes minutes")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels, too")
    parser.add_argument("--csv", type=Path, help="write all columns there, too")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(argv)
    table = list(rows(args.arch or (ARCHS if args.all else ("90",)), args.all, args.liger))
    _print(table, args.markdown)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
