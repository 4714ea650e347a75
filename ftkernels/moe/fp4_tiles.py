"""FP4 weights as matrix operands: where they lie, what their words mean, and their products.

Every E2M1 value times ``2^(c - 5)``, ``c = 0..11``, is a normal E4M3 number, and the eight of them
are bytes of two registers; ``prmt`` looks four magnitudes up at once. Folded metadata puts the
scales of four neighbouring blocks of 32 into ``c``, so that the products of 128 columns chain in
one sum, which takes one factor. Scale bytes keep ``c = 5`` and a factor for each 32 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.backend import INTERPRET
from ftkernels.quant.formats import (
    tl_e2m1_decode,
    tl_ue8m0_decode,
)

FOLDED = tl.constexpr(0)
BYTES = tl.constexpr(1)
CHECKPOINT = tl.constexpr(2)

# words, then low and high half of the tables of A and B, each four times since one word is four
# elements; the third operand of prmt has a table index in each of its low four nibbles
_DECODE = tl.constexpr(
    """{
    .reg .b32 first, second, signs;
    and.b32 first, $2, 0x77777777;
    shr.u32 second, first, 16;
    shl.b32 signs, $2, 4;
    prmt.b32 $0, $3, $7, first;
    prmt.b32 $1, $11, $15, second;
    lop3.b32 $0, $2, 0x80808080, $0, 0xEA;
    lop3.b32 $1, signs, 0x80808080, $1, 0xEA;
    }"""
)
_OPERANDS = tl.constexpr("=&r,=&r," + ",".join("r" * 17))


def step_columns(layout: int, by_group: bool) -> int:
    """Columns of a pass of `expert_products`' loop; ``by_group``: scaled rows come first."""
    if layout == CHECKPOINT.value:
        return 32
    return 128 if layout == FOLDED.value or by_group else 64


@triton.jit
def table(code):
    """The eight magnitudes times ``2^(code - 5)`` as E4M3 bytes: 0..3 in ``low``, 4..7 in
    ``high``."""
    low = code * 0x08080800 + 0x14100800
    high = code * 0x08080808 + 0x24201C18
    return low[:, None], high[:, None]


@triton.jit
def plain_tables(ROWS: tl.constexpr):
    """Tables of code 5, the magnitudes themselves, for ROWS rows."""
    low = tl.full((ROWS, 1), 0x14100800 + 5 * 0x08080800, tl.int32)
    high = tl.full((ROWS, 1), 0x24201C18 + 5 * 0x08080808, tl.int32)
    return low, high


@triton.jit
def _looked_up(word, index, low_shift, sign_shift, low, high):
    """Byte ``index`` of a word's four weights by integer arithmetic."""
    magnitude = (word >> low_shift) & 7
    half = tl.where(magnitude < 4, low, high)
    byte = (half >> ((magnitude & 3) * 8)) & 0xFF
    return (byte | (((word >> sign_shift) & 1) << 7)).to(tl.uint8)


@triton.jit
def decode_words(packed, low_a, high_a, low_b, high_b):
    """Packed bytes ``[N, 32]`` of a step to E4M3 weights of its halves A and B, ``[N, 32]`` each.

    The tables are int32 ``[N, 1]``.
    """
    if INTERPRET:
        N: tl.constexpr = packed.shape[0]
        WIDTH: tl.constexpr = packed.shape[1]
        index = tl.arange(0, WIDTH) % 4
        bytes4 = tl.reshape(packed.to(tl.int32), (N, WIDTH // 4, 4))
        word = tl.sum(bytes4 << (tl.arange(0, 4) * 8)[None, None, :], 2)
        word = tl.reshape(tl.broadcast_to(word[:, :, None], (N, WIDTH // 4, 4)), (N, WIDTH))
        index = index[None, :]
        a = _looked_up(word, index, 4 * index, 8 * index + 7, low_a, high_a)
        b = _looked_up(word, index, 4 * index + 16, 8 * index + 3, low_b, high_b)
    else:
        a, b = tl.inline_asm_elementwise(
            _DECODE, _OPERANDS, [packed, low_a, high_a, low_b, high_b],
            dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    return a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _product(x, weight, acc, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """``acc`` plus the product over 32 columns; with FIRST weight rows are the result's rows."""
    weight = weight.to(DTYPE)
    if FIRST:
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(part, acc, row_scale, x_scale, FIRST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """``acc + part * row_scale * x_scale``, one of each per weight row and per row of ``x``."""
    factor = row_scale[:, None] if FIRST else row_scale[None, :]
    if HAS_SCALE:
        factor = factor * (x_scale[None, :] if FIRST else x_scale[:, None])
    return acc + part * factor


@triton.jit
def _load_x(ptrs, offset, width, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """32 columns of ``x`` from ``offset`` on, of which WIDTH count."""
    if WIDTH == 32:
        x = tl.load(ptrs + offset)
    else:
        offs = tl.arange(0, 32)
        live = (offs < WIDTH)[:, None] if FIRST else (offs < WIDTH)[None, :]
        x = tl.load(ptrs + offset, mask=live, other=0.0)
    return x


@triton.jit
def _x_scale(ptrs, group, HAS_SCALE: tl.constexpr):
    # without scales the pointers stand in, unused
    return tl_ue8m0_decode(tl.load(ptrs + group).to(tl.int32)) if HAS_SCALE else ptrs


@triton.jit
def _step(
    acc, x_ptrs, column, w_ptrs, offset, codes_a, codes_b,
    FIRST: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the products of one packed step's halves of HALF columns each."""
    x_a = _load_x(x_ptrs, column, 32, FIRST, HALF)
    x_b = _load_x(x_ptrs, column + HALF, 32, FIRST, HALF)
    if HALF == 32:
        packed = tl.load(w_ptrs + offset)
    else:
        packed = tl.load(w_ptrs + offset, mask=(tl.arange(0, 32) < HALF)[None, :], other=0)
    low_a, high_a = table(codes_a)
    low_b, high_b = table(codes_b)
    a, b = decode_words(packed, low_a, high_a, low_b, high_b)
    return _product(x_b, b, _product(x_a, a, acc, FIRST, DTYPE), FIRST, DTYPE)


@triton.jit
def _folded_scale(meta):
    return (meta & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _folded_products(
    acc, x_ptrs, sx_ptrs, w_ptrs, tail_ptrs, step_bytes, meta_ptrs, stride_mg, first, last,
    full_groups,
    TAIL: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    zero = tl.zeros(acc.shape, tl.float32)
    for group in range(first, tl.minimum(last, full_groups)):
        meta = tl.load(meta_ptrs + group * stride_mg)
        offset, column = 2 * group * step_bytes, group * 128
        x_scale = _x_scale(sx_ptrs, group, HAS_SCALE)
        part = _step(
            zero, x_ptrs, column, w_ptrs, offset, meta & 15, (meta >> 4) & 15, FIRST, DTYPE, 32
        )
        part = _step(
            part, x_ptrs, column + 64, w_ptrs, offset + step_bytes, (meta >> 8) & 15,
            (meta >> 12) & 15, FIRST, DTYPE, 32,
        )  # fmt: skip
        acc = _scaled(part, acc, _folded_scale(meta), x_scale, FIRST, HAS_SCALE)
    if TAIL > 0 and last > full_groups:
        meta = tl.load(meta_ptrs + full_groups * stride_mg)
        offset, column = 2 * full_groups * step_bytes, full_groups * 128
        x_scale = _x_scale(sx_ptrs, full_groups, HAS_SCALE)
        part = zero
        if TAIL >= 2:
            part = _step(
                part, x_ptrs, column, w_ptrs, offset, meta & 15, (meta >> 4) & 15, FIRST, DTYPE, 32
            )
        if TAIL % 2 == 1:
            column += (TAIL // 2) * 64
            codes = (meta >> ((TAIL // 2) * 8)) & 15
            part = _step(part, x_ptrs, column, tail_ptrs, 0, codes, codes, FIRST, DTYPE, 16)
        acc = _scaled(part, acc, _folded_scale(meta), x_scale, FIRST, HAS_SCALE)
    return acc


@triton.jit
def _half(acc, x_ptrs, column, weight, code, x_scale, FIRST: tl.constexpr, DTYPE: tl.constexpr,
          HAS_SCALE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """``acc`` plus the product of one half under its own scale bytes ``code``."""
    x = _load_x(x_ptrs, column, 32, FIRST, WIDTH)
    part = _product(x, weight, tl.zeros(acc.shape, tl.float32), FIRST, DTYPE)
    return _scaled(part, acc, tl_ue8m0_decode(code.to(tl.int32)), x_scale, FIRST, HAS_SCALE)


@triton.jit
def _power(code, factor):
    """``2^(code - 127) * factor`` of UE8M0 codes; no number is infinite here."""
    bits = tl.maximum(code.to(tl.int32) << 23, 0x00400000)
    return bits.to(tl.float32, bitcast=True) * factor


@triton.jit
def _block(part, x_ptrs, weight, code, factor, DTYPE: tl.constexpr):
    """``part`` plus the product of 32 columns under their scale bytes."""
    product = _product(tl.load(x_ptrs), weight, tl.zeros(part.shape, tl.float32), False, DTYPE)
    return product * _power(code, factor)[None, :] + part


@triton.jit
def _byte_group_products(
    acc, x_ptrs, sx_ptrs, w_ptrs, step_bytes, meta_ptrs, stride_mg, row_meta_ptr, first, last,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Whole groups: 128 columns are summed under the weight's scales, then take the row's.

    Near the end of fp32 the weight's scales lend the row's 20 octaves, all of a tile the same, by
    the code of one of its weight rows: else a sum could leave fp32 where its product stays.
    """
    low, high = plain_tables(w_ptrs.shape[0])
    for group in range(first, last):
        codes = 4 * group * stride_mg
        lent = tl.where(tl.load(row_meta_ptr + codes) > 187, 20, 0)
        less = ((127 - lent) << 23).to(tl.float32, bitcast=True)
        more = ((127 + lent) << 23).to(tl.float32, bitcast=True)
        step, code_ptrs, columns = 2 * group, meta_ptrs + codes, x_ptrs + group * 128
        a, b = decode_words(tl.load(w_ptrs + step * step_bytes), low, high, low, high)
        part = tl.zeros(acc.shape, tl.float32)
        part = _block(part, columns, a, tl.load(code_ptrs), less, DTYPE)
        part = _block(part, columns + 32, b, tl.load(code_ptrs + stride_mg), less, DTYPE)
        a, b = decode_words(tl.load(w_ptrs + (step + 1) * step_bytes), low, high, low, high)
        part = _block(part, columns + 64, a, tl.load(code_ptrs + 2 * stride_mg), less, DTYPE)
        part = _block(part, columns + 96, b, tl.load(code_ptrs + 3 * stride_mg), less, DTYPE)
        acc += part * _power(tl.load(sx_ptrs + group), more)[:, None]
    # a scale that is no number has left an infinity or NaN
    return tl.fma(acc, 0.0, acc)


@triton.jit
def _bytes_products(
    acc, x_ptrs, sx_ptrs, w_ptrs, tail_ptrs, step_bytes, meta_ptrs, stride_mg, first, last,
    full_steps,
    TAIL: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    low, high = plain_tables(w_ptrs.shape[0])
    for step in range(2 * first, tl.minimum(2 * last, full_steps)):
        packed = tl.load(w_ptrs + step * step_bytes)
        code_a = tl.load(meta_ptrs + 2 * step * stride_mg)
        code_b = tl.load(meta_ptrs + (2 * step + 1) * stride_mg)
        x_scale = _x_scale(sx_ptrs, step // 2, HAS_SCALE)
        a, b = decode_words(packed, low, high, low, high)
        column = step * 64
        acc = _half(acc, x_ptrs, column, a, code_a, x_scale, FIRST, DTYPE, HAS_SCALE, 32)
        acc = _half(acc, x_ptrs, column + 32, b, code_b, x_scale, FIRST, DTYPE, HAS_SCALE, 32)
    if TAIL % 2 == 1 and 2 * last > full_steps:
        packed = tl.load(tail_ptrs, mask=(tl.arange(0, 32) < 16)[None, :], other=0)
        code = tl.load(meta_ptrs + 2 * full_steps * stride_mg)
        x_scale = _x_scale(sx_ptrs, full_steps // 2, HAS_SCALE)
        a, b = decode_words(packed, low, high, low, high)
        column = full_steps * 64
        acc = _half(acc, x_ptrs, column, a, code, x_scale, FIRST, DTYPE, HAS_SCALE, 16)
        acc = _half(acc, x_ptrs, column + 16, b, code, x_scale, FIRST, DTYPE, HAS_SCALE, 16)
    return acc


@triton.jit
def _checkpoint_products(
    acc, x_ptrs, sx_ptrs, w_ptrs, meta_ptrs, first, last, blocks,
    FIRST: tl.constexpr, DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Nibbles in column order, ``w_ptrs [N, 16]``; scale codes of a row lie together."""
    for block in range(4 * first, tl.minimum(4 * last, blocks)):
        packed = tl.load(w_ptrs + block * 16).to(tl.int32)
        code = tl.load(meta_ptrs + block)
        x_scale = _x_scale(sx_ptrs, block // 4, HAS_SCALE)
        nibbles = tl.reshape(tl.join(packed & 15, packed >> 4), (w_ptrs.shape[0], 32))
        weight = tl_e2m1_decode(nibbles).to(tl.float8e4nv)
        acc = _half(acc, x_ptrs, block * 32, weight, code, x_scale, FIRST, DTYPE, HAS_SCALE, 32)
    return acc


@triton.jit
def expert_products(
    acc, x_ptrs, sx_ptrs, w_ptr, stride_wn, meta_ptr, stride_mg, stride_mn, rows, row, N, K,
    first, last,
    LAYOUT: tl.constexpr, TAIL: tl.constexpr, WHOLE: tl.constexpr, FIRST: tl.constexpr,
    DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the products of one expert over groups ``[first, last)`` of 128 columns.

    Args:
        acc: fp32, ``[x rows, weight rows]``, or the other way round with FIRST.
        x_ptrs: of columns 0..31 of the rows, ``[rows, 32]``, with FIRST ``[32, rows]``.
        sx_ptrs: of the rows' first scale codes when HAS_SCALE, else anything.
        w_ptr, meta_ptr: of the expert.
        rows: the weight rows wanted, all below N.
        row: a scalar, one of them.
        TAIL: 32-column blocks past the last whole group, ``K % 128 // 32``.
        WHOLE: N is a multiple of the 64 rows of a tile.
        DTYPE: of the operands, that of ``x``.
    """
    meta_ptrs = meta_ptr + rows * stride_mn
    if LAYOUT == CHECKPOINT:
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn + tl.arange(0, 16)[None, :]
        acc = _checkpoint_products(
            acc, x_ptrs, sx_ptrs, w_ptrs, meta_ptrs, first, last, K // 32, FIRST, DTYPE, HAS_SCALE
        )
    else:
        half = K // 2
        tile, in_tile = rows // 64 * 64, rows % 64
        tile_ptrs = w_ptr + (tile * half)[:, None] + tl.arange(0, 32)[None, :]
        step_bytes = 2048 if WHOLE else (tl.minimum(N - tile, 64) * 32)[:, None]
        w_ptrs = tile_ptrs + (in_tile * 32)[:, None]
        tail_ptrs = tile_ptrs + (in_tile * 16)[:, None] + (K // 64) * step_bytes
        if LAYOUT == FOLDED:
            acc = _folded_products(
                acc, x_ptrs, sx_ptrs, w_ptrs, tail_ptrs, step_bytes, meta_ptrs, stride_mg, first,
                last, K // 128, TAIL, FIRST, DTYPE, HAS_SCALE,
            )  # fmt: skip
        else:
            by_group: tl.constexpr = HAS_SCALE and not FIRST
            if by_group:
                acc = _byte_group_products(
                    acc, x_ptrs, sx_ptrs, w_ptrs, step_bytes, meta_ptrs, stride_mg,
                    meta_ptr + row * stride_mn, first, tl.minimum(last, K // 128), DTYPE,
                )  # fmt: skip
                first = tl.maximum(first, K // 128)
            if TAIL > 0 or not by_group:
                acc = _bytes_products(
                    acc, x_ptrs, sx_ptrs, w_ptrs, tail_ptrs, step_bytes, meta_ptrs, stride_mg,
                    first, last, K // 64, TAIL, FIRST, DTYPE, HAS_SCALE,
                )  # fmt: skip
    return acc


@triton.jit
def tile_products(
    x_ptrs, sx_ptrs, w_ptr, stride_wn, meta_ptr, stride_mg, stride_mn, offs_n, row, N, K, first,
    last,
    TILE_X: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, LAYOUT: tl.constexpr,
    TAIL: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, FIRST: tl.constexpr,
    DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Products with the rows ``offs_n`` of an expert, fp32 ``[TILE_X, BLOCK_N]``, or the other way
    round with FIRST; see `expert_products`.

    ``row`` is the first of ``offs_n``. With HALVES the rows are taken from both halves of the
    matrix in turn. EVEN: none of ``offs_n`` lies past N.
    """
    rows = offs_n
    if not EVEN:
        rows = tl.minimum(offs_n, N - 1)
    rows = matrix_rows(rows, N, HALVES)
    acc = tl.zeros((BLOCK_N, TILE_X) if FIRST else (TILE_X, BLOCK_N), tl.float32)
    return expert_products(
        acc, x_ptrs, sx_ptrs, w_ptr, stride_wn, meta_ptr, stride_mg, stride_mn, rows, row, N, K,
        first, last, LAYOUT, TAIL, WHOLE, FIRST, DTYPE, HAS_SCALE,
    )  # fmt: skip


@triton.jit
def matrix_rows(rows, N, IN_TURN: tl.constexpr):
    """Rows of a matrix; IN_TURN: those that come at ``rows`` when its halves take turns."""
    if IN_TURN:
        rows = (rows % 2) * (N // 2) + rows // 2
    return rows


@triton.jit
def route_rows(routes, stride_token, stride_route, TOPK: tl.constexpr):
    """Where the rows of routes begin in a result ``[tokens, TOPK, width]``; int64."""
    rows = (routes // TOPK).to(tl.int64) * stride_token
    if TOPK > 1:
        rows += (routes % TOPK).to(tl.int64) * stride_route
    return rows
