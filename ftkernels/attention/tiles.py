"""The attention step that prefill and decode share, on tiles of KV rows.

The channels of a row are cut into SPLIT slices, one a warp, so that both products use a tile as it
was loaded, once, and no score is computed twice: scores are summed over the slices, probabilities
meet every slice again. Softmax runs in base 2.

Two forms of the same step. From 16 rows of queries on (WIDE) tiles are ``[SPLIT, rows, DIM]`` and
queries come first: scores are ``[queries, rows]``. Below, an MMA would fill up to 16 with zeros, so
tiles are ``[SPLIT, DIM, rows]`` and scores ``[rows, queries]``, of which 8 columns waste nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.attention.stores import DATA, SCALES, VALUES
from ftkernels.quant.formats import tl_ue8m0_decode

NEVER = tl.constexpr(-1e30)
"""Score of a row that is not seen: below every real one, and finite so that differences are."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def by_channel(D: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """Channel numbers, ready to be added to what `by_row` gives."""
    DIM: tl.constexpr = D // SPLIT
    offs_s = tl.arange(0, SPLIT)[:, None, None] * DIM
    offs_d = tl.arange(0, DIM)
    return offs_s + (offs_d[None, None, :] if WIDE else offs_d[None, :, None])


@triton.jit
def by_row(x, WIDE: tl.constexpr):
    """A vector over the rows of a tile, or over queries, beside the channels."""
    return x[None, :, None] if WIDE else x[None, None, :]


@triton.jit
def score_rows(x, WIDE: tl.constexpr):
    """A vector over rows as an axis of the scores."""
    return x[None, :] if WIDE else x[:, None]


@triton.jit
def score_queries(x, WIDE: tl.constexpr):
    """A vector over queries as an axis of the scores."""
    return x[:, None] if WIDE else x[None, :]


@triton.jit
def load_rows(
    ptr, rows, live, D: tl.constexpr, D_P2: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The rows at element offsets ``rows``, zeros where not live."""
    offs_d = by_channel(D_P2, SPLIT, WIDE)
    mask = by_row(live, WIDE)
    if D_P2 > D:
        mask = mask & (offs_d < D)
    return tl.load(ptr + by_row(rows, WIDE) + offs_d, mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr, rows, live, x, D: tl.constexpr, D_P2: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Store what has the form of ``load_rows``."""
    offs_d = by_channel(D_P2, SPLIT, WIDE)
    mask = by_row(live, WIDE)
    if D_P2 > D:
        mask = mask & (offs_d < D)
    tl.store(ptr + by_row(rows, WIDE) + offs_d, x, mask=mask)


@triton.jit
def load_packed(
    ptr, tail_ptr, scale_ptr, page, row, live, stride_p,
    PER_PAGE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Packed rows as bf16 before their scales, and the scales ``[SPLIT, rows]``.

    The 8 slices of 64 channels are the 7 groups of a scale each and the rotated channels, so that a
    scale meets partial scores and probabilities and never an element.
    """
    tl.static_assert(SPLIT == 8)
    offs_s = tl.arange(0, 8)
    is_tail = (offs_s == 7)[:, None, None]
    base = page * stride_p + row * DATA
    mask = by_row(live, WIDE) & (offs_s < 7)[:, None, None]
    kv = tl.load(ptr + by_row(base, WIDE) + by_channel(512, 8, WIDE), mask=mask, other=0.0)
    offs_i = tl.arange(0, 64)
    offs_i = offs_i[None, None, :] if WIDE else offs_i[None, :, None]
    tails = tail_ptr + by_row((base + VALUES) // 2, WIDE) + offs_i
    tail = tl.load(tails, mask=by_row(live, WIDE), other=0.0)
    kv = tl.where(is_tail, tail, kv.to(tl.bfloat16))
    scales = scale_ptr + (page * stride_p + PER_PAGE * DATA) // SCALES + row
    codes = tl.load(scales, mask=live, other=0)
    codes = ((codes[None, :] >> (8 * offs_s)[:, None].to(tl.int64)) & 0xFF).to(tl.int32)
    return kv, tl_ue8m0_decode(tl.where(offs_s[:, None] == 7, 127, codes))


@triton.jit
def attend(
    kv, scales, q, seen, top, total, mixed, factor,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of rows into the running softmax.

    ``seen`` has the shape of the scores or spreads to it. State of each query: largest score
    ``top``, ``total`` of the exponentials, ``mixed`` rows. A tile of which a query sees nothing
    leaves its state as it is, bit for bit; what one before the first seen row adds is taken out
    by that row, since its weight is then an exact zero.
    """
    if WIDE:
        scores = tl.dot(q, tl.permute(kv, (0, 2, 1)), input_precision=PRECISION)
    else:
        scores = tl.dot(tl.permute(kv, (0, 2, 1)), q, input_precision=PRECISION)
    if PACKED:
        scales = scales[:, None, :] if WIDE else scales[:, :, None]
        scores *= scales
    scores = tl.where(seen, tl.sum(scores, 0) * factor, NEVER)
    new_top = tl.maximum(top, tl.max(scores, 1 if WIDE else 0))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(scores - score_queries(new_top, WIDE))
    total = total * decay + tl.sum(p, 1 if WIDE else 0)
    mixed = mixed * by_row(decay, WIDE)
    if PACKED:
        # a power of two: the same rounding as on rows that carry their scales
        spread = (p[None, :, :] * scales).to(kv.dtype)
    else:
        spread = p.to(kv.dtype)[None, :, :]
        spread = tl.broadcast_to(spread, (kv.shape[0], p.shape[0], p.shape[1]))
    if WIDE:
        mixed = tl.dot(spread, kv, mixed, input_precision=PRECISION)
    else:
        mixed = tl.dot(kv, spread, mixed, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit
def load_tile(
    ptr, tail_ptr, scale_ptr, stride_p, stride_r, page, row, live,
    PER_PAGE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` of pages ``page`` and their scales (none: 1), zeros where not live."""
    page, row = page.to(tl.int64), row.to(tl.int64)
    if PACKED:
        kv, scales = load_packed(
            ptr, tail_ptr, scale_ptr, page, row, live, stride_p, PER_PAGE, SPLIT, WIDE
        )
    else:
        rows, scales = page * stride_p + row * stride_r, 1.0
        kv = load_rows(ptr, rows, live, D, D_P2, SPLIT, WIDE).to(DTYPE)
    return kv, scales


@triton.jit
def window_tiles(
    first, last, start, low, high, positions, q, top, total, mixed, factor,
    ptr, tail_ptr, scale_ptr, stride_p, stride_r, table_ptr,
    WINDOW: tl.constexpr, PER_PAGE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, IN_PAGE: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles ``[first, last)`` of the window rows ``[low, high)``; tile 0 begins at ``start``.

    ONE: all queries stand at the same position, so that what is live is seen. IN_PAGE: no tile
    crosses a page.
    """
    offs = tl.arange(0, ROWS)
    for tile in range(first, last):
        begin = start + tile * ROWS
        numbers = begin + offs
        # as unsigned numbers those below the range are above it
        live = (numbers - low).to(tl.uint32) < (high - low).to(tl.uint32)
        if IN_PAGE:
            page, row = tl.load(table_ptr + begin // PER_PAGE), begin % PER_PAGE + offs
        else:
            places = numbers.to(tl.uint32)  # no sign to mind in a division
            page = tl.load(table_ptr + places // PER_PAGE, mask=live, other=0)
            row = places % PER_PAGE
        kv, scales = load_tile(
            ptr, tail_ptr, scale_ptr, stride_p, stride_r, page, row, live,
            PER_PAGE, D, D_P2, SPLIT, WIDE, PACKED, DTYPE,
        )  # fmt: skip
        if ONE:
            seen = score_rows(live, WIDE)
        else:
            ago = score_queries(positions, WIDE) - score_rows(numbers, WIDE)
            seen = ago.to(tl.uint32) < WINDOW
        top, total, mixed = attend(
            kv, scales, q, seen, top, total, mixed, factor, WIDE, PACKED, PRECISION
        )
    return top, total, mixed


@triton.jit
def compressed_tiles(
    first, last, visible, most, picks_ptr, topk, q, top, total, mixed, factor,
    ptr, tail_ptr, scale_ptr, stride_p, stride_r, table_ptr,
    PER_PAGE: tl.constexpr, HAS_PICKS: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles ``[first, last)`` of the compressed rows, or of a query's picks among them.

    Each query sees ``visible`` rows, at most ``most``; with picks, all entries ``>= 0``.
    """
    offs = tl.arange(0, ROWS)
    for tile in range(first, last):
        numbers = tile * ROWS + offs
        if HAS_PICKS:
            numbers = tl.load(picks_ptr + numbers, mask=numbers < topk, other=-1)
            live = numbers >= 0
        else:
            live = numbers < most
        places = numbers.to(tl.uint32)
        page = tl.load(table_ptr + places // PER_PAGE, mask=live, other=0)
        kv, scales = load_tile(
            ptr, tail_ptr, scale_ptr, stride_p, stride_r, page, places % PER_PAGE, live,
            PER_PAGE, D, D_P2, SPLIT, WIDE, PACKED, DTYPE,
        )  # fmt: skip
        if HAS_PICKS or ONE:
            seen = score_rows(live, WIDE)
        else:
            seen = score_rows(numbers, WIDE) < score_queries(visible, WIDE)
        top, total, mixed = attend(
            kv, scales, q, seen, top, total, mixed, factor, WIDE, PACKED, PRECISION
        )
    return top, total, mixed


@triton.jit
def normalize(top, total, sink_ptr, heads, live, HAS_SINK: tl.constexpr):
    """Factor that turns ``mixed`` into the result, and the natural log-sum over the keys."""
    none = total == 0.0  # not "no more than zero", which a NaN is not either
    lse = (top + tl.log2(tl.where(none, 1.0, total))) / LOG2_E
    lse = tl.where(none, float("-inf"), lse)
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=live, other=0.0) * LOG2_E
        joint = tl.maximum(top, sink)
        decay = tl.exp2(top - joint)
        denominator = total * decay + tl.exp2(sink - joint)
    else:
        decay, denominator = tl.full(total.shape, 1.0, tl.float32), total
    return decay / tl.where(denominator == 0.0, 1.0, denominator), lse


@triton.jit
def unrotate(
    x, positions, live, cos_ptr, stride_cos, sin_ptr, stride_sin,
    D: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Turn the last ``2 * HALF`` of D channels back by the queries' positions."""
    PAIRS: tl.constexpr = (x.shape[2] if WIDE else x.shape[1]) // 2
    if WIDE:
        even, odd = tl.split(tl.reshape(x, (SPLIT, x.shape[1], PAIRS, 2)))
    else:
        pairs = tl.reshape(x, (SPLIT, PAIRS, 2, x.shape[2]))
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    angle = by_channel(SPLIT * PAIRS, SPLIT, WIDE) - (D // 2 - HALF)
    turned = (angle >= 0) & (angle < HALF) & by_row(live, WIDE)
    where = by_row(positions.to(tl.int64), WIDE)
    cos = tl.load(cos_ptr + where * stride_cos + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + where * stride_sin + angle, mask=turned, other=0.0)
    pairs = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    if not WIDE:
        pairs = tl.permute(pairs, (0, 1, 3, 2))
    return tl.reshape(pairs, x.shape)
