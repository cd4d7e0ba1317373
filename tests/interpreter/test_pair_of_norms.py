"""q and k together: the numbers of each, and one launch wherever one can take both."""

import pytest
import torch
from judge import check_pair
from operands import fill, make_dy, make_weight, make_x
from oracle import ROUNDINGS
from qknorm_kernels import launch
from qknorm_kernels import rms_norm as kernels
from torch import Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ONE = ["forward"], ["backward", "reduce"]
TWO = ["forward"] * 2, ["backward", "reduce"] * 2


@pytest.fixture(autouse=True)
def two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "programs", lambda tokens, *_: min(tokens, 2))


def fused(b: int, s: int, q_heads: int, k_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q and k of one projection."""
    qkv = torch.full((b, s, q_heads + 2 * k_heads, dim), float("nan"), dtype=dtype)
    return fill(qkv[:, :, :q_heads], 0, 3.0), fill(qkv[:, :, q_heads : q_heads + k_heads], 1, 3.0)


def pair(layout: str, q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, other: str = ""):
    return make_x(layout, q, dtype), make_x(other or layout, k, dtype, seed=3)


def check_launches(x, expected, w_dtypes=(FP16, FP16), w_layouts=("dense", "dense"), dys=("dense", "dense"), **options):
    dim = x[0].shape[-1]
    weights = tuple(make_weight(dim, w_dtypes[i], w_layouts[i], seed=5 + i) for i in range(2))
    dy = tuple(make_dy(dys[i], x[i], seed=7 + i) for i in range(2))
    assert check_pair(x, dy, weights, **options) == expected


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_q_and_k_of_one_dtype_take_one_launch(dtype):
    check_launches(pair("fused qkv chunk", (1, 2, 4, 64), (1, 2, 4, 64), dtype), ONE, (dtype, dtype))


@pytest.mark.parametrize("layout", ["dense", "bfl permute", "transposed", "sliced rows", "odd pitch", "expanded"])
def test_q_and_k_of_one_layout_take_one_launch(layout):
    check_launches(pair(layout, (1, 3, 4, 64), (1, 3, 4, 64), BF16), ONE, (BF16, BF16))


@pytest.mark.parametrize("heads", [(24, 8), (3, 2), (2, 5)])
@pytest.mark.parametrize("batch", [1, 2])
def test_fewer_heads_of_k_in_a_fused_projection_take_one_launch(batch, heads):
    check_launches(fused(batch, 2, *heads, 64, FP16), ONE)


def test_unequal_token_counts_take_one_launch():
    check_launches(pair("fused qkv chunk", (2, 2, 3, 64), (1, 5, 3, 64), FP16), ONE)
    check_launches(pair("dense", (2, 2, 3, 64), (1, 5, 3, 64), BF16), ONE, (BF16, BF16))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_every_rounding_with_a_weight_of_its_own_takes_one_launch(dtype, unit_offset, rounding):
    x = fused(1, 2, 3, 2, 80, dtype)
    check_launches(x, ONE, (FP16, FP16), unit_offset=unit_offset, rounding=rounding, save=not unit_offset)


@pytest.mark.parametrize("dim", [1, 7, 112])
def test_every_head_dim_takes_one_launch(dim):
    check_launches(pair("fused qkv chunk", (1, 2, 3, dim), (1, 2, 2, dim), FP16), ONE)


def test_norms_without_weights_take_one_launch_and_no_reduction():
    check_launches(fused(1, 2, 3, 2, 64, FP16), (["forward"], ["backward"]), (None, None))


def test_frozen_weights_cost_no_reduction():
    check_launches(fused(1, 2, 3, 2, 64, FP16), (["forward"], ["backward"]), mask=(1, 1))


@pytest.mark.parametrize("mask", [(2, 2), (3, 1), (1, 2), (2, 3)])
def test_each_gradient_that_is_wanted_is_right_where_they_differ(mask):
    backward = [name for each in mask for name in ("backward", *(["reduce"] if each & 2 else []))]
    check_launches(fused(1, 2, 3, 2, 64, FP16), (["forward"], backward), mask=mask)


def test_gradients_of_any_layout_take_one_launch():
    for dys in (("transposed", "transposed"), ("strided", "transposed"), ("expanded", "expanded")):
        check_launches(fused(2, 2, 3, 2, 64, FP16), ONE, dys=dys)


def test_both_unaligned_take_one_launch():
    check_launches(pair("unaligned by one element", (1, 2, 3, 64), (1, 2, 2, 64), FP16), ONE)
    check_launches(fused(1, 2, 3, 2, 64, FP16), ONE, w_layouts=("unaligned", "unaligned"))


@pytest.mark.parametrize(
    ("w_dtypes", "w_layouts"),
    [
        ((FP16, FP32), ("dense", "dense")),
        ((FP16, None), ("dense", "dense")),
        ((None, FP32), ("dense", "dense")),
        ((FP64, FP64), ("dense", "dense")),
        ((FP16, FP16), ("dense", "strided")),
        ((BF16, BF16), ("unaligned", "dense")),
    ],
)
def test_weights_that_cannot_share_a_launch_are_taken_one_by_one(w_dtypes, w_layouts):
    expected = TWO[0], [name for w in w_dtypes for name in ("backward", *(["reduce"] if w else []))]
    check_launches(fused(1, 2, 3, 2, 64, FP16), expected, w_dtypes, w_layouts)


def test_one_head_of_k_beside_many_of_q_is_taken_by_itself():
    """Its tokens are one run of rows."""
    check_launches(fused(2, 2, 3, 1, 64, FP16), TWO)


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("dense", "fused qkv chunk"),
        ("dense", "unaligned by one element"),
        ("odd pitch", "padded rows"),
        ("last stride two", "last stride two"),
        ("last stride two", "dense"),
    ],
)
def test_layouts_that_cannot_share_a_launch_are_taken_one_by_one(layout, other):
    check_launches(pair(layout, (1, 2, 3, 64), (1, 2, 3, 64), FP16, other), TWO)


def test_gradients_that_cannot_share_a_launch_are_taken_one_by_one():
    x = pair("dense", (1, 2, 3, 64), (1, 2, 3, 64), FP16)
    check_launches(x, (["forward"], TWO[1]), dys=("dense", "strided"))
    check_launches(x, (["forward"], TWO[1]), dys=("last stride two", "dense"))


def test_more_dimensions_than_a_launch_takes_are_split_for_each():
    q, k = pair("six dimensions", (2, 1, 2, 64), (1, 1, 2, 64), FP16, "dense")
    check_launches((q, k), (["forward"] * 3, ["backward", "reduce"] * 2 + ["reduce", "backward", "reduce"]))


def test_a_tensor_without_rows_beside_one_with_rows():
    none = pair("dense", (1, 0, 3, 64), (1, 2, 3, 64), FP16)
    check_launches(none, (["forward"], ["backward", "reduce"]))
    check_launches(none[::-1], (["forward"], ["backward", "reduce"]))
    check_launches(pair("dense", (1, 0, 3, 64), (1, 0, 3, 64), FP16), ([], []))


def test_a_pair_has_the_bits_of_its_parts_alone():
    q, k = fused(1, 2, 3, 2, 64, FP32)
    weights = make_weight(64, FP32), make_weight(64, FP32, seed=5)
    results = kernels.forward_pair((q, k), weights, 1e-6, False, "once")
    dy = make_dy("dense", q), make_dy("dense", k)
    rstd = results[0][1], results[1][1]
    gradients = kernels.backward_pair(dy, (q, k), weights, rstd, False, "once", (1, 1))
    for i, x in enumerate((q, k)):
        y, r = kernels.forward(x, weights[i], 1e-6, False, "once")
        assert torch.equal(y, results[i][0])
        assert torch.equal(r, results[i][1])
        assert torch.equal(kernels.backward(dy[i], x, weights[i], r, False, "once", 1)[0], gradients[i][0])
