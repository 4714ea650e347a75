"""Routed experts from routing output to combined output: gate-up, SwiGLU, down, sum.

Numerics: the hidden state of a route, its weight included, is rounded once to the dtype of ``x``
(that of the result when ``x`` is e4m3), then quantized like any activation; routes are rounded to
the result's dtype and summed in fp32.
Launches: sorted, gate-up with activation and quantization, down, sum; by GEMV gate-up and down
alone, each finished by the blocks that arrive last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftkernels import backend, check
from ftkernels.moe import gemm_fp4, gemv_fp4
from ftkernels.moe.align import moe_align
from ftkernels.moe.combine import combined, moe_combine, moe_combine_reference
from ftkernels.moe.experts import (
    ACT_GROUP,
    Experts,
    check_experts,
    check_slots,
    check_x,
    expert_products,
    finish_routes,
    quantized,
    route_products,
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.moe.experts import scratch_bytes as quantized_bytes
from ftkernels.moe.gemm_fp4 import expert_weights
from ftkernels.moe.swiglu import activated, check_limit
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn
from ftkernels.work import Work

_GEMV_ROUTES = 64 * 6


def moe_fp4(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *,
    swiglu_limit: float, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, shared: torch.Tensor | None = None,
    activation: str = "fp8", packed: bool = False, gated: bool = True, path: str | None = None,
    routed_out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the routed experts of a layer and add the shared one.

    Args:
        x: ``[T, C]``, bf16/fp16/fp32, or e4m3 with ``x_scale``.
        w13: ``[S, 2I, C/2]`` uint8 with ``w13_scale [S, 2I, C/32]``, or ``[S, 2I, C]`` dense with
            None.
        w2: ``[S, C, I/2]`` with ``w2_scale [S, C, I/32]``, or ``[S, C, I]`` with None.
        topk_weights: ``[T, topk]`` fp32.
        topk_ids: ``[T, topk]`` int32, -1 to skip a route.
        swiglu_limit: clamp bound, 0 = no clamp.
        x_scale: ``[T, ceil(C/128)]`` when ``x`` is e4m3.
        slot_of_expert: ``[E]`` int32, -1 to skip an expert's routes; expert = slot when omitted.
        shared: ``[T, C]``, added in fp32 before the last rounding.
        activation: "fp8" quantizes ``x`` and the hidden state per 128 channels, "bf16" neither.
        packed: weights and scales are ``pack_fp4``'s.
        gated: packed ``w13`` comes from ``pack_fp4(gated=True)``; its tensors do not tell, so one
            packed otherwise gives wrong results unseen.
        path: "gemm" or "gemv" pins the choice, else it goes by the number of routes.
        routed_out: ``[T, topk, C]``; routes whose expert has a slot are written there and nothing
            is combined: a step is run in groups this way, with one ``moe_combine`` at the end.
            Without ``out`` and ``shared``.
        out_dtype: that of ``x`` when omitted, bf16 for e4m3.
        scratch: as ``scratch_bytes("moe_fp4", T=.., topk=.., I=.., C=.., E=..)`` says, with
            ``bytes=4`` for fp32; allocated when omitted.

    Returns:
        ``[T, C]`` of ``out_dtype``, or ``routed_out``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. Two launches by GEMV, four by GEMM, and one
    to quantize a dense ``x``. Dense weights run the reference on every device.
    """
    call = _checked(
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, swiglu_limit, x_scale,
        slot_of_expert, shared, activation, packed, gated, path, routed_out, out_dtype, out,
    )  # fmt: skip
    num_tokens, topk = topk_ids.shape
    plain = call.dense or call.w2.k == 0 or backend.use_reference(x)
    if plain and scratch is None:
        return _reference(call, out)
    size = {"T": num_tokens, "topk": topk, "I": call.w2.k, "C": call.w13.k}
    itemsize = max(call.hidden_dtype.itemsize, call.out_dtype.itemsize)
    num_bytes = _scratch(**size, E=call.num_experts, bytes=itemsize)
    others = (
        ("x", x), ("x_scale", x_scale), ("w13", w13), ("w13_scale", w13_scale), ("w2", w2),
        ("w2_scale", w2_scale), ("topk_weights", topk_weights), ("topk_ids", topk_ids),
        ("slot_of_expert", slot_of_expert), ("shared", shared), ("out", out),
        ("routed_out", routed_out),
    )  # fmt: skip
    scratch = check.scratch("moe_fp4", scratch, num_bytes, x, others)
    if plain:
        return _reference(call, out)
    if out is None and routed_out is None:
        out = torch.empty(num_tokens, call.w13.k, dtype=call.out_dtype, device=x.device)
    result = out if routed_out is None else routed_out
    assert result is not None
    if num_tokens == 0:
        return result
    if topk == 0:
        return result if routed_out is not None else _shared_alone(result, shared)
    if path == "gemv" or (path is None and num_tokens * topk <= _GEMV_ROUTES):
        _gemv(call, result, scratch)
    else:
        _gemm(call, result, scratch)
    return result


def moe_fp4_reference(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *,
    swiglu_limit: float, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, shared: torch.Tensor | None = None,
    activation: str = "fp8", packed: bool = False, gated: bool = True, path: str | None = None,
    routed_out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch; the two paths agree within fp32 rounding."""
    call = _checked(
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, swiglu_limit, x_scale,
        slot_of_expert, shared, activation, packed, gated, path, routed_out, out_dtype, out,
    )  # fmt: skip
    return _reference(call, out)


@dataclass(frozen=True)
class _Call:
    """The checked arguments."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    w13: Experts
    w2: Experts
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    swiglu_limit: float
    slot_of_expert: torch.Tensor | None
    shared: torch.Tensor | None
    activation: str
    path: str | None
    routed_out: torch.Tensor | None
    out_dtype: torch.dtype

    @property
    def dense(self) -> bool:
        return self.w13.scale is None or self.w2.scale is None

    @property
    def num_experts(self) -> int:
        slots = self.slot_of_expert
        return int(self.w13.weight.shape[0] if slots is None else slots.shape[0])

    @property
    def hidden_dtype(self) -> torch.dtype:
        return self.out_dtype if self.x_scale is not None else self.x.dtype


def _checked(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor | None, w2: torch.Tensor,
    w2_scale: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    swiglu_limit: float, x_scale: torch.Tensor | None, slot_of_expert: torch.Tensor | None,
    shared: torch.Tensor | None, activation: str, packed: bool, gated: bool, path: str | None,
    routed_out: torch.Tensor | None, out_dtype: torch.dtype | None, out: torch.Tensor | None,
) -> _Call:  # fmt: skip
    op = "moe_fp4"
    check_x(op, x, x_scale)
    check.tensor(op, "topk_ids", topk_ids, (torch.int32,), (x.shape[0], None), "[T, topk]", x)
    size = tuple(topk_ids.shape)
    check.tensor(op, "topk_weights", topk_weights, (torch.float32,), size, "[T, topk]", x)
    up = check_experts(op, "w13", w13, w13_scale, x.shape[1], x, packed=packed, gated=gated)
    check.require(
        up.num_rows % 2 == 0, lambda: f"{op}: w13 is {tuple(w13.shape)}, expected gate and up rows"
    )
    down = check_experts(op, "w2", w2, w2_scale, up.num_rows // 2, x, packed=packed)
    check.require(
        down.num_rows == x.shape[1] and w2.shape[0] == w13.shape[0],
        lambda: (
            f"{op}: w2 is {tuple(w2.shape)}, expected {w13.shape[0]} experts of {x.shape[1]} rows"
        ),
    )
    check_limit(op, "swiglu_limit", swiglu_limit)
    check.require(
        activation in ("fp8", "bf16"),
        lambda: f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'",
    )
    check.require(
        x_scale is None or activation == "fp8",
        lambda: f"{op}: activation is {activation!r}, expected 'fp8' for an e4m3 x",
    )
    check.require(
        path in (None, "gemm", "gemv"),
        lambda: f"{op}: path is {path!r}, expected None, 'gemm' or 'gemv'",
    )
    check_slots(op, slot_of_expert, x)
    plain = torch.bfloat16 if x_scale is not None else x.dtype
    dtype = plain if out_dtype is None else out_dtype
    check.out_dtype(op, dtype)
    given = (
        w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, slot_of_expert, shared, x_scale,
    )  # fmt: skip
    for name, given_too in (("out", out), ("shared", shared)):
        check.require(
            routed_out is None or given_too is None,
            f"{op}: {name} is given with routed_out, expected None: nothing is combined then",
        )
    if out is not None:
        check.output(op, out, tuple(x.shape), like=x, dtype=dtype, inputs=given)
    if shared is not None:
        check.tensor(op, "shared", shared, check.FLOATS, tuple(x.shape), "[T, C]", x)
    if routed_out is not None:
        size = (*topk_ids.shape, x.shape[1])
        check.output(op, routed_out, size, like=x, dtype=dtype, name="routed_out", inputs=given)
    return _Call(
        x, x_scale, up, down, topk_weights, topk_ids, swiglu_limit, slot_of_expert, shared,
        activation, path, routed_out, dtype,
    )  # fmt: skip


def _reference(call: _Call, out: torch.Tensor | None) -> torch.Tensor:
    tokens, topk = call.topk_ids.shape
    x, dtype, channels, path = call.x, call.out_dtype, call.w13.k, call.path
    slots = slots_of(call.topk_ids.flatten().tolist(), call.slot_of_expert)
    rows = widen_x(x, call.x_scale, call.activation)
    weights, hidden_dtype = call.topk_weights.flatten(), call.hidden_dtype
    if path == "gemv" and call.routed_out is None and slots and min(slots) >= 0:
        rows = rows.expand(topk, -1) if tokens == 1 else rows.repeat_interleave(topk, 0)
        hidden = route_products(rows, slots, call.w13)
        hidden = activated(hidden, call.swiglu_limit, weights)
        hidden = hidden if hidden_dtype == torch.float32 else hidden.to(hidden_dtype)
        down = route_products(widen_x(hidden, None, call.activation), slots, call.w2)
        routed = (down if dtype == torch.float32 else down.to(dtype)).view(tokens, topk, channels)
        return combined(routed, None, call.shared, dtype, out)
    room = call.routed_out
    if room is None:
        room = torch.empty(tokens, topk, channels, dtype=dtype, device=x.device)
    if tokens:
        places = [q // topk for q in range(tokens * topk)]
        routes, hidden = expert_products(rows, places, slots, call.w13, path=path)
        hidden = finish_routes(hidden, routes, call.swiglu_limit, weights).to(hidden_dtype)
        rows, taken = widen_x(hidden, None, call.activation), [slots[q] for q in routes]
        order, down = expert_products(rows, range(len(routes)), taken, call.w2, path=path)
        _write(room, [routes[place] for place in order], down.to(dtype))
    if call.routed_out is not None:
        return room
    skips = any(slot < 0 for slot in slots)
    return moe_combine_reference(
        room, topk_ids=call.topk_ids if skips else None,
        slot_of_expert=call.slot_of_expert if skips else None, shared=call.shared,
        out_dtype=dtype, out=out,
    )  # fmt: skip


def _write(routed: torch.Tensor, routes: list[int], rows: torch.Tensor) -> None:
    topk = routed.shape[1]
    if routes == list(range(routed.shape[0] * topk)) and routed.is_contiguous():
        routed.view(-1, routed.shape[2]).copy_(rows)
        return
    routed[[q // topk for q in routes], [q % topk for q in routes]] = rows


class _Pieces:
    """Hands out the bytes of a scratch, 16-byte aligned, one piece after another."""

    def __init__(self, scratch: torch.Tensor, begin: int) -> None:
        self._scratch, self._begin = scratch, begin

    def take(self, dtype: torch.dtype, *size: int) -> torch.Tensor:
        begin = _aligned(self._begin)
        count = dtype.itemsize
        for dim in size:
            count *= dim
        self._begin = begin + count
        return self._scratch[begin : begin + count].view(dtype).view(size)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _block_m(num_routes: int, num_experts: int) -> int:
    """Rows of a tile by routes an expert."""
    average = num_routes / max(1, num_experts)
    return 64 if average >= 40 else 32 if average >= 20 else 16


def _scratch(*, T: int, topk: int, I: int, C: int, E: int, bytes: int = 2) -> int:
    """``bytes`` of an element of ``x`` and of the result."""
    num_routes = T * topk
    hidden = _aligned(num_routes * I * max(1, bytes)) + _aligned(num_routes * -(-I // ACT_GROUP))
    some = min(T, gemv_fp4.MAX_TOKENS) * topk
    partial = max(gemv_fp4.partial_bytes(some, 2 * I, C), gemv_fp4.partial_bytes(some, C, I))
    padded = num_routes + E * 64
    order = 3 * _aligned(4 * padded + 16)
    routed = order + _aligned(num_routes * C * bytes)
    return _aligned(quantized_bytes(T, C)) + hidden + max(_aligned(partial), routed) + 64


def _quantized_x(
    call: _Call, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, _Pieces]:
    """``x`` as the product takes it, and what is left of the scratch."""
    pieces = _Pieces(scratch, quantized_bytes(*call.x.shape))
    if call.x_scale is not None or call.activation == "bf16":
        return call.x, call.x_scale, pieces
    return *quantized(call.x, scratch), pieces


def _hidden(call: _Call, pieces: _Pieces) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for the activated routes, and for their scales when they are quantized."""
    num_routes, inter = call.topk_ids.numel(), call.w2.k
    if call.activation == "bf16":
        return pieces.take(call.hidden_dtype, num_routes, inter), None
    scale = pieces.take(torch.uint8, num_routes, -(-inter // ACT_GROUP))
    return pieces.take(torch.float8_e4m3fn, num_routes, inter), scale


def _gemv(call: _Call, result: torch.Tensor, scratch: torch.Tensor) -> None:
    x, x_scale, pieces = _quantized_x(call, scratch)
    hidden, hidden_scale = _hidden(call, pieces)
    tokens, topk = call.topk_ids.shape
    some = min(tokens, gemv_fp4.MAX_TOKENS) * topk
    most = max(gemv_fp4.partial_bytes(some, w.num_rows, w.k) for w in (call.w13, call.w2))
    counters = gemv_fp4.counters(scratch)
    partial = pieces.take(torch.float32, most // 4)
    ids, slots = call.topk_ids, call.slot_of_expert
    gemv_fp4.launch(
        x, x_scale, call.w13, ids, slots, call.topk_weights, call.swiglu_limit, hidden, counters,
        partial, out_scale=hidden_scale, rounded=call.hidden_dtype,
    )  # fmt: skip
    combine = gemv_fp4.Sum(call.shared) if call.routed_out is None else None
    gemv_fp4.launch(
        hidden, hidden_scale, call.w2, ids, slots, None, None, result, counters, partial,
        combine=combine,
    )  # fmt: skip


def _gemm(call: _Call, result: torch.Tensor, scratch: torch.Tensor) -> None:
    x, x_scale, pieces = _quantized_x(call, scratch)
    hidden, hidden_scale = _hidden(call, pieces)
    tokens, topk = call.topk_ids.shape
    num_routes, num_experts = tokens * topk, call.num_experts
    block_m = _block_m(num_routes, num_experts)
    blocks = -(-(num_routes + num_experts * (block_m - 1)) // block_m)
    sizes = (blocks * block_m, blocks, 1)
    room = [pieces.take(torch.int32, size) for size in sizes]
    order = moe_align(
        call.topk_ids, num_experts=num_experts, block_m=block_m, out=(room[0], room[1], room[2])
    )
    slots = call.slot_of_expert
    gemm_fp4.launch(
        x, x_scale, call.w13, order, topk, block_m, slots, call.swiglu_limit, call.topk_weights,
        hidden, out_scale=hidden_scale, rounded=call.hidden_dtype,
    )  # fmt: skip
    routed = call.routed_out
    if routed is None:
        routed = pieces.take(call.out_dtype, tokens, topk, call.w2.num_rows)
    gemm_fp4.launch(hidden, hidden_scale, call.w2, order, 1, block_m, slots, None, None, routed)
    if call.routed_out is None:
        moe_combine(
            routed, topk_ids=call.topk_ids, slot_of_expert=slots, shared=call.shared,
            out_dtype=call.out_dtype, out=result,
        )  # fmt: skip


def _shared_alone(out: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    return out.zero_() if shared is None else out.copy_(shared)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    slots, inter, channels = case["S"], case["I"], case["C"]
    packed = bool(case.get("packed"))
    w13 = expert_weights(
        {"S": slots, "N": 2 * inter, "K": channels}, device=device, seed=seed, packed=packed,
        gated=True,
    )  # fmt: skip
    w2 = expert_weights(
        {"S": slots, "N": channels, "K": inter}, device=device, seed=seed + 1, packed=packed
    )
    x = randn(case["T"], channels, dtype=torch.bfloat16, device=device, seed=seed + 2)
    routes = torch.arange(case["T"] * case["topk"], dtype=torch.int32) % slots
    ids = routes.view(case["T"], case["topk"]).to(device)
    weights = randn(case["T"], case["topk"], device=device, seed=seed + 3).abs()
    shared = randn(case["T"], channels, dtype=torch.bfloat16, device=device, seed=seed + 4)
    kwargs = {"swiglu_limit": 10.0, "packed": packed, "shared": shared, "path": case["path"]}
    return (x, *w13, *w2, weights, ids), kwargs


def _work(case: Case, kernel: str, config: Case) -> Work | None:
    tokens, topk = case["T"], case["topk"]
    if "GATED" not in config:
        return None
    n, k = case["C"], case["I"]
    if config["GATED"]:
        n, k = 2 * k, n
    if kernel == "_moe_gemv_fp4_kernel":
        return gemv_fp4.work(tokens, topk, case["S"], n, k, config)
    return gemm_fp4.work(tokens * topk, n, k, True, config)


_FLASH = {"topk": 6, "S": 256, "C": 4096, "packed": True}

SPEC = KernelSpec(
    op=moe_fp4, reference=moe_fp4_reference, default=gemv_fp4.default_config, inputs=_inputs,
    tolerance=1e-2, scratch=_scratch,
    launches=lambda case: 3 if case["path"] == "gemv" else 5,
    cases=(
        {"name": "small", "T": 3, "topk": 2, "S": 4, "I": 32, "C": 64, "path": "gemv"},
        {"name": "small-gemm", "T": 3, "topk": 2, "S": 4, "I": 96, "C": 64, "path": "gemm",
         "packed": True},
        *({"name": f"flash-tp{tp}-t{t}", **_FLASH, "T": t, "I": 2048 // tp, "path": "gemv"}
          for tp in (8, 1) for t in (1, 64)),
        *({"name": f"flash-tp{tp}-t3456", **_FLASH, "T": 3456, "I": 2048 // tp, "path": "gemm"}
          for tp in (8, 1)),
    ),
    bytes_moved=lambda c: min(c["T"] * c["topk"], c["S"]) * 3 * c["I"] * c["C"] * 17 // 32,
    flops=lambda c: 6 * c["T"] * c["topk"] * c["I"] * c["C"], work=_work,
)  # fmt: skip
