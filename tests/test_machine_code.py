"""The machine code of the kernels that ``launch.py`` picks, compiled with no GPU: counts of instructions, not times.

``python -m qknorm_kernels.compile`` prints the figures.
"""

import functools
import itertools

import pytest
from qknorm_kernels import compile as compiler
from qknorm_kernels.compile import Case

HEADS = ((24, 24), (30, 30), (32, 32), (48, 48))
DIMS = (64, 128)
BOTH = ("forward", "backward")
SLACK = 1.03  # what one version of Triton and ptxas differs from another by; all bars hold without it for 3.6 and 3.8


@functools.cache
def machine(case: Case, arch: str = "90") -> tuple[compiler.Code, compiler.Work]:
    launch = compiler.launch_of(case)
    return compiler.code(launch, compiler.target(arch), case.double_eps), compiler.work(launch)


FLUX = [Case(kernel, dim, heads) for kernel, dim, heads in itertools.product(BOTH, DIMS, HEADS)]
# One of each against the others: dtypes, roundings, layouts.
OTHERS = [
    Case("forward", 128, (24, 24), "fp16", "fp16"),
    Case("backward", 64, (24, 24), "fp16", "fp16"),
    Case("forward", 128, (24, 24), "fp32", "fp32"),
    Case("backward", 128, (24, 24), "fp32", "fp32"),
    Case("forward", 64, (24, 24), "bf16", "fp32"),
    Case("backward", 128, (24, 24), "bf16", "fp32", "input"),
    Case("forward", 128, (24,), "bf16", None),
    Case("forward", 128, (24, 8)),
    Case("backward", 128, (24, 24), layout="batched"),
    Case("forward", 64, (24, 24), layout="heads first"),
    Case("backward", 128, (24,), layout="flat, a tail"),
]
WIDE = [
    Case("backward" if dim in (80, 112, 256, 512, 1536, 5120, 8192) else "forward", dim, (1,), layout="flat")
    for dim in (80, 96, 112, 256, 512, 1280, 1536, 3072, 5120, 8192)
]


ROPE = [
    Case(kernel, dim, heads, interleaved=interleaved)
    for kernel in ("rope forward", "rope backward")
    for dim in DIMS
    for heads, interleaved in (((24, 24), True), ((24, 24), False), ((30, 30), True), ((48, 48), False))
]
ROPE_OTHERS = [
    Case("rope forward", 128, (24, 24), table="complex"),
    Case("rope backward", 64, (24, 24), table="shared"),
    Case("rope forward", 64, (24, 24), rounded=True, interleaved=False),
    Case("rope forward", 128, (24, 24), rounding="weight", rounded=True),
    Case("rope backward", 128, (24, 24), rounding="weight"),
    Case("rope forward", 96, (24, 24)),
    Case("rope backward", 256, (24, 24), interleaved=False),
    Case("rope backward", 512, (24, 24), interleaved=False),
    Case("rope backward", 128, (24, 24), "fp16", "fp16"),
    Case("rope forward", 64, (24, 24), "fp32", "fp32"),
    Case("rope forward", 128, (24, 8), layout="batched"),
]


def name(case: Case) -> str:
    heads = "+".join(map(str, case.heads))
    rope = f"-{case.interleaved}-{case.table}-{case.rounded}" if case.kernel.startswith("rope") else ""
    return f"{case.kernel}-{case.dim}-{heads}-{case.dtype}-{case.weight}-{case.rounding}-{case.layout}{rope}"


@pytest.mark.parametrize("case", FLUX + OTHERS + ROPE + ROPE_OTHERS, ids=name)
def test_nothing_spills_no_float64_no_barrier_in_the_loop_and_every_access_is_128_bits_wide(case):
    code, _ = machine(case)
    assert (code.spills, code.float64(), code.barriers()) == (0, 0, 0)
    assert set(code.accesses("load")) == {128}
    assert set(code.accesses("store")) == {128}


@pytest.mark.parametrize("case", WIDE, ids=name)
def test_no_tile_that_launch_picks_spills(case):
    code, _ = machine(case)
    assert (code.spills, code.float64()) == (0, 0)


@pytest.mark.parametrize("case", FLUX + ROPE, ids=name)
def test_each_tensor_is_read_once_and_written_once(case):
    code, work = machine(case)
    itemsize, (reads, writes) = work.itemsize, work.tensors
    assert code.bytes("load") == work.padded * itemsize * reads
    assert code.bytes("store") == work.padded * itemsize * writes


@pytest.mark.parametrize(("dim", "heads"), itertools.product(DIMS, HEADS))
def test_instructions_an_element_stay_within_the_bars(dim, heads):
    # "weight" and "input" round in the middle: forward multiplies two halves at once and is cheaper, backward needs the
    # rounded value widened again for dw, three instructions an element.
    for rounding, forward, backward in (("once", 6.5, 9.7), ("weight", 6.5, 13.0), ("input", 6.5, 13.0)):
        if rounding != "once" and heads != (24, 24):
            continue
        for kernel, bar in (("forward", forward), ("backward", backward)):
            assert compiler.instructions(*machine(Case(kernel, dim, heads, rounding=rounding))) <= SLACK * bar


@pytest.mark.parametrize("case", ROPE, ids=name)
def test_instructions_an_element_of_norm_and_rope_stay_within_the_bars(case):
    bar = 8.8 if case.kernel == "rope forward" else 12.3
    assert compiler.instructions(*machine(case)) <= SLACK * bar


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
@pytest.mark.parametrize("dim", DIMS)
def test_rounding_before_the_rotation_costs_what_the_rounding_costs(dim, interleaved):
    # The weight cannot be folded into cos and sin there: a multiplication more an element, and the roundings.
    for kernel, rounding, bar in (
        ("rope forward", "once", 10.4),
        ("rope forward", "weight", 10.2),
        ("rope backward", "weight", 15.3),
    ):
        case = Case(kernel, dim, (24, 24), rounding=rounding, rounded=kernel == "rope forward", interleaved=interleaved)
        assert compiler.instructions(*machine(case)) <= SLACK * bar


def test_an_access_is_told_apart_by_the_line_of_the_kernel_that_made_it():
    code, _ = machine(Case("rope backward", 128, (24, 24)))
    sources = {i.source.strip() for i in code.loop if i.access and not i.of_tensor}
    assert any("_rotation(cos" in source for source in sources)
    assert any("_read(rstd_g" in source for source in sources)
    assert len(sources) == 2


def test_occupancy_is_not_what_the_count_is_bought_with():
    for dim in DIMS:
        for kernel, least in (("forward", 20), ("backward", 16)):
            code, _ = machine(Case(kernel, dim, (24, 24)))
            warps, _ = code.occupancy()
            assert warps >= least
            assert 16 * code.bytes_in_flight() >= 25 * 1024  # what an H200 needs, by the warps that are launched
    for case in ROPE:
        code, _ = machine(case)
        warps, _ = code.occupancy()
        assert warps >= 16
        assert 16 * code.bytes_in_flight() >= 25 * 1024


def test_a_float64_eps_is_converted_once_and_spreads_no_further():
    code, _ = machine(Case("forward", 128, (24, 24), double_eps=True))
    assert code.float64(loop=True) == 0
    assert code.float64() <= 1


def test_unaligned_rows_compile_to_narrow_accesses():
    code, _ = machine(Case("forward", 64, (24, 24), layout="unaligned"))
    assert set(code.accesses("load")) == {16}
    assert code.spills == 0


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "100", "120"])
@pytest.mark.parametrize("rope", ["", "rope "], ids=["norm", "norm + RoPE"])
def test_every_target_has_wide_accesses_and_no_spill(rope, arch):
    dtype = "fp16" if arch == "75" else "bf16"
    kernel = "forward" if arch in ("80", "89") else "backward"
    code, _ = machine(Case(rope + kernel, 128, (24, 24), dtype, dtype), arch)
    assert (code.spills, code.float64(), code.barriers()) == (0, 0, 0)
    assert set(code.accesses("load")) == {128}
    assert set(code.accesses("store")) == {128}


@pytest.mark.parametrize("kernel", ["backward", "rope backward"])
def test_amds_target_compiles_without_a_spill(kernel):
    code, _ = machine(Case(kernel, 128, (24, 24)), "gfx942")
    assert code.spills == 0
    assert set(code.accesses("store")) == {64}  # 64 lanes a wavefront: half the width is the same line of memory


def test_the_reduction_does_not_spill():
    code, _ = machine(Case("reduce", 128, (24, 24)))
    assert (code.spills, code.float64()) == (0, 0)
