"""Row selection of the lightning indexer: the best visible rows by ``sum_h w_h * relu(q_h . k)``.

Numerics: fp32 sums over operands that are exact in FP8 once round-tripped, so both ``scores`` modes
select the same rows here. Equal scores at the cut: the lower row stays.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.attention.pools import check_index_pool, empty_pool, read_index_rows
from ftkernels.attention.ragged import sequences
from ftkernels.linear.linear import matmul_rows
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

_SCORE_BYTES = 64 << 20


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
        scores: "fp8" (operands on the FP4 grid) or "exact" (fp32).

    Returns:
        ``[T, topk]`` int32: the rows, ascending, then -1.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("index_select", scratch, index_q)
    return index_select_reference(
        index_q, index_weights, index_k, block_table, cu_seqlens, seq_lens, topk=topk,
        compress_ratio=compress_ratio, index_format=index_format, scores=scores, out=out,
    )  # fmt: skip


def index_select_reference(
    index_q: torch.Tensor, index_weights: torch.Tensor, index_k: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, topk: int,
    compress_ratio: int = 4, index_format: str = "bf16", scores: str = "fp8",
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    op = "index_select"
    check.tensor(op, "index_q", index_q, check.FLOATS, (None, None, None), "[T, Hi, Di]")
    num_tokens, heads, dim = index_q.shape
    size = (num_tokens, heads)
    check.tensor(op, "index_weights", index_weights, (torch.float32,), size, "[T, Hi]", index_q)
    check_index_pool(op, "index_k", index_k, index_format, dim, index_q)
    ints = (torch.int32,)
    check.tensor(op, "seq_lens", seq_lens, ints, (None,), "[S]", index_q)
    count = seq_lens.shape[0]
    check.tensor(op, "cu_seqlens", cu_seqlens, ints, (count + 1,), "[S+1]", index_q)
    check.tensor(op, "block_table", block_table, ints, (count, None), "[S, max_pages]", index_q)
    check.number(op, "topk", topk, 1)
    check.require(
        compress_ratio >= 1, lambda: f"{op}: compress_ratio is {compress_ratio}, expected >= 1"
    )
    check.require(
        scores in ("fp8", "exact"),
        lambda: f"{op}: scores is {scores!r}, expected 'fp8' or 'exact'",
    )
    inputs = (index_weights, index_k, block_table, cu_seqlens, seq_lens)
    size = (num_tokens, topk)
    out = check.output(op, out, size, like=index_q, dtype=torch.int32, inputs=inputs)
    out.fill_(-1)
    for s, begin, end, pos0 in sequences(cu_seqlens, seq_lens):
        _select_sequence(
            out[begin:end], index_q[begin:end], index_weights[begin:end], index_k, block_table[s],
            pos0, topk, compress_ratio, index_format,
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


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, heads, dim = case["T"], case["Hi"], case["Di"]
    index_q = randn(tokens, heads, dim, dtype=torch.bfloat16, device=device, seed=seed)
    weights = randn(tokens, heads, device=device, seed=seed + 1)
    length = case["pos0"] + tokens
    pages = -(-length // 128)
    pool = empty_pool(pages + 1, 32, dim, device=device)
    if pool.device.type != "meta":
        pool.copy_(randn(*pool.shape, dtype=pool.dtype, seed=seed + 2))
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None].to(device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32).to(device)
    lens = torch.tensor([length], dtype=torch.int32).to(device)
    return (index_q, weights, pool, table, bounds, lens), {"topk": case["topk"]}


SPEC = KernelSpec(
    op=index_select, reference=index_select_reference, kernel=False, inputs=_inputs, grows="T",
    scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "T": 5, "Hi": 4, "Di": 128, "pos0": 100, "topk": 16},
        {"name": "flash-c4096", "T": 4096, "Hi": 64, "Di": 128, "pos0": 12288, "topk": 512},
    ),
    bytes_moved=lambda c: 2 * c["T"] * c["Hi"] * c["Di"] + 4 * c["T"] * c["topk"],
    flops=lambda c: 2 * c["T"] * c["Hi"] * c["Di"] * (c["pos0"] + c["T"]) // 4,
)  # fmt: skip
