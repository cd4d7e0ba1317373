"""Every layout, dtype, head dim and option of one norm, each pair of them met by a case."""

import pytest
import torch
from cover import Case, pairwise, product
from judge import check
from operands import GRADIENTS, LAYOUTS, WEIGHTS, make_dy, make_weight, make_x
from oracle import ROUNDINGS
from qknorm_kernels import launch
from qknorm_kernels import rms_norm as kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, "none": None}
# Batch, sequence and heads.
ROWS = {"no row": (2, 0, 3), "one row": (1, 1, 1), "odd rows": (1, 3, 3), "many rows": (2, 2, 5)}

NUMBERS = {
    "x_dtype": ("fp16", "fp32", "bf16"),
    "w_dtype": ("fp16", "fp32", "bf16", "fp64", "none"),
    "rounding": ROUNDINGS,
    "unit_offset": (False, True),
    "mask": (3, 1, 2),
    "save": (True, False),
    "eps": (1e-6, 0.0, 10.0),
}
WALKS = {
    "layout": tuple(LAYOUTS),
    "dy_layout": tuple(GRADIENTS),
    "dim": (128, 64, 80, 96, 112, 256, 7, 1, 1536, 5120),
    "rows": tuple(ROWS),
    "w_layout": tuple(WEIGHTS),
    "programs": ("one", "two", "as computed"),
}


def cases(full: bool) -> list[Case]:
    if not full:
        return pairwise(NUMBERS | WALKS)
    # What is computed of a value and where it lies are independent: the product of each, over all of the other in turn.
    numbers, walks = product(NUMBERS), product(WALKS)
    count = max(len(numbers), len(walks))
    return [numbers[i % len(numbers)] | walks[i * 7919 % len(walks)] for i in range(count)]


def test_numbers_and_memory_are_right_whatever_the_layout_dtype_and_option(case, monkeypatch):
    if case["programs"] != "as computed":
        most = {"one": 1, "two": 2}[case["programs"]]
        monkeypatch.setattr(launch, "programs", lambda tokens, *_: min(tokens, most))
    x_dtype, w_dtype = DTYPES[case["x_dtype"]], DTYPES[case["w_dtype"]]
    b, s, h = ROWS[case["rows"]]
    if case["dim"] > 256:
        monkeypatch.setattr(kernels, "_REDUCE_COLUMNS", 512)  # fewer programs to interpret, and fewer rows
        s = min(s, 2)
    x = make_x(case["layout"], (b, s, h, case["dim"]), x_dtype)
    weight = make_weight(case["dim"], w_dtype, case["w_layout"])
    options = {name: case[name] for name in ("eps", "unit_offset", "rounding", "mask", "save")}
    check(x, make_dy(case["dy_layout"], x), weight, **options)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("w_dtype", list(DTYPES))
@pytest.mark.parametrize("x_dtype", ["bf16", "fp16", "fp32"])
def test_each_rounding_is_where_the_formula_has_it_for_every_pair_of_dtypes(x_dtype, w_dtype, rounding, unit_offset):
    x = make_x("dense", (1, 1, 3, 64), DTYPES[x_dtype])
    check(x, make_dy("dense", x), make_weight(64, DTYPES[w_dtype]), unit_offset=unit_offset, rounding=rounding)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dim", [1, 7, 64, 80, 96, 112, 128, 256, 1536, 5120, 8192])
def test_every_head_dim_with_and_without_128_bit_accesses(dim, dtype, wide, monkeypatch):
    monkeypatch.setattr(kernels, "_REDUCE_COLUMNS", 512)
    x = make_x("storage offset" if wide else "unaligned by one element", (1, 1, 3, dim), DTYPES[dtype])
    check(x, make_dy("dense", x), make_weight(dim, DTYPES[dtype]))


@pytest.mark.parametrize("heads", [1, 2, 8, 23, 24, 30, 32])
def test_every_head_count_is_normed_whole(heads):
    x = make_x("fused qkv chunk", (1, 2, heads, 128), torch.bfloat16)
    check(x, make_dy("dense", x), make_weight(128, torch.bfloat16), mask=1)
