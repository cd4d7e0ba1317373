"""How a kernel is laid over its input: pure functions of shape, strides, dtype and processor count, no GPU needed.

Imports nothing but the standard library. The figures beside the rungs are from ``python -m qknorm_kernels.compile``.
"""

from dataclasses import dataclass
from functools import cache

MAX_DIM = 8192  # beyond it a row no longer fits the registers of eight warps

# Bytes of one access of one lane, and the lanes of a warp that a tile is spread over. AMD's wavefronts have 64 lanes
# and take two such tiles at once.
_ACCESS = 16
_LANES = 32


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time: ``groups`` times ``rows`` rows, each in ``chunks`` pieces."""

    rows: int
    groups: int
    batch: int  # groups that are read before the first of them is computed
    chunks: int
    ways: int  # neighbours in a row that one lane holds: summed in a chain, without a shuffle
    warps: int

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return self.rows * self.groups


@dataclass(frozen=True)
class Layout:
    """Rows [batch, tokens, heads] as a kernel walks them; strides in elements, one for each tensor (x; or x and dy).

    ``flat``: one run of rows at one distance, which a program cuts into tiles of its own. ``tokens`` counts all
    batches; ``sequence`` is the number of tokens between two steps of ``batch_strides``.
    """

    flat: bool
    tokens: int
    rows: int
    sequence: int
    batch_strides: tuple[int, ...]
    token_strides: tuple[int, ...]
    row_strides: tuple[int, ...]


def layout(shape: tuple[int, ...], *strides: tuple[int, ...]) -> Layout | None:
    """The layout of tensors of one shape [..., D], their last stride 1; None where three dimensions do not suffice."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for i, size in enumerate(shape[:-1]):
        step = tuple(s[i] for s in strides)
        if size == 1:
            continue
        if dims and dims[-1][1] == tuple(size * s for s in step):
            dims[-1] = (dims[-1][0] * size, step)
        else:
            dims.append((size, step))
    none = (0,) * len(strides)
    match dims:
        case []:
            return Layout(True, 1, 1, 1, none, none, (shape[-1],) * len(strides))
        case [(rows, row)]:
            return Layout(True, 1, rows, 1, none, none, row)
        case [(tokens, token), (rows, row)] if tokens < 2**31:
            return Layout(False, tokens, rows, tokens, none, token, row)
        case [(batch, far), (tokens, token), (rows, row)] if batch * tokens < 2**31:
            return Layout(False, batch * tokens, rows, tokens, far, token, row)
    return None


def aligned(itemsize: int, dim: int, places: Layout) -> bool:
    """Whether every row starts at a multiple of 16 bytes where the tensors do: 128-bit loads and stores need it."""
    steps = (dim, *places.batch_strides, *places.token_strides, *places.row_strides)
    return all(step * itemsize % _ACCESS == 0 for step in steps)


@cache
def tile(dim: int, itemsize: int, backward: bool, wide: bool, rows: tuple[int, ...], flat: bool) -> Tile:
    """The tile for rows of ``dim`` elements; ``rows`` is a token's, of q and k where both are in the launch.

    ``wide``: 128-bit accesses are possible.
    """
    lane = _ACCESS // itemsize
    warps, width = _chunk(dim, itemsize, backward)
    chunks = -(-dim // width)
    height = _LANES * warps * lane // width
    # 96 elements a lane share the addresses, the weight and the loop: forward 5.7 instructions an element at dim 128
    # with six groups, 6.6 with one. A row that fills a warp has shared all that already.
    limit = max(1, 96 // (chunks * lane)) if height > 1 else 1
    # As few rows past the end as possible; among those near the limit, above it where that leaves none over (32 heads).
    groups = min(
        range(1, limit * 4 // 3 + 1),
        key=lambda g: (sum(_overhang(r, height * g, flat) for r in rows), abs(limit - g), -g),
    )
    # No compiler moves a load over a store that may alias, so what is to be in flight at once is read at once:
    # 6 KiB a warp, of x or of x and dy: 48 registers a lane, 80 in all forward and 112 backward at dim 128.
    most = 192 // (_ACCESS * chunks * (2 if backward else 1))
    batch = max(b for b in range(1, groups + 1) if groups % b == 0 and (b <= most or b == 1))
    return Tile(height, groups, batch, chunks, lane if wide else 1, warps)


@cache
def rope_tile(
    dim: int, rotary: int, itemsize: int, backward: bool, wide: bool, rows: tuple[int, ...], interleaved: bool
) -> Tile | None:
    """As ``tile``, for rows that are rotated too; None where no chunk divides a row into whole rotations.

    Half as much is read at once, since four values of the rotation are held for every column: 108 registers forward and
    128 backward at dim 128, where reading as much as the norm does takes 148 and 240.
    """
    lane = _ACCESS // itemsize
    if rotary % 8 or rotary > dim:
        return None
    # Elements of a row that a lane holds: 32 spill backward where halves are split (dim 256).
    for held in (24, 40) if backward else (40,):
        for width in (8 * lane, 4 * lane, 2 * lane, lane, 16 * lane, 32 * lane):
            chunks = dim // width
            pairs = interleaved or (rotary % (2 * width) == 0 and (dim - rotary) % (2 * width) == 0)
            if dim % width or chunks < (1 if interleaved else 2) or not pairs or chunks * lane > held:
                continue
            if chunks == 1 and width > 4 * lane:  # two chunks a row
                continue
            height = _LANES * lane // width
            limit = max(1, 96 // (chunks * lane))
            groups = min(
                range(1, limit * 4 // 3 + 1),
                key=lambda g: (sum(_overhang(r, height * g, False) for r in rows), abs(limit - g), -g),
            )
            most = (64 if backward else 96) // (_ACCESS * chunks * (2 if backward else 1))
            batch = max(b for b in range(1, groups + 1) if groups % b == 0 and (b <= most or b == 1))
            return Tile(height, groups, batch, chunks, lane if wide else 1, 1)
    return None


def _chunk(dim: int, itemsize: int, backward: bool) -> tuple[int, int]:
    """Warps of a program, and the elements of a row that lie side by side in one access of a group of lanes."""
    lane = _ACCESS // itemsize
    for warps in (1, 2, 4, 8):
        # Elements of a row that a lane holds. Backward keeps x, dy, the weight and the sums of dw of each: 32 are 168
        # registers and no spill; across warps 40, which is what 5120 takes.
        most = 48 if not backward else 32 if warps == 1 else 40
        span = _LANES * lane * warps
        widths = [lane << k for k in range(6)] if warps == 1 else [span]
        widths = [width for width in widths if -(-dim // width) * lane <= most]
        if widths:
            # No lane idle; two chunks a row, which saves a third of the shuffles; whole lines of 128 bytes.
            return warps, min(
                widths,
                key=lambda w: (-dim % w, w >= dim, abs((w * itemsize).bit_length() - (128).bit_length())),
            )
    raise ValueError(f"dim must be at most {MAX_DIM}, but is {dim}")


def _overhang(rows: int, height: int, flat: bool) -> int:
    # A flat run overhangs once, at its end: what counts there is whether it has to be masked at all.
    over = -rows % height
    return bool(over) if flat else over


def programs(tokens: int, tiles: int, warps: int, processors: int) -> int:
    """Programs that share the tokens of each tile: the second dimension of the grid.

    Sixteen warps a multiprocessor: at 6 KiB of loads each, half of the time, that is twice the bytes that must be in
    flight to fill the memory of an H200 (4.8 TB/s times 0.7 us, over 132: 25 KiB), and leaves what a program does once
    (a tenth of its instructions for one token) to few programs. All get equally many tokens: a second wave with one
    token each would double the time.
    """
    most = max(1, processors * max(2, 16 // warps) // tiles)
    rounds = -(-tokens // min(most, 65535))
    return max(1, -(-tokens // rounds)) if tokens else 1
