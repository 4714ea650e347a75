"""Triton side of the indexer's scores ``sum_h w_h * relu(q_h . k)`` of consecutive index rows.

Operands become e4m3 under powers of two: one a head of the query; for the rows one a sequence
(dense pools) or one a row with its four block scales folded into the codes (packed pools). What
the 8 bits cannot hold exactly becomes NaN, which the product carries into the row's score;
`rescore` computes those rows in fp32. Which of the two a row goes through depends on the row and
the query alone.
Numerics: products exact, fp32 sums over channels, then over heads in an order that is the same
for any number of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.backend import INTERPRET
from ftkernels.quant.formats import (
    tl_absbits,
    tl_e2m1_decode,
    tl_e4m3_round,
    tl_ue8m0_decode,
)

INDEX_GROUP = tl.constexpr(32)
_SAMPLE = tl.constexpr(16)  # leading rows that give a sequence its scale
_STEP = tl.constexpr(16)  # channels of an fp32 product, which is unrolled
_CODES = tl.constexpr(11)  # octaves the folded block scales of a row may be apart
# bf16 pairs under s = $3 to fields 0..15, which are those of e4m3; $5 = -1/s shows what was lost
_TO_E4M3 = tl.constexpr("""{
    .reg .b32 a, b, c, d, e, x;
    .reg .pred p;
    mov.b32 x, 0x80008000;
    fma.rn.bf16x2 a, $1, $3, x;
    fma.rn.bf16x2 b, $2, $3, x;
    fma.rn.bf16x2 c, a, $5, $1;
    fma.rn.bf16x2 d, b, $5, $2;
    lop3.b32 e, a, b, 0x780F780F, 0xA8;
    lop3.b32 c, c, d, e, 0xFE;
    setp.ne.u32 p, c, 0;
    shl.b32 c, a, 4;
    shl.b32 d, b, 4;
    lop3.b32 a, a, c, x, 0xE4;
    lop3.b32 b, b, d, x, 0xE4;
    prmt.b32 a, a, b, 0x7531;
    selp.b32 $0, 0x7F7F7F7F, a, p;
}""")
# four bytes to e4m3 of the low ($0) and of the high nibbles ($1) by the byte table $7:$3
_DECODE = tl.constexpr("""{
    .reg .b32 a, b, c;
    and.b32 a, $2, 0x07070707;
    shr.u32 b, $2, 4;
    and.b32 b, b, 0x07070707;
    shr.u32 c, a, 4;
    or.b32 a, a, c;
    shr.u32 c, b, 4;
    or.b32 b, b, c;
    prmt.b32 a, a, a, 0x2020;
    prmt.b32 b, b, b, 0x2020;
    prmt.b32 a, $3, $7, a;
    prmt.b32 b, $3, $7, b;
    shl.b32 c, $2, 4;
    lop3.b32 $0, c, 0x80808080, a, 0xEA;
    lop3.b32 $1, $2, 0x80808080, b, 0xEA;
}""")


@triton.jit
def exact_e4m3(x, code):
    """``x / 2^(code - 127)`` as e4m3, NaN where that is not exact; int32 `code` in 3..251."""
    x = x.to(tl.float32)
    rounded = tl_e4m3_round(x * ((254 - code) << 23).to(tl.float32, bitcast=True))
    same = rounded * (code << 23).to(tl.float32, bitcast=True) == x
    return tl.where(same, rounded, float("nan")).to(tl.float8e4nv)


@triton.jit
def dense_e4m3(x, code):
    """As `exact_e4m3` with `code` in 9..133; four neighbours of bf16 share code and NaN."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return exact_e4m3(x, code)
    else:
        scale = ((134 - code) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)
        inverse = (-((120 + code) << 23).to(tl.float32, bitcast=True)).to(tl.bfloat16)
        return tl.inline_asm_elementwise(
            _TO_E4M3, "=r,r,r,r,r,r,r", [x, scale, inverse],
            dtype=tl.float8e4nv, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def packed_e4m3(nibbles, table):
    """e4m3 of the low and of the high nibbles times ``2^(table - 5)``, NaN where `table` < 0."""
    if INTERPRET:
        factor = tl.where(table < 0, 0x7FC00000, (table + 122) << 23).to(tl.float32, bitcast=True)
        codes = nibbles.to(tl.int32)
        low = (tl_e2m1_decode(codes & 15) * factor).to(tl.float8e4nv)
        return low, (tl_e2m1_decode(codes >> 4) * factor).to(tl.float8e4nv)
    else:
        first = tl.where(table < 0, 0x7F7F7F7F, 0x14100800 + table * 0x08080800)
        second = tl.where(table < 0, 0x7F7F7F7F, 0x24201C18 + table * 0x08080808)
        return tl.inline_asm_elementwise(
            _DECODE, "=r,=r,r,r,r,r,r,r,r,r,r", [nibbles, first, second],
            dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def load_query(
    q_ptr, stride_qh, w_ptr,
    HI: tl.constexpr, BLOCK_H: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Heads of one query as e4m3 ``[channels, BLOCK_H]`` and their weights with the scales in.

    Two tiles for packed rows: even channels, which stand in low nibbles, and odd ones.
    """
    offs_h = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_h < HI)[:, None] & (offs_d < DI)[None, :]
    q_ptrs = q_ptr + (offs_h.to(tl.int64) * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    # the largest value of a head goes to 2^7..2^8
    largest = tl.max(tl_absbits(q.to(tl.float32)), 1) >> 23
    code = tl.minimum(tl.maximum(largest, 64), 140) - 7
    narrow = dense_e4m3(q, code[:, None])
    weights = tl.load(w_ptr + offs_h, mask=offs_h < HI, other=0.0)
    weights *= (code << 23).to(tl.float32, bitcast=True)
    if PACKED:
        even, odd = tl.split(tl.reshape(narrow, (BLOCK_H, BLOCK_D // 2, 2)))
        return tl.trans(even), tl.trans(odd), weights
    else:
        return tl.trans(narrow), tl.trans(narrow), weights


@triton.jit
def dense_code(k_ptr, stride_kp, table_ptr, DI: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scale code of a sequence's dense rows, from its first: 2^5 for the largest magnitude."""
    page = tl.maximum(tl.load(table_ptr), 0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    row = tl.load(k_ptr + page * stride_kp + offs_d, mask=offs_d < DI, other=0.0)
    largest = tl.max(tl_absbits(row.to(tl.float32)), 0) >> 23
    return tl.minimum(tl.maximum(largest - 5, 34), 133)


@triton.jit
def _load_dense(
    base_ptr, code, STRIDE_KR: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_i = tl.arange(0, ROWS).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inner = (offs_i * STRIDE_KR)[:, None] + offs_d[None, :]
    k_ptrs = base_ptr[:, None, None] + inner[None, :, :]
    if DI == BLOCK_D:
        k = tl.load(k_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(offs_d < DI)[None, None, :], other=0.0)
    return tl.reshape(dense_e4m3(k, code), (PIECES * ROWS, BLOCK_D))


@triton.jit
def _load_packed(nibbles_ptr, scales_ptr, PIECES: tl.constexpr, ROWS: tl.constexpr):
    """Low and high nibbles as e4m3 ``[rows, 64]``, and each row's scale; ``[PIECES]`` addresses."""
    offs_x = tl.arange(0, 4 * ROWS)  # four blocks of 16 bytes a row
    inner = (offs_x * 16)[:, None] + tl.arange(0, 16)[None, :]
    nibbles = tl.load(nibbles_ptr[:, None, None] + inner[None, :, :])
    scales = tl.load(scales_ptr[:, None] + (offs_x // 4)[None, :])
    top = tl.maximum(
        tl.maximum(scales & 255, (scales >> 8) & 255),
        tl.maximum((scales >> 16) & 255, (scales >> 24) & 255),
    )
    table = _CODES - top + ((scales >> ((offs_x % 4) * 8)[None, :]) & 255)
    # an infinite scale, or one that could leave the range of a sum, is for fp32
    table = tl.where((top > 190) | (top < 64), -1, table)
    table = tl.broadcast_to(table[:, :, None], (PIECES, 4 * ROWS, 16))
    low, high = packed_e4m3(nibbles, table)
    scale = ((tl.maximum(top, 64) - 6) << 23).to(tl.float32, bitcast=True)
    scale = tl.max(tl.reshape(scale, (PIECES * ROWS, 4)), 1)
    shape: tl.constexpr = (PIECES * ROWS, 64)
    return tl.reshape(low, shape), tl.reshape(high, shape), scale


@triton.jit
def _weighted(acc, weights):
    # the product may be NaN, and a plain maximum would lose it
    positive = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(positive * weights[None, :], 1)


@triton.jit
def score_rows(
    raw_ptr, slot_words, first, last, num_rows, q0a, q0b, w0, q1a, q1b, w1,
    k_ptr, stride_kp, table_ptr, STRIDE_KR: tl.constexpr,
    DI: tl.constexpr, BLOCK_D: tl.constexpr, RC: tl.constexpr, BLOCK_R: tl.constexpr,
    NQ: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the scores of rows ``first .. last`` as bits, NaN where `rescore_rows` has to come.

    `first` and BLOCK_R agree, so tiles stand at the same rows whatever the range. Rows from
    `num_rows` on share pages with visible ones; their scores are not stored.
    """
    # a tile is cut where pages end, row by row where their size does not fit
    ROWS: tl.constexpr = 1 if RC & (RC - 1) else (RC if RC < BLOCK_R else BLOCK_R)
    PIECES: tl.constexpr = BLOCK_R // ROWS
    if not PACKED:
        code = dense_code(k_ptr, stride_kp, table_ptr, DI, BLOCK_D)
    for begin in range(first, last, BLOCK_R):
        offs_r = begin + tl.arange(0, BLOCK_R)
        mask_r = offs_r < last
        piece = begin + tl.arange(0, PIECES) * ROWS
        number = piece // RC
        page = tl.load(table_ptr + number, mask=piece < num_rows, other=0).to(tl.int64)
        base_ptr = k_ptr + page * stride_kp
        in_page = piece - number * RC
        if PACKED:
            scales_ptr = (base_ptr + RC * 64 + in_page * 4).to(tl.pointer_type(tl.int32))
            ka, kb, scale = _load_packed(base_ptr + in_page * 64, scales_ptr, PIECES, ROWS)
        else:
            row_ptr = base_ptr + in_page.to(tl.int64) * STRIDE_KR
            ka = _load_dense(row_ptr, code, STRIDE_KR, PIECES, ROWS, DI, BLOCK_D)
            scale = (code << 23).to(tl.float32, bitcast=True)
        for i in tl.static_range(NQ):
            acc = tl.dot(ka, q0a if i == 0 else q1a)
            if PACKED:
                acc = tl.dot(kb, q0b if i == 0 else q1b, acc)
            score = _weighted(acc, w0 if i == 0 else w1) * scale
            bits = score.to(tl.int32, bitcast=True)
            tl.store(raw_ptr + i * slot_words + (offs_r - first), bits, mask=mask_r)


@triton.jit
def any_lost(raw_ptr, count, BLOCK: tl.constexpr):
    """Whether one of `count` scores is NaN or infinite; reads whole blocks."""
    lost = tl.zeros([BLOCK], tl.float32)
    tl.debug_barrier()
    for begin in range(0, count, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        bits = tl.load(raw_ptr + offs)
        lost += tl.where(offs < count, bits.to(tl.float32, bitcast=True), 0.0) * 0.0
    total = tl.sum(lost, 0)
    return total != total


@triton.jit
def rescore_rows(
    raw_ptr, first, last, q_ptr, stride_qh, w_ptr, k_ptr, stride_kp, table_ptr,
    STRIDE_KR: tl.constexpr, HI: tl.constexpr, BLOCK_H: tl.constexpr, DI: tl.constexpr,
    BLOCK_D: tl.constexpr, RC: tl.constexpr, BLOCK_X: tl.constexpr, PACKED: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Scores in fp32 of the rows whose score is NaN, or of `ALL`; NaN becomes -inf."""
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HI
    weights = tl.load(w_ptr + offs_h, mask=mask_h, other=0.0)
    tl.debug_barrier()
    for begin in range(first, last, BLOCK_X):
        offs_r = begin + tl.arange(0, BLOCK_X)
        needed = offs_r < last
        if not ALL:
            bits = tl.load(raw_ptr + (offs_r - first), mask=needed, other=0)
            score = bits.to(tl.float32, bitcast=True)
            needed = needed & (score != score)
        if tl.max(needed.to(tl.int32), 0) > 0:
            page = tl.load(table_ptr + offs_r // RC, mask=needed, other=0).to(tl.int64)
            base_ptr = k_ptr + page * stride_kp
            acc = tl.zeros([BLOCK_X, BLOCK_H], tl.float32)
            for begin_d in tl.range(0, BLOCK_D, _STEP, num_stages=1):
                offs_d = begin_d + tl.arange(0, _STEP)
                mask_d = offs_d < DI
                k = _wide_rows(base_ptr, offs_r % RC, offs_d, needed, STRIDE_KR, DI, RC, PACKED)
                q_ptrs = q_ptr + (offs_h.to(tl.int64) * stride_qh)[None, :] + offs_d[:, None]
                q = tl.load(q_ptrs, mask=mask_d[:, None] & mask_h[None, :], other=0.0)
                acc = tl.dot(k, q.to(tl.float32), acc, input_precision="ieee")
            score = _weighted(acc, weights)
            bits = tl.where(score != score, float("-inf"), score).to(tl.int32, bitcast=True)
            tl.store(raw_ptr + (offs_r - first), bits, mask=needed)
    tl.debug_barrier()


@triton.jit
def _wide_rows(
    base_ptr, in_page, offs_d, mask_r,
    STRIDE_KR: tl.constexpr, DI: tl.constexpr, RC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Channels `offs_d` of rows in fp32."""
    mask = mask_r[:, None] & (offs_d < DI)[None, :]
    if PACKED:
        byte_ptrs = (base_ptr + in_page * 64)[:, None] + (offs_d // 2)[None, :]
        byte = tl.load(byte_ptrs, mask=mask, other=0).to(tl.int32)
        scale_ptrs = base_ptr + RC * 64 + in_page * 4
        scale_ptrs = scale_ptrs[:, None] + (offs_d // INDEX_GROUP)[None, :]
        scale = tl.load(scale_ptrs, mask=mask, other=0).to(tl.int32)
        code = (byte >> ((offs_d % 2) * 4)[None, :]) & 15
        return tl_e2m1_decode(code) * tl_ue8m0_decode(scale)
    else:
        row_ptrs = base_ptr + in_page.to(tl.int64) * STRIDE_KR
        return tl.load(row_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
