"""The kernels of `compress_kv`: who does what, the pooling itself, and the way into the pool.

Program ``s < S`` is the first one of sequence ``s``; the others take up what the sequences leave,
in order, by a sum over all lengths. Old state is read by a sequence's first program alone. Where
the state that is written may be the one that was read, the same program writes it, afterwards.
Every fused multiply-add is spelled out, so that no two paths to a row differ in its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.attention.stores import (
    fp4_round_trip,
    fp8_round_trip,
    normed_row,
    rotated_row,
    rounded,
    store_index_row,
    store_packed_row,
    store_row,
    turned_row,
)

CSA_RATIO, HCA_RATIO = 4, 128
_CSA = tl.constexpr(CSA_RATIO)
_HCA = tl.constexpr(HCA_RATIO)
_RING = tl.constexpr(2 * CSA_RATIO)


def num_programs(compress_ratio: int, num_tokens: int, num_sequences: int) -> int:
    """One a sequence, and as many as its tokens can keep busy beside the first, at the most."""
    if compress_ratio == CSA_RATIO:
        return num_sequences + num_tokens // CSA_RATIO
    # n tokens lie in at most 1 + (n + 126) // 128 windows
    windows = (num_tokens + (HCA_RATIO - 2) * num_sequences) // HCA_RATIO
    return num_sequences + min(num_tokens // 2, windows)


def sequence_lanes(num_sequences: int) -> int:
    """BLOCK_S of a launch; the same for 2 to 64 sequences, so that few kernels are compiled."""
    return 1 if num_sequences == 1 else max(64, triton.next_power_of_2(num_sequences))


@triton.jit
def _later_rows(pos0, end):
    """Rows beyond the first two that tokens ``pos0..end-1`` close; only those two see old state."""
    return tl.maximum(end // _CSA - pos0 // _CSA - 2, 0)


@triton.jit
def _is_joined(pos0, end):
    """Whether the open window's state goes over the one that the first window starts from."""
    windows = (end - 1) // _HCA - pos0 // _HCA
    return (windows > 0) & (pos0 % _HCA != 0) & ((end - pos0) % 2 == 0)


@triton.jit
def _later_windows(pos0, end):
    """Windows beyond the first one, less the last where the first one's program takes it."""
    return (end - 1) // _HCA - pos0 // _HCA - _is_joined(pos0, end).to(tl.int32)


@triton.jit
def place(
    pid, index_ptr, cu_ptr, lens_ptr, S, IS_CSA: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Sequence and number of the work of a program; a surplus one gets a sequence from S on."""
    sequence, number = pid, tl.full((), 0, tl.int32)
    if pid >= S:
        offs_s = tl.arange(0, BLOCK_S)
        mask_s = offs_s < S
        begin = tl.load(cu_ptr + offs_s, mask=mask_s, other=0)
        stop = tl.load(cu_ptr + offs_s + 1, mask=mask_s, other=0)
        end = tl.load(lens_ptr + offs_s, mask=mask_s, other=0)
        owner = tl.load(index_ptr + offs_s, mask=mask_s, other=-1)
        pos0 = end - (stop - begin)
        later = _later_rows(pos0, end) if IS_CSA else _later_windows(pos0, end)
        later = tl.where((owner >= 0) & (stop > begin) & (end > 0), later, 0)
        rank = pid - S
        sequence = tl.sum((tl.cumsum(later, 0) <= rank).to(tl.int32), 0)
        number = rank + 1 - tl.sum(tl.where(offs_s < sequence, later, 0), 0)
    return sequence, number


@triton.jit
def _store_pooled(
    x, row, table_row, norm_ptr, eps, cos_ptr, stride_cp, sin_ptr, stride_sp,
    pool_ptr, stride_pp, stride_pr, num_rows, factor,
    RATIO: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr,
    LOG2_C: tl.constexpr, STORE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Norm, RoPE at ``RATIO * row``, round trip and store of one row."""
    dtype: tl.constexpr = tl.float32 if pool_ptr.dtype.element_ty == tl.float32 else tl.bfloat16
    x = normed_row(rounded(x, dtype), norm_ptr, eps, C, BLOCK_C, dtype)
    if HALF > 0:
        position = row.to(tl.int64) * RATIO
        cos_row, sin_row = cos_ptr + position * stride_cp, sin_ptr + position * stride_sp
        x = rotated_row(x, cos_row, sin_row, C, HALF, BLOCK_C, dtype)
    page = tl.load(table_row + row // num_rows).to(tl.int64)
    page_ptr = pool_ptr + page * stride_pp
    row = (row % num_rows).to(tl.int64)
    if STORE == "index":
        x = turned_row(x, factor, BLOCK_C, LOG2_C, dtype)
    if PACKED:
        if STORE == "index":
            store_index_row(x, page_ptr, row, num_rows)
        else:
            store_packed_row(x, page_ptr, row, num_rows)
    else:
        if STORE == "index":
            x = fp4_round_trip(x, BLOCK_C, dtype)
        elif STORE == "kv" and C > 2 * HALF:
            x = fp8_round_trip(x, C - 2 * HALF, BLOCK_C, dtype)
        store_row(x, page_ptr + row * stride_pr, C, BLOCK_C)


@triton.jit
def _pool_csa(
    row, pos0, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
    ring_ptr, stride_sb, stride_sr, C: tl.constexpr, BLOCK_C: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """Softmax over the 8 slots of a row, per channel; OLD: some of them may lie in the ring."""
    offs_i = tl.arange(0, _CSA)[:, None]
    offs_c = tl.arange(0, BLOCK_C)[None, :]
    top = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    # series A of the window before, which the first row does not have, then B of its own
    for series in range(tl.where(row == 0, 1, 0), 2):
        position = (offs_i + (row - 1 + series) * _CSA).to(tl.int64)
        offs_w = offs_c + series * C
        ape_ptrs = ape_ptr + offs_i.to(tl.int64) * stride_ap + offs_w
        bias = tl.load(ape_ptrs, mask=offs_c < C, other=0.0)
        is_new = offs_c < C
        if OLD:
            is_new = is_new & (position >= pos0)
        z = tl.load(gate_ptr + position * stride_gt + offs_w, mask=is_new, other=0.0)
        value = tl.load(kv_ptr + position * stride_kt + offs_w, mask=is_new, other=0.0)
        if OLD:
            is_old = (offs_c < C) & (position < pos0)
            old_ptrs = ring_ptr + (position % _RING) * stride_sr + offs_w
            value = tl.where(is_old, tl.load(old_ptrs, mask=is_old, other=0.0), value)
            z = tl.where(is_old, tl.load(old_ptrs + stride_sb, mask=is_old, other=0.0), z)
        z += bias
        new_top = tl.maximum(top, tl.max(z, 0))
        decay, p = tl.exp(top - new_top), tl.exp(z - new_top[None, :])
        total = tl.fma(total, decay, tl.sum(p, 0))
        mixed = tl.fma(mixed, decay, tl.sum(tl.fma(p, value, 0.0), 0))
        top = new_top
    return mixed / total


@triton.jit
def _copy_ring(
    pos0, end, kv_ptr, stride_kt, gate_ptr, stride_gt, ring_ptr, stride_sb, stride_sr,
    W: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The newest 8 tokens, or as many as are new, to their places in the ring."""
    offs_w = tl.arange(0, BLOCK_W)
    mask_w = offs_w < W
    for p in range(tl.maximum(pos0, end - _RING), end):
        position = tl.full((), p, tl.int64)
        kv = tl.load(kv_ptr + position * stride_kt + offs_w, mask=mask_w, other=0.0)
        gate = tl.load(gate_ptr + position * stride_gt + offs_w, mask=mask_w, other=0.0)
        new_ptrs = ring_ptr + (position % _RING) * stride_sr + offs_w
        tl.store(new_ptrs, kv, mask=mask_w)
        tl.store(new_ptrs + stride_sb, gate, mask=mask_w)


@triton.jit
def _keep_carry(
    row, pos0, kv_ptr, stride_kt, gate_ptr, stride_gt, ring_ptr, stride_sb, stride_sr,
    snaps_ptr, stride_nn, stride_nb, stride_nr, entry_ptr, num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """After a page's last row: series A of its four tokens, of which some may lie in the ring."""
    if (row + 1) % num_rows == 0:
        entry = tl.load(entry_ptr + row // num_rows).to(tl.int64)
        if entry >= 0:
            offs_i = tl.arange(0, _CSA).to(tl.int64)[:, None]
            offs_c = tl.arange(0, BLOCK_C)[None, :]
            position = row.to(tl.int64) * _CSA + offs_i
            is_new = (offs_c < C) & (position >= pos0)
            is_old = (offs_c < C) & (position < pos0)
            kv_ptrs = kv_ptr + position * stride_kt + offs_c
            gate_ptrs = gate_ptr + position * stride_gt + offs_c
            old_ptrs = ring_ptr + (position % _RING) * stride_sr + offs_c
            snap_ptrs = snaps_ptr + entry * stride_nn + offs_i * stride_nr + offs_c
            tl.store(snap_ptrs, tl.load(kv_ptrs, mask=is_new, other=0.0), mask=is_new)
            tl.store(snap_ptrs, tl.load(old_ptrs, mask=is_old, other=0.0), mask=is_old)
            old_ptrs += stride_sb
            snap_ptrs += stride_nb
            tl.store(snap_ptrs, tl.load(gate_ptrs, mask=is_new, other=0.0), mask=is_new)
            tl.store(snap_ptrs, tl.load(old_ptrs, mask=is_old, other=0.0), mask=is_old)


@triton.jit
def csa_rows(
    sequence, number,
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, 2*C]
    ape_ptr, stride_ap,  # [4, 2*C]
    norm_ptr,  # [C]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 8, 2*C]
    index_ptr,  # [S]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, C], or packed
    num_rows,
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    snaps_ptr, stride_nn, stride_nb, stride_nr,  # [N, 2, 4, C]
    snap_table_ptr, stride_st,  # [S, max_pages]
    eps, factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, LOG2_C: tl.constexpr,
    STORE: tl.constexpr, PACKED: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """Work `number` of a sequence: rows of it and, in its first, the state."""
    owner = tl.load(index_ptr + sequence).to(tl.int64)
    begin = tl.load(cu_ptr + sequence).to(tl.int64)
    num_new = tl.load(cu_ptr + sequence + 1) - tl.load(cu_ptr + sequence)
    end = tl.load(lens_ptr + sequence)
    if (owner >= 0) & (num_new > 0) & (end > 0):
        pos0 = end - num_new
        # where position 0 would lie
        kv_ptr += (begin - pos0) * stride_kt
        gate_ptr += (begin - pos0) * stride_gt
        ring_ptr = state_ptr + owner * stride_sn
        table_row = table_ptr + tl.full((), sequence, tl.int64) * stride_ts
        first = pos0 // _CSA + tl.where(number > 0, number + 1, 0)
        stop = first + 1
        if number == 0:
            stop = tl.minimum(first + 2, end // _CSA)
        for j in range(first, stop):
            row = tl.full((), j, tl.int32)
            if number == 0:
                x = _pool_csa(
                    row, pos0, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
                    ring_ptr, stride_sb, stride_sr, C, BLOCK_C, True,
                )  # fmt: skip
            else:
                x = _pool_csa(
                    row, pos0, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
                    ring_ptr, stride_sb, stride_sr, C, BLOCK_C, False,
                )  # fmt: skip
            _store_pooled(
                x, row, table_row, norm_ptr, eps, cos_ptr, stride_cp, sin_ptr, stride_sp,
                pool_ptr, stride_pp, stride_pr, num_rows, factor,
                _CSA, C, BLOCK_C, HALF, LOG2_C, STORE, PACKED,
            )  # fmt: skip
            if SNAPSHOTS:
                _keep_carry(
                    row, pos0, kv_ptr, stride_kt, gate_ptr, stride_gt, ring_ptr, stride_sb,
                    stride_sr, snaps_ptr, stride_nn, stride_nb, stride_nr,
                    snap_table_ptr + tl.full((), sequence, tl.int64) * stride_st, num_rows,
                    C, BLOCK_C,
                )  # fmt: skip
        if number == 0:
            # every thread of the block has read the ring
            tl.debug_barrier()
            _copy_ring(
                pos0, end, kv_ptr, stride_kt, gate_ptr, stride_gt, ring_ptr, stride_sb, stride_sr,
                2 * C, 2 * BLOCK_C,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stride_ts", "stride_st"])
def csa_kernel(
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, 2*C]
    ape_ptr, stride_ap,  # [4, 2*C]
    norm_ptr,  # [C]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 8, 2*C]
    index_ptr,  # [S]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, C], or packed
    num_rows,
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    snaps_ptr, stride_nn, stride_nb, stride_nr,  # [N, 2, 4, C]
    snap_table_ptr, stride_st,  # [S, max_pages]
    S, eps, factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, LOG2_C: tl.constexpr,
    STORE: tl.constexpr, PACKED: tl.constexpr, SNAPSHOTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    sequence, number = place(tl.program_id(0), index_ptr, cu_ptr, lens_ptr, S, True, BLOCK_S)
    if sequence < S:
        csa_rows(
            sequence, number,
            kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap, norm_ptr, state_ptr,
            stride_sn, stride_sb, stride_sr, index_ptr, pool_ptr, stride_pp, stride_pr, num_rows,
            table_ptr, stride_ts, cu_ptr, lens_ptr, cos_ptr, stride_cp, sin_ptr, stride_sp,
            snaps_ptr, stride_nn, stride_nb, stride_nr, snap_table_ptr, stride_st, eps, factor, C,
            BLOCK_C, HALF, LOG2_C, STORE, PACKED, SNAPSHOTS,
        )  # fmt: skip


@triton.jit
def _advance(
    top, total, mixed, p, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The token at ``p`` into the running largest gate, sum and weighted sum of its window."""
    position = tl.full((), p, tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    z = tl.load(gate_ptr + position * stride_gt + offs_c, mask=mask_c, other=0.0)
    z += tl.load(ape_ptr + (position % _HCA) * stride_ap + offs_c, mask=mask_c, other=0.0)
    value = tl.load(kv_ptr + position * stride_kt + offs_c, mask=mask_c, other=0.0)
    new_top = tl.maximum(top, z)
    decay, weight = tl.exp(top - new_top), tl.exp(z - new_top)
    total = tl.fma(total, decay, weight)
    return new_top, total, tl.fma(mixed, decay, weight * value)


@triton.jit
def hca_rows(
    sequence, number,
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, C]
    ape_ptr, stride_ap,  # [128, C]
    norm_ptr,  # [C]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 3, C]
    index_ptr,  # [S]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, C], or packed
    num_rows,
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    eps, factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, LOG2_C: tl.constexpr,
    STORE: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Work `number` of a sequence: rows of it and, in its first, the state."""
    owner = tl.load(index_ptr + sequence).to(tl.int64)
    begin = tl.load(cu_ptr + sequence).to(tl.int64)
    num_new = tl.load(cu_ptr + sequence + 1) - tl.load(cu_ptr + sequence)
    end = tl.load(lens_ptr + sequence)
    if (owner >= 0) & (num_new > 0) & (end > 0):
        pos0 = end - num_new
        # where position 0 would lie
        kv_ptr += (begin - pos0) * stride_kt
        gate_ptr += (begin - pos0) * stride_gt
        offs_c = tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        state_ptrs = state_ptr + owner * stride_sn + offs_c
        table_row = table_ptr + tl.full((), sequence, tl.int64) * stride_ts
        first, last = pos0 // _HCA, (end - 1) // _HCA
        turns = 1 + ((number == 0) & _is_joined(pos0, end)).to(tl.int32)
        for turn in range(0, turns):
            window = tl.where(turn == 0, first + number, last)
            start, stop = tl.maximum(window * _HCA, pos0), tl.minimum(window * _HCA + _HCA, end)
            # a window that an earlier call began; its state is in the buffer of the token before
            is_open = offs_c < tl.where(start > window * _HCA, C, 0)
            old_ptrs = state_ptrs + ((start + 1) % 2) * stride_sb
            top = tl.load(old_ptrs, mask=is_open, other=float("-inf"))
            total = tl.load(old_ptrs + stride_sr, mask=is_open, other=0.0)
            mixed = tl.load(old_ptrs + stride_sr + stride_sr, mask=is_open, other=0.0)
            # stages of copies run ahead of the chain of sums, which goes token by token
            for p in tl.range(start, stop, num_stages=STAGES):
                top, total, mixed = _advance(
                    top, total, mixed, p, kv_ptr, stride_kt, gate_ptr, stride_gt,
                    ape_ptr, stride_ap, C, BLOCK_C,
                )  # fmt: skip
            if stop == window * _HCA + _HCA:
                _store_pooled(
                    mixed / total, window, table_row, norm_ptr, eps, cos_ptr, stride_cp,
                    sin_ptr, stride_sp, pool_ptr, stride_pp, stride_pr, num_rows, factor,
                    _HCA, C, BLOCK_C, HALF, LOG2_C, STORE, PACKED,
                )  # fmt: skip
            if window == last:
                # every thread of the block has read the buffer
                tl.debug_barrier()
                new_ptrs = state_ptrs + ((end + 1) % 2) * stride_sb
                tl.store(new_ptrs, top, mask=mask_c)
                tl.store(new_ptrs + stride_sr, total, mask=mask_c)
                tl.store(new_ptrs + stride_sr + stride_sr, mixed, mask=mask_c)


@triton.jit(do_not_specialize=["stride_ts"])
def hca_kernel(
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, C]
    ape_ptr, stride_ap,  # [128, C]
    norm_ptr,  # [C]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 3, C]
    index_ptr,  # [S]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, C], or packed
    num_rows,
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    S, eps, factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, LOG2_C: tl.constexpr,
    STORE: tl.constexpr, PACKED: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, number = place(tl.program_id(0), index_ptr, cu_ptr, lens_ptr, S, False, BLOCK_S)
    if sequence < S:
        hca_rows(
            sequence, number,
            kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap, norm_ptr, state_ptr,
            stride_sn, stride_sb, stride_sr, index_ptr, pool_ptr, stride_pp, stride_pr, num_rows,
            table_ptr, stride_ts, cu_ptr, lens_ptr, cos_ptr, stride_cp, sin_ptr, stride_sp, eps,
            factor, C, BLOCK_C, HALF, LOG2_C, STORE, PACKED, STAGES,
        )  # fmt: skip
