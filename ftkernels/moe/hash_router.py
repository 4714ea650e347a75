"""Routing of the first layers: the experts of a token are the row of its id in a fixed table.

``ids = tid2eid[token_id]`` in the table's order, duplicates kept; weights as in `route_topk`, from
the scores of the listed experts: ``s_k / sum(s_k) * route_scale``. Numerics: scores, sum (in order
of k) and weights in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.moe.router import (
    Routes,
    check_routes,
    lanes,
    score_tile,
    scores_reference,
    store_routes,
    weigh_reference,
)  # fmt: skip
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn


def route_hash(
    router_logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, *,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    out: Routes | None = None,
) -> Routes:  # fmt: skip
    """Weigh the experts that a table gives for each token id.

    Args:
        router_logits: ``[T, E]`` fp32, rows may be strided.
        token_ids: ``[T]`` int32 or int64, ids within the table.
        tid2eid: ``[V, topk]`` int32 or int64 expert ids, rows may be strided.
        route_scale: factor on the normalized weights (DeepSeek-V4-Flash: 1.5).
        score: ``"sqrtsoftplus"``, ``"sigmoid"`` or ``"softmax"``.
        num_tokens: ``[1]`` int32 on the device; rows from there on get id -1 and weight 0, and
            their token id is not read.
        out: ``(topk_weights, topk_ids)``; allocated when omitted.

    Returns:
        ``topk_weights [T, topk]`` fp32 and ``topk_ids [T, topk]`` int32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or score outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(router_logits, token_ids, tid2eid, score, num_tokens, out)
    if router_logits.shape[0] == 0 or tid2eid.shape[1] == 0:
        return out
    if backend.use_reference(router_logits):
        return weigh_table_reference(
            router_logits, token_ids, tid2eid, route_scale, score, num_tokens, out
        )
    weights, ids = out
    rows, num_experts = router_logits.shape
    topk = tid2eid.shape[1]
    cfg = config.lookup("route_hash", {"E": num_experts}, default_config)
    with backend.on_device(router_logits):
        _route_hash_kernel[(rows,)](
            router_logits, router_logits.stride(0), token_ids, token_ids.stride(0),
            tid2eid, tid2eid.stride(0),
            weights, weights.stride(0), ids, ids.stride(0), num_tokens,
            rows, num_experts, route_scale,
            SCORE=score, TOPK=topk, LANES_K=lanes(topk), BLOCK_E=lanes(num_experts),
            HAS_COUNT=num_tokens is not None, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    router_logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, score: str,
    num_tokens: torch.Tensor | None, out: Routes | None,
) -> Routes:  # fmt: skip
    op = "route_hash"
    check.tensor(op, "router_logits", router_logits, (torch.float32,), (None, None), "[T, E]")
    check_table(op, token_ids, tid2eid, router_logits)
    inputs = (token_ids, tid2eid, num_tokens)
    return check_routes(op, router_logits, tid2eid.shape[1], score, num_tokens, out, inputs)


def check_table(op: str, token_ids: torch.Tensor, tid2eid: torch.Tensor, x: torch.Tensor) -> None:
    """The refusals that all routings of rows `x` by a table share."""
    check.dtype(op, "token_ids", token_ids, check.INTS)
    check.shape(op, "token_ids", token_ids, (x.shape[0],), "[T]")
    check.device(op, "token_ids", token_ids, x)
    check.tensor(op, "tid2eid", tid2eid, check.INTS, (None, None), "[V, topk]", x)


def route_hash_reference(
    router_logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, *,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    out: Routes | None = None,
) -> Routes:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(router_logits, token_ids, tid2eid, score, num_tokens, out)
    if router_logits.shape[0] == 0 or tid2eid.shape[1] == 0:
        return out
    return weigh_table_reference(
        router_logits, token_ids, tid2eid, route_scale, score, num_tokens, out
    )


def weigh_table_reference(
    router_logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor,
    route_scale: float, score: str, num_tokens: torch.Tensor | None, out: Routes,
) -> Routes:  # fmt: skip
    """`route_hash` in plain torch, its arguments checked."""
    if num_tokens is not None:  # padded rows may hold any id
        used = torch.arange(token_ids.shape[0], device=token_ids.device) < num_tokens
        token_ids = torch.where(used, token_ids, 0)
    ids = tid2eid.index_select(0, token_ids).long()
    scores = scores_reference(router_logits, score)
    return weigh_reference(scores, ids, route_scale, num_tokens, out)


@dataclass(frozen=True)
class HashRouterConfig:
    """Not for tuning: the order of a softmax's sum follows the threads."""

    num_warps: int


def default_config(key: Case) -> HashRouterConfig:
    """One token per program; a warp holds 128 experts or more."""
    return HashRouterConfig(num_warps=1 if key["E"] <= 128 else 2)


@triton.jit
def hash_rows(
    logits, offs_t, mask_t, token_ptr, stride_tt, table_ptr, stride_bv, weights_ptr, stride_wt,
    ids_ptr, stride_it, count_ptr, E, route_scale,
    SCORE: tl.constexpr, TOPK: tl.constexpr, LANES_K: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Looks up and writes the routes of rows `offs_t`, whose logits are ``[BLOCK_E, R]``."""
    offs_e = tl.arange(0, BLOCK_E)[:, None]
    offs_k = tl.arange(0, LANES_K)[:, None]
    used = mask_t
    if HAS_COUNT:
        used = mask_t & (offs_t < tl.load(count_ptr))
    rows = offs_t.to(tl.int64)
    token = tl.load(token_ptr + rows * stride_tt, mask=used, other=0).to(tl.int64)
    table_ptrs = table_ptr + (token * stride_bv)[None, :] + offs_k
    ids = tl.load(table_ptrs, mask=used[None, :] & (offs_k < TOPK), other=0).to(tl.int32)
    scores = score_tile(logits, offs_e < E, SCORE)
    weights = tl.zeros(ids.shape, tl.float32)
    total = tl.zeros(offs_t.shape, tl.float32)
    for k in tl.static_range(TOPK):
        expert = tl.sum(tl.where(offs_k == k, ids, 0), 0)[None, :]
        weight = tl.sum(tl.where(offs_e == expert, scores, 0.0), 0)
        total += weight
        weights = tl.where(offs_k == k, weight[None, :], weights)
    store_routes(
        ids, weights, total, offs_t, mask_t, weights_ptr, stride_wt, ids_ptr, stride_it,
        count_ptr, route_scale, TOPK, LANES_K, HAS_COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _route_hash_kernel(
    logits_ptr, stride_lt,  # [T, E]
    token_ptr, stride_tt,  # [T]
    table_ptr, stride_bv,  # [V, topk]
    weights_ptr, stride_wt,  # [T, topk]
    ids_ptr, stride_it,  # [T, topk]
    count_ptr,  # [1]
    T, E, route_scale,
    SCORE: tl.constexpr, TOPK: tl.constexpr, LANES_K: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_COUNT: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) + tl.arange(0, 1)
    offs_e = tl.arange(0, BLOCK_E)[:, None]
    rows = offs_t.to(tl.int64)[None, :] * stride_lt
    logits = tl.load(logits_ptr + rows + offs_e, mask=offs_e < E, other=0.0)
    hash_rows(
        logits, offs_t, offs_t < T, token_ptr, stride_tt, table_ptr, stride_bv,
        weights_ptr, stride_wt, ids_ptr, stride_it, count_ptr, E, route_scale,
        SCORE, TOPK, LANES_K, BLOCK_E, HAS_COUNT,
    )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    num_tokens, num_experts, vocab = case["T"], case["E"], case["V"]
    router_logits = randn(num_tokens, num_experts, device=device, scale=2.0, seed=seed)
    ids = torch.arange(num_tokens, device=device, dtype=torch.int32) * 97 % vocab
    table = torch.arange(vocab * case["topk"], device=device).view(vocab, -1) * 31 % num_experts
    return (router_logits, ids, table), {"route_scale": 1.5}


SPEC = KernelSpec(
    op=route_hash, reference=route_hash_reference, default=default_config,
    cases=(
        {"name": "small", "T": 5, "E": 16, "topk": 4, "V": 50},
        {"name": "flash-t1", "T": 1, "E": 256, "topk": 6, "V": 129280},
        {"name": "flash-t3456", "T": 3456, "E": 256, "topk": 6, "V": 129280},
    ),
    inputs=_inputs, tolerance=1e-5,
    bytes_moved=lambda case: case["T"] * (4 * case["E"] + 16 * case["topk"] + 4),
)  # fmt: skip
