"""Router: ``s = sqrt(softplus(logits))``, the ``topk`` largest ``s + bias``, weights from ``s``.

Order: falling biased score, lower expert id on ties. Weights: ``s_k / sum(s_k) * route_scale``; the
bias takes part in the choice only.
Numerics: scores to fp32 accuracy, biased scores, sums and weights in fp32, the sum in order of k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

Routes = tuple[torch.Tensor, torch.Tensor]
_TAKEN = tl.constexpr(-(2**31))
SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


def route_topk(
    router_logits: torch.Tensor, bias: torch.Tensor | None, *, topk: int, route_scale: float = 1.0,
    score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None, out: Routes | None = None,
) -> Routes:  # fmt: skip
    """Choose ``topk`` experts for each token.

    Args:
        router_logits: ``[T, E]`` fp32, rows may be strided.
        bias: ``[E]`` fp32 added to the scores for the choice, or None.
        topk: experts a token, ``1..E``.
        route_scale: factor on the normalized weights (DeepSeek-V4-Flash: 1.5).
        score: ``"sqrtsoftplus"``, ``"sigmoid"`` or ``"softmax"``.
        num_tokens: ``[1]`` int32 on the device; rows from there on get id -1 and weight 0.
        out: ``(topk_weights, topk_ids)``; allocated when omitted.

    Returns:
        ``topk_weights [T, topk]`` fp32 and ``topk_ids [T, topk]`` int32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, topk or score outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(router_logits, bias, topk, score, num_tokens, out)
    if router_logits.shape[0] == 0:
        return out
    if backend.use_reference(router_logits):
        return choose_reference(router_logits, bias, topk, route_scale, score, num_tokens, out)
    weights, ids = out
    rows, num_experts = router_logits.shape
    cfg = config.lookup("route_topk", {"E": num_experts}, default_config)
    with backend.on_device(router_logits):
        _route_topk_kernel[(rows,)](
            router_logits, router_logits.stride(0), bias,
            weights, weights.stride(0), ids, ids.stride(0), num_tokens,
            rows, num_experts, route_scale,
            SCORE=score, TOPK=topk, LANES_K=lanes(topk), BLOCK_E=lanes(num_experts),
            HAS_BIAS=bias is not None, HAS_COUNT=num_tokens is not None, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    router_logits: torch.Tensor, bias: torch.Tensor | None, topk: int, score: str,
    num_tokens: torch.Tensor | None, out: Routes | None,
) -> Routes:  # fmt: skip
    op = "route_topk"
    check.tensor(op, "router_logits", router_logits, (torch.float32,), (None, None), "[T, E]")
    num_experts = router_logits.shape[1]
    if bias is not None:
        check.tensor(op, "bias", bias, (torch.float32,), (num_experts,), "[E]", router_logits)
    check.require(
        1 <= topk <= num_experts, lambda: f"{op}: topk is {topk}, expected 1 to {num_experts}"
    )
    return check_routes(op, router_logits, topk, score, num_tokens, out, (bias, num_tokens))


def check_routes(
    op: str, x: torch.Tensor, topk: int, score: str, num_tokens: torch.Tensor | None,
    out: Routes | None, inputs: tuple[torch.Tensor | None, ...],
) -> Routes:  # fmt: skip
    """The refusals that all routings of rows `x` share; gives the outputs."""
    check.require(score in SCORES, lambda: f"{op}: score is {score!r}, expected one of {SCORES}")
    if num_tokens is not None:
        check.tensor(op, "num_tokens", num_tokens, (torch.int32,), (1,), "[1]", x)
    given = check.parts(op, out, 2)
    size = (x.shape[0], topk)
    weights = check.output(
        op, given[0], size, like=x, dtype=torch.float32, name="topk_weights", inputs=inputs
    )
    ids = check.output(
        op, given[1], size, like=x, dtype=torch.int32, name="topk_ids", inputs=(*inputs, weights)
    )
    return weights, ids


def route_topk_reference(
    router_logits: torch.Tensor, bias: torch.Tensor | None, *, topk: int, route_scale: float = 1.0,
    score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None, out: Routes | None = None,
) -> Routes:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(router_logits, bias, topk, score, num_tokens, out)
    return choose_reference(router_logits, bias, topk, route_scale, score, num_tokens, out)


def choose_reference(
    router_logits: torch.Tensor, bias: torch.Tensor | None, topk: int, route_scale: float,
    score: str, num_tokens: torch.Tensor | None, out: Routes,
) -> Routes:  # fmt: skip
    """`route_topk` in plain torch, its arguments checked."""
    scores = scores_reference(router_logits, score)
    biased = scores if bias is None else scores + bias
    ids = biased.sort(dim=-1, descending=True, stable=True)[1][:, :topk]
    return weigh_reference(scores, ids, route_scale, num_tokens, out)


def scores_reference(router_logits: torch.Tensor, score: str) -> torch.Tensor:
    """fp32 scores, by way of fp64 so that a value does not depend on its place in the tensor."""
    wide = router_logits.double()
    if score == "sqrtsoftplus":
        return torch.nn.functional.softplus(wide, threshold=20.0).sqrt_().float()
    if score == "sigmoid":
        return wide.sigmoid_().float()
    return wide.softmax(-1).float()


def weigh_reference(
    scores: torch.Tensor, ids: torch.Tensor, route_scale: float, num_tokens: torch.Tensor | None,
    out: Routes,
) -> Routes:  # fmt: skip
    """Writes the normalized weights of `ids`, and the ids; not of rows from `num_tokens` on."""
    chosen = scores.gather(1, ids)
    total = chosen.cumsum(-1)[:, -1:]  # in order of k whatever the number of rows
    weights = chosen.div_(total).mul_(route_scale)
    if num_tokens is not None:
        unused = torch.arange(ids.shape[0], device=ids.device)[:, None] >= num_tokens
        weights, ids = weights.masked_fill_(unused, 0.0), ids.masked_fill(unused, -1)
    out[0].copy_(weights)
    out[1].copy_(ids)
    return out


def lanes(size: int) -> int:
    """Width of a tile that holds `size` columns."""
    return max(2, triton.next_power_of_2(size))


@dataclass(frozen=True)
class RouterConfig:
    """Not for tuning: the order of a softmax's sum follows the threads."""

    num_warps: int


def default_config(key: Case) -> RouterConfig:
    """One token per program; a warp holds 128 experts or more."""
    return RouterConfig(num_warps=1 if key["E"] <= 128 else 2)


@triton.jit
def score_tile(x, mask, SCORE: tl.constexpr):
    """fp32 scores of logits ``[BLOCK_E, R]``; those outside `mask` count for nothing."""
    if SCORE == "sqrtsoftplus":
        # log1p(u) for u in (0, 1]: the quotient takes out the rounding of 1 + u
        u = tl.exp(-tl.abs(x))
        y = 1.0 + u
        log1p = tl.where(y == 1.0, u, tl.log(y) * (u / (y - 1.0)))
        scores = tl.sqrt_rn(tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p))
        # exp(x) underflows long before its root does
        return tl.where(x < -17.0, tl.exp(0.5 * x), scores)
    elif SCORE == "sigmoid":
        return tl.sigmoid(x)
    else:
        top = tl.max(tl.where(mask, x, float("-inf")), 0)
        e = tl.where(mask, tl.exp(x - top[None, :]), 0.0)
        return e / tl.sum(e, 0)[None, :]


@triton.jit
def store_routes(
    ids, weights, total, offs_t, mask_t, weights_ptr, stride_wt, ids_ptr, stride_it, count_ptr,
    route_scale, TOPK: tl.constexpr, LANES_K: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Normalizes and writes routes ``[LANES_K, R]``; those from the count on are unused."""
    weights = weights / total[None, :] * route_scale
    if HAS_COUNT:
        used = (offs_t < tl.load(count_ptr))[None, :]
        ids = tl.where(used, ids, -1)
        weights = tl.where(used, weights, 0.0)
    offs_k = tl.arange(0, LANES_K)[:, None]
    mask = mask_t[None, :] & (offs_k < TOPK)
    rows = offs_t.to(tl.int64)[None, :]
    tl.store(weights_ptr + rows * stride_wt + offs_k, weights, mask=mask)
    tl.store(ids_ptr + rows * stride_it + offs_k, ids, mask=mask)


@triton.jit
def topk_rows(
    logits, offs_t, mask_t, bias_ptr, weights_ptr, stride_wt, ids_ptr, stride_it, count_ptr,
    E, route_scale,
    SCORE: tl.constexpr, TOPK: tl.constexpr, LANES_K: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Chooses and writes the routes of rows `offs_t`, whose logits are ``[BLOCK_E, R]``."""
    offs_e = tl.arange(0, BLOCK_E)[:, None]
    offs_k = tl.arange(0, LANES_K)[:, None]
    mask_e = offs_e < E
    scores = score_tile(logits, mask_e, SCORE)
    biased = scores
    if HAS_BIAS:
        biased += tl.load(bias_ptr + offs_e, mask=mask_e, other=0.0)
    biased = tl.where(biased != biased, float("inf"), biased)
    # integers in the order of the floats, none as small as what marks a taken one
    bits = biased.to(tl.int32, bitcast=True)
    order = tl.where(mask_e, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _TAKEN)
    ids = tl.full((LANES_K, logits.shape[1]), -1, tl.int32)
    weights = tl.zeros(ids.shape, tl.float32)
    total = tl.zeros(offs_t.shape, tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.max(order, 0)[None, :]
        expert = tl.min(tl.where(order == best, offs_e, BLOCK_E), 0)[None, :]
        weight = tl.sum(tl.where(offs_e == expert, scores, 0.0), 0)
        total += weight
        ids = tl.where(offs_k == k, expert, ids)
        weights = tl.where(offs_k == k, weight[None, :], weights)
        order = tl.where(offs_e == expert, _TAKEN, order)
    store_routes(
        ids, weights, total, offs_t, mask_t, weights_ptr, stride_wt, ids_ptr, stride_it,
        count_ptr, route_scale, TOPK, LANES_K, HAS_COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _route_topk_kernel(
    logits_ptr, stride_lt,  # [T, E]
    bias_ptr,  # [E]
    weights_ptr, stride_wt,  # [T, topk]
    ids_ptr, stride_it,  # [T, topk]
    count_ptr,  # [1]
    T, E, route_scale,
    SCORE: tl.constexpr, TOPK: tl.constexpr, LANES_K: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) + tl.arange(0, 1)
    offs_e = tl.arange(0, BLOCK_E)[:, None]
    rows = offs_t.to(tl.int64)[None, :] * stride_lt
    logits = tl.load(logits_ptr + rows + offs_e, mask=offs_e < E, other=0.0)
    topk_rows(
        logits, offs_t, offs_t < T, bias_ptr, weights_ptr, stride_wt, ids_ptr, stride_it,
        count_ptr, E, route_scale, SCORE, TOPK, LANES_K, BLOCK_E, HAS_BIAS, HAS_COUNT,
    )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    router_logits = randn(case["T"], case["E"], device=device, scale=2.0, seed=seed)
    bias = randn(case["E"], device=device, scale=0.5, seed=seed + 1)
    return (router_logits, bias), {"topk": case["topk"], "route_scale": 1.5}


SPEC = KernelSpec(
    op=route_topk, reference=route_topk_reference, default=default_config,
    cases=(
        {"name": "small", "T": 5, "E": 16, "topk": 4},
        {"name": "flash-t1", "T": 1, "E": 256, "topk": 6},
        {"name": "flash-t3456", "T": 3456, "E": 256, "topk": 6},
        {"name": "pro-t64", "T": 64, "E": 384, "topk": 6},
    ),
    inputs=_inputs, tolerance=1e-5,
    bytes_moved=lambda case: case["T"] * (4 * case["E"] + 8 * case["topk"]) + 4 * case["E"],
)  # fmt: skip
