"""The norm in Triton: forward, backward, and the fixed-order reduction of the weight gradient.

Imports torch and triton, never qknorm. One program is (mostly) one warp that owns ``GROUPS * ROWS`` rows, all heads of
one token where they fit, and walks over tokens. Nothing is divided by the head count, nothing crosses warps, and the
weight is read once a program. A row is cut into ``CHUNKS`` pieces that the same lanes hold: fewer lanes a row, fewer
shuffles. ``launch.py`` chooses all of it.

Dimensions: rows are [tokens, heads, D] in the order of the output, which is contiguous; ``launch.Layout`` has how a
strided input is walked in that order.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

# What changes from call to call must not compile a kernel anew; alignment has an argument of its own.
_INTEGERS = (
    "tiles",
    *(
        name + number
        for name in ("tokens", "rows", "sequence", "batch_stride", "token_stride", "row_stride")
        for number in ("", "2")
    ),
)
_DY_INTEGERS = tuple(
    f"dy_{name}{number}" for name in ("batch_stride", "token_stride", "row_stride") for number in ("", "2")
)


@triton.jit
def _read(pointer, offset, mask, PACKED: tl.constexpr):
    """A tile as it lies in memory; PACKED reads bfloat16 two at a time, at offsets in int32."""
    other: tl.constexpr = None if mask is None else 0
    if PACKED:
        return tl.load(pointer.to(tl.pointer_type(tl.int32)) + offset, mask=mask, other=other)
    else:
        return tl.load(pointer + offset, mask=mask, other=other)


@triton.jit
def _widen(tile, ROWS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """[ROWS, C] in float32 from what was read."""
    if PACKED:
        # A bfloat16 is the upper half of a float32: shift and mask cost less than the conversion of both halves.
        even = (tile << 16).to(tl.float32, bitcast=True)
        odd = (tile & -65536).to(tl.float32, bitcast=True)
        return tl.join(even, odd).reshape(ROWS, C)
    else:
        return tile.to(tl.float32)


@triton.jit
def _load_weight(
    weight,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The factor in float32 (NATIVE: in the weight's dtype), a [ROWS, C] tile a chunk.

    In the layout of x it needs no shared memory.
    """
    HALVES: tl.constexpr = 2 if PACKED else 1
    columns = tl.arange(0, C // HALVES)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    factors = ()
    for c in tl.static_range(CHUNKS):
        mask = None if C * CHUNKS == DIM else c * C + HALVES * columns < DIM
        factor = _widen(_read(weight + c * C, columns, mask, PACKED), ROWS, C, PACKED)
        if OFFSET:  # the sum is taken in the weight's own dtype
            factor = _round(factor + 1.0, weight.dtype.element_ty)
        if NATIVE:
            factor = factor.to(weight.dtype.element_ty)
        factors = factors + (factor,)
    return factors


@triton.jit
def _round(value, DTYPE: tl.constexpr):
    """The float32 value rounded to DTYPE, as float32."""
    if DTYPE is None:
        return value
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def _accumulate(total, a, b, ROWS: tl.constexpr, C: tl.constexpr, WAYS: tl.constexpr):
    """total + a * b, [ROWS, C] tiles, total [ROWS, C / WAYS]: the WAYS neighbours that a lane holds go to one sum.

    A chain of fused multiply-adds: summing neighbours afterwards would cost an addition for each.
    """
    if WAYS == 1:
        return total + a * b
    else:
        a_even, a_odd = a.reshape(ROWS, C // 2, 2).split()
        b_even, b_odd = b.reshape(ROWS, C // 2, 2).split()
        total = _accumulate(total, a_even, b_even, ROWS, C // 2, WAYS // 2)
        return _accumulate(total, a_odd, b_odd, ROWS, C // 2, WAYS // 2)


@triton.jit
def _token(t, sequence, batch_stride, token_stride, BATCHED: tl.constexpr, ALIGN: tl.constexpr):
    """Offset of token t. The hint must be on the products: on the strides themselves it is lost."""
    if BATCHED:
        b = t // sequence
        offset = tl.multiple_of(tl.cast(b, tl.int64) * batch_stride, ALIGN)
        return offset + tl.multiple_of(tl.cast(t - b * sequence, tl.int64) * token_stride, ALIGN)
    else:
        return tl.multiple_of(tl.cast(t, tl.int64) * token_stride, ALIGN)


@triton.jit
def _rows(count, row_stride, ROW_STRIDE: tl.constexpr, ALIGN: tl.constexpr):
    """Offset of a row or of [ROWS] rows; ROW_STRIDE 0: known at run time alone."""
    if ROW_STRIDE == 0:
        return tl.multiple_of(row_stride * count, ALIGN)
    else:
        return count * ROW_STRIDE


@triton.jit
def _valid(rows, rows_left, VALID: tl.constexpr):
    """[ROWS] mask of the rows that exist; VALID 0: known at run time alone."""
    if VALID == 0:
        return rows < rows_left
    else:
        return rows < VALID


@triton.jit
def _mask(valid, columns, DIM: tl.constexpr, EXACT: tl.constexpr):
    """Mask of a tile whose rows (valid, None: all) or columns (EXACT: all) do not all exist."""
    if EXACT:
        return valid[:, None]
    elif valid is None:
        return columns < DIM
    else:
        return (columns < DIM) & valid[:, None]


@triton.jit(do_not_specialize=_INTEGERS)
def forward_kernel(
    x,
    weight,
    y,
    rstd,
    x2,
    weight2,
    y2,
    rstd2,
    eps,
    tokens: tl.int32,
    rows: tl.int64,
    sequence: tl.int32,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    tiles: tl.int32,
    tokens2: tl.int32,
    rows2: tl.int64,
    sequence2: tl.int32,
    batch_stride2: tl.int64,
    token_stride2: tl.int64,
    row_stride2: tl.int64,
    DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
    VALID: tl.constexpr,
    FLAT: tl.constexpr,
    BATCHED: tl.constexpr,
    ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """y = x * rstd * weight. Grid: (tiles of a token's rows, of both tensors; programs that share the tokens)."""
    C: tl.constexpr = triton.next_power_of_2(triton.cdiv(DIM, CHUNKS))
    TILE: tl.constexpr = ROWS * GROUPS
    EXACT: tl.constexpr = C * CHUNKS == DIM
    HALVES: tl.constexpr = 2 if PACKED else 1
    eps = tl.cast(
        eps, tl.float32
    )  # compilers pass a Python float as float64, which would spread to everything after it
    tile = tl.program_id(0)
    if x2 is not None:
        if tile >= tiles:
            tile -= tiles
            x, weight, y, rstd, tokens, rows = x2, weight2, y2, rstd2, tokens2, rows2
            sequence, batch_stride, token_stride, row_stride = sequence2, batch_stride2, token_stride2, row_stride2
    first_row = tile.to(tl.int64) * TILE
    x += tl.multiple_of(_rows(first_row, row_stride, ROW_STRIDE, ALIGN), ALIGN)
    pitch = TILE if FLAT else rows
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, C // HALVES)[None, :]
    out_columns = tl.arange(0, C)[None, :]
    lane = _rows(row, row_stride // HALVES, ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    if weight is not None:
        factors = _load_weight(weight, ROWS, DIM, CHUNKS, C, PACKED_WEIGHT and not NATIVE, OFFSET, NATIVE)
    for t in range(tl.program_id(1), tokens, tl.num_programs(1)):
        x_t = x + _token(t, sequence, batch_stride, token_stride, BATCHED, ALIGN)
        out_row = tl.cast(t, tl.int64) * pitch + first_row
        y_t = y + tl.multiple_of(out_row * DIM, ALIGN)
        rows_left = tl.cast(tl.minimum(rows - (out_row if FLAT else first_row), TILE), tl.int32)
        for first in tl.static_range(0, GROUPS, BATCH):
            tiles_read = ()
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                x_g = x_t + _rows(g * ROWS, row_stride, ROW_STRIDE, ALIGN)
                for c in tl.static_range(CHUNKS):
                    mask = None if EXACT and valid is None else _mask(valid, c * C + HALVES * columns, DIM, EXACT)
                    tiles_read = tiles_read + (_read(x_g + c * C, lane, mask, PACKED),)
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                chunks = ()
                squares = tl.zeros((ROWS, C // WAYS), tl.float32)
                for c in tl.static_range(CHUNKS):
                    chunk = _widen(tiles_read[(g - first) * CHUNKS + c], ROWS, C, PACKED)
                    chunks = chunks + (chunk,)
                    squares = _accumulate(squares, chunk, chunk, ROWS, C, WAYS)
                r = tl.rsqrt(tl.sum(squares, 1) * (1.0 / DIM) + eps)
                if rstd is not None:
                    tl.store(rstd + out_row + g * ROWS + row, r, mask=valid)
                for c in tl.static_range(CHUNKS):
                    value = chunks[c] * r[:, None]
                    if weight is not None:
                        if NATIVE:
                            value = value.to(NORMED) * factors[c]
                        else:
                            value = _round(value, NORMED) * factors[c]
                    mask = None if EXACT and valid is None else _mask(valid, c * C + out_columns, DIM, EXACT)
                    target = y_t + (g * ROWS * DIM + c * C) + row[:, None] * DIM + out_columns
                    tl.store(target, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_INTEGERS + _DY_INTEGERS)
def backward_kernel(
    x,
    dy,
    weight,
    rstd,
    dx,
    x2,
    dy2,
    weight2,
    rstd2,
    dx2,
    partial,
    tokens: tl.int32,
    rows: tl.int64,
    sequence: tl.int32,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    dy_batch_stride: tl.int64,
    dy_token_stride: tl.int64,
    dy_row_stride: tl.int64,
    tiles: tl.int32,
    tokens2: tl.int32,
    rows2: tl.int64,
    sequence2: tl.int32,
    batch_stride2: tl.int64,
    token_stride2: tl.int64,
    row_stride2: tl.int64,
    dy_batch_stride2: tl.int64,
    dy_token_stride2: tl.int64,
    dy_row_stride2: tl.int64,
    DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    DY_ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
    VALID: tl.constexpr,
    FLAT: tl.constexpr,
    BATCHED: tl.constexpr,
    ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMED: tl.constexpr,
):
    """dx, and a row of float32 partial sums of dw for each program. Grid: as the forward's.

    With d = dy * rstd: dx = d * w - x * rstd^2 * mean(d * w * x), and dw = sum(d * x) where nothing was rounded before
    the weight: five float operations an element.
    """
    C: tl.constexpr = triton.next_power_of_2(triton.cdiv(DIM, CHUNKS))
    TILE: tl.constexpr = ROWS * GROUPS
    EXACT: tl.constexpr = C * CHUNKS == DIM
    HALVES: tl.constexpr = 2 if PACKED else 1
    tile = tl.program_id(0)
    if x2 is not None:
        if tile >= tiles:
            tile -= tiles
            x, dy, weight, rstd, dx, tokens, rows = x2, dy2, weight2, rstd2, dx2, tokens2, rows2
            sequence, batch_stride, token_stride, row_stride = sequence2, batch_stride2, token_stride2, row_stride2
            dy_batch_stride, dy_token_stride, dy_row_stride = dy_batch_stride2, dy_token_stride2, dy_row_stride2
    first_row = tile.to(tl.int64) * TILE
    x += tl.multiple_of(_rows(first_row, row_stride, ROW_STRIDE, ALIGN), ALIGN)
    dy += tl.multiple_of(_rows(first_row, dy_row_stride, DY_ROW_STRIDE, ALIGN), ALIGN)
    pitch = TILE if FLAT else rows
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, C // HALVES)[None, :]
    out_columns = tl.arange(0, C)[None, :]
    lane = _rows(row, row_stride // HALVES, ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    dy_lane = _rows(row, dy_row_stride // HALVES, DY_ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    if weight is not None:
        factors = _load_weight(weight, ROWS, DIM, CHUNKS, C, PACKED_WEIGHT, OFFSET, False)
    if partial is not None:
        sums = ()
        for _ in tl.static_range(CHUNKS):
            sums = sums + (tl.zeros((ROWS, C), tl.float32),)
    for t in range(tl.program_id(1), tokens, tl.num_programs(1)):
        x_t = x + _token(t, sequence, batch_stride, token_stride, BATCHED, ALIGN)
        dy_t = dy + _token(t, sequence, dy_batch_stride, dy_token_stride, BATCHED, ALIGN)
        out_row = tl.cast(t, tl.int64) * pitch + first_row
        rows_left = tl.cast(tl.minimum(rows - (out_row if FLAT else first_row), TILE), tl.int32)
        for first in tl.static_range(0, GROUPS, BATCH):
            tiles_read = ()
            rstds = ()
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                x_g = x_t + _rows(g * ROWS, row_stride, ROW_STRIDE, ALIGN)
                dy_g = dy_t + _rows(g * ROWS, dy_row_stride, DY_ROW_STRIDE, ALIGN)
                rstds = rstds + (_read(rstd + out_row + g * ROWS, row, valid, False),)
                for c in tl.static_range(CHUNKS):
                    mask = None if EXACT and valid is None else _mask(valid, c * C + HALVES * columns, DIM, EXACT)
                    tiles_read = tiles_read + (
                        _read(x_g + c * C, lane, mask, PACKED),
                        _read(dy_g + c * C, dy_lane, mask, PACKED),
                    )
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                r = rstds[g - first]
                chunks = ()
                gradients = ()
                products = tl.zeros((ROWS, C // WAYS), tl.float32)
                new_sums = ()
                for c in tl.static_range(CHUNKS):
                    chunk = _widen(tiles_read[2 * ((g - first) * CHUNKS + c)], ROWS, C, PACKED)
                    given = _widen(tiles_read[2 * ((g - first) * CHUNKS + c) + 1], ROWS, C, PACKED)
                    scaled = given * r[:, None]
                    if partial is not None:
                        if NORMED is None:
                            new_sums = new_sums + (sums[c] + scaled * chunk,)
                        else:  # dw takes the very value that met the weight in the forward
                            new_sums = new_sums + (sums[c] + given * _round(chunk * r[:, None], NORMED),)
                    if weight is not None:
                        scaled *= factors[c]
                    if dx is not None:
                        products = _accumulate(products, scaled, chunk, ROWS, C, WAYS)
                        chunks = chunks + (chunk,)
                        gradients = gradients + (scaled,)
                if partial is not None:
                    sums = new_sums
                if dx is not None:
                    along = tl.sum(products, 1) * (1.0 / DIM) * r * r
                    for c in tl.static_range(CHUNKS):
                        mask = None if EXACT and valid is None else _mask(valid, c * C + out_columns, DIM, EXACT)
                        value = gradients[c] - chunks[c] * along[:, None]
                        target = dx + tl.multiple_of(out_row * DIM, ALIGN) + (g * ROWS * DIM + c * C)
                        target += row[:, None] * DIM + out_columns
                        tl.store(target, value.to(dx.dtype.element_ty), mask=mask)
    if partial is not None:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        column = tl.arange(0, C)
        for c in tl.static_range(CHUNKS):
            mask = None if EXACT else c * C + column < DIM
            tl.store(partial + program * DIM + c * C + column, tl.sum(sums[c], 0), mask=mask)


@triton.jit(do_not_specialize=("first", "count"))
def reduce_kernel(
    partial, dw, dw2, first: tl.int32, count: tl.int32, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """dw from [count, D] partial sums, in one fixed order, cast once. Grid: (blocks of columns, tensors)."""
    begin, end = 0, first
    if dw2 is not None:
        if tl.program_id(1) == 1:
            dw, begin, end = dw2, first, count
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        at = start + row
        mask = (at < end)[:, None] & (column < DIM)[None, :]
        total += tl.load(partial + at[:, None].to(tl.int64) * DIM + column[None, :], mask=mask, other=0.0)
    tl.store(dw + column, tl.sum(total, 0).to(dw.dtype.element_ty), mask=column < DIM)


# Rows and columns of partial sums that a program of the reduction reads at once: whole sectors of 32 bytes, and enough
# of them that a thousand partial sums take three rounds of memory latency.
_REDUCE_ROWS, _REDUCE_COLUMNS, _REDUCE_WARPS = 512, 8, 8
_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
DTYPES = tuple(_TRITON)
_HALF = (torch.bfloat16, torch.float16)


def forward(
    x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, rounding: str, save: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``(y, rstd)``; no rstd where it is not to be saved.

    ``x`` is [..., D] in bfloat16, float16 or float32, D at most ``launch.MAX_DIM``; ``weight`` [D] on its device.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if save else None
    _forward((x, weight, y, rstd), eps, unit_offset, rounding)
    return y, rstd


def forward_pair(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor | None, Tensor | None],
    eps: float,
    unit_offset: bool,
    rounding: str,
    save: bool = True,
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """``forward`` of q and k, in one launch where dtypes, alignment and layouts allow it."""
    q, k = x
    q_weight, k_weight = weight
    q_y = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_y = torch.empty_like(k, memory_format=torch.contiguous_format)
    q_rstd = k_rstd = None
    if save:
        q_rstd = q.new_empty(q.shape[:-1], dtype=torch.float32)
        k_rstd = k.new_empty(k.shape[:-1], dtype=torch.float32)
    key = (
        *(q.shape, q.stride(), k.shape, k.stride(), q.dtype, k.dtype, q.get_device()),
        *((q.data_ptr() | k.data_ptr()) & 15, save, unit_offset, rounding, _kind(q_weight), _kind(k_weight)),
    )
    tensors = (q, q_weight, q_y, q_rstd, k, k_weight, k_y, k_rstd)
    plan = _plans.get(key) or _remember(key, _plan_forward((tensors[:4], tensors[4:]), unit_offset, rounding))
    plan(*tensors, eps)
    return (q_y, q_rstd), (k_y, k_rstd)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, unit_offset: bool, rounding: str, mask: int
) -> tuple[Tensor, Tensor]:
    """``(dx, dw)`` of ``forward``; what ``mask`` (1: dx, 2: dw) does not want is an empty tensor."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if mask & 1 else None
    dw = torch.empty_like(weight) if mask & 2 and weight is not None else None
    _backward((x, dy, weight, rstd.contiguous(), dx, dw), unit_offset, rounding)
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw


def backward_pair(
    dy: tuple[Tensor, Tensor],
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor | None, Tensor | None],
    rstd: tuple[Tensor, Tensor],
    unit_offset: bool,
    rounding: str,
    mask: tuple[int, int],
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``backward`` of q and k, in one launch and one reduction where dtypes, alignment and layouts allow it."""
    q, k = x
    q_dy, k_dy = dy
    q_weight, k_weight = weight
    if mask[0] != mask[1] or not mask[0] & 1:
        q_result = backward(q_dy, q, q_weight, rstd[0], unit_offset, rounding, mask[0])
        return q_result, backward(k_dy, k, k_weight, rstd[1], unit_offset, rounding, mask[1])
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.empty_like(k, memory_format=torch.contiguous_format)
    dq_weight = torch.empty_like(q_weight) if mask[0] & 2 and q_weight is not None else None
    dk_weight = torch.empty_like(k_weight) if mask[0] & 2 and k_weight is not None else None
    key = (
        *(q.shape, q.stride(), k.shape, k.stride(), q.dtype, k.dtype, q.get_device(), q_dy.stride(), k_dy.stride()),
        (q.data_ptr() | k.data_ptr() | q_dy.data_ptr() | k_dy.data_ptr()) & 15,
        *(mask, unit_offset, rounding, _kind(q_weight), _kind(k_weight)),
    )
    q_tensors = (q, q_dy, q_weight, rstd[0].contiguous(), dq, dq_weight)
    k_tensors = (k, k_dy, k_weight, rstd[1].contiguous(), dk, dk_weight)
    plan = _plans.get(key) or _remember(key, _plan_backward((q_tensors, k_tensors), unit_offset, rounding))
    plan(*q_tensors[:5], *k_tensors[:5], dq_weight, dk_weight)
    nothing = q.new_empty(0) if dq_weight is None or dk_weight is None else None
    return (
        (dq, nothing if dq_weight is None else dq_weight),
        (dk, nothing if dk_weight is None else dk_weight),
    )


# A plan is all that a call needs to know beyond its tensors, found once for their shapes, strides, dtypes and
# alignment; it must keep none of them alive. Sequence lengths that never repeat must not fill the memory.
_Plan = Callable[..., Any]
_plans: dict[tuple[Any, ...], _Plan] = {}
_MOST_PLANS = 4096


def _remember(key: tuple[Any, ...], plan: _Plan) -> _Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _kind(weight: Tensor | None) -> Any:
    return weight is not None and (weight.dtype, weight.data_ptr() & 15, weight.is_contiguous())


def _forward(tensors: tuple[Any, ...], eps: float, unit_offset: bool, rounding: str) -> None:
    """Fill y and rstd of (x, weight, y, rstd)."""
    x, weight, y, rstd = tensors
    key = (
        *(x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, y.data_ptr() & 15),
        *(rstd is None, unit_offset, rounding, _kind(weight)),
    )
    plan = _plans.get(key) or _remember(key, _plan_forward((tensors,), unit_offset, rounding))
    plan(x, weight, y, rstd, None, None, None, None, eps)


def _backward(tensors: tuple[Any, ...], unit_offset: bool, rounding: str) -> None:
    """Fill dx and dw, each where it is not None, of (x, dy, weight, rstd, dx, dw)."""
    x, dy, weight, rstd, dx, dw = tensors
    key = (
        *(x.shape, x.stride(), dy.stride(), x.dtype, x.get_device(), (x.data_ptr() | dy.data_ptr()) & 15),
        *(dx is None or dx.data_ptr() & 15, dw is None or (dw.dtype, dw.data_ptr() & 15)),
        *(unit_offset, rounding, _kind(weight)),
    )
    plan = _plans.get(key) or _remember(key, _plan_backward((tensors,), unit_offset, rounding))
    plan(x, dy, weight, rstd, dx, None, None, None, None, None, dw, None)


def _plan_forward(operands: tuple[Any, ...], unit_offset: bool, rounding: str) -> _Plan:
    """What fills y and rstd, called as the kernel is: (x, weight, y, rstd, x2, weight2, y2, rstd2, eps)."""
    if len(operands) == 2 and not _fit(operands, 1):

        def singly(*arguments: Any) -> None:
            for tensors in (arguments[:4], arguments[4:8]):
                _forward(tensors, arguments[8], unit_offset, rounding)

        return singly
    x, weight, y, _ = operands[0]
    if x.numel() == 0:
        return lambda *_: None
    if not _ready(x, weight):

        def copied(x: Tensor, weight: Tensor | None, *rest: Any) -> None:
            _forward((_unit_stride(x), _plain_weight(weight), *rest[:2]), rest[-1], unit_offset, rounding)

        return copied
    if launch.layout(x.shape, x.stride()) is None:

        def split(x: Tensor, weight: Tensor | None, y: Tensor, rstd: Tensor | None, *rest: Any) -> None:
            for i in range(x.shape[0]):
                tensors = (x[i], weight, y[i], None if rstd is None else rstd[i])
                _forward(tensors, rest[-1], unit_offset, rounding)

        return split

    grid = _Grid(operands, 1, y.data_ptr(), False)
    normed = _normed_dtype(x, weight, rounding)
    tail = (*grid.arguments(6), unit_offset, normed, _multiplies_native(normed, weight))
    second = operands[1] if len(operands) == 2 else (None,) * 4
    return _compile(forward_kernel, (*operands[0], *second, 0.0), tail, grid.shape, grid.warps, x.get_device())


def _plan_backward(operands: tuple[Any, ...], unit_offset: bool, rounding: str) -> _Plan:
    """What fills dx and dw, called with (x, dy, weight, rstd, dx), the same again for the second, dw and dw2."""
    if len(operands) == 2 and not _fit(operands, 2):

        def singly(*arguments: Any) -> None:
            for tensors in ((*arguments[:5], arguments[10]), (*arguments[5:10], arguments[11])):
                _backward(tensors, unit_offset, rounding)

        return singly
    x, dy, weight, _, dx, dw = operands[0]
    dw2 = operands[1][5] if len(operands) == 2 else None
    if dx is None and dw is None:
        return lambda *_: None
    if x.numel() == 0:
        return lambda *arguments: None if arguments[10] is None else arguments[10].zero_()
    if not (_ready(x, weight) and _ready(dy, None)):

        def copied(x: Tensor, dy: Tensor, weight: Tensor | None, *rest: Any) -> None:
            tensors = (_unit_stride(x), _unit_stride(dy), _plain_weight(weight), *rest[:2], rest[-2])
            _backward(tensors, unit_offset, rounding)

        return copied
    if launch.layout(x.shape, x.stride(), dy.stride()) is None:
        return lambda *arguments: _backward_split((*arguments[:5], arguments[10]), unit_offset, rounding)

    index, dim = x.get_device(), x.shape[-1]
    grid = _Grid(operands, 2, dx.data_ptr() if dx is not None else 0, True)
    tail = (*grid.arguments(9), unit_offset, _normed_dtype(x, weight, rounding))
    first, count = grid.tiles[0] * grid.shape[1], sum(grid.tiles) * grid.shape[1]
    partial = None if dw is None else x.new_empty((count, dim), dtype=torch.float32)
    second = operands[1][:5] if len(operands) == 2 else (None,) * 5
    head = (*operands[0][:5], *second, partial)
    start = _compile(backward_kernel, head, tail, grid.shape, grid.warps, index)
    if partial is None:
        return lambda *arguments: start(*arguments[:10], None)
    reduce = _reduction(partial, dw, dw2, first)
    del partial

    def run(*arguments: Any) -> None:
        partial = arguments[0].new_empty((count, dim), dtype=torch.float32)
        start(*arguments[:10], partial)
        reduce(partial, *arguments[10:])

    return run


def _backward_split(tensors: tuple[Any, ...], unit_offset: bool, rounding: str) -> None:
    x, dy, weight, rstd, dx, dw = tensors
    sums = None if dw is None else x.new_empty((x.shape[0], x.shape[-1]), dtype=torch.float32)
    for i in range(x.shape[0]):
        targets = (None if dx is None else dx[i], None if sums is None else sums[i])
        _backward((x[i], dy[i], weight, rstd[i], *targets), unit_offset, rounding)
    if sums is not None:
        _reduction(sums, dw, None, len(sums))(sums, dw, None)


def _reduction(partial: Tensor, dw: Tensor, dw2: Tensor | None, first: int) -> _Plan:
    """What sums partial sums in a fixed order: the first rows to dw, the rest to dw2."""
    dim = partial.shape[-1]
    tail = (first, len(partial), dim, _REDUCE_ROWS, _REDUCE_COLUMNS)
    shape = (-(-dim // _REDUCE_COLUMNS), 1 if dw2 is None else 2)
    return _compile(reduce_kernel, (partial, dw, dw2), tail, shape, _REDUCE_WARPS, partial.get_device())


class _Grid:
    """How operands are cut into programs; the first ``strided`` tensors of each are walked by their strides."""

    def __init__(self, operands: tuple[Any, ...], strided: int, out_pointer: int, backward: bool) -> None:
        x, weight = operands[0][0], operands[0][strided]
        dim, itemsize = x.shape[-1], x.itemsize
        walked = [operand[:strided] for operand in operands]
        layouts = [launch.layout(ts[0].shape, *(t.stride() for t in ts)) for ts in walked]
        flat = layouts[0].flat
        pointers = [t.data_ptr() for ts in walked for t in ts]
        wide = not any(p & 15 for p in (*pointers, out_pointer)) and all(
            launch.aligned(itemsize, dim, each) for each in layouts
        )
        rows = tuple(each.rows for each in layouts)
        self.tile = tile = launch.tile(dim, itemsize, backward, wide, rows, flat)
        self.tiles = [1 if flat else -(-r // tile.height) for r in rows]
        if all(r % tile.height == 0 for r in rows):
            valid = tile.height
        else:
            valid = rows[0] if not flat and sum(self.tiles) == len(rows) and len(set(rows)) == 1 else 0
        self._integers = []
        for each in layouts:
            if flat:
                tokens = -(-each.rows // tile.height)
                steps = [(0, tile.height * step, step) for step in each.row_strides]
                self._integers.append((tokens, each.rows, tokens, *(s for step in steps for s in step)))
            else:
                steps = zip(each.batch_strides, each.token_strides, each.row_strides, strict=True)
                self._integers.append((each.tokens, each.rows, each.sequence, *(s for step in steps for s in step)))
        tokens = max(integers[0] for integers in self._integers)
        self.shape = (
            sum(self.tiles),
            launch.programs(tokens, sum(self.tiles), tile.warps, _processors(x.get_device())),
        )
        self.warps = tile.warps
        half_weight = weight is not None and weight.dtype is torch.bfloat16 and weight.data_ptr() & 15 == 0
        one_row = tile.height == 1 and sum(self.tiles) == len(rows)
        self._constants = (
            dim,
            *(dim if one_row or all(each.row_strides[i] == dim for each in layouts) else 0 for i in range(strided)),
            tile.rows,
            tile.groups,
            tile.batch,
            tile.chunks,
            tile.ways,
            valid,
            flat,
            any(each.tokens != each.sequence for each in layouts),
            16 // itemsize if wide else 1,
            wide and x.dtype is torch.bfloat16,
            wide and half_weight,
        )

    def arguments(self, integers: int) -> tuple[Any, ...]:
        """The kernel's integers and constants, in its order; ``integers`` is how many an operand has."""
        second = self._integers[1] if len(self._integers) == 2 else (None,) * integers
        return (*self._integers[0], self.tiles[0], *second, *self._constants)


def _fit(operands: tuple[Any, ...], strided: int) -> bool:
    """Whether one launch can take both operands."""
    kinds = set()
    for operand in operands:
        walked, weight = operand[:strided], operand[strided]
        ready = all(_ready(t, weight) for t in walked) and walked[0].numel() > 0
        places = launch.layout(walked[0].shape, *(t.stride() for t in walked)) if ready else None
        if places is None:
            return False
        dim, itemsize = walked[0].shape[-1], walked[0].itemsize
        wide = launch.aligned(itemsize, dim, places) and not any(t.data_ptr() & 15 for t in walked)
        weighted = None if weight is None else (weight.dtype, weight.data_ptr() & 15 == 0)
        kinds.add((dim, walked[0].dtype, weighted, places.flat, wide, *(t is None for t in operand[strided + 1 :])))
    return len(kinds) == 1


def _ready(t: Tensor, weight: Tensor | None) -> bool:
    unit = t.shape[-1] == 1 or t.stride(-1) == 1
    return unit and (weight is None or (weight.is_contiguous() and weight.dtype in _TRITON))


def _unit_stride(t: Tensor) -> Tensor:
    return t if _ready(t, None) else t.contiguous()


def _plain_weight(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else (weight if weight.dtype in _TRITON else weight.float()).contiguous()


def _normed_dtype(x: Tensor, weight: Tensor | None, rounding: str) -> Any:
    """The dtype that the normed value is rounded to before it meets the weight; None where it is not."""
    if weight is None or rounding == "once":
        return None
    dtype = weight.dtype if rounding == "weight" else x.dtype
    return _TRITON[dtype] if dtype in _HALF else None


def _multiplies_native(normed: Any, weight: Tensor | None) -> bool:
    """Whether the product is taken in the weight's own half dtype: rounded once, as it should be, two at a time."""
    interpreted = not isinstance(forward_kernel, triton.JITFunction)  # which multiplies bfloat16 as integers
    same = normed is not None and weight is not None and _TRITON[weight.dtype] is normed
    return same and not (interpreted and normed is tl.bfloat16)


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1


_compiling = threading.RLock()  # Triton's front end is not made for threads, and autograd has some of its own


def _compile(
    kernel: Any, head: tuple[Any, ...], tail: tuple[Any, ...], shape: tuple[int, int], warps: int, index: int
) -> _Plan:
    """A function of tensors and eps that launches the kernel, compiled for arguments like these, on its device.

    Triton's own look-up binds, specialises and hashes every argument at every call; the plan's key has done that.
    """
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        return lambda *head: kernel[shape](*head, *tail, num_warps=warps)
    driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
    with _compiling, _on_device(index):
        compiled = kernel.warmup(*head, *tail, grid=shape, num_warps=warps, num_stages=1)
        run = compiled.run  # loads it
    columns, tokens = shape
    function, packed = compiled.function, compiled.packed_metadata
    current_device, current_stream = driver.get_current_device, driver.get_current_stream
    del head

    def start(*head: Any) -> None:
        if current_device() != index:
            with _on_device(index):
                return start(*head)
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler listens
            return compiled[(columns, tokens, 1)](*head, *tail)
        return run(columns, tokens, 1, current_stream(index), function, packed, None, None, None, *head, *tail)

    return start


def _on_device(index: int) -> Any:
    return torch.cuda.device(index)
