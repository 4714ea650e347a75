"""Attention of one token per sequence over the window and the compressed rows.

The same visibility, sink and rotation as ``mla_prefill``; the query stands at ``seq_lens - 1``. A
sequence's result is a function of its own rows only, alone or batched.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.attention.dense import Pools, check_queries, softmax_mix
from ftkernels.attention.merge import outputs
from ftkernels.attention.prefill import SPEC as _PREFILL
from ftkernels.attention.prefill import Result
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.rope.rope import rotate
from ftkernels.spec import Case, Inputs, KernelSpec


def mla_decode(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, softmax_scale: float, sink: torch.Tensor | None = None,
    window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    num_splits: int | None = None, out: Result | None = None, scratch: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attend from the newest token of each sequence; its own rows are already in the pools.

    Args:
        q: ``[S, H, D]``.
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
        out: ``[S, H, D]``, a pair with ``return_lse``.
        scratch: uint8, ``scratch_bytes("mla_decode")`` long.

    Returns:
        ``[S, H, D]`` in the dtype of ``q`` (and ``lse [S, H]`` fp32).

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("mla_decode", scratch, q)
    return mla_decode_reference(
        q, window_kv, window_block_table, seq_lens, softmax_scale=softmax_scale, sink=sink,
        window=window, cmp_kv=cmp_kv, block_table=block_table, compress_ratio=compress_ratio,
        index_topk=index_topk, kv_format=kv_format, cos=cos, sin=sin, return_lse=return_lse,
        num_splits=num_splits, out=out,
    )  # fmt: skip


def mla_decode_reference(
    q: torch.Tensor, window_kv: torch.Tensor, window_block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, softmax_scale: float, sink: torch.Tensor | None = None,
    window: int = 128, cmp_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, compress_ratio: int = 0,
    index_topk: torch.Tensor | None = None, kv_format: str = "bf16",
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, return_lse: bool = False,
    num_splits: int | None = None, out: Result | None = None,
) -> Result:  # fmt: skip
    """The definition in plain torch, one sequence after another."""
    op = "mla_decode"
    check_queries(op, q, "[S, H, D]", sink, cos, sin, softmax_scale)
    count = q.shape[0]
    check.tensor(op, "seq_lens", seq_lens, (torch.int32,), (count,), "[S]", q)
    pools = Pools(
        window_kv, window_block_table, window, cmp_kv, block_table, compress_ratio, kv_format
    )
    pools.check(op, q, count, 64 if cos is None else 2 * cos.shape[1])
    check.require(
        num_splits is None or (isinstance(num_splits, int) and num_splits >= 1),
        lambda: f"{op}: num_splits is {num_splits!r}, expected None or an integer >= 1",
    )
    if index_topk is not None:
        check.tensor(op, "index_topk", index_topk, (torch.int32,), (count, None), "[S, topk]", q)
        check.require(cmp_kv is not None, f"{op}: index_topk is given without cmp_kv")
    lengths = seq_lens.tolist()

    def attend(s: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        picks = None if index_topk is None else index_topk[s]
        mixed, total = _attend(q[s], pools, s, lengths[s], picks, softmax_scale, sink, return_lse)
        if cos is not None and sin is not None:
            position = torch.tensor([lengths[s] - 1], device=q.device)
            mixed = rotate(mixed, position, cos, sin, True, mixed)
        return mixed, total

    if count == 1 and lengths[0] and out is None and not return_lse:
        return attend(0)[0].to(q.dtype)
    size = (q.shape[0], q.shape[1], q.shape[2])
    inputs = (
        window_kv, window_block_table, seq_lens, sink, cmp_kv, block_table, index_topk, cos, sin
    )  # fmt: skip
    result, lse = outputs(op, out, size, q, q.dtype, return_lse, inputs)
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


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    sequences, length = case["S"], case["length"]
    one = {**case, "T": 1, "pos0": length - 1}
    (q, pool, table, _, _), kwargs = _PREFILL.inputs(one, device=device, seed=seed)
    lens = torch.full((sequences,), length, dtype=torch.int32, device=device)
    for name in ("block_table", "index_topk"):
        if name in kwargs:
            kwargs[name] = kwargs[name].expand(sequences, -1)
    q = q.expand(sequences, -1, -1)
    return (q, pool, table.expand(sequences, -1), lens), kwargs


SPEC = KernelSpec(
    op=mla_decode, reference=mla_decode_reference, kernel=False, inputs=_inputs, grows="S",
    tolerance=5e-3, scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "S": 2, "H": 2, "D": 128, "length": 300, "ratio": 4, "topk": 16},
        {"name": "flash-tp8-swa", "S": 1, "H": 8, "D": 512, "length": 4096, "ratio": 0},
        {"name": "flash-tp8-hca", "S": 1, "H": 8, "D": 512, "length": 4096, "ratio": 128},
        {"name": "flash-tp8-csa", "S": 1, "H": 8, "D": 512, "length": 4096, "ratio": 4,
         "topk": 512},
    ),
    bytes_moved=lambda c: 2 * c["S"] * (min(c["length"], 128) + c.get("topk", 0)) * c["D"],
    flops=lambda c: 4 * c["S"] * c["H"] * c["D"] * (128 + c.get("topk", 0)),
)  # fmt: skip
