"""What the routed expert products share: checks of their weights, and the plain-torch product by
expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftkernels import check
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.moe.swiglu import activated
from ftkernels.quant.pack import unpack_fp4_reference
from ftkernels.quant.round_trip import round_tripped
from ftkernels.quant.weight_quant import dequantize_fp4_reference, dequantize_fp8_reference

GROUP = 32
ACT_GROUP = 128
_DENSE = (torch.bfloat16, torch.float32)


def check_experts(
    op: str, name: str, weight: torch.Tensor, scale: torch.Tensor | None, k: int,
    like: torch.Tensor, *, packed: bool,
) -> int:  # fmt: skip
    """Refuse expert weights of the wrong form; gives the rows ``N`` of one expert."""
    if scale is None:
        require_scale(op, name, weight)
        check.matrix(op, name, weight, _DENSE, (None, None, k), "[S, N, K]", like)
        return int(weight.shape[1])
    if packed:  # the packed order is the unpacker's to check
        check.dtype(op, name, weight, (torch.uint8, torch.int32))
        return int(weight.shape[1])
    check.require(k % GROUP == 0, lambda: f"{op}: K is {k}, expected a multiple of {GROUP}")
    check.tensor(op, name, weight, (torch.uint8,), (None, None, k // 2), "[S, N, K/2]", like)
    size = (weight.shape[0], weight.shape[1], k // GROUP)
    check.tensor(op, f"{name}_scale", scale, (torch.uint8,), size, "[S, N, K/32]", like)
    return int(weight.shape[1])


def require_scale(op: str, name: str, weight: object) -> None:
    """Quantized codes without their scales: say what is missing."""
    quantized = (torch.uint8, torch.int32, torch.float8_e4m3fn)
    if isinstance(weight, torch.Tensor) and weight.dtype in quantized:
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: {name}_scale is None, expected the scales of {name}, {kind} codes")


def check_options(
    op: str, activation: str, swiglu_limit: float | None, route_weights: torch.Tensor | None,
    num_routes: int, like: torch.Tensor,
) -> None:  # fmt: skip
    check.require(
        activation in ("fp8", "bf16"),
        lambda: f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'",
    )
    check.require(
        swiglu_limit is None or swiglu_limit >= 0,
        lambda: f"{op}: swiglu_limit is {swiglu_limit}, expected None or >= 0",
    )
    if route_weights is not None:
        size = (num_routes,)
        check.tensor(op, "route_weights", route_weights, (torch.float32,), size, "[R]", like)


def check_slots(op: str, slot_of_expert: torch.Tensor | None, like: torch.Tensor) -> None:
    if slot_of_expert is not None:
        ints = (torch.int32,)
        check.tensor(op, "slot_of_expert", slot_of_expert, ints, (None,), "[E]", like)


def check_x(op: str, x: torch.Tensor, x_scale: torch.Tensor | None) -> None:
    if x_scale is None:
        check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
        return
    check.tensor(op, "x", x, (torch.float8_e4m3fn,), (None, None), "[T, K]")
    size = (x.shape[0], -(-x.shape[1] // ACT_GROUP))
    check.tensor(op, "x_scale", x_scale, (torch.uint8,), size, "[T, ceil(K/128)]", x)


def widen_x(x: torch.Tensor, x_scale: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Activations in fp32 as the product sees them."""
    if x_scale is not None:
        return dequantize_fp8_reference(x, x_scale, group=ACT_GROUP, dtype=torch.float32)
    if activation == "bf16":
        return wide(x)
    return round_tripped(wide(x), "fp8", ACT_GROUP)


def slots_of(ids: Sequence[int], slot_of_expert: torch.Tensor | None) -> list[int]:
    """Slot of each route's expert, -1 where there is none."""
    if slot_of_expert is None:
        return list(ids)
    table = slot_of_expert.tolist()
    return [table[e] if e >= 0 else -1 for e in ids]


def expert_products(
    rows: torch.Tensor, row_of_route: Sequence[int], slots: Sequence[int], weight: torch.Tensor,
    scale: torch.Tensor | None, *, packed: bool, path: str | None = None,
) -> tuple[list[int], torch.Tensor]:  # fmt: skip
    """fp32 products of the routes that have a slot, expert by expert.

    Args:
        rows: ``[X, K]`` fp32; route ``q`` reads row ``row_of_route[q]``.
        slots: slot of each route, -1 to leave it out.

    Returns:
        The routes taken, and their products in that order, ``[len, N]`` fp32.
    """
    by_slot: dict[int, list[int]] = {}
    for route, slot in enumerate(slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).append(route)
    if packed and scale is not None:
        weight, scale = unpack_fp4_reference(weight, scale)
    routes: list[int] = []
    products: list[torch.Tensor] = []
    for slot, mine in sorted(by_slot.items()):
        matrix = wide(weight[slot]) if scale is None else _widen(weight[slot], scale[slot])
        places = [row_of_route[q] for q in mine]
        taken = rows[places[0]][None] if len(places) == 1 else rows[places]
        products.append(matmul_rows(taken, matrix, path))
        routes.extend(mine)
    return routes, torch.cat(products) if products else rows.new_empty(0, weight.shape[1])


def route_products(
    rows: torch.Tensor, slots: Sequence[int], weight: torch.Tensor, scale: torch.Tensor | None, *,
    packed: bool,
) -> torch.Tensor:  # fmt: skip
    """As ``expert_products`` by GEMV, a row for each route in its own order; every route has a
    slot."""
    if packed and scale is not None:
        weight, scale = unpack_fp4_reference(weight, scale)
    products = [
        matmul_rows(
            row, wide(weight[slot]) if scale is None else _widen(weight[slot], scale[slot]), "gemv"
        )
        for row, slot in zip(rows[:, None].unbind(0), slots, strict=True)
    ]
    return torch.cat(products)


def finish_routes(
    products: torch.Tensor, routes: Sequence[int], swiglu_limit: float | None,
    route_weights: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Activation and route weight in fp32, before the one rounding."""
    weights = None if route_weights is None else route_weights[list(routes)]
    if swiglu_limit is not None:
        return activated(products, swiglu_limit, weights)
    return products if weights is None else products * weights[:, None]


def _widen(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_fp4_reference(weight, scale, group=GROUP, dtype=torch.float32)
