"""q and k normed and rotated in one launch, forward and backward, in Triton. Imports torch and triton, never qknorm.

As in ``rms_norm.py`` a program walks over tokens and owns all heads of one where they fit; what a token's rotation
needs is read once for all of them, with the weight folded in where nothing is rounded in between. Every row is cut into
units of two halves (a, b) that rotate into each other, both held by the same lanes: even and odd columns of a chunk
where pairs are interleaved, two chunks half a rotation apart where they are not.

    y_a = n_a cos_a - n_b sin_a        y_b = n_b cos_b + n_a sin_b
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .rms_norm import (
    _HALF,
    _TRITON,
    _accumulate,
    _compile,
    _kind,
    _multiplies_native,
    _normed_dtype,
    _plain_weight,
    _plans,
    _processors,
    _read,
    _reduction,
    _remember,
    _round,
    _rows,
    _token,
    _unit_stride,
    _valid,
    _widen,
)

# What a table of cosines and sines holds: one value for two columns; one for each; or complex64, one for two.
SHARED, REPEATED, COMPLEX = 0, 1, 2


@triton.constexpr_function
def _chunk_of(unit, second, width, rotary, interleaved):
    """The chunk that holds a half of a unit; chunks beyond the rotary dimension are paired with their neighbours."""
    if interleaved:
        return unit
    half = rotary // (2 * width)
    return unit + second * half if unit < half else 2 * unit + second


@triton.jit
def _halves(first, second, ROWS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(a, b) of a unit in float32 from the chunks that were read."""
    if INTERLEAVED:
        return _widen(first, ROWS, C, PACKED).reshape(ROWS, C // 2, 2).split()
    else:
        return _widen(first, ROWS, C, PACKED), _widen(second, ROWS, C, PACKED)


@triton.jit
def _weights(
    weight,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    UNITS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
    OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Factors of all units, a and b in turn: in float32 (NATIVE: in the weight's dtype)."""
    columns = tl.arange(0, C // 2 if PACKED else C)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    factors = ()
    for u in tl.static_range(UNITS):
        first = _read(weight + _chunk_of(u, 0, C, ROTARY, INTERLEAVED) * C, columns, None, PACKED)
        if INTERLEAVED:
            a, b = _halves(first, first, ROWS, C, PACKED, True)
        else:
            second = _read(weight + _chunk_of(u, 1, C, ROTARY, INTERLEAVED) * C, columns, None, PACKED)
            a, b = _halves(first, second, ROWS, C, PACKED, False)
        if OFFSET:  # the sum is taken in the weight's own dtype
            a, b = _round(a + 1.0, weight.dtype.element_ty), _round(b + 1.0, weight.dtype.element_ty)
        if NATIVE:
            a, b = a.to(weight.dtype.element_ty), b.to(weight.dtype.element_ty)
        factors = factors + (a, b)
    return factors


@triton.jit
def _pair(table, offset, mask, other):
    """Two neighbouring float32, read as one int64 so that the layout is that of a row's halves."""
    both = tl.load(table.to(tl.pointer_type(tl.int64)) + offset, mask=mask, other=other)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _rotation(
    cos,
    sin,
    u: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """cos_a, cos_b, sin_a, sin_b of a unit of one token, the same in all rows; 1 and 0 beyond the rotary dimension."""
    WIDTH: tl.constexpr = C // 2 if INTERLEAVED else C
    column = tl.arange(0, WIDTH)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    place = u * WIDTH + column  # of the unit's columns among the ROTARY / 2 rotations
    mask = None if EXACT else place < ROTARY // 2
    if TABLE == 2:
        one: tl.constexpr = None if EXACT else 0x3F800000  # the pair (1, 0)
        cos_a, sin_a = _pair(cos, place, mask, one)
        return cos_a, cos_a, sin_a, sin_a
    else:
        cos_other: tl.constexpr = None if EXACT else 1.0
        sin_other: tl.constexpr = None if EXACT else 0.0
        if TABLE == 0:
            cos_a = tl.load(cos + place, mask=mask, other=cos_other)
            sin_a = tl.load(sin + place, mask=mask, other=sin_other)
            return cos_a, cos_a, sin_a, sin_a
        elif INTERLEAVED:
            ones: tl.constexpr = None if EXACT else 0x3F8000003F800000
            zeros: tl.constexpr = None if EXACT else 0
            cos_a, cos_b = _pair(cos, place, mask, ones)
            sin_a, sin_b = _pair(sin, place, mask, zeros)
            return cos_a, cos_b, sin_a, sin_b
        else:
            cos_a = tl.load(cos + place, mask=mask, other=cos_other)
            cos_b = tl.load(cos + ROTARY // 2 + place, mask=mask, other=cos_other)
            sin_a = tl.load(sin + place, mask=mask, other=sin_other)
            sin_b = tl.load(sin + ROTARY // 2 + place, mask=mask, other=sin_other)
            return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _write(
    target,
    row_stride,
    a,
    b,
    valid,
    u: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Store a unit of [ROWS] rows."""
    lane = _rows(tl.arange(0, ROWS), row_stride, ROW_STRIDE, ALIGN)[:, None] + tl.arange(0, C)[None, :]
    mask = None if valid is None else valid[:, None]
    dtype = target.dtype.element_ty
    first = target + _chunk_of(u, 0, C, ROTARY, INTERLEAVED) * C
    if INTERLEAVED:
        tl.store(first + lane, tl.join(a, b).reshape(ROWS, C).to(dtype), mask=mask)
    else:
        tl.store(first + lane, a.to(dtype), mask=mask)
        tl.store(target + _chunk_of(u, 1, C, ROTARY, INTERLEAVED) * C + lane, b.to(dtype), mask=mask)


_SHARED = ("tokens", "sequence", "tiles", "table_batch_stride")
_EACH = ("rows", "batch_stride", "token_stride", "row_stride", "out_batch_stride", "out_token_stride", "out_row_stride")
_INTEGERS = (*_SHARED, *(name + number for name in _EACH for number in ("", "2")))


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
    cos,
    sin,
    eps,
    tokens: tl.int32,
    sequence: tl.int32,
    tiles: tl.int32,
    table_batch_stride: tl.int64,
    rows: tl.int32,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    out_batch_stride: tl.int64,
    out_token_stride: tl.int64,
    out_row_stride: tl.int64,
    rows2: tl.int32,
    batch_stride2: tl.int64,
    token_stride2: tl.int64,
    row_stride2: tl.int64,
    out_batch_stride2: tl.int64,
    out_token_stride2: tl.int64,
    out_row_stride2: tl.int64,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    OUT_ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
    VALID: tl.constexpr,
    BATCHED: tl.constexpr,
    ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLE: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    FOLD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """y = rotate(x * rstd * weight). Grid: (tiles of a token's rows, of q and of k; programs that share the tokens).

    NORMED and SCALED are the dtypes that the normed and the scaled value are rounded to, FOLD says that neither is;
    NATIVE that both are the weight's, so that the product is taken in it, two at a time.
    """
    C: tl.constexpr = DIM // CHUNKS
    UNITS: tl.constexpr = CHUNKS if INTERLEAVED else CHUNKS // 2
    WIDTH: tl.constexpr = C // 2 if INTERLEAVED else C
    UNIT_WAYS: tl.constexpr = WAYS // 2 if INTERLEAVED and WAYS > 1 else WAYS
    HALVES: tl.constexpr = 2 if PACKED else 1
    EXACT: tl.constexpr = ROTARY == DIM
    eps = tl.cast(eps, tl.float32)
    tile = tl.program_id(0)
    if tile >= tiles:
        tile -= tiles
        x, weight, y, rstd, rows, row_stride = x2, weight2, y2, rstd2, rows2, row_stride2
        batch_stride, token_stride, out_batch_stride = batch_stride2, token_stride2, out_batch_stride2
        out_token_stride, out_row_stride = out_token_stride2, out_row_stride2
    first_row = tile * ROWS * GROUPS
    wide_first = tl.cast(first_row, tl.int64)
    x += tl.multiple_of(_rows(wide_first, row_stride, ROW_STRIDE, ALIGN), ALIGN)
    y += tl.multiple_of(_rows(wide_first, out_row_stride, OUT_ROW_STRIDE, ALIGN), ALIGN)
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, C // HALVES)[None, :]
    lane = _rows(row, row_stride // HALVES, ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    rows_left = rows - first_row
    if weight is not None:
        factors = _weights(weight, ROWS, C, UNITS, ROTARY, INTERLEAVED, PACKED_WEIGHT, OFFSET, NATIVE)
    for t in range(tl.program_id(1), tokens, tl.num_programs(1)):
        x_t = x + _token(t, sequence, batch_stride, token_stride, BATCHED, ALIGN)
        y_t = y + _token(t, sequence, out_batch_stride, out_token_stride, BATCHED, ALIGN)
        table_row: tl.constexpr = ROTARY // 2 if TABLE == 0 else ROTARY  # in float32
        place = _token(t, sequence, table_batch_stride, table_row, BATCHED, 4)
        # cos_a, cos_b, sin_a, sin_b of each unit, times the weight of what they multiply
        rotations = ()
        for u in tl.static_range(UNITS):
            cos_a, cos_b, sin_a, sin_b = _rotation(
                cos + place, sin + place, u, ROWS, C, ROTARY, INTERLEAVED, TABLE, EXACT
            )
            if weight is not None and FOLD:
                cos_a, cos_b = cos_a * factors[2 * u], cos_b * factors[2 * u + 1]
                sin_a, sin_b = sin_a * factors[2 * u + 1], sin_b * factors[2 * u]
            rotations = rotations + (cos_a, cos_b, sin_a, sin_b)
        for first in tl.static_range(0, GROUPS, BATCH):
            tiles_read = ()
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                mask = None if valid is None else valid[:, None]
                x_g = x_t + _rows(g * ROWS, row_stride, ROW_STRIDE, ALIGN)
                for c in tl.static_range(CHUNKS):
                    tiles_read = tiles_read + (_read(x_g + c * C, lane, mask, PACKED),)
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                units = ()
                squares = tl.zeros((ROWS, WIDTH // UNIT_WAYS), tl.float32)
                for u in tl.static_range(UNITS):
                    a, b = _halves(
                        tiles_read[(g - first) * CHUNKS + _chunk_of(u, 0, C, ROTARY, INTERLEAVED)],
                        tiles_read[(g - first) * CHUNKS + _chunk_of(u, 1, C, ROTARY, INTERLEAVED)],
                        ROWS,
                        C,
                        PACKED,
                        INTERLEAVED,
                    )
                    squares = _accumulate(squares, a, a, ROWS, WIDTH, UNIT_WAYS)
                    squares = _accumulate(squares, b, b, ROWS, WIDTH, UNIT_WAYS)
                    units = units + (a, b)
                r = tl.rsqrt(tl.sum(squares, 1) * (1.0 / DIM) + eps)
                if rstd is not None:
                    tl.store(rstd + tl.cast(t, tl.int64) * rows + first_row + g * ROWS + row, r, mask=valid)
                y_g = y_t + _rows(g * ROWS, out_row_stride, OUT_ROW_STRIDE, ALIGN)
                for u in tl.static_range(UNITS):
                    a, b = units[2 * u], units[2 * u + 1]
                    if NATIVE:
                        a = ((a * r[:, None]).to(NORMED) * factors[2 * u]).to(tl.float32)
                        b = ((b * r[:, None]).to(NORMED) * factors[2 * u + 1]).to(tl.float32)
                    elif not FOLD:
                        a, b = _round(a * r[:, None], NORMED), _round(b * r[:, None], NORMED)
                        if weight is not None:
                            a, b = a * factors[2 * u], b * factors[2 * u + 1]
                        a, b = _round(a, SCALED), _round(b, SCALED)
                    y_a = a * rotations[4 * u] - b * rotations[4 * u + 2]
                    y_b = b * rotations[4 * u + 1] + a * rotations[4 * u + 3]
                    if FOLD:
                        y_a, y_b = y_a * r[:, None], y_b * r[:, None]
                    _write(y_g, out_row_stride, y_a, y_b, valid, u, ROWS, C, OUT_ROW_STRIDE, ROTARY, INTERLEAVED, ALIGN)


@triton.jit(do_not_specialize=(*_INTEGERS, *(name.replace("out", "dx") for name in _INTEGERS if "out" in name)))
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
    cos,
    sin,
    partial,
    tokens: tl.int32,
    sequence: tl.int32,
    tiles: tl.int32,
    table_batch_stride: tl.int64,
    rows: tl.int32,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    out_batch_stride: tl.int64,
    out_token_stride: tl.int64,
    out_row_stride: tl.int64,
    dx_batch_stride: tl.int64,
    dx_token_stride: tl.int64,
    dx_row_stride: tl.int64,
    rows2: tl.int32,
    batch_stride2: tl.int64,
    token_stride2: tl.int64,
    row_stride2: tl.int64,
    out_batch_stride2: tl.int64,
    out_token_stride2: tl.int64,
    out_row_stride2: tl.int64,
    dx_batch_stride2: tl.int64,
    dx_token_stride2: tl.int64,
    dx_row_stride2: tl.int64,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    OUT_ROW_STRIDE: tl.constexpr,
    DX_ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
    VALID: tl.constexpr,
    BATCHED: tl.constexpr,
    ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """dx, and a row of float32 partial sums of dw for each program; ``out`` strides are dy's. Grid: as the forward's.

    dy is rotated back, and what comes out is the gradient that ``rms_norm.backward_kernel`` starts from.
    """
    C: tl.constexpr = DIM // CHUNKS
    UNITS: tl.constexpr = CHUNKS if INTERLEAVED else CHUNKS // 2
    WIDTH: tl.constexpr = C // 2 if INTERLEAVED else C
    UNIT_WAYS: tl.constexpr = WAYS // 2 if INTERLEAVED and WAYS > 1 else WAYS
    HALVES: tl.constexpr = 2 if PACKED else 1
    EXACT: tl.constexpr = ROTARY == DIM
    tile = tl.program_id(0)
    if tile >= tiles:
        tile -= tiles
        x, dy, weight, rstd, dx, rows, row_stride = x2, dy2, weight2, rstd2, dx2, rows2, row_stride2
        batch_stride, token_stride, out_batch_stride = batch_stride2, token_stride2, out_batch_stride2
        out_token_stride, out_row_stride, dx_batch_stride = out_token_stride2, out_row_stride2, dx_batch_stride2
        dx_token_stride, dx_row_stride = dx_token_stride2, dx_row_stride2
    first_row = tile * ROWS * GROUPS
    wide_first = tl.cast(first_row, tl.int64)
    x += tl.multiple_of(_rows(wide_first, row_stride, ROW_STRIDE, ALIGN), ALIGN)
    dy += tl.multiple_of(_rows(wide_first, out_row_stride, OUT_ROW_STRIDE, ALIGN), ALIGN)
    dx += tl.multiple_of(_rows(wide_first, dx_row_stride, DX_ROW_STRIDE, ALIGN), ALIGN)
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, C // HALVES)[None, :]
    lane = _rows(row, row_stride // HALVES, ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    dy_lane = _rows(row, out_row_stride // HALVES, OUT_ROW_STRIDE // HALVES, ALIGN // HALVES)[:, None] + columns
    rows_left = rows - first_row
    if weight is not None:
        factors = _weights(weight, ROWS, C, UNITS, ROTARY, INTERLEAVED, PACKED_WEIGHT, OFFSET, False)
    if partial is not None:
        sums = ()
        for _ in tl.static_range(2 * UNITS):
            sums = sums + (tl.zeros((ROWS, WIDTH), tl.float32),)
    for t in range(tl.program_id(1), tokens, tl.num_programs(1)):
        x_t = x + _token(t, sequence, batch_stride, token_stride, BATCHED, ALIGN)
        dy_t = dy + _token(t, sequence, out_batch_stride, out_token_stride, BATCHED, ALIGN)
        dx_t = dx + _token(t, sequence, dx_batch_stride, dx_token_stride, BATCHED, ALIGN)
        table_row: tl.constexpr = ROTARY // 2 if TABLE == 0 else ROTARY  # in float32
        place = _token(t, sequence, table_batch_stride, table_row, BATCHED, 4)
        rotations = ()
        for u in tl.static_range(UNITS):
            rotations = rotations + _rotation(cos + place, sin + place, u, ROWS, C, ROTARY, INTERLEAVED, TABLE, EXACT)
        for first in tl.static_range(0, GROUPS, BATCH):
            tiles_read = ()
            rstds = ()
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                mask = None if valid is None else valid[:, None]
                x_g = x_t + _rows(g * ROWS, row_stride, ROW_STRIDE, ALIGN)
                dy_g = dy_t + _rows(g * ROWS, out_row_stride, OUT_ROW_STRIDE, ALIGN)
                rstd_g = rstd + tl.cast(t, tl.int64) * rows + first_row + g * ROWS
                rstds = rstds + (_read(rstd_g, row, valid, False),)
                for c in tl.static_range(CHUNKS):
                    tiles_read = tiles_read + (
                        _read(x_g + c * C, lane, mask, PACKED),
                        _read(dy_g + c * C, dy_lane, mask, PACKED),
                    )
            for g in tl.static_range(first, first + BATCH):
                valid = None if VALID >= (g + 1) * ROWS else _valid(g * ROWS + row, rows_left, VALID)
                r = rstds[g - first]
                units = ()
                gradients = ()
                new_sums = ()
                products = tl.zeros((ROWS, WIDTH // UNIT_WAYS), tl.float32)
                for u in tl.static_range(UNITS):
                    a, b = _halves(
                        tiles_read[2 * ((g - first) * CHUNKS + _chunk_of(u, 0, C, ROTARY, INTERLEAVED))],
                        tiles_read[2 * ((g - first) * CHUNKS + _chunk_of(u, 1, C, ROTARY, INTERLEAVED))],
                        ROWS,
                        C,
                        PACKED,
                        INTERLEAVED,
                    )
                    dy_a, dy_b = _halves(
                        tiles_read[2 * ((g - first) * CHUNKS + _chunk_of(u, 0, C, ROTARY, INTERLEAVED)) + 1],
                        tiles_read[2 * ((g - first) * CHUNKS + _chunk_of(u, 1, C, ROTARY, INTERLEAVED)) + 1],
                        ROWS,
                        C,
                        PACKED,
                        INTERLEAVED,
                    )
                    given_a = dy_a * rotations[4 * u] + dy_b * rotations[4 * u + 3]
                    given_b = dy_b * rotations[4 * u + 1] - dy_a * rotations[4 * u + 2]
                    scaled_a, scaled_b = given_a * r[:, None], given_b * r[:, None]
                    if partial is not None:
                        if NORMED is None:
                            new_sums = new_sums + (sums[2 * u] + scaled_a * a, sums[2 * u + 1] + scaled_b * b)
                        else:  # dw takes the very value that met the weight in the forward
                            new_sums = new_sums + (
                                sums[2 * u] + given_a * _round(a * r[:, None], NORMED),
                                sums[2 * u + 1] + given_b * _round(b * r[:, None], NORMED),
                            )
                    if weight is not None:
                        scaled_a *= factors[2 * u]
                        scaled_b *= factors[2 * u + 1]
                    products = _accumulate(products, scaled_a, a, ROWS, WIDTH, UNIT_WAYS)
                    products = _accumulate(products, scaled_b, b, ROWS, WIDTH, UNIT_WAYS)
                    units = units + (a, b)
                    gradients = gradients + (scaled_a, scaled_b)
                if partial is not None:
                    sums = new_sums
                along = tl.sum(products, 1) * (1.0 / DIM) * r * r
                dx_g = dx_t + _rows(g * ROWS, dx_row_stride, DX_ROW_STRIDE, ALIGN)
                for u in tl.static_range(UNITS):
                    dx_a = gradients[2 * u] - units[2 * u] * along[:, None]
                    dx_b = gradients[2 * u + 1] - units[2 * u + 1] * along[:, None]
                    _write(
                        dx_g, dx_row_stride, dx_a, dx_b, valid, u, ROWS, C, DX_ROW_STRIDE, ROTARY, INTERLEAVED, ALIGN
                    )
    if partial is not None:
        program = tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)
        column = tl.arange(0, C)
        for u in tl.static_range(UNITS):
            a, b = tl.sum(sums[2 * u], 0), tl.sum(sums[2 * u + 1], 0)
            target = partial + program * DIM
            if INTERLEAVED:
                tl.store(target + u * C + column, tl.join(a, b).reshape(C))
            else:
                tl.store(target + _chunk_of(u, 0, C, ROTARY, False) * C + column, a)
                tl.store(target + _chunk_of(u, 1, C, ROTARY, False) * C + column, b)


def takes(head_dim: int, rotary: int, itemsize: int, interleaved: bool) -> bool:
    """Whether a tile can hold whole units of these dimensions; else it is plain torch's work."""
    return all(
        launch.rope_tile(head_dim, rotary, itemsize, backward, True, (1,), interleaved) is not None
        for backward in (False, True)
    )


def forward(
    operands: tuple[tuple[Tensor, Tensor | None, Tensor], ...],
    cos: Tensor,
    sin: Tensor | None,
    eps: float,
    unit_offset: bool,
    rounding: str,
    interleaved: bool,
    round_before_rope: bool,
    save: bool = True,
) -> tuple[Tensor | None, ...]:
    """Fill y of each (x, weight, y), one operand or q and k, and return their rstd where it is to be saved.

    x and y are [B, S, H, D] of any strides, B and S the same in both. cos and sin are float32 [S, R], [S, R / 2] or
    [B, S, ...]; or cos is complex64 [S, R / 2] and sin None. ``takes`` must hold.
    """
    options = (unit_offset, rounding, interleaved, round_before_rope)
    if len(operands) == 2 and _kind(operands[0][1]) != _kind(operands[1][1]):
        return tuple(forward((each,), cos, sin, eps, *options, save)[0] for each in operands)
    x = operands[0][0]
    rstds = tuple(x.new_empty(x.shape[:-1], dtype=torch.float32) if save else None for x, *_ in operands)
    if x.numel() == 0:
        return rstds
    complex_table = sin is None
    cos, sin = _tables(cos, sin)
    tensors = tuple(
        (_unit_stride(x), _plain_weight(weight), y, rstd) for (x, weight, y), rstd in zip(operands, rstds, strict=True)
    )
    key = ("rope", options, save, complex_table, cos.shape, x.dtype, x.get_device(), _kind(tensors[0][1]))
    key += tuple((t.shape, t.stride(), t.data_ptr() & 15) for x, _, y, _ in tensors for t in (x, y))
    plan = _plans.get(key) or _remember(key, _plan_forward(tensors, cos, sin, complex_table, *options))
    plan(*tensors[0], *tensors[-1], cos, sin, eps)
    return rstds


def backward(
    operands: tuple[tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, bool], ...],
    cos: Tensor,
    sin: Tensor | None,
    unit_offset: bool,
    rounding: str,
    interleaved: bool,
) -> tuple[Tensor | None, ...]:
    """Fill dx of each (x, dy, weight, rstd, dx, whether dw is wanted), and return dw where it is.

    Shapes and layouts are as in ``forward``.
    """
    options = (unit_offset, rounding, interleaved)
    if len(operands) == 2 and (_kind(operands[0][2]) != _kind(operands[1][2]) or operands[0][5] != operands[1][5]):
        return tuple(backward((each,), cos, sin, *options)[0] for each in operands)
    x, _, weight, _, _, wants_dw = operands[0]
    wants_dw = wants_dw and weight is not None
    results = tuple(torch.empty_like(each[2]) if wants_dw else None for each in operands)
    if x.numel() == 0:
        return tuple(None if dw is None else dw.zero_() for dw in results)
    complex_table = sin is None
    cos, sin = _tables(cos, sin)
    tensors = tuple(
        (_unit_stride(x), _unit_stride(dy), _plain_weight(weight), rstd.contiguous(), dx)
        for x, dy, weight, rstd, dx, _ in operands
    )
    key = ("rope backward", options, wants_dw, complex_table, cos.shape, x.dtype, x.get_device(), _kind(tensors[0][2]))
    key += tuple((t.shape, t.stride(), t.data_ptr() & 15) for x, dy, _, _, dx in tensors for t in (x, dy, dx))
    plan = _plans.get(key) or _remember(key, _plan_backward(tensors, cos, sin, complex_table, results, *options))
    plan(tensors, cos, sin, results)
    return results


def _plan_forward(
    tensors: tuple[Any, ...],
    cos: Tensor,
    sin: Tensor,
    complex_table: bool,
    unit_offset: bool,
    rounding: str,
    interleaved: bool,
    round_before_rope: bool,
) -> Any:
    """What fills y and rstd, called as the kernel is: (x, weight, y, rstd) twice, cos, sin, eps."""
    x, weight, _, _ = tensors[0]
    normed = _normed_dtype(x, weight, rounding)
    scaled = _scaled_dtype(x, weight, rounding, round_before_rope)
    walked = [(x, y) for x, _, y, _ in tensors]
    shape, warps, tail = _arrange(walked, cos, complex_table, weight, unit_offset, interleaved, False)
    native = scaled is not None and scaled is normed and _multiplies_native(normed, weight)
    tail = (*tail, normed, scaled, normed is None and scaled is None, native)
    head = (*tensors[0], *tensors[-1], cos, sin, 0.0)
    return _compile(forward_kernel, head, tail, shape, warps, x.get_device())


def _plan_backward(
    tensors: tuple[Any, ...],
    cos: Tensor,
    sin: Tensor,
    complex_table: bool,
    results: tuple[Tensor | None, ...],
    unit_offset: bool,
    rounding: str,
    interleaved: bool,
) -> "_Backward":
    """What fills dx of (x, dy, weight, rstd, dx), and the dw of each that ``results`` has."""
    x, _, weight, _, _ = tensors[0]
    walked = [(x, dy, dx) for x, dy, _, _, dx in tensors]
    shape, warps, tail = _arrange(walked, cos, complex_table, weight, unit_offset, interleaved, True)
    tail = (*tail, _normed_dtype(x, weight, rounding))
    size = (shape[0] * shape[1], x.shape[-1])
    partial = None if results[0] is None else x.new_empty(size, dtype=torch.float32)
    head = (*tensors[0], *tensors[-1], cos, sin, partial)
    start = _compile(backward_kernel, head, tail, shape, warps, x.get_device())
    reduce = None
    if partial is not None:
        reduce = _reduction(partial, results[0], results[1] if len(results) == 2 else None, tail[2] * shape[1])
    return _Backward(start, reduce, size)


class _Backward:
    """A launch and its reduction, kept without the tensors of the call that made it."""

    def __init__(self, start: Any, reduce: Any, size: tuple[int, int]) -> None:
        self.start, self.reduce, self.size = start, reduce, size

    def __call__(self, tensors: Any, cos: Tensor, sin: Tensor, results: Any) -> None:
        partial = None if self.reduce is None else cos.new_empty(self.size)
        self.start(*tensors[0], *tensors[-1], cos, sin, partial)
        if self.reduce is not None:
            self.reduce(partial, results[0], results[1] if len(results) == 2 else None)


def _arrange(
    walked: list[tuple[Tensor, ...]],
    cos: Tensor,
    complex_table: bool,
    weight: Tensor | None,
    unit_offset: bool,
    interleaved: bool,
    backward: bool,
) -> tuple[tuple[int, int], int, tuple[Any, ...]]:
    """Grid, warps, and the kernel's integers and constants but for the roundings, for tensors [B, S, H, D]."""
    x = walked[0][0]
    batch, sequence, _, dim = x.shape
    rotary, table = rotation_of(dim, cos.shape[-1], complex_table)
    itemsize = x.itemsize
    wide = all(t.data_ptr() & 15 == 0 and _steps_aligned(t) for tensors in walked for t in tensors)
    heads = tuple(tensors[0].shape[2] for tensors in walked)
    tile = launch.rope_tile(dim, rotary, itemsize, backward, wide, heads, interleaved)
    tiles = [-(-h // tile.height) for h in heads]
    if all(h % tile.height == 0 for h in heads):
        valid = tile.height
    else:
        valid = heads[0] if sum(tiles) == len(heads) and len(set(heads)) == 1 else 0
    integers = [
        (h, *(step for t in tensors for step in t.stride()[:3])) for h, tensors in zip(heads, walked, strict=True)
    ]
    tokens = batch * sequence
    table_batch_stride = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    shape = (sum(tiles), launch.programs(tokens, sum(tiles), tile.warps, _processors(x.get_device())))
    tail = (
        *(tokens, sequence, tiles[0], table_batch_stride, *integers[0], *integers[-1], dim, rotary),
        *(dim if all(ts[i].stride(2) == dim for ts in walked) else 0 for i in range(len(walked[0]))),
        *(tile.rows, tile.groups, tile.batch, tile.chunks, tile.ways, valid, batch > 1),
        *(16 // itemsize if wide else 1, wide and x.dtype is torch.bfloat16),
        wide and weight is not None and weight.dtype is torch.bfloat16 and weight.data_ptr() & 15 == 0,
        *(unit_offset, interleaved, table),
    )
    return shape, tile.warps, tail


def rotation_of(dim: int, columns: int, complex_table: bool) -> tuple[int, int]:
    """Rotary dimension and kind of a float32 table of ``columns``, complex64 counted as two each.

    ``dim / 2`` columns are one for two of the whole row; any other number is the rotary dimension itself.
    """
    if complex_table:
        return columns, COMPLEX
    return (dim, SHARED) if 2 * columns == dim else (columns, REPEATED)


def _steps_aligned(t: Tensor) -> bool:
    return all(step * t.itemsize % 16 == 0 for step in (*t.stride()[:3], t.shape[-1]))


def _scaled_dtype(x: Tensor, weight: Tensor | None, rounding: str, round_before_rope: bool) -> Any:
    """The dtype that the scaled value is rounded to before it is rotated; None where it is not."""
    if round_before_rope:
        return _TRITON[x.dtype] if x.dtype in _HALF else None
    if weight is None or rounding == "once" or weight.dtype not in _HALF:
        return None
    same = rounding == "weight" or weight.dtype is x.dtype
    return _TRITON[weight.dtype] if same else None


def _tables(cos: Tensor, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both tables in float32, dense and aligned; a complex one stands for both."""
    if sin is None:
        cos = torch.view_as_real(cos.resolve_conj()).flatten(-2)
    tables = (cos, cos if sin is None else sin)
    return tuple(t if t.is_contiguous() and t.data_ptr() & 15 == 0 else t.contiguous().clone() for t in tables)
