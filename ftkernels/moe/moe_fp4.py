"""Routed experts from routing output to combined output: gate-up, SwiGLU, down, sum.

Numerics: the hidden state of a route, its weight included, is rounded once to the dtype of ``x``,
then quantized like any activation; routes are rounded to the result's dtype and summed in fp32.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.moe.combine import combined, moe_combine_reference
from ftkernels.moe.experts import (
    check_experts,
    check_slots,
    check_x,
    expert_products,
    finish_routes,
    route_products,
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.moe.gemm_fp4 import expert_weights
from ftkernels.moe.swiglu import activated
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn


def moe_fp4(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *,
    swiglu_limit: float, slot_of_expert: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    path: str | None = None, routed_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the routed experts of a layer and add the shared one.

    Args:
        x: ``[T, C]``, bf16/fp16/fp32.
        w13: ``[S, 2I, C/2]`` uint8 with ``w13_scale [S, 2I, C/32]``, or ``[S, 2I, C]`` dense with
            None.
        w2: ``[S, C, I/2]`` with ``w2_scale [S, C, I/32]``, or ``[S, C, I]`` with None.
        topk_weights: ``[T, topk]`` fp32.
        topk_ids: ``[T, topk]`` int32, -1 to skip a route.
        swiglu_limit: clamp bound, 0 = no clamp.
        slot_of_expert: ``[E]`` int32; expert = slot when omitted.
        shared: ``[T, C]``, added in fp32 before the last rounding.
        activation: "fp8" quantizes ``x`` and the hidden state per 128 channels, "bf16" neither.
        packed: weights and scales are ``pack_fp4``'s.
        path: "gemm" or "gemv" pins the choice, else it goes by the number of routes.
        routed_out: ``[T, topk, C]``; routes whose expert has a slot are written there and nothing
            is combined: a step is run in groups this way, with one ``moe_combine`` at the end.

    Returns:
        ``[T, C]`` of ``out_dtype`` (that of ``x`` when omitted), or ``routed_out``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("moe_fp4", scratch, x)
    return moe_fp4_reference(
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, swiglu_limit=swiglu_limit,
        slot_of_expert=slot_of_expert, shared=shared, activation=activation, packed=packed,
        path=path, routed_out=routed_out, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def moe_fp4_reference(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *,
    swiglu_limit: float, slot_of_expert: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    path: str | None = None, routed_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch; the two paths agree within fp32 rounding."""
    op = "moe_fp4"
    tokens, topk = _checked(
        op, x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, swiglu_limit, slot_of_expert,
        activation, path, packed,
    )  # fmt: skip
    dtype, channels = x.dtype if out_dtype is None else out_dtype, x.shape[1]
    check.out_dtype(op, dtype)
    given = (w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, slot_of_expert, shared)
    if out is not None:
        check.output(op, out, tuple(x.shape), like=x, dtype=dtype, inputs=given)
    if shared is not None:
        check.tensor(op, "shared", shared, check.FLOATS, tuple(x.shape), "[T, C]", x)
    slots = slots_of(topk_ids.flatten().tolist(), slot_of_expert)
    if path == "gemv" and routed_out is None and slots and min(slots) >= 0:
        rows = widen_x(x, None, activation)
        rows = rows.expand(topk, -1) if tokens == 1 else rows.repeat_interleave(topk, 0)
        hidden = route_products(rows, slots, w13, w13_scale, packed=packed)
        hidden = activated(hidden, swiglu_limit, topk_weights.flatten())
        rows = widen_x(hidden if x.dtype == torch.float32 else hidden.to(x.dtype), None, activation)
        down = route_products(rows, slots, w2, w2_scale, packed=packed)
        routed = (down if dtype == torch.float32 else down.to(dtype)).view(tokens, topk, channels)
        return combined(routed, None, shared, dtype, out)
    if routed_out is not None:
        size = (tokens, topk, channels)
        check.tensor(op, "routed_out", routed_out, (dtype,), size, "[T, topk, C]", x)
    if routed_out is None:
        routed = torch.empty(tokens, topk, channels, dtype=dtype, device=x.device)
    else:
        routed = routed_out
    ids = topk_ids
    if tokens:
        routes, hidden = expert_products(
            widen_x(x, None, activation), [q // topk for q in range(tokens * topk)], slots,
            w13, w13_scale, packed=packed, path=path,
        )  # fmt: skip
        hidden = finish_routes(hidden, routes, swiglu_limit, topk_weights.flatten())
        rows = widen_x(hidden.to(x.dtype), None, activation)
        order, down = expert_products(
            rows,
            range(len(routes)),
            [slots[q] for q in routes],
            w2,
            w2_scale,
            packed=packed,
            path=path,
        )
        taken = [routes[place] for place in order]
        _write(routed, taken, down.to(dtype))
        if routed_out is None and len(taken) < tokens * topk:
            ids = ids.clone()
            ids.view(-1)[[q for q, slot in enumerate(slots) if slot < 0]] = -1
    if routed_out is not None:
        return routed_out
    skip = ids if any(i < 0 for i in ids.flatten().tolist()) else None
    return moe_combine_reference(routed, topk_ids=skip, shared=shared, out_dtype=dtype, out=out)


def _write(routed: torch.Tensor, routes: list[int], rows: torch.Tensor) -> None:
    topk = routed.shape[1]
    if routes == list(range(routed.shape[0] * topk)) and routed.is_contiguous():
        routed.view(-1, routed.shape[2]).copy_(rows)
        return
    routed[[q // topk for q in routes], [q % topk for q in routes]] = rows


def _checked(
    op: str, x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    swiglu_limit: float, slot_of_expert: torch.Tensor | None, activation: str, path: str | None,
    packed: bool,
) -> tuple[int, int]:  # fmt: skip
    check_x(op, x, None)
    check.tensor(op, "topk_ids", topk_ids, (torch.int32,), (x.shape[0], None), "[T, topk]", x)
    size = tuple(topk_ids.shape)
    check.tensor(op, "topk_weights", topk_weights, (torch.float32,), size, "[T, topk]", x)
    inter2 = check_experts(op, "w13", w13, w13_scale, x.shape[1], x, packed=packed)
    channels = check_experts(op, "w2", w2, w2_scale, inter2 // 2, x, packed=packed)
    check.require(
        channels == x.shape[1] and w2.shape[0] == w13.shape[0],
        lambda: (
            f"{op}: w2 is {tuple(w2.shape)}, expected {w13.shape[0]} experts of {x.shape[1]} rows"
        ),
    )
    check.require(swiglu_limit >= 0, lambda: f"{op}: swiglu_limit is {swiglu_limit}, expected >= 0")
    check.require(
        activation in ("fp8", "bf16"),
        lambda: f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'",
    )
    check.require(
        path in (None, "gemm", "gemv"),
        lambda: f"{op}: path is {path!r}, expected None, 'gemm' or 'gemv'",
    )
    check_slots(op, slot_of_expert, x)
    return topk_ids.shape[0], topk_ids.shape[1]


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    slots, inter, channels = case["S"], case["I"], case["C"]
    w13 = expert_weights({"S": slots, "N": 2 * inter, "K": channels}, device=device, seed=seed)
    w2 = expert_weights({"S": slots, "N": channels, "K": inter}, device=device, seed=seed + 1)
    x = randn(case["T"], channels, dtype=torch.bfloat16, device=device, seed=seed + 2)
    routes = torch.arange(case["T"] * case["topk"], dtype=torch.int32) % slots
    ids = routes.view(case["T"], case["topk"]).to(device)
    weights = randn(case["T"], case["topk"], device=device, seed=seed + 3).abs()
    return (x, *w13, *w2, weights, ids), {"swiglu_limit": 10.0}


SPEC = KernelSpec(
    op=moe_fp4, reference=moe_fp4_reference, kernel=False, inputs=_inputs, tolerance=1e-2,
    grows="T", scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "T": 3, "topk": 2, "S": 4, "I": 32, "C": 64},
        {"name": "flash-tp1-t1", "T": 1, "topk": 6, "S": 256, "I": 2048, "C": 4096},
    ),
    bytes_moved=lambda c: min(c["T"] * c["topk"], c["S"]) * 3 * c["I"] * c["C"] * 17 // 32,
    flops=lambda c: 6 * c["T"] * c["topk"] * c["I"] * c["C"],
)  # fmt: skip
