"""Routed FP4 product without sorting, for few tokens: ``out[t*topk+k] = weight[slot] @ x``.

Layouts and numerics are those of ``moe_gemm_fp4``.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.moe.experts import (
    check_experts,
    check_options,
    check_slots,
    check_x,
    expert_products,
    finish_routes,
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.moe.gemm_fp4 import expert_weights
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

MAX_TOKENS = 64


def moe_gemv_fp4(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    topk_ids: torch.Tensor, *, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply each route's activation by its expert's matrix (decode, at most 64 tokens).

    Args:
        x: ``[T, K]``, or ``[R, K]`` with a row per route, ``R = T*topk``.
        topk_ids: ``[T, topk]`` int32, -1 to skip a route.
        weight: ``[S, N, K/2]`` uint8 with ``weight_scale [S, N, K/32]``, or ``[S, N, K]`` dense
            with None.
        x_scale: ``[rows, ceil(K/128)]`` when ``x`` is e4m3.
        slot_of_expert: ``[E]`` int32, -1 for an expert without a slot; expert = slot when omitted.
        swiglu_limit: gate-up matrix with the clamped SwiGLU on its result; 0 = no clamp.
        route_weights: ``[R]`` fp32, multiplied before the one rounding.
        activation: "fp8", or "bf16" to leave ``x`` as it is.
        packed: weight and scale are ``pack_fp4``'s.
        out_dtype, out: of the result, and its tensor.
        scratch: uint8, ``scratch_bytes("moe_gemv_fp4")`` long.

    Returns:
        ``[R, N]``, or ``[R, N/2]`` with ``swiglu_limit``; routes without a slot are not written.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("moe_gemv_fp4", scratch, x)
    return moe_gemv_fp4_reference(
        x, weight, weight_scale, topk_ids, x_scale=x_scale, slot_of_expert=slot_of_expert,
        swiglu_limit=swiglu_limit, route_weights=route_weights, activation=activation,
        packed=packed, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def moe_gemv_fp4_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    topk_ids: torch.Tensor, *, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    op = "moe_gemv_fp4"
    check_x(op, x, x_scale)
    check.tensor(op, "topk_ids", topk_ids, (torch.int32,), (None, None), "[T, topk]", x)
    tokens, topk = topk_ids.shape
    check.require(
        tokens <= MAX_TOKENS, lambda: f"{op}: T is {tokens}, expected at most {MAX_TOKENS}"
    )
    num_routes = tokens * topk
    check.require(
        x.shape[0] in (tokens, num_routes),
        lambda: f"{op}: x is {tuple(x.shape)}, expected {tokens} or {num_routes} rows",
    )
    rows = check_experts(op, "weight", weight, weight_scale, x.shape[1], x, packed=packed)
    check_options(op, activation, swiglu_limit, route_weights, num_routes, x)
    check_slots(op, slot_of_expert, x)
    width = rows if swiglu_limit is None else rows // 2
    check.out_dtype(op, out_dtype)
    inputs = (weight, weight_scale, x_scale, slot_of_expert, route_weights)
    out = check.output(op, out, (num_routes, width), like=x, dtype=out_dtype, inputs=inputs)
    if num_routes == 0:
        return out
    per_row = num_routes // x.shape[0]
    routes, products = expert_products(
        widen_x(x, x_scale, activation), [q // per_row for q in range(num_routes)],
        slots_of(topk_ids.flatten().tolist(), slot_of_expert), weight, weight_scale, packed=packed,
        path="gemv",
    )  # fmt: skip
    out[routes] = finish_routes(products, routes, swiglu_limit, route_weights).to(out_dtype)
    return out


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    weight, scale = expert_weights(case, device=device, seed=seed)
    x = randn(case["T"], case["K"], dtype=torch.bfloat16, device=device, seed=seed + 1)
    routes = torch.arange(case["T"] * case["topk"], dtype=torch.int32) % case["S"]
    ids = routes.view(case["T"], case["topk"]).to(device)
    return (x, weight, scale, ids), {"swiglu_limit": 10.0 if case.get("gated") else None}


SPEC = KernelSpec(
    op=moe_gemv_fp4, reference=moe_gemv_fp4_reference, kernel=False, inputs=_inputs, tolerance=5e-3,
    grows="T", scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "T": 3, "topk": 2, "S": 4, "N": 64, "K": 96, "gated": True},
        {"name": "flash-tp1-t1", "T": 1, "topk": 6, "S": 256, "N": 4096, "K": 4096, "gated": True},
        {"name": "flash-tp1-t8", "T": 8, "topk": 6, "S": 256, "N": 4096, "K": 4096, "gated": True},
    ),
    bytes_moved=lambda c: min(c["T"] * c["topk"], c["S"]) * c["N"] * c["K"] * 17 // 32,
    flops=lambda c: 2 * c["T"] * c["topk"] * c["N"] * c["K"],
)  # fmt: skip
