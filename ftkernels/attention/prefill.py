"""Attention of new tokens over the window and the compressed rows, one latent head as key and
value.

Visible: window rows ``max(0, p-window+1)..p`` and compressed rows ``j < (p+1)//ratio``, or exactly
the entries ``>= 0`` of ``index_topk``. The sink is in the denominator only; ``lse`` is over the
keys. Query blocks and tiles of rows stand at places that a query's position alone decides, so that
the cut of a prompt into chunks does not change a bit.
Numerics: fp32 scores, softmax, sums and rotation, one rounding of the result; probabilities take
the rows' dtype before the value product.
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
from ftkernels.attention.pools import empty_pool
from ftkernels.attention.ragged import sequences
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
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn
from ftkernels.work import Work, even_loop

_QUERY_BLOCK = 64
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def mla_prefill(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, softmax_scale: float,
    sink: torch.Tensor | None = None, window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    out: Result | None = None, scratch: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attend from every new token; their own rows are already in the pools.

    Args:
        q: ``[T, H, D]``, D up to 512.
        window_kv: ``[pages, P, D]`` or packed; position ``p`` is row ``p % P`` of page ``p // P``.
        window_block_table: ``[S, max_wpages]`` int32; a -1 page is never read.
        cu_seqlens, seq_lens: ``[S+1]``, ``[S]`` int32.
        softmax_scale: factor on ``q . k``.
        window: tokens a query sees of the window, itself included.
        kv_format: "bf16" (rows in the pools' dtype) or "fp8" (packed), of both pools.
        sink: ``[H]`` fp32.
        cmp_kv, block_table, compress_ratio: compressed rows, all or none of them.
        index_topk: ``[T, topk]`` int32 picks, -1 for none; all visible rows when omitted.
        cos, sin: rope tables; the result is rotated back by the query's position.
        return_lse: also give ``lse [T, H]`` fp32.
        out: ``[T, H, D]``, a pair with ``return_lse``.
        scratch: accepted, and none is needed.

    Returns:
        ``[T, H, D]`` in the dtype of ``q`` (and ``lse``). Rows of no sequence are zero, ``lse``
        -inf.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    check.given_scratch("mla_prefill", scratch, q)
    pools, result, lse = _checked(
        q, window_kv, window_block_table, cu_seqlens, seq_lens, softmax_scale, sink, window,
        cmp_kv, block_table, compress_ratio, index_topk, kv_format, cos, sin, return_lse, out,
    )  # fmt: skip
    if result.numel():
        run = _prefill if backend.use_reference(q) else _launch
        run(q, pools, cu_seqlens, seq_lens, softmax_scale, sink, index_topk, cos, sin, result, lse)
    return result if lse is None else (result, lse)


def mla_prefill_reference(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, softmax_scale: float,
    sink: torch.Tensor | None = None, window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    out: Result | None = None,
) -> Result:  # fmt: skip
    """The definition in plain torch, block by block of each sequence."""
    pools, result, lse = _checked(
        q, window_kv, window_block_table, cu_seqlens, seq_lens, softmax_scale, sink, window,
        cmp_kv, block_table, compress_ratio, index_topk, kv_format, cos, sin, return_lse, out,
    )  # fmt: skip
    if result.numel():
        _prefill(
            q, pools, cu_seqlens, seq_lens, softmax_scale, sink, index_topk, cos, sin, result, lse
        )
    return result if lse is None else (result, lse)


def _checked(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, softmax_scale: float,
    sink: torch.Tensor | None, window: int, cmp_kv: torch.Tensor | None,
    block_table: torch.Tensor | None, compress_ratio: int, index_topk: torch.Tensor | None,
    kv_format: str, cos: torch.Tensor | None, sin: torch.Tensor | None, return_lse: bool,
    out: Result | None,
) -> tuple[Pools, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    op = "mla_prefill"
    check_queries(op, q, "[T, H, D]", sink, cos, sin, softmax_scale)
    check.tensor(op, "seq_lens", seq_lens, (torch.int32,), (None,), "[S]", q)
    count = seq_lens.shape[0]
    check.tensor(op, "cu_seqlens", cu_seqlens, (torch.int32,), (count + 1,), "[S+1]", q)
    pools = Pools(
        window_kv, window_block_table, window, cmp_kv, block_table, compress_ratio, kv_format
    )
    pools.check(op, q, count, 64 if cos is None else 2 * cos.shape[1])
    if index_topk is not None:
        picks_size = (q.shape[0], None)
        check.tensor(op, "index_topk", index_topk, (torch.int32,), picks_size, "[T, topk]", q)
        check.require(cmp_kv is not None, f"{op}: index_topk is given without cmp_kv")
    size = (q.shape[0], q.shape[1], q.shape[2])
    inputs = (
        window_kv, window_block_table, cu_seqlens, seq_lens, sink, cmp_kv, block_table,
        index_topk, cos, sin,
    )  # fmt: skip
    return pools, *outputs(op, out, size, q, q.dtype, return_lse, inputs)


def _prefill(
    q: torch.Tensor, pools: Pools, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor,
    softmax_scale: float, sink: torch.Tensor | None, index_topk: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None, result: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:  # fmt: skip
    result.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    for s, begin, end, pos0 in sequences(cu_seqlens, seq_lens):
        last = pos0 + end - begin
        for block in range(pos0 // _QUERY_BLOCK, (last - 1) // _QUERY_BLOCK + 1):
            lo = max(pos0, _QUERY_BLOCK * block)
            hi = min(last, _QUERY_BLOCK * (block + 1))
            rows = slice(begin + lo - pos0, begin + hi - pos0)
            picks = None if index_topk is None else index_topk[rows]
            mixed, total = _attend(
                q[rows], pools, s, block, lo, picks, softmax_scale, sink, lse is not None
            )
            if cos is not None and sin is not None:
                positions = torch.arange(lo, hi, device=q.device)
                mixed = rotate(mixed, positions, cos, sin, True, mixed)
            result[rows] = mixed.to(q.dtype)
            if lse is not None and total is not None:
                lse[rows] = total


def _attend(
    q: torch.Tensor, pools: Pools, s: int, block: int, lo: int, picks: torch.Tensor | None,
    scale: float, sink: torch.Tensor | None, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Queries at ``lo..`` of one aligned block over the block's fixed range of keys."""
    num, heads, dim = q.shape
    positions = torch.arange(lo, lo + num, device=q.device)[:, None]
    flat = wide(q).reshape(num * heads, dim)
    start = _QUERY_BLOCK * block - pools.window + 1
    keys = torch.arange(start, _QUERY_BLOCK * (block + 1), device=q.device)
    seen = (keys <= positions) & (keys > positions - pools.window) & (keys >= 0)
    rows = _live(pools.window_rows(s, keys.clamp_min(0)), seen)
    parts, mask = [rows], [seen]
    if pools.cmp_kv is not None and picks is None:
        total = _QUERY_BLOCK * (block + 1) // pools.compress_ratio
        numbers = torch.arange(total, device=q.device)
        seen = numbers < (positions + 1) // pools.compress_ratio
        parts.append(_live(pools.compressed_rows(s, numbers), seen))
        mask.append(seen)
    rows, seen = torch.cat(parts), torch.cat(mask, dim=1)
    scores = matmul_rows(flat, rows).view(num, heads, -1) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if picks is None:
        return softmax_mix(scores, rows, sink, return_lse)
    chosen = pools.compressed_rows(s, picks.long().clamp_min(0).flatten())
    chosen = _live(chosen, picks.reshape(1, -1) >= 0).view(num, -1, dim)
    extra = torch.bmm(_padded(wide(q)), chosen.transpose(1, 2))[:, :heads] * scale
    extra = extra.masked_fill((picks < 0)[:, None], float("-inf"))
    both = torch.cat((rows.expand(num, -1, -1), chosen), dim=1)
    return softmax_mix(torch.cat((scores, extra), dim=2), both, sink, return_lse)


def _live(rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Zeros for rows that nobody sees: they may never have been written."""
    return torch.where(seen.any(dim=0)[:, None], rows, 0.0)


def _padded(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(q, (0, 0, 0, max(0, 4 - q.shape[1])))


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of ``block_window`` and ``block_rows`` rows against ``block_q * block_h`` queries.

    ``split`` slices of channels; from 16 queries on the queries stand on the MMA's long side.
    """

    block_q: int
    block_h: int
    block_window: int
    block_rows: int
    split: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> PrefillConfig:
    """Used when no tuned entry fits.

    One query with its picks, or whole blocks of 16 rows of queries where rows are shared; 32 rows
    from 32 heads on, which halves what is read.
    """
    block_h = min(triton.next_power_of_2(key["H"]), 32)
    if key["bytes"] == 1:
        return _packed_config(max(block_h, 8))
    if key["bytes"] == 4:
        return PrefillConfig(1, 8, 16, 16, 8, 8, 1)
    if block_h < 16 and not key["topk"]:
        return PrefillConfig(16 // block_h, block_h, 16, 16, 4, 4, 3)
    if block_h < 16:
        return PrefillConfig(1, 8, 32, 32, 4, 4, 3)
    return PrefillConfig(1, block_h, 16, 32 if key["topk"] and block_h == 16 else 16, 4, 4, 3)


def _packed_config(block_h: int) -> PrefillConfig:
    if block_h < 16:
        return PrefillConfig(1, block_h, 32, 32, 8, 4, 2)
    return PrefillConfig(1, block_h, 16, 16, 8, 8 if block_h == 32 else 4, 2)


def candidates(key: Case, target: Target) -> Iterable[PrefillConfig]:
    """Other cuts of the queries, and stages: the tiles of rows set the order of a row's sums."""
    base = default_config(key)
    cuts = [(base.block_q, base.block_h)]
    if base.block_q > 1:
        cuts = [(16 // block_h, block_h) for block_h in (1, 2, 4, 8) if block_h <= key["H"]]
    elif base.block_h >= 16:
        cuts = [(1, block_h) for block_h in (16, 32) if block_h <= key["H"]]
    if key["bytes"] != 4:
        for (block_q, block_h), stages in itertools.product(cuts, (2, 3, 4)):
            yield replace(base, block_q=block_q, block_h=block_h, num_stages=stages)


def _launch(
    q: torch.Tensor, pools: Pools, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor,
    softmax_scale: float, sink: torch.Tensor | None, index_topk: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None, result: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:  # fmt: skip
    (num_tokens, num_heads, _), num_seqs = q.shape, seq_lens.shape[0]
    topk = 0 if index_topk is None else index_topk.shape[1]
    with backend.on_device(q):
        cfg = config.lookup("mla_prefill", config_key(q, pools, topk), default_config)
        blocks = num_tokens
        if cfg.block_q > 1:
            blocks = num_tokens // cfg.block_q + 2 * (num_seqs + 1)
        # with maxnreg: no spill to make room for blocks that shared memory does not admit
        _mla_prefill_kernel[(blocks, triton.cdiv(num_heads, cfg.block_h))](
            q, q.stride(0), q.stride(1),
            *pools.window_arguments(),
            cu_seqlens, seq_lens,
            sink,
            *pools.compressed_arguments(),
            index_topk, 0 if index_topk is None else index_topk.stride(0),
            cos, 0 if cos is None else cos.stride(0),
            sin, 0 if sin is None else sin.stride(0),
            result, result.stride(0), result.stride(1),
            lse, 0 if lse is None else lse.stride(0),
            num_tokens, num_seqs, num_heads, topk, softmax_scale * LOG2_E.value,
            **pools.constants(q), HAS_PICKS=index_topk is not None,
            HAS_SINK=sink is not None, HAS_LSE=lse is not None,
            HALF=0 if cos is None else cos.shape[1], SPLIT=cfg.split,
            STEPS=_search_steps(num_seqs), BLOCK_Q=cfg.block_q, BLOCK_H=cfg.block_h,
            BLOCK_W=cfg.block_window, BLOCK_R=cfg.block_rows,
            WIDE=cfg.block_q * cfg.block_h >= 16,
            num_warps=cfg.num_warps, num_stages=cfg.num_stages, maxnreg=255,
        )  # fmt: skip


def _search_steps(num_seqs: int) -> int:
    """Halvings that find a sequence; the same for 2 to 63, so that few kernels are compiled."""
    return 1 if num_seqs == 1 else max(6, num_seqs.bit_length())


@triton.jit
def _first_block(seq, cu_ptr, BLOCK_Q: tl.constexpr):
    """Where the blocks of ``seq`` begin; it may begin and end inside a block of positions."""
    begin = tl.load(cu_ptr + seq)
    return begin if BLOCK_Q == 1 else begin // BLOCK_Q + 2 * seq


@triton.jit
def _find_sequence(pid, cu_ptr, num_seqs, BLOCK_Q: tl.constexpr, STEPS: tl.constexpr):
    """The last sequence that begins at block ``pid`` or before; ``num_seqs`` owns what is left.

    By halves and one number at a time: whoever compiles it sees that all threads agree.
    """
    seq = 0
    for step in tl.static_range(STEPS):
        later = seq + (1 << (STEPS - 1 - step))
        first = _first_block(tl.minimum(later, num_seqs), cu_ptr, BLOCK_Q)
        seq = tl.where((later <= num_seqs) & (first <= pid), later, seq)
    return seq


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "stride_wt", "stride_bt"])
def _mla_prefill_kernel(
    q_ptr, stride_qt, stride_qh,  # [T, H, D]
    window_ptr, window_tail_ptr, window_scale_ptr, stride_wp, stride_wr,  # [pages, P, D]
    window_table_ptr, stride_wt,  # [S, max_wpages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    sink_ptr,  # [H]
    cmp_ptr, cmp_tail_ptr, cmp_scale_ptr, stride_cp, stride_cr,  # [pages, Rc, D]
    table_ptr, stride_bt,  # [S, max_pages]
    picks_ptr, stride_kt,  # [T, topk]
    cos_ptr, stride_cos,  # [max_positions, HALF]
    sin_ptr, stride_sin,  # [max_positions, HALF]
    out_ptr, stride_ot, stride_oh,  # [T, H, D]
    lse_ptr, stride_lt,  # [T, H]
    num_tokens, num_seqs, num_heads, topk, factor,
    WINDOW: tl.constexpr, PER_WINDOW: tl.constexpr, PER_PAGE: tl.constexpr, RATIO: tl.constexpr,
    HAS_PICKS: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, HALF: tl.constexpr,
    D: tl.constexpr, D_P2: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = D_P2 // SPLIT
    R: tl.constexpr = BLOCK_Q * BLOCK_H
    ONE: tl.constexpr = BLOCK_Q == 1
    seq = _find_sequence(tl.program_id(0), cu_ptr, num_seqs, BLOCK_Q, STEPS)
    begin = tl.load(cu_ptr + seq)
    end, length = num_tokens, 0
    if seq < num_seqs:
        end, length = tl.load(cu_ptr + seq + 1), tl.load(lens_ptr + seq)
    count = end - begin
    # a sequence of no length sees nothing, wherever its rows would stand
    pos0 = tl.where(length > 0, length - count, 0)
    block = tl.program_id(0) - _first_block(seq, cu_ptr, BLOCK_Q) + pos0 // BLOCK_Q
    block *= BLOCK_Q
    if block >= pos0 + count:
        return
    low = tl.maximum(block, pos0)
    high = tl.where(length > 0, tl.minimum(block + BLOCK_Q, length), 0)
    offs_r = tl.arange(0, R)
    positions = block + offs_r // BLOCK_H
    heads = tl.program_id(1) * BLOCK_H + offs_r % BLOCK_H
    live = (positions >= pos0) & (positions < pos0 + count) & (heads < num_heads)
    tokens = (begin - pos0 + positions).to(tl.int64)
    q = load_rows(
        q_ptr, tokens * stride_qt + heads.to(tl.int64) * stride_qh, live, D, D_P2, SPLIT, WIDE
    ).to(DTYPE)
    top = tl.full((R,), NEVER, tl.float32)
    total = tl.zeros((R,), tl.float32)
    mixed = tl.zeros((SPLIT, R, DIM) if WIDE else (SPLIT, DIM, R), tl.float32)
    seq_row = tl.minimum(seq, num_seqs - 1).to(tl.int64)
    low = tl.maximum(low - WINDOW + 1, 0)
    if ONE:
        # tiles end with the query itself
        TILES: tl.constexpr = (WINDOW + BLOCK_W - 1) // BLOCK_W
        start = high - TILES * BLOCK_W
        first = (low - start) // BLOCK_W
    else:
        start, first = low // BLOCK_W * BLOCK_W, 0
    top, total, mixed = window_tiles(
        first, tl.where(high > 0, tl.cdiv(high - start, BLOCK_W), 0), start, low, high, positions,
        q, top, total, mixed, factor, window_ptr, window_tail_ptr, window_scale_ptr,
        stride_wp, stride_wr, window_table_ptr + seq_row * stride_wt,
        WINDOW, PER_WINDOW, D, D_P2, SPLIT, BLOCK_W, ONE, not ONE and PER_WINDOW % BLOCK_W == 0,
        WIDE, PACKED, DTYPE, PRECISION,
    )  # fmt: skip
    if RATIO > 0:
        most = high // RATIO
        last = tl.cdiv(most, BLOCK_R)
        if HAS_PICKS:
            last = tl.where(high > 0, tl.cdiv(topk, BLOCK_R), 0)
            picks_ptr += (begin - pos0 + block).to(tl.int64) * stride_kt
        top, total, mixed = compressed_tiles(
            0, last, (positions + 1) // RATIO, most, picks_ptr, topk, q, top, total, mixed, factor,
            cmp_ptr, cmp_tail_ptr, cmp_scale_ptr, stride_cp, stride_cr,
            table_ptr + seq_row * stride_bt,
            PER_PAGE, HAS_PICKS, D, D_P2, SPLIT, BLOCK_R, ONE, WIDE, PACKED, DTYPE, PRECISION,
        )  # fmt: skip
    scale, lse = normalize(top, total, sink_ptr, heads, live, HAS_SINK)
    if HAS_LSE:
        tl.store(lse_ptr + tokens * stride_lt + heads, lse, mask=live)
    out = mixed * by_row(scale, WIDE)
    if HALF > 0:
        out = unrotate(
            out, positions, live & (positions < high), cos_ptr, stride_cos, sin_ptr, stride_sin,
            D, HALF, SPLIT, WIDE,
        )  # fmt: skip
    store_rows(
        out_ptr, tokens * stride_ot + heads.to(tl.int64) * stride_oh, live,
        out.to(out_ptr.dtype.element_ty), D, D_P2, SPLIT, WIDE,
    )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, heads, dim, ratio = case["T"], case["H"], case["D"], case["ratio"]
    length = case["pos0"] + tokens
    pages, kv_format = -(-length // 128), case.get("kv_format", "bf16")
    dtype = torch.float32 if case.get("fp32") else torch.bfloat16
    q = randn(tokens, heads, dim, dtype=dtype, device=device, seed=seed)

    def pool(rows: int) -> torch.Tensor:
        made = empty_pool(pages + 1, rows, dim, kv_format=kv_format, dtype=dtype, device=device)
        if made.device.type != "meta" and kv_format == "bf16":
            made.copy_(randn(*made.shape, dtype=made.dtype, seed=seed + rows))
        return made

    table = torch.arange(1, pages + 1, dtype=torch.int32)[None].to(device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32).to(device)
    lens = torch.tensor([length], dtype=torch.int32).to(device)
    rope = min(64, dim // 4)
    angles = randn(length, rope // 2 if kv_format == "bf16" else 32, device=device, seed=seed + 2)
    kwargs: dict[str, object] = {
        "softmax_scale": dim**-0.5, "sink": randn(heads, device=device, seed=seed + 1),
        "kv_format": kv_format, "cos": angles.cos(), "sin": angles.sin(),
    }  # fmt: skip
    if ratio:
        kwargs |= {"cmp_kv": pool(128 // ratio), "block_table": table, "compress_ratio": ratio}
    if ratio == 4:
        picks = torch.arange(case["topk"], dtype=torch.int32).expand(tokens, -1)
        kwargs["index_topk"] = picks.contiguous().to(device)
    return (q, pool(128), table, bounds, lens), kwargs


def rows_seen(case: Case, position: int) -> int:
    """Rows that the query at ``position`` sees."""
    ratio, extra = case["ratio"], 0
    if ratio:
        extra = (position + 1) // ratio
    if "topk" in case:
        extra = min(extra, case["topk"])
    return min(position + 1, 128) + extra


def flash_cases(size: Case) -> tuple[Case, ...]:
    """The model's layers under 8, 4, 2 and 1 cards; ``size`` has the counts of tokens."""
    layers: tuple[tuple[str, Case], ...] = (
        ("swa", {"ratio": 0}), ("hca", {"ratio": 128}), ("csa", {"ratio": 4, "topk": 512}),
        ("csa-fp8", {"ratio": 4, "topk": 512, "kv_format": "fp8"}),
    )  # fmt: skip
    return tuple(
        {"name": f"flash-tp{tp}-{name}", **size, "H": 64 // tp, "D": 512, **layer}
        for tp in (8, 4, 2, 1)
        for name, layer in layers
    )


def _work(case: Case, kernel: str, config: Case) -> Work:
    block_q, size, end = config["BLOCK_Q"], config["BLOCK_W"], case["pos0"] + case["T"]
    starts = range(case["pos0"] // block_q * block_q, end, block_q)
    window = rows = 0
    for block in starts:
        low, high = max(max(block, case["pos0"]) - 127, 0), min(block + block_q, end)
        start = high - triton.cdiv(128, size) * size if block_q == 1 else low // size * size
        window += triton.cdiv(high - start, size) - (low - start) // size
        if case["ratio"]:
            rows += triton.cdiv(case.get("topk", high // case["ratio"]), config["BLOCK_R"])
    blocks = len(starts) * triton.cdiv(case["H"], config["BLOCK_H"])
    near = sum(min(p + 1, 128) for p in _queries(case))
    far = sum(rows_seen(case, p) for p in _queries(case)) - near
    macs = 2 * case["H"] * case["D"]
    loops = even_loop(macs * near, blocks, window / len(starts)), even_loop(
        macs * far, blocks, rows / len(starts)
    )
    return Work(blocks, loops if case["ratio"] else loops[:1])


def _queries(case: Case) -> range:
    return range(case["pos0"], case["pos0"] + case["T"])


SPEC = KernelSpec(
    op=mla_prefill, reference=mla_prefill_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=5e-3, scratch=lambda **dims: 0,
    cases=(
        {"name": "small-csa", "T": 5, "H": 2, "D": 128, "pos0": 300, "ratio": 4, "topk": 16},
        {"name": "small-hca", "T": 5, "H": 2, "D": 64, "pos0": 300, "ratio": 128},
        {"name": "exact-csa", "T": 3, "H": 8, "D": 512, "pos0": 300, "ratio": 4, "topk": 40,
         "fp32": 1},
        {"name": "exact-hca", "T": 3, "H": 64, "D": 512, "pos0": 300, "ratio": 128, "fp32": 1},
        {"name": "flash-tp8-hca-fp8", "T": 3456, "H": 8, "D": 512, "pos0": 3456, "ratio": 128,
         "kv_format": "fp8"},
        *flash_cases({"T": 3456, "pos0": 3456}),
    ),
    bytes_moved=lambda c: 4 * c["T"] * c["H"] * c["D"] + 2 * c["D"] * rows_seen(
        c, c["pos0"] + c["T"] - 1
    ),
    flops=lambda c: 4 * c["H"] * c["D"] * sum(rows_seen(c, p) for p in _queries(c)),
    work=_work,
)  # fmt: skip
