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
_BLOCK = tl.constexpr(1024)  # scores moved at a time
_SCAN = tl.constexpr(4096)  # scores counted at a time
_NAN = tl.constexpr(0x7FC00000)


def capacity(topk: int, chunk: int) -> int:
    """Scores that a query's buffer has room for: a chunk besides `topk`, in whole blocks."""
    block = min(chunk, _SCAN.value)
    return -(-(topk + chunk) // block) * block


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
    held = tl.load(state_ptr)
    floor = tl.load(state_ptr + 1).to(tl.float32, bitcast=True)
    if (held + count > CAP) | (held > 0) & (numbered == 0):
        floor = _keep_best(
            scores_ptr, rows_ptr, rows_ptr, held, numbered, False, TOPK, CHUNK, BLOCK
        )
        held = tl.minimum(held, TOPK)
    for begin in range(0, count, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        # other blocks may have written them
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
    held = tl.load(state_ptr)
    _keep_best(scores_ptr, rows_ptr, out_ptr, held, numbered, True, TOPK, CHUNK, BLOCK)


@triton.jit
def all_visible(out_ptr, num_rows, TOPK: tl.constexpr):
    """Write rows ``0 .. num_rows``, then -1."""
    for begin in range(0, TOPK, _BLOCK):
        offs = begin + tl.arange(0, _BLOCK)
        tl.store(out_ptr + offs, tl.where(offs < num_rows, offs, -1), mask=offs < TOPK)


@triton.jit
def _fill_up(scores_ptr, held, BLOCK: tl.constexpr):
    stop = tl.cdiv(held, BLOCK) * BLOCK
    if held < stop:
        offs = held + tl.arange(0, BLOCK)
        tl.store(scores_ptr + offs, tl.full([BLOCK], _NAN, tl.int32), mask=offs < stop)
        tl.debug_barrier()


@triton.jit
def _keep_best(
    scores_ptr, rows_ptr, out_ptr, held, numbered,
    FINAL: tl.constexpr, TOPK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the best `TOPK`, or all where there are no more, to the front, rows to `out_ptr`.

    Returns their cut: what is not above it is not wanted any more.
    """
    SCAN: tl.constexpr = CHUNK if CHUNK < _SCAN else _SCAN
    _fill_up(scores_ptr, held, SCAN)
    cut, last_tie = _cut(scores_ptr, held, TOPK, SCAN)
    filled = tl.full([], 0, tl.int32)
    for begin in range(0, held, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        score = _load(scores_ptr + offs)
        row = offs
        if numbered:
            row = tl.load(rows_ptr + offs)
        kept = (score > cut) | ((score == cut) & (offs <= last_tie))
        place = filled + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(out_ptr + place, row, mask=kept)
        if not FINAL:
            tl.store(scores_ptr + place, score.to(tl.int32, bitcast=True), mask=kept)
        filled += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return tl.where(held > TOPK, cut, float("nan"))


@triton.jit
def _load(bits_ptrs):
    return tl.load(bits_ptrs).to(tl.float32, bitcast=True)


@triton.jit
def _cut(scores_ptr, held, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """A cut that `TOPK` of the scores reach, and the last place at which one may equal it.

    The bracket ``low <= cut < high`` shrinks by straight lines through the logarithms of the
    counts at its ends, with the weight of an end halved while the other one moves.
    """
    offs = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, held, BLOCK):
        score = _load(scores_ptr + begin + offs)
        lowest = tl.minimum(lowest, score)
        highest = tl.maximum(highest, score)
    low = ordered(tl.min(lowest, 0))
    high = tl.where(held > TOPK, ordered(tl.max(highest, 0)) + 1, low)
    wanted = tl.log2(tl.full([], TOPK, tl.float32))
    more = tl.log2(held.to(tl.float32)) - wanted
    less = wanted + 1.0  # as if half a score were above the last key
    reached_low, reached_high = held, tl.full([], 0, tl.int32)
    turn = tl.full([], 0, tl.int32)
    rose = turn  # 1 when the lower end moved last; no matter at first
    while low + 1 < high:
        middle = _between(low, high, tl.fdiv(more, tl.maximum(more + less, 1e-6)), turn)
        cut = unordered(middle)
        count = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, held, BLOCK):
            count += tl.where(_load(scores_ptr + begin + offs) >= cut, 1.0, 0.0)
        reached = tl.sum(count, 0).to(tl.int32)
        enough = reached >= TOPK
        apart = tl.log2(reached.to(tl.float32) + 0.5) - wanted
        again = tl.where(enough == (rose > 0), 0.5, 1.0)
        more = tl.where(enough, apart, more * again)
        less = tl.where(enough, less * again, -apart)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached_low = tl.where(enough, reached, reached_low)
        reached_high = tl.where(enough, reached_high, reached)
        high = tl.where(reached == TOPK, low, high)
        rose = enough.to(tl.int32)
        turn += 1
    last_tie = tl.full([], 2147483647, tl.int32)
    cut = unordered(low)
    if (reached_low > TOPK) & (held > TOPK):
        last_tie = _nth_tie(scores_ptr, held, cut, TOPK - reached_high, BLOCK)
    return cut, last_tie


@triton.jit
def _between(low, high, share, turn):
    """A key between two: `share` of the way between their values, now and then the mean."""
    # an infinity stands for a large number, and so does the NaN after the last key
    guess = tl.maximum(unordered(low), -3e38) * (1.0 - share)
    guess += tl.minimum(unordered(high), 3e38) * share
    apart = low ^ high
    middle = (low & high) + (apart >> 1) + (apart & 1)
    middle = tl.where((turn % 8 < 7) & (turn < 24), ordered(guess), middle)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _nth_tie(scores_ptr, held, cut, number, BLOCK: tl.constexpr):
    """Where the tie of this number stands."""
    place = tl.full([], -1, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for begin in range(0, held, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        tied = (_load(scores_ptr + offs) == cut).to(tl.int32)
        rank = seen + tl.cumsum(tied, 0)
        place = tl.maximum(place, tl.max(tl.where((tied > 0) & (rank == number), offs, -1), 0))
        seen += tl.sum(tied, 0)
    return place
