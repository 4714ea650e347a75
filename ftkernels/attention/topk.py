"""Triton side of a streaming top-k: scores come in rising rows, the best of them stay in memory.

A query owns a buffer of scores and their rows, rising by row. A chunk's scores above the floor are
appended; when the next chunk might not fit, the best ``TOPK`` are kept in place and the floor
becomes their cut. So the lower row stays on ties, and the rows come out in order.
Scores are fp32 without NaN; the buffer is read in whole blocks, filled up with NaN, which no
comparison takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels import backend  # noqa: F401  (first: it fixes interpretation)
from ftkernels.sampling.select import ordered, unordered

STATE = tl.constexpr(16)  # words of a query's state: scores held, floor
_BLOCK = tl.constexpr(2048)
_NAN = tl.constexpr(0x7FC00000)


def capacity(topk: int, chunk: int) -> int:
    """Scores that a query's buffer has room for: whole blocks, and two chunks besides `topk`."""
    block = min(chunk, _BLOCK.value)
    return -(-topk // block) * block + 2 * chunk


@triton.jit
def set_state(state_ptr, held, floor):
    """`held` scores lie in the buffer; all that are not at or below `floor` are wanted."""
    tl.debug_barrier()
    tl.store(state_ptr, held)
    tl.store(state_ptr + 1, floor.to(tl.int32, bitcast=True))
    tl.debug_barrier()


@triton.jit
def append(
    state_ptr, scores_ptr, rows_ptr, raw_ptr, first, count, numbered,
    TOPK: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Take in the scores of rows ``first .. first + count``, which lie at `raw_ptr`.

    Without `numbered`, the scores in the buffer are those of rows 0, 1, .. and all are there.
    """
    BLOCK: tl.constexpr = CHUNK if CHUNK < _BLOCK else _BLOCK
    tl.debug_barrier()
    held = tl.load(state_ptr, cache_modifier=".cg")
    floor = tl.load(state_ptr + 1, cache_modifier=".cg").to(tl.float32, bitcast=True)
    if (held + count > CAP) | (held > 0) & (numbered == 0):
        _fill_up(scores_ptr, held, BLOCK)
        floor = _keep_best(scores_ptr, rows_ptr, rows_ptr, held, numbered, False, TOPK, BLOCK)
        held = tl.minimum(held, TOPK)
    for begin in range(0, count, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        bits = tl.load(raw_ptr + offs, cache_modifier=".cg")
        score = bits.to(tl.float32, bitcast=True)
        taken = (offs < count) & ((score <= floor) == 0)
        place = held + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(scores_ptr + place, bits, mask=taken)
        tl.store(rows_ptr + place, first + offs, mask=taken)
        held += tl.sum(taken.to(tl.int32), 0)
    set_state(state_ptr, held, floor)


@triton.jit
def finish(
    state_ptr, scores_ptr, rows_ptr, out_ptr, numbered, TOPK: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the best `TOPK` rows, rising; at least so many scores have been taken in."""
    BLOCK: tl.constexpr = CHUNK if CHUNK < _BLOCK else _BLOCK
    tl.debug_barrier()
    held = tl.load(state_ptr, cache_modifier=".cg")
    _fill_up(scores_ptr, held, BLOCK)
    _keep_best(scores_ptr, rows_ptr, out_ptr, held, numbered, True, TOPK, BLOCK)


@triton.jit
def all_visible(out_ptr, num_rows, TOPK: tl.constexpr):
    """Write rows ``0 .. num_rows``, then -1."""
    for begin in range(0, TOPK, _BLOCK):
        offs = begin + tl.arange(0, _BLOCK)
        tl.store(out_ptr + offs, tl.where(offs < num_rows, offs, -1), mask=offs < TOPK)


@triton.jit
def _fill_up(scores_ptr, held, BLOCK: tl.constexpr):
    offs = held + tl.arange(0, BLOCK)
    nan = tl.full([BLOCK], _NAN, tl.int32)
    tl.store(scores_ptr + offs, nan, mask=offs < tl.cdiv(held, BLOCK) * BLOCK)
    tl.debug_barrier()


@triton.jit
def _keep_best(
    scores_ptr, rows_ptr, out_ptr, held, numbered,
    FINAL: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the best `TOPK`, or all where there are no more, to the front, rows to `out_ptr`.

    Returns their cut: what is not above it is not wanted any more.
    """
    cut, above = _cut(scores_ptr, held, TOPK, BLOCK)
    room = TOPK - above
    filled = tl.full([], 0, tl.int32)
    for begin in range(0, held, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        bits = tl.load(scores_ptr + offs, cache_modifier=".cg")
        score = bits.to(tl.float32, bitcast=True)
        row = tl.load(rows_ptr + offs, mask=tl.full([BLOCK], 0, tl.int32) + numbered > 0, other=0,
                      cache_modifier=".cg")  # fmt: skip
        row = tl.where(numbered > 0, row, offs)
        over = score > cut
        tied = score == cut
        # both counts in one scan: of a block's scores none fills 16 bits
        seen = tl.cumsum(tl.where(over, 1, 0) + tl.where(tied, 0x10000, 0), 0)
        ties = seen >> 16
        place = filled + (seen & 0xFFFF) + tl.minimum(ties, room) - 1
        kept = over | (tied & (ties <= room))
        tl.debug_barrier()
        tl.store(out_ptr + place, row, mask=kept)
        if not FINAL:
            tl.store(scores_ptr + place, bits, mask=kept)
        filled += tl.sum(kept.to(tl.int32), 0)
        room -= tl.minimum(tl.sum(tied.to(tl.int32), 0), room)
    tl.debug_barrier()
    return tl.where(held > TOPK, cut, float("nan"))


@triton.jit
def _cut(scores_ptr, held, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The largest cut that `TOPK` of the scores reach, and how many are above it.

    Where no tie is cut, it may lie between two scores, with 0 as the count.
    """
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, held, BLOCK):
        bits = tl.load(scores_ptr + begin + tl.arange(0, BLOCK), cache_modifier=".cg")
        score = bits.to(tl.float32, bitcast=True)
        lowest = tl.minimum(lowest, score)
        highest = tl.maximum(highest, score)
    low = ordered(tl.min(lowest, 0))
    high = ordered(tl.max(highest, 0)) + 1
    reached_low, reached_high = held, tl.full([], 0, tl.int32)
    if held <= TOPK:
        high = low
    turn = tl.full([], 0, tl.int32)
    while low + 1 < high:
        middle = _between(low, high, reached_low, reached_high, turn, TOPK)
        cut = unordered(middle)
        count = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, held, BLOCK):
            bits = tl.load(scores_ptr + begin + tl.arange(0, BLOCK), cache_modifier=".cg")
            count += (bits.to(tl.float32, bitcast=True) >= cut).to(tl.int32)
        reached = tl.sum(count, 0)
        enough = reached >= TOPK
        low = tl.where(enough, middle, low)
        reached_low = tl.where(enough, reached, reached_low)
        high = tl.where(enough, high, middle)
        reached_high = tl.where(enough, reached_high, reached)
        # the very number: no tie is cut
        high = tl.where(reached == TOPK, low, high)
        reached_high = tl.where(reached == TOPK, 0, reached_high)
        turn += 1
    return unordered(low), reached_high


@triton.jit
def _between(low, high, reached_low, reached_high, turn, TOPK: tl.constexpr):
    """A key between two: where a straight line has the count, every third time the mean."""
    share = (reached_low - TOPK + 0.5) / (reached_low - reached_high).to(tl.float32)
    # an infinity stands for a large number, and so does the NaN after the last key
    guess = tl.maximum(unordered(low), -3e38) * (1.0 - share)
    guess += tl.minimum(unordered(high), 3e38) * share
    apart = low ^ high
    middle = (low & high) + (apart >> 1) + (apart & 1)
    middle = tl.where(turn % 3 < 2, ordered(guess), middle)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)
