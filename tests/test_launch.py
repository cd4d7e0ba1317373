"""How kernels are laid over their input: pure functions, checked by walking every row."""

import dataclasses
import itertools

import pytest
import torch
from qknorm_kernels import launch

D = 64


def strides(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(x.shape), x.stride()


def views() -> dict[str, torch.Tensor]:
    fused = torch.empty(2, 6, 3 * 4 * D + 32)
    return {
        "dense": torch.empty(2, 6, 4, D),
        "fused qkv chunk": fused[..., 4 * D : 8 * D].unflatten(-1, (4, D)),
        "bfl permute": torch.empty(2, 6, 3, 4, D).permute(2, 0, 3, 1, 4)[0],
        "transposed": torch.empty(2, 4, 6, D).transpose(1, 2),
        "sliced rows": fused[:, 2:, : 4 * D].unflatten(-1, (4, D)),
        "sliced heads": torch.empty(2, 6, 9, D)[:, :, 1:5],
        "expanded": torch.empty(1, 1, 4, D).expand(2, 6, 4, D),
        "one dimension": torch.empty(D),
        "ones": torch.empty(2, 1, 6, 1, D)[:, :, ::2],
        "five dimensions": torch.empty(2, 3, 2, 4, D),
        "across heads": fused[..., : 4 * D],
    }


def offsets(places: launch.Layout, which: int = 0) -> list[int]:
    """Where each row lies, in the order of the output, as the kernels walk it."""
    if places.flat:
        return [row * places.row_strides[which] for row in range(places.rows)]
    return [
        t // places.sequence * places.batch_strides[which]
        + t % places.sequence * places.token_strides[which]
        + row * places.row_strides[which]
        for t in range(places.tokens)
        for row in range(places.rows)
    ]


def expected(shape: tuple[int, ...], step: tuple[int, ...]) -> list[int]:
    rows = itertools.product(*map(range, shape[:-1]))
    return [sum(i * s for i, s in zip(row, step, strict=False)) for row in rows]


@pytest.mark.parametrize("name", views())
def test_a_layout_visits_every_row_once_in_the_order_of_the_output(name):
    shape, step = strides(views()[name])
    assert offsets(launch.layout(shape, step)) == expected(shape, step)


@pytest.mark.parametrize(
    ("x", "dy"), itertools.product(["dense", "fused qkv chunk", "transposed", "sliced rows"], repeat=2)
)
def test_a_layout_of_two_tensors_walks_both(x, dy):
    shape, x_step = strides(views()[x][:, :4])
    _, dy_step = strides(views()[dy][:, :4])
    places = launch.layout(shape, x_step, dy_step)
    assert offsets(places, 0) == expected(shape, x_step)
    assert offsets(places, 1) == expected(shape, dy_step)


def test_what_lies_at_one_distance_is_one_run_of_rows():
    for name in ("dense", "five dimensions", "one dimension", "across heads"):
        assert launch.layout(*strides(views()[name])).flat
    assert not launch.layout(*strides(views()["fused qkv chunk"])).flat


def test_more_than_three_irreducible_dimensions_have_no_layout():
    x = torch.empty(4, 4, 4, 4, D)[::2, ::2, ::2, ::2]
    assert launch.layout(*strides(x)) is None
    assert launch.layout(*strides(x[0])) is not None


def test_alignment_takes_every_step_to_be_a_multiple_of_16_bytes():
    def aligned(x, itemsize):
        shape, step = strides(x)
        return launch.aligned(itemsize, shape[-1], launch.layout(shape, step))

    assert aligned(torch.empty(2, 6, 3 * D)[..., :D], 2)
    assert not aligned(torch.empty(2, 6, 3 * D + 4)[..., :D], 2)
    assert aligned(torch.empty(2, 6, 3 * D + 4)[..., :D], 4)
    assert not aligned(torch.empty(3, 100), 2)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_a_tile_covers_its_rows_and_columns_for_every_dim_up_to_8192(itemsize, backward):
    for dim in (*range(1, 600), *range(600, 8193, 37), 1536, 3072, 5120, 8192):
        tile = launch.tile(dim, itemsize, backward, dim * itemsize % 16 == 0, (24,), False)
        width = 1 << (-(-dim // tile.chunks) - 1).bit_length()
        assert width * tile.chunks >= dim
        assert tile.groups % tile.batch == 0
        assert dim < 8 or tile.rows * width * itemsize >= 16 * 32 * tile.warps  # no lane idle
        assert width * tile.chunks < 2 * dim + 16 * 32


def test_a_dim_that_no_registers_hold_is_an_error():
    with pytest.raises(ValueError, match="at most 8192, but is 20000"):
        launch.tile(20000, 2, False, True, (1,), True)


@pytest.mark.parametrize("heads", [(24,), (30,), (32,), (48,), (24, 8), (1,), (7,)])
def test_a_tile_hardly_overhangs_a_token(heads):
    for dim in (64, 128):
        tile = launch.tile(dim, 2, False, True, heads, False)
        for rows in heads:
            assert -rows % tile.height < tile.rows


@pytest.mark.parametrize("tokens", [0, 1, 2, 77, 512, 4608, 32760, 75600, 2**20 + 1])
@pytest.mark.parametrize("tiles", [1, 2, 7, 300])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_programs_get_equally_many_tokens_and_fit_the_grid(tokens, tiles, warps):
    for processors in (1, 28, 108, 132):
        programs = launch.programs(tokens, tiles, warps, processors)
        assert 1 <= programs <= 65535
        rounds = -(-tokens // programs)
        assert programs * rounds < tokens + programs  # none gets two fewer than another
        if tokens and tiles * tokens * warps <= 16 * processors:
            assert programs == tokens


@pytest.mark.parametrize(("dim", "rotary", "interleaved"), [(64, 64, True), (128, 64, False), (256, 256, False)])
def test_a_rope_tile_has_whole_units(dim, rotary, interleaved):
    for backward in (False, True):
        tile = launch.rope_tile(dim, rotary, 2, backward, True, (24, 8), interleaved)
        width = dim // tile.chunks
        assert width * tile.chunks == dim
        assert interleaved or (rotary // 2 % width == 0 and tile.chunks % 2 == 0)


def test_configurations_are_frozen():
    tile = launch.tile(128, 2, False, True, (24,), False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.rows = 1
