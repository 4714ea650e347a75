"""Attention of one token per sequence over the window and the compressed rows.

The same visibility, sink and rotation as ``mla_prefill``; the query stands at ``seq_lens - 1``. A
sequence's tiles, window first, are cut into runs by their own number: a result is a function of its
own rows only, alone or batched. The last run of a sequence to finish joins them all, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.attention.dense import Pools, check_queries, config_key, softmax_mix
from ftkernels.attention.merge import outputs
from ftkernels.attention.prefill import SPEC as _PREFILL
from ftkernels.attention.prefill import Result, flash_cases, rows_seen
from ftkernels.attention.queries import prepare_queries, prepared
from ftkernels.attention.tiles import (
    LOG2_E,
    NEVER,
    by_row,
    compressed_tiles,
    load_rows,
    normalize,
    store_rows,
    unrotate,
    window_tiles,
)  # fmt: skip
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.rope.rope import rotate
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.work import Work, even_loop

_TILE = 16  # rows
_MOST_BLOCKS = 256  # of one sequence: twice the SMs of the largest card in mind


def mla_decode(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, softmax_scale: float, sink: torch.Tensor | None = None,
    window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    num_splits: int | None = None, q_norm_eps: float | None = None, out: Result | None = None,
    scratch: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attend from the newest token of each sequence; its own rows are already in the pools.

    Args:
        q: ``[S, H, D]``, D up to 512, S up to 2048 with 64 heads.
        window_kv: ``[pages, P, D]`` or packed; position ``p`` is row ``p % P`` of page ``p // P``.
        window_block_table: ``[S, max_wpages]`` int32; a -1 page is never read.
        seq_lens: ``[S]`` int32; 0 marks a padded row, which gets zeros.
        softmax_scale: factor on ``q . k``.
        sink: ``[H]`` fp32.
        window: tokens a query sees of the window, itself included.
        cmp_kv, block_table, compress_ratio: compressed rows, all or none of them.
        index_topk: ``[S, topk]`` int32 picks, -1 for none; all visible rows when omitted.
        kv_format: "bf16" (rows in the pools' dtype) or "fp8" (packed), of both pools.
        cos, sin: rope tables; the result is rotated back by the query's position.
        return_lse: also give ``lse [S, H]`` fp32.
        num_splits: upper bound of the runs a sequence's tiles are cut into.
        q_norm_eps: ``q`` is the raw projection: each head is RMS-normed without a weight under this
            eps and rotated by the query's position first, as `rms_norm` and `apply_rope` do.
        out: ``[S, H, D]``, a pair with ``return_lse``.
        scratch: as ``scratch_bytes("mla_decode", S=.., H=.., D=.., topk=.., rows=..)`` says,
            ``rows`` being what ``block_table`` holds, with ``window=`` and ``num_splits=`` where
            they are not the defaults; allocated when omitted.

    Returns:
        ``[S, H, D]`` in the dtype of ``q`` (and ``lse [S, H]`` fp32).

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    pools = _checked(
        q, window_kv, window_block_table, seq_lens, softmax_scale, sink, window, cmp_kv,
        block_table, compress_ratio, index_topk, kv_format, cos, sin, num_splits, q_norm_eps,
    )  # fmt: skip
    if scratch is not None:
        count, heads, dim = q.shape
        num_bytes = _num_bytes(count, heads, dim, _splits(q, pools, index_topk, num_splits))
        others = (
            ("q", q), ("window_kv", window_kv), ("window_block_table", window_block_table),
            ("seq_lens", seq_lens), ("sink", sink), ("cmp_kv", cmp_kv),
            ("block_table", block_table), ("index_topk", index_topk), ("cos", cos), ("sin", sin),
        )  # fmt: skip
        check.scratch("mla_decode", scratch, num_bytes, q, others)
    if backend.use_reference(q):
        return _decode(
            q, pools, seq_lens, softmax_scale, sink, index_topk, cos, sin, return_lse, q_norm_eps,
            out,
        )  # fmt: skip
    result, lse = _outputs(q, pools, seq_lens, sink, index_topk, cos, sin, return_lse, out)
    if result.numel():
        _launch(
            q, pools, seq_lens, softmax_scale, sink, index_topk, cos, sin, num_splits, q_norm_eps,
            result, lse, scratch,
        )  # fmt: skip
    return result if lse is None else (result, lse)


def mla_decode_reference(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, softmax_scale: float, sink: torch.Tensor | None = None,
    window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    num_splits: int | None = None, q_norm_eps: float | None = None, out: Result | None = None,
) -> Result:  # fmt: skip
    """The definition in plain torch, one sequence after another."""
    pools = _checked(
        q, window_kv, window_block_table, seq_lens, softmax_scale, sink, window, cmp_kv,
        block_table, compress_ratio, index_topk, kv_format, cos, sin, num_splits, q_norm_eps,
    )  # fmt: skip
    return _decode(
        q, pools, seq_lens, softmax_scale, sink, index_topk, cos, sin, return_lse, q_norm_eps, out
    )


def _checked(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    seq_lens: torch.Tensor, softmax_scale: float, sink: torch.Tensor | None, window: int,
    cmp_kv: torch.Tensor | None, block_table: torch.Tensor | None, compress_ratio: int,
    index_topk: torch.Tensor | None, kv_format: str, cos: torch.Tensor | None,
    sin: torch.Tensor | None, num_splits: int | None, q_norm_eps: float | None,
) -> Pools:  # fmt: skip
    op = "mla_decode"
    check_queries(op, q, "[S, H, D]", sink, cos, sin, softmax_scale)
    count = q.shape[0]
    check.tensor(op, "seq_lens", seq_lens, (torch.int32,), (count,), "[S]", q)
    pools = Pools(
        window_kv, window_block_table, window, cmp_kv, block_table, compress_ratio, kv_format
    )
    pools.check(op, q, count, 64 if cos is None else 2 * cos.shape[1])
    if num_splits is not None:
        check.integer(op, "num_splits", num_splits, 1)
    if q_norm_eps is not None:
        check.number(op, "q_norm_eps", q_norm_eps, 0)
        check.require(cos is not None, f"{op}: q_norm_eps is given without cos and sin")
    most = COUNTER_BYTES // (4 * max(1, triton.cdiv(q.shape[1], 8)))
    if count > most:
        raise ValueError(f"{op}: q is {tuple(q.shape)}, expected at most {most} sequences")
    if index_topk is not None:
        check.tensor(op, "index_topk", index_topk, (torch.int32,), (count, None), "[S, topk]", q)
        check.require(cmp_kv is not None, f"{op}: index_topk is given without cmp_kv")
    return pools


def _outputs(
    q: torch.Tensor, pools: Pools, seq_lens: torch.Tensor, sink: torch.Tensor | None,
    index_topk: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
    return_lse: bool, out: Result | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    size = (q.shape[0], q.shape[1], q.shape[2])
    inputs = (
        pools.window_kv, pools.window_block_table, seq_lens, sink, pools.cmp_kv,
        pools.block_table, index_topk, cos, sin,
    )  # fmt: skip
    return outputs("mla_decode", out, size, q, q.dtype, return_lse, inputs)


def _decode(
    q: torch.Tensor, pools: Pools, seq_lens: torch.Tensor, softmax_scale: float,
    sink: torch.Tensor | None, index_topk: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, return_lse: bool, q_norm_eps: float | None, out: Result | None,
) -> Result:  # fmt: skip
    lengths = seq_lens.tolist()
    raw = q
    if q_norm_eps is not None and cos is not None and sin is not None:
        positions = (seq_lens - 1).clamp_min_(0)
        q = prepared(q, positions, q_norm_eps, cos, sin)

    def attend(s: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        picks = None if index_topk is None else index_topk[s]
        mixed, total = _attend(q[s], pools, s, lengths[s], picks, softmax_scale, sink, return_lse)
        if cos is not None and sin is not None:
            position = torch.tensor([lengths[s] - 1], device=q.device)
            mixed = rotate(mixed, position, cos, sin, True, mixed)
        return mixed, total

    if len(lengths) == 1 and lengths[0] and out is None and not return_lse:
        return attend(0)[0].to(q.dtype)
    result, lse = _outputs(raw, pools, seq_lens, sink, index_topk, cos, sin, return_lse, out)
    for s, length in enumerate(lengths):
        if length == 0:
            result[s] = 0.0
            if lse is not None:
                lse[s] = float("-inf")
            continue
        mixed, total = attend(s)
        result[s] = mixed[0]
        if lse is not None and total is not None:
            lse[s] = total[0]
    return (result, lse) if lse is not None else result


def _attend(
    q: torch.Tensor, pools: Pools, s: int, length: int, picks: torch.Tensor | None, scale: float,
    sink: torch.Tensor | None, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    rows = pools.newest_rows(s, length)
    if pools.cmp_kv is not None:
        if picks is None:
            numbers = torch.arange(length // pools.compress_ratio, device=q.device)
        else:
            numbers = picks[picks >= 0]
        if numbers.shape[0]:
            rows = torch.cat((rows, pools.compressed_rows(s, numbers)))
    scores = matmul_rows(wide(q), rows)[None].mul_(scale)
    return softmax_mix(scores, rows, sink, return_lse)


@dataclass(frozen=True)
class DecodeConfig:
    """``block_h`` heads a block, from 16 on the long side of the MMA; ``split`` channel slices."""

    block_h: int
    split: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> DecodeConfig:
    """Used when no tuned entry fits."""
    block_h = 8 if key["H"] <= 8 else 16
    if key["bytes"] == 4:
        return DecodeConfig(8, 8, 8, 1)
    return DecodeConfig(block_h, 8 if key["bytes"] == 1 else 4, 4, 2)


def candidates(key: Case, target: Target) -> Iterable[DecodeConfig]:
    """Other cuts of the heads, and stages: split and warps set the order of a row's sums."""
    base = default_config(key)
    cuts = [h for h in (16, 32) if h <= key["H"]] if base.block_h >= 16 else [base.block_h]
    if key["bytes"] != 4:
        for block_h, stages in itertools.product(cuts, (2, 3, 4)):
            yield replace(base, block_h=block_h, num_stages=stages)


def _most_splits(num_heads: int, window: int, rows: int, num_splits: int | None) -> int:
    """Runs that a launch has room for; ``rows`` compressed rows or picks at most.

    More than a sequence has tiles changes nothing, so that a table's width does not either.
    """
    blocks = max(1, triton.cdiv(num_heads, 8 if num_heads <= 8 else 16))
    most = num_splits or max(1, _MOST_BLOCKS // blocks)
    return min(most, triton.cdiv(window, _TILE) + triton.cdiv(rows, _TILE))


def _scratch(
    *, S: int, H: int, D: int, topk: int = 0, rows: int = 0, window: int = 128,
    num_splits: int = 0,
) -> int:  # fmt: skip
    """``topk`` is the width of ``index_topk``, without picks ``rows`` what the table holds."""
    return _num_bytes(S, H, D, _most_splits(H, window, topk or rows, num_splits or None))


def _num_bytes(count: int, num_heads: int, dim: int, splits: int) -> int:
    """Counters, then the state of every run: largest score, sum and mixed rows of each head."""
    return COUNTER_BYTES + 4 * count * splits * num_heads * (dim + 2)


def _splits(
    q: torch.Tensor, pools: Pools, index_topk: torch.Tensor | None, num_splits: int | None
) -> int:
    rows = pools.most_rows if index_topk is None else index_topk.shape[1]
    return _most_splits(q.shape[1], pools.window, rows, num_splits)


def _launch(
    q: torch.Tensor, pools: Pools, seq_lens: torch.Tensor, softmax_scale: float,
    sink: torch.Tensor | None, index_topk: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, num_splits: int | None, q_norm_eps: float | None,
    result: torch.Tensor, lse: torch.Tensor | None, scratch: torch.Tensor | None,
) -> None:  # fmt: skip
    op = "mla_decode"
    count, num_heads, dim = q.shape
    topk = 0 if index_topk is None else index_topk.shape[1]
    splits = _splits(q, pools, index_topk, num_splits)
    with backend.on_device(q):
        cfg = config.lookup(op, config_key(q, pools, topk), default_config)
        others = (("q", q), ("out", result), ("lse", lse))
        num_bytes = _num_bytes(count, num_heads, dim, splits)
        scratch = check.scratch(op, scratch, num_bytes, q, others)
        states = count * splits * num_heads
        floats = scratch[COUNTER_BYTES:num_bytes].view(torch.float32)
        mixed, sums = floats.split((states * dim, 2 * states))
        _mla_decode_kernel[(count, splits, triton.cdiv(num_heads, cfg.block_h))](
            q, q.stride(0), q.stride(1),
            *pools.window_arguments(),
            seq_lens,
            sink,
            *pools.compressed_arguments(),
            index_topk, 0 if index_topk is None else index_topk.stride(0),
            cos, 0 if cos is None else cos.stride(0),
            sin, 0 if sin is None else sin.stride(0),
            result, result.stride(0), result.stride(1),
            lse, 0 if lse is None else lse.stride(0),
            scratch[:COUNTER_BYTES].view(torch.int32), mixed, sums,
            num_heads, topk, softmax_scale * LOG2_E.value, q_norm_eps or 0.0,
            **pools.constants(q), HAS_PICKS=index_topk is not None,
            HAS_SINK=sink is not None, HAS_LSE=lse is not None, RAW=q_norm_eps is not None,
            HALF=0 if cos is None else cos.shape[1], SPLIT=cfg.split,
            NUM_SPLITS=splits, BLOCK_H=cfg.block_h, BLOCK_R=_TILE,
            WIDE=cfg.block_h >= 16,
            num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip


@triton.jit
def _join_runs(
    mixed_ptr, sums_ptr, first, used, heads, live, num_heads, D: tl.constexpr, D_P2: tl.constexpr
):  # fmt: skip
    """State of runs ``[first, first + used)`` together, in order; ``mixed`` is ``[1, R, D_P2]``."""
    sums_ptr += heads
    top = tl.full(heads.shape, NEVER, tl.float32)
    for run in range(0, used):
        tops = sums_ptr + (first + run) * 2 * num_heads
        top = tl.maximum(top, tl.load(tops, mask=live, other=NEVER, cache_modifier=".cg"))
    total = tl.zeros(heads.shape, tl.float32)
    mixed = tl.zeros((1, heads.shape[0], D_P2), tl.float32)
    offs_d = tl.arange(0, D_P2)[None, None, :]
    mask = live[None, :, None] & (offs_d < D)
    for run in range(0, used):
        tops = sums_ptr + (first + run) * 2 * num_heads
        mine = tl.load(tops, mask=live, other=NEVER, cache_modifier=".cg")
        sums = tl.load(tops + num_heads, mask=live, other=0.0, cache_modifier=".cg")
        rows = (((first + run) * num_heads + heads) * D)[None, :, None]
        part = tl.load(mixed_ptr + rows + offs_d, mask=mask, other=0.0, cache_modifier=".cg")
        decay = tl.exp2(mine - top)
        total += sums * decay
        mixed += part * decay[None, :, None]
    return top, total, mixed


@triton.jit
def _finish(
    top, total, mixed, heads, live, position, sink_ptr, cos_ptr, stride_cos, sin_ptr, stride_sin,
    out_ptr, stride_oh, lse_ptr,
    D: tl.constexpr, D_P2: tl.constexpr, HALF: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sink, rotation and store of one sequence's heads."""
    scale, lse = normalize(top, total, sink_ptr, heads, live, HAS_SINK)
    if HAS_LSE:
        tl.store(lse_ptr + heads, lse, mask=live)
    out = mixed * by_row(scale, WIDE)
    if HALF > 0:
        positions = position + heads * 0
        out = unrotate(
            out, positions, live & (positions >= 0), cos_ptr, stride_cos, sin_ptr, stride_sin,
            D, HALF, SPLIT, WIDE,
        )  # fmt: skip
    rows = heads.to(tl.int64) * stride_oh
    store_rows(out_ptr, rows, live, out.to(out_ptr.dtype.element_ty), D, D_P2, SPLIT, WIDE)


@triton.jit(do_not_specialize=["stride_wt", "stride_bt"])
def _mla_decode_kernel(
    q_ptr, stride_qs, stride_qh,  # [S, H, D]
    window_ptr, window_tail_ptr, window_scale_ptr, stride_wp, stride_wr,  # [pages, P, D]
    window_table_ptr, stride_wt,  # [S, max_wpages]
    lens_ptr,  # [S]
    sink_ptr,  # [H]
    cmp_ptr, cmp_tail_ptr, cmp_scale_ptr, stride_cp, stride_cr,  # [pages, Rc, D]
    table_ptr, stride_bt,  # [S, max_pages]
    picks_ptr, stride_kt,  # [S, topk]
    cos_ptr, stride_cos,  # [max_positions, HALF]
    sin_ptr, stride_sin,  # [max_positions, HALF]
    out_ptr, stride_os, stride_oh,  # [S, H, D]
    lse_ptr, stride_ls,  # [S, H]
    counters_ptr,  # [S, head blocks]
    mixed_ptr,  # [S, NUM_SPLITS, H, D]
    sums_ptr,  # [S, NUM_SPLITS, 2, H]: top, total
    num_heads, topk, factor, q_eps,
    WINDOW: tl.constexpr, PER_WINDOW: tl.constexpr, PER_PAGE: tl.constexpr, RATIO: tl.constexpr,
    HAS_PICKS: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, RAW: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, WIDE: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = D_P2 // SPLIT
    WINDOW_TILES: tl.constexpr = (WINDOW + BLOCK_R - 1) // BLOCK_R
    seq, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens_ptr + seq)
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = heads < num_heads
    # window tiles end with the query; those before the sequence do not exist
    low, start = tl.maximum(length - WINDOW, 0), length - WINDOW_TILES * BLOCK_R
    first = (low - start) // BLOCK_R
    in_window = tl.where(length > 0, WINDOW_TILES - first, 0)
    tiles, most = in_window, 0
    if RATIO > 0:
        most = length // RATIO
        if HAS_PICKS:
            tiles += tl.where(length > 0, tl.cdiv(topk, BLOCK_R), 0)
        else:
            tiles += tl.cdiv(most, BLOCK_R)
    per_run = tl.maximum(tl.cdiv(tiles, NUM_SPLITS), 1)
    used = tl.maximum(tl.cdiv(tiles, per_run), 1)
    if run >= used:
        return
    begin = run * per_run
    end = tl.minimum(begin + per_run, tiles)
    q_ptr += seq * stride_qs
    rows = heads.to(tl.int64) * stride_qh
    first_run = seq * NUM_SPLITS
    if RAW:
        # where this run's state goes at the end, each head to its own bytes
        Q_DTYPE: tl.constexpr = q_ptr.dtype.element_ty
        Q_STRIDE: tl.constexpr = D * (32 // Q_DTYPE.primitive_bitwidth)
        own_ptr = mixed_ptr + (first_run + run) * num_heads * D
        own_ptr = own_ptr.to(tl.pointer_type(Q_DTYPE), bitcast=True)
        prepare_queries(
            q_ptr, stride_qh, own_ptr, heads, live, length - 1, q_eps, cos_ptr, stride_cos,
            sin_ptr, stride_sin, D, D_P2, HALF, Q_STRIDE,
        )  # fmt: skip
        q_ptr, rows = own_ptr, heads.to(tl.int64) * Q_STRIDE
    q = load_rows(q_ptr, rows, live, D, D_P2, SPLIT, WIDE).to(DTYPE)
    top = tl.full((BLOCK_H,), NEVER, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mixed = tl.zeros((SPLIT, BLOCK_H, DIM) if WIDE else (SPLIT, DIM, BLOCK_H), tl.float32)
    top, total, mixed = window_tiles(
        first + begin, first + tl.minimum(end, in_window), start, low, length, heads,
        q, top, total, mixed, factor, window_ptr, window_tail_ptr, window_scale_ptr,
        stride_wp, stride_wr, window_table_ptr + seq * stride_wt,
        WINDOW, PER_WINDOW, D, D_P2, SPLIT, BLOCK_R, True, False, WIDE, PACKED, DTYPE, PRECISION,
    )  # fmt: skip
    if RATIO > 0:
        if HAS_PICKS:
            picks_ptr += seq * stride_kt
        top, total, mixed = compressed_tiles(
            tl.maximum(begin - in_window, 0), end - in_window, heads, most, picks_ptr, topk,
            q, top, total, mixed, factor, cmp_ptr, cmp_tail_ptr, cmp_scale_ptr,
            stride_cp, stride_cr, table_ptr + seq * stride_bt,
            PER_PAGE, HAS_PICKS, D, D_P2, SPLIT, BLOCK_R, True, WIDE, PACKED, DTYPE, PRECISION,
        )  # fmt: skip
    out_ptr += seq * stride_os
    if HAS_LSE:
        lse_ptr += seq * stride_ls
    if NUM_SPLITS == 1:
        _finish(
            top, total, mixed, heads, live, length - 1, sink_ptr, cos_ptr, stride_cos, sin_ptr,
            stride_sin, out_ptr, stride_oh, lse_ptr, D, D_P2, HALF, HAS_SINK, HAS_LSE, SPLIT, WIDE,
        )  # fmt: skip
    else:
        tops = sums_ptr + (first_run + run) * 2 * num_heads + heads
        tl.store(tops, top, mask=live)
        tl.store(tops + num_heads, total, mask=live)
        rows = ((first_run + run) * num_heads + heads) * D
        store_rows(mixed_ptr, rows, live, mixed, D, D_P2, SPLIT, WIDE)
        # all threads' states are in memory before the run counts as finished
        tl.debug_barrier()
        counter = counters_ptr + seq * tl.num_programs(2) + tl.program_id(2)
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            joint_top, joint_total, joint = _join_runs(
                mixed_ptr, sums_ptr, first_run, used, heads, live, num_heads, D, D_P2
            )
            _finish(
                joint_top, joint_total, joint, heads, live, length - 1, sink_ptr, cos_ptr,
                stride_cos, sin_ptr, stride_sin, out_ptr, stride_oh, lse_ptr, D, D_P2, HALF,
                HAS_SINK, HAS_LSE, 1, True,
            )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    sequences, length = case["S"], case["length"]
    one = {**case, "T": 1, "pos0": length - 1}
    (q, pool, table, _, _), kwargs = _PREFILL.inputs(one, device=device, seed=seed)
    lens = torch.full((sequences,), length, dtype=torch.int32, device=device)
    for name in ("block_table", "index_topk"):
        if name in kwargs:
            kwargs[name] = kwargs[name].expand(sequences, -1)
    if case.get("raw"):
        kwargs["q_norm_eps"] = 1e-6
    q = q.expand(sequences, -1, -1)
    return (q, pool, table.expand(sequences, -1), lens), kwargs


def _work(case: Case, kernel: str, config: Case) -> Work:
    length, ratio = case["length"], case["ratio"]
    near = min(length, 128)
    far = rows_seen(case, length - 1) - near
    window = triton.cdiv(near, _TILE)
    rows = triton.cdiv(case.get("topk", far), _TILE) if ratio else 0
    per_run = triton.cdiv(window + rows, config["NUM_SPLITS"])
    runs = triton.cdiv(window + rows, per_run)
    blocks = case["S"] * runs * triton.cdiv(case["H"], config["BLOCK_H"])
    macs = 2 * case["S"] * case["H"] * case["D"]
    loops = even_loop(macs * near, blocks, window / runs), even_loop(
        macs * far, blocks, rows / runs
    )
    return Work(blocks, loops if ratio else loops[:1])


_FLASH = flash_cases({"S": 1, "length": 4096})
SPEC = KernelSpec(
    op=mla_decode, reference=mla_decode_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=5e-3, scratch=_scratch,
    cases=(
        {"name": "small", "S": 2, "H": 2, "D": 128, "length": 300, "ratio": 4, "topk": 16},
        {"name": "exact-csa", "S": 1, "H": 8, "D": 512, "length": 300, "ratio": 4, "topk": 40,
         "fp32": 1},
        {"name": "flash-tp8-hca-fp8", "S": 1, "H": 8, "D": 512, "length": 4096, "ratio": 128,
         "kv_format": "fp8"},
        {"name": "small-raw", "S": 2, "H": 3, "D": 128, "length": 300, "ratio": 128, "raw": 1},
        *_FLASH,
        *({**c, "name": f"{c['name']}-raw", "raw": 1} for c in _FLASH if c["H"] in (8, 64)),
    ),
    bytes_moved=lambda c: 2 * c["S"] * c["D"] * (rows_seen(c, c["length"] - 1) + 2 * c["H"]),
    flops=lambda c: 4 * c["S"] * c["H"] * c["D"] * rows_seen(c, c["length"] - 1),
    work=_work,
)  # fmt: skip
