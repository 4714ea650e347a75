"""Grouped FP4 product over sorted routes: ``out[q] = weight[slot(q)] @ x[q // topk]``.

Layout: ``weight [S, N, K/2]`` uint8, low nibble = even k, one UE8M0 code per 32 of K. Activations
are quantized to FP8 per 128 of K. With ``swiglu_limit`` gate rows come first, then up rows.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.moe.experts import (
    GROUP,
    check_experts,
    check_options,
    check_slots,
    check_x,
    expert_products,
    finish_routes,
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn


def moe_gemm_fp4(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    *, topk: int, num_routes: int, block_m: int, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply each route's activation by its expert's matrix (prefill).

    Args:
        x: ``[T, K]``; route ``q`` reads ``x[q // topk]`` (``topk=1``: a row per route).
        weight: ``[S, N, K/2]`` uint8 with ``weight_scale [S, N, K/32]``, or ``[S, N, K]`` dense
            with None.
        sorted_token_ids, expert_ids, num_tokens_post_padded: output of
            ``moe_align(block_m=block_m)``.
        num_routes: rows of the result.
        x_scale: ``[T, ceil(K/128)]`` when ``x`` is e4m3.
        slot_of_expert: ``[E]`` int32, -1 for an expert without a slot; expert = slot when omitted.
        swiglu_limit: gate-up matrix with the clamped SwiGLU on its result; 0 = no clamp.
        route_weights: ``[num_routes]`` fp32, multiplied before the one rounding.
        activation: "fp8", or "bf16" to leave ``x`` as it is.
        packed: weight and scale are ``pack_fp4``'s.
        out_dtype: of the result.
        out: the result's tensor; allocated when omitted.
        scratch: uint8, ``scratch_bytes("moe_gemm_fp4")`` long.

    Returns:
        ``[num_routes, N]``, or ``[num_routes, N/2]`` with ``swiglu_limit``; routes without a slot
        are not written.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("moe_gemm_fp4", scratch, x)
    return moe_gemm_fp4_reference(
        x, weight, weight_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, topk=topk,
        num_routes=num_routes, block_m=block_m, x_scale=x_scale, slot_of_expert=slot_of_expert,
        swiglu_limit=swiglu_limit, route_weights=route_weights, activation=activation,
        packed=packed, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def moe_gemm_fp4_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    *, topk: int, num_routes: int, block_m: int, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    op, ints = "moe_gemm_fp4", (torch.int32,)
    check_x(op, x, x_scale)
    rows = check_experts(op, "weight", weight, weight_scale, x.shape[1], x, packed=packed)
    check.tensor(op, "sorted_token_ids", sorted_token_ids, ints, (None,), "[M]", x)
    check.require(
        block_m > 0 and sorted_token_ids.shape[0] % block_m == 0,
        lambda: f"{op}: block_m is {block_m}, expected a divisor of {sorted_token_ids.shape[0]}",
    )
    blocks = (sorted_token_ids.shape[0] // block_m,)
    check.tensor(op, "expert_ids", expert_ids, ints, blocks, "[M/block_m]", x)
    check.tensor(op, "num_tokens_post_padded", num_tokens_post_padded, ints, (1,), "[1]", x)
    check.require(
        topk >= 1 and num_routes == x.shape[0] * topk,
        lambda: f"{op}: num_routes is {num_routes}, expected T*topk = {x.shape[0]}*{topk}",
    )
    check_options(op, activation, swiglu_limit, route_weights, num_routes, x)
    check_slots(op, slot_of_expert, x)
    width = rows if swiglu_limit is None else rows // 2
    check.out_dtype(op, out_dtype)
    inputs = (weight, weight_scale, x_scale, slot_of_expert, route_weights)
    out = check.output(op, out, (num_routes, width), like=x, dtype=out_dtype, inputs=inputs)
    if num_routes == 0:
        return out
    ids = [-1] * num_routes
    order, experts = sorted_token_ids.tolist(), expert_ids.tolist()
    for place in range(int(num_tokens_post_padded)):
        if order[place] < num_routes:
            ids[order[place]] = experts[place // block_m]
    routes, products = expert_products(
        widen_x(x, x_scale, activation), [q // topk for q in range(num_routes)],
        slots_of(ids, slot_of_expert), weight, weight_scale, packed=packed,
    )  # fmt: skip
    out[routes] = finish_routes(products, routes, swiglu_limit, route_weights).to(out_dtype)
    return out


def expert_weights(case: Case, *, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random FP4 experts of ``case`` (S, N, K) with scales of differing size."""
    slots, n, k = case["S"], case["N"], case["K"]
    if torch.device(device).type == "meta":
        packed = torch.empty(slots, n, k // 2, dtype=torch.uint8, device=device)
        return packed, torch.empty(slots, n, k // GROUP, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(seed)
    size = {"dtype": torch.uint8, "generator": generator}
    packed = torch.randint(0, 256, (slots, n, k // 2), **size)  # type: ignore[call-overload]
    scale = torch.randint(116, 124, (slots, n, k // GROUP), **size)  # type: ignore[call-overload]
    return packed.to(device), scale.to(device)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, topk, experts, block_m = case["T"], case["topk"], case["S"], case["block_m"]
    num_routes = tokens * topk
    weight, scale = expert_weights(case, device=device, seed=seed)
    x = randn(tokens, case["K"], dtype=torch.bfloat16, device=device, seed=seed + 1)
    size = -(-(num_routes + experts * (block_m - 1)) // block_m) * block_m
    order = torch.full((size,), num_routes, dtype=torch.int32)
    owners = torch.full((size // block_m,), -1, dtype=torch.int32)
    block = 0
    for expert in range(experts):
        mine = torch.arange(expert, num_routes, experts, dtype=torch.int32)
        for start in range(0, len(mine), block_m):
            part = mine[start : start + block_m]
            order[block * block_m : block * block_m + len(part)] = part
            owners[block] = expert
            block += 1
    count = torch.tensor([block * block_m], dtype=torch.int32)
    args = (x, weight, scale, order.to(device), owners.to(device), count.to(device))
    limit = 10.0 if case.get("gated") else None
    return args, {"topk": topk, "num_routes": num_routes, "block_m": block_m, "swiglu_limit": limit}


SPEC = KernelSpec(
    op=moe_gemm_fp4, reference=moe_gemm_fp4_reference, kernel=False, inputs=_inputs, tolerance=5e-3,
    grows="T", scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "T": 5, "topk": 2, "S": 3, "N": 64, "K": 96, "block_m": 4, "gated": True},
        {"name": "flash-tp1-m64", "T": 3456, "topk": 6, "S": 256, "N": 4096, "K": 4096,
         "block_m": 64, "gated": True},
    ),
    bytes_moved=lambda c: c["S"] * c["N"] * c["K"] * 17 // 32,
    flops=lambda c: 2 * c["T"] * c["topk"] * c["N"] * c["K"],
)  # fmt: skip
