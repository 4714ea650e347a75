"""FP4 experts in every layout, activations in every dtype, and the fp64 results of their routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ftkernels.quant.pack import pack_fp4
from tests.support.fp8_cases import fp8_codes, quantized, scales, spread

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
KINDS = ("fp8", "scaled", "bf16", "fp16", "fp32")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# layout, swiglu_limit, gated
FORMS: dict[str, tuple[str, float | None, bool | None]] = {
    "folded": ("folded", None, None),
    "folded-interleaved": ("folded", None, True),
    "folded-swiglu": ("folded", 1.5, None),
    "folded-halves": ("folded", 1.5, False),
    "bytes": ("bytes", None, None),
    "bytes-swiglu": ("bytes", 0, None),
    "bytes-halves": ("bytes", 1.5, False),
    "checkpoint": ("checkpoint", None, None),
    "checkpoint-swiglu": ("checkpoint", 1.5, None),
}

Given = tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]


@dataclass
class Fp4:
    """``codes [S, N, K/2]``, ``scale [S, N, K/32]`` and the fp64 matrices they stand for."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def matrix(self) -> torch.Tensor:
        low, high = E2M1[(self.codes & 15).long()], E2M1[(self.codes >> 4).long()]
        return torch.stack((low, high), -1).flatten(2) * scales(self.scale).repeat_interleave(32, 2)

    def given(self, layout: str, limit: float | None = None, gated: bool | None = None) -> Given:
        """Weight, scale and keyword arguments that an op takes them with."""
        kwargs: dict[str, Any] = {"swiglu_limit": limit, "packed": layout != "checkpoint"}
        if layout == "checkpoint":
            return (self.codes, self.scale), kwargs
        interleaved = limit is not None if gated is None else gated
        fold = layout == "folded"
        return pack_fp4(self.codes, self.scale, gated=interleaved, fold=fold), {
            **kwargs, "gated": gated,
        }  # fmt: skip


def fp4(slots: int, n: int, k: int, *, seed: int = 1, low: int = 118, high: int = 127) -> Fp4:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (slots, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(low, high, (slots, n, k // 32), generator=generator, dtype=torch.uint8)
    return Fp4(codes, scale)


def extreme(slots: int, n: int, k: int, rows: int, *, seed: int, low: int = 7, high: int = 254):
    """Scale codes over their range, and rows in FP8 whose scales bring the products back."""
    generator = torch.Generator().manual_seed(seed)
    made = {"generator": generator}
    groups = -(-k // 128)
    base = torch.randint(low, high + 1, (groups,), **made)
    largest = base + torch.randint(-8, 9, (slots, n, groups), **made)
    below = torch.randint(0, 12, (slots, n, groups, 4), **made)
    codes = (largest.clamp(low, high)[..., None] - below).clamp_min(1).flatten(2)[..., : k // 32]
    # a short last group lacks some of its four, and has a largest code of its own
    codes[..., groups * 4 - 4 :] = codes[..., groups * 4 - 4 :].clamp_min(low)
    x_scale = (254 - base + torch.randint(-8, 9, (rows, groups), **made)).clamp(1, 253)
    weights = fp4(slots, n, k, seed=seed)
    return (
        Fp4(weights.codes, codes.to(torch.uint8)), fp8_codes(rows, k, seed=seed + 1),
        x_scale.to(torch.uint8),
    )  # fmt: skip


def fp8_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows quantized by the formula: codes and scales."""
    values, width = quantized(x), x.shape[1]
    amax = torch.stack([p.abs().amax(-1) for p in x.double().split(128, 1)], 1).clamp_min(1e-4)
    codes = (torch.ceil(torch.log2(amax / 448)) + 127).to(torch.uint8)
    factor = scales(codes).repeat_interleave(128, 1)[:, :width]
    return (values / factor).float().to(torch.float8_e4m3fn), codes


def fp8_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * spread(scale, codes.shape[0], codes.shape[1], 1)


def activations(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """``x`` as an op takes it, its keyword arguments, and the fp64 rows that are multiplied."""
    if kind == "scaled":
        codes, scale = fp8_pair(x)
        return codes, {"x_scale": scale}, fp8_values(codes, scale)
    if kind == "fp8":
        x = x.bfloat16()
        return x, {}, quantized(x)
    x = x.to(_DTYPES[kind])
    return x, {"activation": "bf16"}, x.double()


def slots(ids: torch.Tensor, slot_of_expert: torch.Tensor | None = None) -> list[int]:
    table = None if slot_of_expert is None else slot_of_expert.tolist()
    return [e if e < 0 or table is None else table[e] for e in ids.flatten().tolist()]


def routes(
    rows: torch.Tensor, slot_of_route: list[int], matrix: torch.Tensor, limit: float | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Section 9.4 for each route, and by how much fp32 sums may miss it; NaN without a slot.

    ``rows`` are ``[R, K]`` or ``[T, K]``. The bound is 1e-6 of ``sum |a||b|``, carried through the
    activation.
    """
    count, n = len(slot_of_route), matrix.shape[1]
    values, bound = torch.full((2, count, n), float("nan"), dtype=torch.float64)
    per_row = count // max(1, rows.shape[0])
    for q, slot in enumerate(slot_of_route):
        if slot >= 0:
            row = rows[q // per_row]
            values[q] = matrix[slot] @ row
            bound[q] = 1e-6 * (matrix[slot].abs() @ row.abs())
    if limit is not None:
        top = limit or float("inf")
        (gate, up), (by_gate, by_up) = values.chunk(2, 1), bound.chunk(2, 1)
        gate, up = gate.clamp(max=top), up.clamp(-top, top)
        silu = gate * torch.sigmoid(gate)
        values = silu * up
        # silu is nowhere steeper than 1.1
        bound = 1.1 * by_gate * (up.abs() + by_up) + silu.abs() * by_up + 1e-6 * values.abs()
    if weights is not None:
        values, bound = values * weights[:, None].double(), bound * weights[:, None].abs().double()
        bound += 1e-7 * values.abs()
    return values, bound


def assert_routes(out: torch.Tensor, values: torch.Tensor, bound: torch.Tensor) -> None:
    """Routes with a slot are within the bound and a rounding; the others are ``out``'s to keep."""
    live = ~values.isnan().all(1)
    got, values, bound = out.cpu().double()[live], values[live], bound[live]
    excess = (got - values).abs() - torch.finfo(out.dtype).eps / 2 * values.abs() - bound
    if excess.numel() and not (excess <= 0).all():
        worst = torch.where(excess.isnan(), float("inf"), excess / (bound + 1e-300)).argmax()
        where = tuple(int(i) for i in torch.unravel_index(worst, excess.shape))
        raise AssertionError(
            f"{int((~(excess <= 0)).sum())} of {excess.numel()} values are off; at live route and "
            f"column {where}: {got[where]:.9g}, expected {values[where]:.9g} +- {bound[where]:.3g}"
        )


def random_ids(tokens: int, topk: int, experts: int, *, seed: int = 3) -> torch.Tensor:
    """Skipped routes and routes of a token on one expert occur."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts, (tokens, topk), generator=generator, dtype=torch.int32)


def ordered(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, ...]:
    """What ``moe_align`` gives."""
    given = ids.flatten().tolist()
    size = -(-(len(given) + experts * (block_m - 1)) // block_m) * block_m
    order: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = [q for q, e in enumerate(given) if e == expert]
        owners += [expert] * -(-len(mine) // block_m)
        order += mine + [len(given)] * (-len(mine) % block_m)
    count = len(order)
    order += [len(given)] * (size - count)
    owners += [-1] * (size // block_m - len(owners))
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (order, owners, [count]))


def apart(x: torch.Tensor, before: int = 16, after: int = 48) -> torch.Tensor:
    """``x`` as a view of memory that is NaN (bytes: 0xFF) around its rows and matrices."""
    wide = [2 * x.shape[0], *x.shape[1:]]
    wide[-1] += before + after
    memory = torch.full((*wide[:-1], wide[-1] * x.element_size()), 255, dtype=torch.uint8)
    view = memory.view(x.dtype)[::2, ..., before : before + x.shape[-1]]
    return view.copy_(x)
