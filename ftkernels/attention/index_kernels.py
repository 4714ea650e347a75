"""The two kernels of `index_select`, each the op's only launch.

Few queries: blocks over row ranges of each query, and the last to arrive selects. Many: each block
takes two neighbouring queries at a time, scores a chunk of rows for both and merges it into their
best rows so far, so that scratch grows with neither the queries nor the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.attention import topk as best
from ftkernels.attention.index_scores import any_lost, load_query, rescore_rows, score_rows


@triton.jit
def _wide(number):
    # interpreted, a loop's number is Python's
    return tl.full([], 0, tl.int64) + number


@triton.jit
def _locate(t, cu_ptr, lens_ptr, T, S, ratio):
    """Sequence of token `t`, and the rows it sees: 0 where it belongs to none."""
    ended = tl.full([], 0, tl.int32)
    for begin in range(0, S, 128):
        offs_s = begin + tl.arange(0, 128)
        end = tl.load(cu_ptr + 1 + offs_s, mask=offs_s < S, other=2147483647)
        ended += tl.sum((end <= t).to(tl.int32), 0)
    known = (ended < S) & (t < T)
    s = tl.minimum(ended, S - 1)
    length = tl.load(lens_ptr + s)
    position = length - (tl.load(cu_ptr + 1 + s) - t)
    # in an empty sequence positions are below 0, and what is seen is not above it
    return s, tl.where(known, (position + 1) // ratio, 0)


@triton.jit(do_not_specialize=["T", "S", "stride_ts"])
def index_split_kernel(
    q_ptr, stride_qt, stride_qh,  # [T, Hi, Di]
    w_ptr, stride_wt,  # [T, Hi]
    k_ptr, stride_kp,  # [pages, Rc, Di]
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    out_ptr, stride_ot,  # [T, topk]
    counter_ptr, scratch_ptr, T, S, ratio, most, words,
    TOPK: tl.constexpr, STRIDE_KR: tl.constexpr, HI: tl.constexpr, BLOCK_H: tl.constexpr,
    DI: tl.constexpr, BLOCK_D: tl.constexpr, RC: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, CAP: tl.constexpr, NQ: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    splits = tl.num_programs(1)
    s, num_rows = _locate(tl.program_id(0), cu_ptr, lens_ptr, T, S, ratio)
    num_rows = tl.minimum(num_rows, most)  # what the table, and so scratch, has room for
    out_ptr += pid_t * stride_ot
    if num_rows <= TOPK:
        if tl.program_id(1) == 0:
            best.all_visible(out_ptr, num_rows, TOPK)
    else:
        state_ptr = scratch_ptr + pid_t * words
        scores_ptr = state_ptr + best.STATE
        rows_ptr = scores_ptr + CAP
        raw_ptr = rows_ptr + CAP
        q_ptr += pid_t * stride_qt
        w_ptr += pid_t * stride_wt
        table_ptr += s.to(tl.int64) * stride_ts
        tiles = tl.cdiv(num_rows, BLOCK_R)
        first = tl.program_id(1) * tl.cdiv(tiles, splits) * BLOCK_R
        last = tl.minimum(first + tl.cdiv(tiles, splits) * BLOCK_R, num_rows)
        if not EXACT:
            qa, qb, w = load_query(q_ptr, stride_qh, w_ptr, HI, BLOCK_H, DI, BLOCK_D, PACKED)
            score_rows(
                raw_ptr + first, 0, first, last, num_rows, qa, qb, w, qa, qb, w,
                k_ptr, stride_kp, table_ptr, STRIDE_KR, DI, BLOCK_D, RC, BLOCK_R, 1, PACKED,
            )  # fmt: skip
        lost = first < last
        if not EXACT:
            lost = any_lost(raw_ptr + first, last - first, BLOCK_R)
        if lost:
            rescore_rows(
                raw_ptr + first, first, last, q_ptr, stride_qh, w_ptr,
                k_ptr, stride_kp, table_ptr, STRIDE_KR,
                HI, BLOCK_H, DI, BLOCK_D, RC, 32, PACKED, EXACT,
            )  # fmt: skip
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + pid_t, 1, sem="acq_rel")
        if arrived == splits - 1:
            best.set_state(state_ptr, 0, tl.full([], float("nan"), tl.float32))
            for begin in range(0, num_rows, CHUNK):
                best.append(
                    state_ptr, scores_ptr, rows_ptr, raw_ptr + begin, begin,
                    tl.minimum(num_rows - begin, CHUNK), 1, TOPK, CAP, CHUNK,
                )  # fmt: skip
            best.finish(state_ptr, scores_ptr, rows_ptr, out_ptr, 1, TOPK, CHUNK)
            tl.store(counter_ptr + pid_t, 0)


@triton.jit(do_not_specialize=["T", "S", "stride_ts"])
def index_stream_kernel(
    q_ptr, stride_qt, stride_qh,  # [T, Hi, Di]
    w_ptr, stride_wt,  # [T, Hi]
    k_ptr, stride_kp,  # [pages, Rc, Di]
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    out_ptr, stride_ot,  # [T, topk]
    counter_ptr, scratch_ptr, T, S, ratio, most, words,
    TOPK: tl.constexpr, STRIDE_KR: tl.constexpr, HI: tl.constexpr, BLOCK_H: tl.constexpr,
    DI: tl.constexpr, BLOCK_D: tl.constexpr, RC: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, CAP: tl.constexpr, NQ: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    slot_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * NQ * words
    for begin_t in range(tl.program_id(0) * NQ, T, tl.num_programs(0) * NQ):
        s0, rows0 = _locate(begin_t, cu_ptr, lens_ptr, T, S, ratio)
        s1, rows1 = s0, 0
        if NQ == 2:
            s1, rows1 = _locate(begin_t + 1, cu_ptr, lens_ptr, T, S, ratio)
        for i in range(0, tl.minimum(NQ, T - begin_t)):
            seen = tl.where(i == 0, rows0, rows1)
            if seen <= TOPK:
                out_row = out_ptr + _wide(begin_t + i) * stride_ot
                best.all_visible(out_row, seen, TOPK)
        # neighbours in one sequence share its rows, others take turns
        turns = tl.where(s0 == s1, 1, 2)
        for turn in range(0, turns):
            t = _wide(begin_t + turn)
            _scan(
                q_ptr + t * stride_qt, stride_qt, stride_qh, w_ptr + t * stride_wt, stride_wt,
                k_ptr, stride_kp,
                table_ptr + tl.where(turn == 0, s0, s1).to(tl.int64) * stride_ts,
                out_ptr + t * stride_ot, stride_ot, slot_ptr, words,
                tl.where(turn == 0, rows0, rows1), tl.where(turns == 1, rows1, 0),
                TOPK, STRIDE_KR, HI, BLOCK_H, DI, BLOCK_D, RC, BLOCK_R,
                CHUNK, CAP, NQ, PACKED, EXACT,
            )  # fmt: skip


@triton.jit
def _scan(
    q_ptr, stride_qt, stride_qh, w_ptr, stride_wt, k_ptr, stride_kp, table_ptr,
    out_ptr, stride_ot, slot_ptr, words, rows0, rows1,
    TOPK: tl.constexpr, STRIDE_KR: tl.constexpr, HI: tl.constexpr, BLOCK_H: tl.constexpr,
    DI: tl.constexpr, BLOCK_D: tl.constexpr, RC: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, CAP: tl.constexpr, NQ: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Pick for a query that sees `rows0` rows and, unless `rows1` is 0, for the one after it."""
    num_rows = tl.maximum(rows0, rows1)
    if num_rows > TOPK:
        scores_ptr = slot_ptr + best.STATE
        if not EXACT:
            q0a, q0b, w0 = load_query(q_ptr, stride_qh, w_ptr, HI, BLOCK_H, DI, BLOCK_D, PACKED)
            q1a, q1b, w1 = q0a, q0b, w0
            if NQ == 2:
                after = tl.where(rows1 > 0, 1, 0).to(tl.int64)
                q1a, q1b, w1 = load_query(
                    q_ptr + after * stride_qt, stride_qh, w_ptr + after * stride_wt,
                    HI, BLOCK_H, DI, BLOCK_D, PACKED,
                )  # fmt: skip
        for first in range(0, num_rows, CHUNK):
            last = tl.minimum(first + CHUNK, num_rows)
            # the first chunk is scored into the buffer itself
            chunk_ptr = scores_ptr + tl.multiple_of(tl.where(first > 0, 2 * CAP, 0), 16)
            if not EXACT:
                score_rows(
                    chunk_ptr, words, first, last, num_rows, q0a, q0b, w0, q1a, q1b, w1,
                    k_ptr, stride_kp, table_ptr, STRIDE_KR, DI, BLOCK_D, RC, BLOCK_R, NQ, PACKED,
                )  # fmt: skip
            for i in range(0, NQ):
                seen = tl.where(i == 0, rows0, rows1)
                if (seen > TOPK) & (seen > first):
                    stop = tl.minimum(last, seen)
                    lost = first < stop
                    if not EXACT:
                        lost = any_lost(chunk_ptr + i * words, stop - first, CHUNK)
                    if lost:
                        rescore_rows(
                            chunk_ptr + i * words, first, stop,
                            q_ptr + _wide(i) * stride_qt, stride_qh, w_ptr + _wide(i) * stride_wt,
                            k_ptr, stride_kp, table_ptr, STRIDE_KR,
                            HI, BLOCK_H, DI, BLOCK_D, RC, 32, PACKED, EXACT,
                        )  # fmt: skip
                    state_ptr = slot_ptr + i * words
                    if first == 0:
                        best.set_state(state_ptr, stop, tl.full([], float("nan"), tl.float32))
                    else:
                        best.append(
                            state_ptr, scores_ptr + i * words, scores_ptr + i * words + CAP,
                            chunk_ptr + i * words, first, stop - first, first > CHUNK,
                            TOPK, CAP, CHUNK,
                        )  # fmt: skip
        for i in range(0, NQ):
            seen = tl.where(i == 0, rows0, rows1)
            if seen > TOPK:
                best.finish(
                    slot_ptr + i * words, scores_ptr + i * words, scores_ptr + i * words + CAP,
                    out_ptr + _wide(i) * stride_ot, seen > CHUNK, TOPK, CHUNK,
                )  # fmt: skip
