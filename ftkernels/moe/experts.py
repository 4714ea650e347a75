"""What the routed expert products share: checks of their weights, and the plain-torch product by
expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftkernels import check
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.moe.fp4_tiles import BYTES, CHECKPOINT, FOLDED
from ftkernels.moe.swiglu import activated, check_limit
from ftkernels.quant.act_quant import Pair, quantize_fp8
from ftkernels.quant.pack import unpack_fp4_reference
from ftkernels.quant.round_trip import round_tripped
from ftkernels.quant.weight_quant import dequantize_fp4_reference, dequantize_fp8_reference
from ftkernels.spec import COUNTER_BYTES

GROUP = 32
ACT_GROUP = 128
_DENSE = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Experts:
    """Checked weights of one matrix of every expert: ``num_rows`` rows of ``k`` columns each.

    Args:
        scale: UE8M0 codes, or packed metadata; None for dense weights.
        gated: packed rows are gate, up, gate, up.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    num_rows: int
    k: int
    packed: bool
    gated: bool

    @property
    def layout(self) -> int:
        """As `fp4_tiles` numbers them."""
        assert self.scale is not None
        if not self.packed:
            return int(CHECKPOINT.value)
        return int((FOLDED if self.scale.dtype == torch.int32 else BYTES).value)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and scales in the checkpoint's order."""
        if self.packed and self.scale is not None:
            return unpack_fp4_reference(self.weight.contiguous(), self.scale, gated=self.gated)
        return self.weight, self.scale

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Weight and metadata pointers of a kernel, each with its strides."""
        weight, scale = self.weight, self.scale
        assert scale is not None
        strides = (scale.stride(1), 1) if self.packed else (0, scale.stride(1))
        return weight, weight.stride(0), weight.stride(1), scale, scale.stride(0), *strides


def check_experts(
    op: str, name: str, weight: torch.Tensor, scale: torch.Tensor | None, k: int,
    like: torch.Tensor, *, packed: bool, gated: bool = False,
) -> Experts:  # fmt: skip
    """Refuse expert weights of the wrong form.

    Args:
        k: columns of a matrix.
        gated: how packed rows would be ordered.
    """
    if scale is None:
        require_scale(op, name, weight)
        check.matrix(op, name, weight, _DENSE, (None, None, k), "[S, N, K]", like)
        return Experts(weight, None, int(weight.shape[1]), k, False, False)
    check.require(k % GROUP == 0, lambda: f"{op}: K is {k}, expected a multiple of {GROUP}")
    check.tensor(op, name, weight, (torch.uint8,), (None, None, k // 2), "[S, N, K/2]", like)
    slots, num_rows = weight.shape[0], int(weight.shape[1])
    experts = Experts(weight, scale, num_rows, k, packed, packed and gated)
    if not packed:
        size = (slots, num_rows, k // GROUP)
        check.tensor(op, f"{name}_scale", scale, (torch.uint8,), size, "[S, N, K/32]", like)
        return experts
    check.dtype(op, f"{name}_scale", scale, (torch.int32, torch.uint8))
    folded = scale.dtype == torch.int32
    size = (slots, -(-k // ACT_GROUP) if folded else k // GROUP, num_rows)
    text = "[S, ceil(K/128), N]" if folded else "[S, K/32, N]"
    check.tensor(op, f"{name}_scale", scale, (scale.dtype,), size, text, like)
    check.require(
        num_rows < 2 or weight.stride(1) == k // 2,
        lambda: (
            f"{op}: {name} is {tuple(weight.shape)} with strides {weight.stride()}, "
            "expected packed experts that are contiguous each"
        ),
    )
    check.require(
        not experts.gated or num_rows % 2 == 0,
        lambda: f"{op}: {name} is {tuple(weight.shape)}, expected an even number of gated rows",
    )
    return experts


def require_scale(op: str, name: str, weight: object) -> None:
    """Quantized codes without their scales: say what is missing."""
    quantized = (torch.uint8, torch.int32, torch.float8_e4m3fn)
    if isinstance(weight, torch.Tensor) and weight.dtype in quantized:
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: {name}_scale is None, expected the scales of {name}, {kind} codes")


def check_options(
    op: str, activation: str, swiglu_limit: float | None, experts: Experts,
    route_weights: torch.Tensor | None, num_routes: int, like: torch.Tensor,
) -> None:  # fmt: skip
    check.require(
        activation in ("fp8", "bf16"),
        lambda: f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'",
    )
    if swiglu_limit is not None:
        check_limit(op, "swiglu_limit", swiglu_limit)
    check.require(
        swiglu_limit is None or experts.num_rows % 2 == 0,
        lambda: f"{op}: weight is {tuple(experts.weight.shape)}, expected gate and up rows",
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


def scratch_bytes(num_rows: int, k: int) -> int:
    """Counters, then room for ``x`` in FP8 and its scales."""
    return COUNTER_BYTES + num_rows * (k + -(-k // ACT_GROUP))


def quantized(x: torch.Tensor, scratch: torch.Tensor | None) -> Pair:
    """Launches ``quantize_fp8`` into ``scratch``, laid out as `scratch_bytes` counts."""
    num_rows, k = x.shape
    if scratch is None:
        return quantize_fp8(x)
    used = scratch[COUNTER_BYTES : scratch_bytes(num_rows, k)]
    codes, scales = used.split((num_rows * k, num_rows * -(-k // ACT_GROUP)))
    pair = (codes.view(torch.float8_e4m3fn).view(num_rows, k), scales.view(num_rows, -1))
    return quantize_fp8(x, out=pair)


def slots_of(ids: Sequence[int], slot_of_expert: torch.Tensor | None) -> list[int]:
    """Slot of each route's expert, -1 where there is none."""
    if slot_of_expert is None:
        return list(ids)
    table = slot_of_expert.tolist()
    return [table[e] if e >= 0 else -1 for e in ids]


def expert_products(
    rows: torch.Tensor, row_of_route: Sequence[int], slots: Sequence[int], experts: Experts, *,
    path: str | None = None,
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
    weight, scale = experts.plain()
    routes: list[int] = []
    products: list[torch.Tensor] = []
    for slot, mine in sorted(by_slot.items()):
        matrix = wide(weight[slot]) if scale is None else _widen(weight[slot], scale[slot])
        places = [row_of_route[q] for q in mine]
        taken = rows[places[0]][None] if len(places) == 1 else rows[places]
        products.append(matmul_rows(taken, matrix, path))
        routes.extend(mine)
    return routes, torch.cat(products) if products else rows.new_empty(0, experts.num_rows)


def route_products(
    rows: torch.Tensor, slots: Sequence[int], experts: Experts
) -> torch.Tensor:  # fmt: skip
    """As ``expert_products`` by GEMV, a row for each route in its own order; every route has a
    slot."""
    weight, scale = experts.plain()
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
