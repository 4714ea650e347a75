"""Triton helpers that find where a falling order of logits is cut, without sorting.

The order is by value, then by lower id. A cut is the last ``(key, id)`` kept, with `ordered` keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASS = tl.constexpr(1 << 30)
KEY_LOWEST = tl.constexpr(-2139095041)
"""`ordered` of -inf."""
_KEY_MIN = tl.constexpr(-2147483648)
_KEY_MAX = tl.constexpr(2147483647)


@triton.jit
def ordered(x):
    """int32 in the order of fp32 `x`: both zeros alike, NaN as -inf."""
    x = tl.where(x != x, float("-inf"), x)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The fp32 value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_scaled(logits_ptr, offs, V, temperature):
    """``logits / temperature`` in IEEE fp32; -inf for NaN and past the end."""
    x = tl.load(logits_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    dead = (x != x) | (x == float("-inf"))
    return tl.where(dead, float("-inf"), tl.div_rn(x, zeros_like(x) + temperature))


@triton.jit
def zeros_like(x):
    return tl.where(x == x, 0.0, 0.0)


@triton.jit
def is_kept(key, ids, cut_key, cut_id):
    """Whether tokens stand at or before a cut."""
    return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))


@triton.jit
def _weight(z, top, BY_MASS: tl.constexpr):
    # probabilities relative to the largest, as integers: their sum has no order
    if BY_MASS:
        return (tl.exp(z - top) * MASS).to(tl.int64)
    else:
        return tl.where(z == z, 1, 1).to(tl.int64)


@triton.jit
def total_mass(logits_ptr, V, temperature, top, cut_key, cut_id, BLOCK_V: tl.constexpr):
    """Weight of all tokens kept by a cut."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        z = load_scaled(logits_ptr, offs, V, temperature)
        kept = is_kept(ordered(z), offs, cut_key, cut_id)
        total += tl.sum(tl.where(kept, _weight(z, top, True), 0), 0)
    return total


@triton.jit
def tighten(
    logits_ptr, V, temperature, top, high, cut_key, cut_id, target,
    BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The cut after which the tokens ahead of each one kept weigh less than `target`.

    `high` is the largest key; `cut_key` is the key of a token.
    """
    low = cut_key
    # bisection between keys of tokens: the smallest one that less than target stands above
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        ahead = tl.full([], 0, tl.int64)
        below, above = low, high
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)
            z = load_scaled(logits_ptr, offs, V, temperature)
            key = ordered(z)
            kept = is_kept(key, offs, cut_key, cut_id)
            over = kept & (key > middle)
            ahead += tl.sum(tl.where(over, _weight(z, top, BY_MASS), 0), 0)
            below = tl.maximum(below, tl.max(tl.where(kept & (key <= middle), key, _KEY_MIN), 0))
            above = tl.minimum(above, tl.min(tl.where(over, key, _KEY_MAX), 0))
        enough = ahead < target
        high = tl.where(enough, below, high)
        low = tl.where(enough, low, above)
    return low, _last_tie(
        logits_ptr, V, temperature, top, low, cut_key, cut_id, target, BY_MASS, BLOCK_V
    )


@triton.jit
def _last_tie(
    logits_ptr, V, temperature, top, key_at, cut_key, cut_id, target,
    BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    ahead = tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        z = load_scaled(logits_ptr, offs, V, temperature)
        key = ordered(z)
        over = is_kept(key, offs, cut_key, cut_id) & (key > key_at)
        ahead += tl.sum(tl.where(over, _weight(z, top, BY_MASS), 0), 0)
    each = tl.maximum(_weight(unordered(key_at), top, BY_MASS), 1)
    allowed = (target - ahead + each - 1) // each
    last = tl.full([], -1, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        key = ordered(load_scaled(logits_ptr, offs, V, temperature))
        tied = (key == key_at) & is_kept(key, offs, cut_key, cut_id)
        rank = seen + tl.cumsum(tied.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(tied & (rank <= allowed), offs, -1), 0))
        seen += tl.sum(tied.to(tl.int32), 0)
    return last
