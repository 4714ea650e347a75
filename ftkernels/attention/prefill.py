"""Attention of new tokens over the window and the compressed rows, one latent head as key and
value.

Visible: window rows ``max(0, p-window+1)..p`` and compressed rows ``j < (p+1)//ratio``, or exactly
the entries ``>= 0`` of ``index_topk``. The sink is in the denominator only; ``lse`` is over the
keys. Query blocks and key ranges are aligned to absolute positions, so that the cut of a prompt
into chunks does not change a bit.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.attention.dense import Pools, check_queries, softmax_mix
from ftkernels.attention.merge import outputs
from ftkernels.attention.pools import empty_pool
from ftkernels.attention.ragged import sequences
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.rope.rope import rotate
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

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
        q: ``[T, H, D]``.
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
        scratch: uint8, ``scratch_bytes("mla_prefill")`` long.

    Returns:
        ``[T, H, D]`` in the dtype of ``q`` (and ``lse``). Rows of no sequence are zero, ``lse``
        -inf.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("mla_prefill", scratch, q)
    return mla_prefill_reference(
        q, window_kv, window_block_table, cu_seqlens, seq_lens, softmax_scale=softmax_scale,
        sink=sink, window=window, cmp_kv=cmp_kv, block_table=block_table,
        compress_ratio=compress_ratio, index_topk=index_topk, kv_format=kv_format, cos=cos,
        sin=sin, return_lse=return_lse, out=out,
    )  # fmt: skip


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
    result, lse = outputs(op, out, size, q, q.dtype, return_lse, inputs)
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
                q[rows], pools, s, block, lo, picks, softmax_scale, sink, return_lse
            )
            if cos is not None and sin is not None:
                positions = torch.arange(lo, hi, device=q.device)
                mixed = rotate(mixed, positions, cos, sin, True, mixed)
            result[rows] = mixed.to(q.dtype)
            if lse is not None and total is not None:
                lse[rows] = total
    return (result, lse) if lse is not None else result


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


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, heads, dim, ratio = case["T"], case["H"], case["D"], case["ratio"]
    length = case["pos0"] + tokens
    pages, kv_format = -(-length // 128), case.get("kv_format", "bf16")
    q = randn(tokens, heads, dim, dtype=torch.bfloat16, device=device, seed=seed)

    def pool(rows: int) -> torch.Tensor:
        made = empty_pool(pages + 1, rows, dim, kv_format=kv_format, device=device)
        if made.device.type != "meta" and kv_format == "bf16":
            made.copy_(randn(*made.shape, dtype=made.dtype, seed=seed + rows))
        return made

    table = torch.arange(1, pages + 1, dtype=torch.int32)[None].to(device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32).to(device)
    lens = torch.tensor([length], dtype=torch.int32).to(device)
    kwargs: dict[str, object] = {
        "softmax_scale": dim**-0.5, "sink": randn(heads, device=device, seed=seed + 1),
        "kv_format": kv_format,
    }  # fmt: skip
    if ratio:
        kwargs |= {"cmp_kv": pool(128 // ratio), "block_table": table, "compress_ratio": ratio}
    if ratio == 4:
        picks = torch.arange(case["topk"], dtype=torch.int32).expand(tokens, -1)
        kwargs["index_topk"] = picks.contiguous().to(device)
    return (q, pool(128), table, bounds, lens), kwargs


SPEC = KernelSpec(
    op=mla_prefill, reference=mla_prefill_reference, kernel=False, inputs=_inputs, grows="T",
    tolerance=5e-3, scratch=lambda **dims: 0,
    cases=(
        {"name": "small-csa", "T": 5, "H": 2, "D": 128, "pos0": 300, "ratio": 4, "topk": 16},
        {"name": "small-hca", "T": 5, "H": 2, "D": 128, "pos0": 300, "ratio": 128},
        {"name": "flash-tp8-swa", "T": 3456, "H": 8, "D": 512, "pos0": 3456, "ratio": 0},
        {"name": "flash-tp8-hca", "T": 3456, "H": 8, "D": 512, "pos0": 3456, "ratio": 128},
        {"name": "flash-tp8-csa", "T": 3456, "H": 8, "D": 512, "pos0": 3456, "ratio": 4,
         "topk": 512},
    ),
    bytes_moved=lambda c: 4 * c["T"] * c["H"] * c["D"],
    flops=lambda c: 4 * c["T"] * c["H"] * c["D"] * (128 + c.get("topk", 0)),
)  # fmt: skip
