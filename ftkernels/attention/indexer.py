"""Row selection of the lightning indexer: the best visible rows by ``sum_h w_h * relu(q_h . k)``.

Numerics: fp32 sums of exact products. With ``scores="fp8"`` operands on the FP4 grid go through
FP8 products without loss, and whatever does not fit them through fp32, as with ``"exact"``.
Equal scores at the cut: the lower row stays. NaN scores count as -inf.
One launch, of one of the two kernels in `index_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton

from ftkernels import backend, check, config
from ftkernels.attention import topk as best
from ftkernels.attention.index_kernels import index_split_kernel, index_stream_kernel
from ftkernels.attention.pools import (
    INDEX_GROUP,
    check_index_pool,
    empty_pool,
    read_index_rows,
    write_index_rows,
)
from ftkernels.attention.ragged import sequences
from ftkernels.linear.linear import matmul_rows
from ftkernels.quant.round_trip import quant_round_trip_reference as quant_round_trip
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn
from ftkernels.work import Work, even_loop

_SCORE_BYTES = 64 << 20
_SCRATCH_WORDS = ((64 << 20) - COUNTER_BYTES) // 4
_MAX_CHUNK = 4096
_FEW_QUERIES = 128  # up to here blocks share a query
_BLOCKS = 256


def index_select(
    index_q: torch.Tensor, index_weights: torch.Tensor, index_k: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, topk: int,
    compress_ratio: int = 4, index_format: str = "bf16", scores: str = "fp8",
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Select the compressed rows each query attends to.

    Args:
        index_q: ``[T, Hi, Di]``, after RoPE, Hadamard and round trip.
        index_weights: ``[T, Hi]`` fp32, carrying ``Di**-0.5 * Hi**-0.5``.
        index_k: ``[pages, Rc, Di]`` or packed ``[pages, Rc, 68]`` uint8.
        block_table: ``[S, max_pages]`` int32.
        cu_seqlens, seq_lens: ``[S+1]``, ``[S]`` int32.
        topk: rows kept; all ``V = (pos+1)//compress_ratio`` visible ones while ``V <= topk``.
        index_format: "bf16" (rows in the dtype of ``index_k``) or "fp4" (packed).
        scores: "fp8" (made for operands on the FP4 grid) or "exact" (fp32).
        scratch: as ``scratch_bytes("index_select", T=.., rows=max_pages*Rc, topk=..)`` says,
            at most 64 MiB unless ``topk`` itself needs more; allocated when omitted.

    Returns:
        ``[T, topk]`` int32: the rows, ascending, then -1.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. One launch.
    """
    out = _checked(
        index_q, index_weights, index_k, block_table, cu_seqlens, seq_lens, topk, compress_ratio,
        index_format, scores, out,
    )  # fmt: skip
    num_tokens, num_rows = index_q.shape[0], block_table.shape[1] * index_k.shape[1]
    if scratch is not None:
        num_bytes = scratch_bytes(T=num_tokens, rows=num_rows, topk=topk)
        others = (("index_q", index_q), ("out", out))
        check.scratch("index_select", scratch, num_bytes, index_q, others)
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return out.fill_(-1)
    if backend.use_reference(index_q):
        return _reference(
            index_q, index_weights, index_k, block_table, cu_seqlens, seq_lens, topk,
            compress_ratio, index_format, out,
        )  # fmt: skip
    plan = _plan(num_tokens, num_rows, topk)
    num_bytes = COUNTER_BYTES + 4 * plan.blocks * plan.words
    if scratch is None:
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=index_q.device)
        if plan.splits:
            scratch[:COUNTER_BYTES].zero_()
    words = scratch[COUNTER_BYTES:num_bytes]
    heads, dim = index_q.shape[1:]
    bits = 4 if index_format == "fp4" else 8 * index_k.element_size()
    key = {"Hi": heads, "Di": dim, "topk": topk, "bits": bits}
    cfg = config.lookup("index_select", key, default_config)
    kernel, grid = index_split_kernel, (num_tokens, plan.splits)
    if not plan.splits:
        kernel, grid = index_stream_kernel, (triton.cdiv(plan.blocks, cfg.num_queries), 1)
    with backend.on_device(index_q):
        kernel[grid](
            index_q, index_q.stride(0), index_q.stride(1), index_weights, index_weights.stride(0),
            index_k, index_k.stride(0), block_table, block_table.stride(0),
            cu_seqlens, seq_lens, out, out.stride(0),
            scratch[:COUNTER_BYTES].view(torch.int32), words.view(torch.int32),
            num_tokens, seq_lens.shape[0], compress_ratio, num_rows, plan.words,
            TOPK=topk, STRIDE_KR=index_k.stride(1),
            HI=heads, BLOCK_H=max(16, triton.next_power_of_2(heads)),
            DI=dim, BLOCK_D=max(32, triton.next_power_of_2(dim)),
            RC=index_k.shape[1], BLOCK_R=cfg.block_r,
            CHUNK=cfg.block_c, CAP=best.capacity(topk, cfg.block_c),
            NQ=1 if plan.splits else cfg.num_queries,
            PACKED=index_format == "fp4", EXACT=scores == "exact",
            num_warps=cfg.num_warps, num_stages=cfg.num_stages, maxnreg=255,
        )  # fmt: skip
    return out


def _checked(
    index_q: torch.Tensor, index_weights: torch.Tensor, index_k: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, topk: int,
    ratio: int, index_format: str, scores: str, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "index_select"
    check.tensor(op, "index_q", index_q, check.FLOATS, (None, None, None), "[T, Hi, Di]")
    num_tokens, heads, dim = index_q.shape
    check.require(
        heads > 0 and dim > 0,
        lambda: f"{op}: index_q is {tuple(index_q.shape)}, expected at least one head and channel",
    )
    size = (num_tokens, heads)
    check.tensor(op, "index_weights", index_weights, (torch.float32,), size, "[T, Hi]", index_q)
    check_index_pool(op, "index_k", index_k, index_format, dim, index_q)
    ints = (torch.int32,)
    check.tensor(op, "seq_lens", seq_lens, ints, (None,), "[S]", index_q)
    count = seq_lens.shape[0]
    check.tensor(op, "cu_seqlens", cu_seqlens, ints, (count + 1,), "[S+1]", index_q)
    check.tensor(op, "block_table", block_table, ints, (count, None), "[S, max_pages]", index_q)
    check.integer(op, "topk", topk, 1)
    check.integer(op, "compress_ratio", ratio, 1)
    check.require(
        scores in ("fp8", "exact"),
        lambda: f"{op}: scores is {scores!r}, expected 'fp8' or 'exact'",
    )
    inputs = (index_weights, index_k, block_table, cu_seqlens, seq_lens)
    size = (num_tokens, topk)
    return check.output(op, out, size, like=index_q, dtype=torch.int32, inputs=inputs)


def index_select_reference(
    index_q: torch.Tensor, index_weights: torch.Tensor, index_k: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, topk: int,
    compress_ratio: int = 4, index_format: str = "bf16", scores: str = "fp8",
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch: both ``scores`` modes are fp32 sums."""
    out = _checked(
        index_q, index_weights, index_k, block_table, cu_seqlens, seq_lens, topk, compress_ratio,
        index_format, scores, out,
    )  # fmt: skip
    return _reference(
        index_q, index_weights, index_k, block_table, cu_seqlens, seq_lens, topk,
        compress_ratio, index_format, out,
    )  # fmt: skip


def _reference(
    index_q: torch.Tensor, index_weights: torch.Tensor, index_k: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, topk: int,
    ratio: int, index_format: str, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out.fill_(-1)
    for s, begin, end, pos0 in sequences(cu_seqlens, seq_lens):
        _select_sequence(
            out[begin:end], index_q[begin:end], index_weights[begin:end], index_k, block_table[s],
            pos0, topk, ratio, index_format,
        )  # fmt: skip
    return out


def _select_sequence(
    out: torch.Tensor, index_q: torch.Tensor, weights: torch.Tensor, index_k: torch.Tensor,
    pages: torch.Tensor, pos0: int, topk: int, ratio: int, index_format: str,
) -> None:  # fmt: skip
    num_new, per_page = out.shape[0], index_k.shape[1]
    # the queries that see no more than topk rows take them all
    plain = min(num_new, max(0, ratio * (topk + 1) - 1 - pos0))
    if plain == num_new == 1:
        count = min(topk, (pos0 + 1) // ratio)
        out[0, :count] = torch.arange(count, dtype=torch.int32, device=out.device)
        return
    if plain:
        visible = (torch.arange(pos0 + 1, pos0 + plain + 1, device=out.device) // ratio)[:, None]
        slots = torch.arange(topk, device=out.device)[None]
        out[:plain] = torch.where(slots < visible, slots, -1).to(torch.int32)
    if plain == num_new:
        return
    total = (pos0 + num_new) // ratio
    numbers = torch.arange(total, device=out.device)
    where = pages[numbers // per_page].long()
    rows = read_index_rows(index_k, where, numbers % per_page, index_format)
    heads, dim = index_q.shape[1:]
    block = max(1, _SCORE_BYTES // (4 * heads * total))
    for begin in range(plain, num_new, block):
        end = min(begin + block, num_new)
        queries = index_q[begin:end].float().reshape(-1, dim)
        dots = matmul_rows(queries, rows).view(end - begin, heads, total)
        score = (dots.relu_() * weights[begin:end, :, None]).sum(dim=1)
        visible = torch.arange(pos0 + begin + 1, pos0 + end + 1, device=out.device) // ratio
        score.masked_fill_(numbers[None] >= visible[:, None], float("-inf"))
        out[begin:end] = _best_rows(score, topk).to(torch.int32)


def _best_rows(score: torch.Tensor, topk: int) -> torch.Tensor:
    """The ``topk`` largest of each row, ascending by index; of equal ones at the cut the lower."""
    score = score.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    cut = score.topk(topk, dim=1, sorted=True).values[:, -1:]
    above, level = score > cut, score == cut
    room = topk - above.sum(dim=1, keepdim=True)
    kept = above | (level & (level.cumsum(dim=1) <= room))
    return kept.nonzero()[:, 1].view(-1, topk)


@dataclass(frozen=True)
class Plan:
    """How a call is laid out: blocks a query, or queries at once and their words of scratch."""

    splits: int
    blocks: int
    words: int


def _plan(num_tokens: int, num_rows: int, topk: int) -> Plan:
    if num_rows <= topk:
        return Plan(splits=1, blocks=0, words=0)  # every query takes what it sees
    words = _words(num_rows, topk)
    if num_tokens <= _FEW_QUERIES and num_tokens * words <= _SCRATCH_WORDS:
        splits = min(-(-_BLOCKS // num_tokens), -(-num_rows // 64))
        return Plan(splits, num_tokens, words)
    words = _words(_MAX_CHUNK, topk)
    most = min(2 * _BLOCKS, num_tokens, _SCRATCH_WORDS // words)
    return Plan(0, max(2, most // 2 * 2), words)


def _words(num_rows: int, topk: int) -> int:
    """The best rows of a query, and the scores of ``num_rows``."""
    buffer = best.STATE.value + 2 * best.capacity(topk, _MAX_CHUNK)
    return buffer + -(-num_rows // _MAX_CHUNK) * _MAX_CHUNK


def scratch_bytes(*, T: int, rows: int, topk: int) -> int:
    """Scratch for up to `T` queries over block tables that hold up to `rows` rows."""
    plan = _plan(max(1, T), rows, topk)
    words = plan.blocks * plan.words
    if not plan.splits:
        # a smaller call may keep the scores of all its rows, and then takes more
        few = min(T, _FEW_QUERIES) * _words(rows, topk)
        words = max(words, min(_SCRATCH_WORDS, few))
    return COUNTER_BYTES + 4 * words


@dataclass(frozen=True)
class IndexConfig:
    """The same for every number of queries, so that a row's score is."""

    block_r: int
    block_c: int
    num_queries: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> IndexConfig:
    """Sixteen rows a warp and two queries at once while that fits the registers."""
    two = key["Hi"] * key["Di"] <= 64 * 128 and key["bits"] <= 16
    return IndexConfig(
        block_r=64, block_c=_MAX_CHUNK, num_queries=2 if two else 1, num_warps=4, num_stages=3
    )


def candidates(key: Case, target: Target) -> Iterable[IndexConfig]:
    """Stages only: with the tile goes which warps share the sum over a row's heads."""
    for num_stages in (2, 3, 4):
        yield replace(default_config(key), num_stages=num_stages)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, heads, dim = case["T"], case["Hi"], case["Di"]
    index_q = randn(tokens, heads, dim, dtype=torch.bfloat16, device=device, seed=seed)
    if index_q.device.type != "meta":
        quant_round_trip(index_q, fmt="fp4", group=INDEX_GROUP, out=index_q)
    weights = randn(tokens, heads, device=device, seed=seed + 1)
    length = case["pos0"] + tokens
    pages = -(-length // 128)
    index_format = "fp4" if case.get("fp4") else "bf16"
    pool = empty_pool(pages + 1, 32, dim, kv_format=index_format, device=device)
    if pool.device.type != "meta":
        rows = torch.arange(pool.shape[0] * 32)
        values = randn(len(rows), dim, dtype=torch.bfloat16, seed=seed + 2)
        values = quant_round_trip(values, fmt="fp4", group=INDEX_GROUP)
        pool.zero_()
        write_index_rows(pool, rows // 32, rows % 32, values, index_format)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None].to(device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32).to(device)
    lens = torch.tensor([length], dtype=torch.int32).to(device)
    kwargs = {"topk": case["topk"], "index_format": index_format}
    if case.get("exact"):
        kwargs["scores"] = "exact"
    return (index_q, weights, pool, table, bounds, lens), kwargs


def _rows_scored(case: Case) -> int:
    """By all queries; those that see no more than ``topk`` rows score none."""
    seen = ((p + 1) // 4 for p in range(case["pos0"], case["pos0"] + case["T"]))
    return sum(rows for rows in seen if rows > case["topk"])


def _row_bytes(case: Case) -> int:
    """Of the index rows that are scored, each read once."""
    rows, width = (case["pos0"] + case["T"]) // 4, case["Di"]
    size = width // 2 + width // INDEX_GROUP if case.get("fp4") else 2 * width
    return rows * size if rows > case["topk"] else 0


def _work(case: Case, kernel: str, config: Case) -> Work | None:
    if config["EXACT"]:
        return None
    rows, tile = _rows_scored(case), config["BLOCK_R"] * config["BLOCK_H"] * config["BLOCK_D"]
    plan = _plan(case["T"], (case["pos0"] + case["T"]) // 4, case["topk"])
    together = 1 if plan.splits else config["NQ"]
    blocks = case["T"] * plan.splits or triton.cdiv(plan.blocks, config["NQ"])
    passes = rows / config["BLOCK_R"] / together / blocks
    macs = rows * case["Hi"] * case["Di"]
    return Work(blocks, (even_loop(macs, blocks, passes, tile * together),))


SPEC = KernelSpec(
    op=index_select, reference=index_select_reference, default=default_config,
    candidates=candidates, inputs=_inputs, scratch=scratch_bytes,
    cases=(
        {"name": "small", "T": 5, "Hi": 4, "Di": 128, "pos0": 100, "topk": 16},
        {"name": "small-fp4", "T": 130, "Hi": 3, "Di": 128, "pos0": 60, "topk": 7, "fp4": 1},
        {"name": "small-exact", "T": 131, "Hi": 5, "Di": 64, "pos0": 70, "topk": 8, "exact": 1},
        {"name": "flash-t1", "T": 1, "Hi": 64, "Di": 128, "pos0": 16383, "topk": 512},
        {"name": "flash-t1-fp4", "T": 1, "Hi": 64, "Di": 128, "pos0": 16383, "topk": 512, "fp4": 1},
        {"name": "flash-c4096", "T": 4096, "Hi": 64, "Di": 128, "pos0": 12288, "topk": 512},
        {"name": "flash-c4096-fp4", "T": 4096, "Hi": 64, "Di": 128, "pos0": 12288, "topk": 512,
         "fp4": 1},
    ),
    bytes_moved=lambda c: 2 * c["T"] * c["Hi"] * c["Di"] + 4 * c["T"] * c["topk"] + _row_bytes(c),
    flops=lambda c: 2 * c["Hi"] * c["Di"] * _rows_scored(c), work=_work,
)  # fmt: skip
