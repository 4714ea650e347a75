"""Grouped FP4 product over sorted routes: ``out[q] = weight[slot(q)] @ x[q // topk]``.

Layout: ``weight [S, N, K/2]`` uint8, low nibble = even k, one UE8M0 code per 32 of K; or both as
``pack_fp4`` orders them. Activations are quantized to FP8 per 128 of K. With ``swiglu_limit`` gate
rows come first, then up rows (packed: gate, up, gate, up).
Numerics: the products of 128 columns are summed on the tensor cores and enter the fp32 sum under
one factor; when the scales are not folded those of 32 are, and 128 meet in fp32 before the rows'
own factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.moe.experts import (
    ACT_GROUP,
    GROUP,
    Experts,
    check_experts,
    check_options,
    check_slots,
    check_x,
    expert_products,
    finish_routes,
    quantized,
    scratch_bytes,
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.moe.fp4_tiles import (
    BYTES,
    matrix_rows,
    route_rows,
    step_columns,
    tile_products,
)  # fmt: skip
from ftkernels.moe.swiglu import clamp_bound
from ftkernels.quant.act_quant import Pair
from ftkernels.quant.formats import tl_clamped_swiglu, tl_quantized_fp8
from ftkernels.quant.pack import TILE_ROWS, pack_fp4
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn
from ftkernels.work import Work, even_loop


def moe_gemm_fp4(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    *, topk: int, num_routes: int, block_m: int, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    gated: bool | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
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
        gated: packed rows are interleaved, as ``pack_fp4(gated=True)`` does; with
            ``swiglu_limit`` they are unless this is False.
        out_dtype: of the result.
        out: the result's tensor; allocated when omitted.
        scratch: as ``scratch_bytes("moe_gemm_fp4", T=.., K=..)`` says; allocated when omitted.

    Returns:
        ``[num_routes, N]``, or ``[num_routes, N/2]`` with ``swiglu_limit``; routes without a slot
        are not written.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. One launch, and one to quantize a dense
    ``x``. Dense weights run the reference on every device.
    """
    experts, out = _checked(
        x, weight, weight_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, topk,
        num_routes, block_m, x_scale, slot_of_expert, swiglu_limit, route_weights, activation,
        packed, gated, out_dtype, out,
    )  # fmt: skip
    if scratch is not None:
        num_bytes = scratch_bytes(*x.shape)
        others = (
            ("x", x), ("x_scale", x_scale), ("weight", weight), ("weight_scale", weight_scale),
            ("sorted_token_ids", sorted_token_ids), ("expert_ids", expert_ids),
            ("num_tokens_post_padded", num_tokens_post_padded),
            ("slot_of_expert", slot_of_expert), ("route_weights", route_weights), ("out", out),
        )  # fmt: skip
        check.scratch("moe_gemm_fp4", scratch, num_bytes, x, others)
    if num_routes == 0:
        return out
    order = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    if experts.scale is None or backend.use_reference(x):
        return _reference(
            x, experts, order, topk, block_m, x_scale, slot_of_expert, swiglu_limit,
            route_weights, activation, out,
        )  # fmt: skip
    if x_scale is None and activation == "fp8":
        x, x_scale = quantized(x, scratch)
    launch(
        x, x_scale, experts, order, topk, block_m, slot_of_expert, swiglu_limit, route_weights, out
    )
    return out


def moe_gemm_fp4_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    *, topk: int, num_routes: int, block_m: int, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    gated: bool | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    experts, out = _checked(
        x, weight, weight_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, topk,
        num_routes, block_m, x_scale, slot_of_expert, swiglu_limit, route_weights, activation,
        packed, gated, out_dtype, out,
    )  # fmt: skip
    if num_routes == 0:
        return out
    order = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    return _reference(
        x, experts, order, topk, block_m, x_scale, slot_of_expert, swiglu_limit, route_weights,
        activation, out,
    )  # fmt: skip


def _checked(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    topk: int, num_routes: int, block_m: int, x_scale: torch.Tensor | None,
    slot_of_expert: torch.Tensor | None, swiglu_limit: float | None,
    route_weights: torch.Tensor | None, activation: str, packed: bool, gated: bool | None,
    out_dtype: torch.dtype, out: torch.Tensor | None,
) -> tuple[Experts, torch.Tensor]:  # fmt: skip
    op, ints = "moe_gemm_fp4", (torch.int32,)
    check_x(op, x, x_scale)
    interleaved = swiglu_limit is not None if gated is None else gated
    experts = check_experts(
        op, "weight", weight, weight_scale, x.shape[1], x, packed=packed, gated=interleaved
    )
    check.tensor(op, "sorted_token_ids", sorted_token_ids, ints, (None,), "[M]", x)
    check.integer(op, "block_m", block_m, 1)
    check.require(
        sorted_token_ids.shape[0] % block_m == 0,
        lambda: f"{op}: block_m is {block_m}, expected a divisor of {sorted_token_ids.shape[0]}",
    )
    blocks = (sorted_token_ids.shape[0] // block_m,)
    check.tensor(op, "expert_ids", expert_ids, ints, blocks, "[M/block_m]", x)
    check.tensor(op, "num_tokens_post_padded", num_tokens_post_padded, ints, (1,), "[1]", x)
    check.integer(op, "topk", topk, 1)
    check.integer(op, "num_routes", num_routes, 0)
    check.require(
        num_routes == x.shape[0] * topk,
        lambda: f"{op}: num_routes is {num_routes}, expected T*topk = {x.shape[0]}*{topk}",
    )
    check_options(op, activation, swiglu_limit, experts, route_weights, num_routes, x)
    check_slots(op, slot_of_expert, x)
    width = experts.num_rows if swiglu_limit is None else experts.num_rows // 2
    check.out_dtype(op, out_dtype)
    inputs = (weight, weight_scale, x_scale, slot_of_expert, route_weights)
    out = check.output(op, out, (num_routes, width), like=x, dtype=out_dtype, inputs=inputs)
    return experts, out


Order = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _reference(
    x: torch.Tensor, experts: Experts, order: Order, topk: int, block_m: int,
    x_scale: torch.Tensor | None, slot_of_expert: torch.Tensor | None, swiglu_limit: float | None,
    route_weights: torch.Tensor | None, activation: str, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    num_routes = out.shape[0]
    ids = [-1] * num_routes
    routes, owners = order[0].tolist(), order[1].tolist()
    for place in range(int(order[2])):
        if routes[place] < num_routes:
            ids[routes[place]] = owners[place // block_m]
    rows = widen_x(x, x_scale, activation)
    places = [q // topk for q in range(num_routes)]
    taken, products = expert_products(rows, places, slots_of(ids, slot_of_expert), experts)
    out[taken] = finish_routes(products, taken, swiglu_limit, route_weights).to(out.dtype)
    return out


@dataclass(frozen=True)
class GemmConfig:
    """``block_n`` weight rows a tile; a tile of routes is ``block_m``, at most 64."""

    block_n: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> GemmConfig:
    """Used when no tuned entry fits. A gated tile of 256 rows is one FP8 group of results."""
    if key["bytes"] == 4:
        return GemmConfig(32, 4, 1)
    if key["bytes"] == 2:
        return GemmConfig(128, 4, 2)
    if key["layout"] == BYTES.value:
        warps, stages = (8, 2) if key["rows"] == 64 else (4, 3)
        return GemmConfig(256 if key["gated"] else 128, warps, stages)
    wide = key["gated"] and key["rows"] >= 32
    return GemmConfig(256 if key["gated"] else 128, 8 if wide else 4, 3)


def candidates(key: Case, target: Target) -> Iterable[GemmConfig]:
    for block_n, warps, stages in itertools.product((64, 128, 256), (4, 8), (2, 3)):
        # eight warps of 64 rows would share pieces of the MMA
        if block_n == 256 or not (key["quantizes"] or (block_n == 64 and warps == 8)):
            yield GemmConfig(block_n, warps, stages)


def launch(
    x: torch.Tensor, x_scale: torch.Tensor | None, experts: Experts, order: Order, topk: int,
    block_m: int, slot_of_expert: torch.Tensor | None, swiglu_limit: float | None,
    route_weights: torch.Tensor | None, out: torch.Tensor, *,
    out_scale: torch.Tensor | None = None, rounded: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Launches the product.

    Args:
        route_weights: ``[num_routes]`` or ``[T, topk]``.
        out, out_scale: with ``out_scale [num_routes, ceil(I/128)]`` the activated rows, rounded to
            ``rounded``, are quantized into ``out``, e4m3. ``out`` may be ``[T', topk', N]``.
    """
    num_rows, k = experts.num_rows, experts.k
    gated, quantizes = swiglu_limit is not None, out_scale is not None
    tile_m = min(TILE_ROWS, max(16, triton.next_power_of_2(block_m)))
    key = {
        "N": num_rows, "K": k, "rows": tile_m, "bytes": x.element_size(), "gated": int(gated),
        "quantizes": int(quantizes), "layout": experts.layout,
    }  # fmt: skip
    with backend.on_device(x):
        cfg = config.lookup("moe_gemm_fp4", key, default_config)
        block_n = max(16, min(cfg.block_n, triton.next_power_of_2(num_rows)))
        tiles_n = triton.cdiv(num_rows, block_n)
        per_block = triton.cdiv(block_m, tile_m)
        blocks = order[1].shape[0] * per_block
        _moe_gemm_fp4_kernel[(tiles_n * blocks,)](
            x, x.stride(0), x_scale, 0 if x_scale is None else x_scale.stride(0),
            *experts.arguments(), *order, slot_of_expert, *weight_arguments(route_weights, topk),
            *out_arguments(out), out_scale, 0 if out_scale is None else out_scale.stride(0),
            num_rows, k, x.shape[0] * topk, tiles_n,
            clamp_bound(swiglu_limit or 0.0),
            TOPK=topk, OUT_TOPK=out_topk(out), BLOCK_M=block_m, PER_BLOCK=per_block,
            TILE_M=tile_m, BLOCK_N=block_n, GATED=gated, INTERLEAVED=experts.gated,
            LAYOUT=experts.layout, TAIL=k % ACT_GROUP // GROUP, WHOLE=num_rows % TILE_ROWS == 0,
            EVEN=num_rows % block_n == 0, ROUNDED=triton_type(rounded),
            num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip


def weight_arguments(weights: torch.Tensor | None, topk: int) -> tuple[torch.Tensor | None, int]:
    """Route weights and the distance of two tokens' weights."""
    if weights is None or weights.ndim == 1:
        return weights, topk
    return weights, weights.stride(0)


def out_topk(out: torch.Tensor) -> int:
    """Routes between which a result's rows lie evenly; 1 when all of them do."""
    even = out.ndim == 2 or out.stride(0) == out.shape[1] * out.stride(1)
    return 1 if even else out.shape[1]


def out_arguments(out: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A result with a row for each route: its strides over tokens and over a token's routes."""
    if out_topk(out) == 1:
        # a dimension of one route may have any stride
        return out, out.stride(0 if out.ndim == 2 or out.shape[1] == 1 else 1), 0
    return out, out.stride(0), out.stride(1)


def triton_type(dtype: torch.dtype | None) -> tl.dtype | None:
    """Triton's name of a float type."""
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return None if dtype is None else names[dtype]


@triton.jit(do_not_specialize=["num_routes"])
def _moe_gemm_fp4_kernel(
    x_ptr, stride_xt,  # [T, K]
    x_scale_ptr, stride_st,  # [T, ceil(K/128)]
    w_ptr, stride_ws, stride_wn,  # [S, N, K/2]
    meta_ptr, stride_ms, stride_mg, stride_mn,
    sorted_ptr,  # [M]
    expert_ptr,  # [M / BLOCK_M]
    count_ptr,  # [1]
    slot_ptr,  # [E]
    route_weight_ptr, stride_rt,  # [T, TOPK]
    out_ptr, stride_ot, stride_ok,  # [num_routes / OUT_TOPK, OUT_TOPK, N or N/2]
    out_scale_ptr, stride_oc,  # [num_routes, ceil(N/2/128)]
    N, K, num_routes, tiles_n, limit,
    TOPK: tl.constexpr, OUT_TOPK: tl.constexpr, BLOCK_M: tl.constexpr, PER_BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LAYOUT: tl.constexpr, TAIL: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    # neighbouring programs share a tile of routes, then an expert: both come from L2
    pid_n, pid_m = tl.program_id(0) % tiles_n, tl.program_id(0) // tiles_n
    block, part = pid_m // PER_BLOCK, pid_m % PER_BLOCK
    if block * BLOCK_M >= tl.load(count_ptr):
        return
    slot = tl.load(expert_ptr + block)
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + tl.maximum(slot, 0), mask=slot >= 0, other=-1)
    if slot < 0:
        return
    slot = slot.to(tl.int64)
    sorted_ptr += block * BLOCK_M
    offs_m = part * TILE_M + tl.arange(0, TILE_M)
    routes = tl.load(sorted_ptr + offs_m, mask=offs_m < BLOCK_M, other=num_routes)
    x_rows = (tl.where(routes < num_routes, routes, 0) // TOPK).to(tl.int64)
    HAS_SCALE: tl.constexpr = x_scale_ptr is not None
    sx_ptrs = x_rows
    if HAS_SCALE:
        sx_ptrs = x_scale_ptr + x_rows * stride_st
    x_ptrs = x_ptr + (x_rows * stride_xt)[:, None] + tl.arange(0, 32)[None, :]
    w_ptr += slot * stride_ws
    meta_ptr += slot * stride_ms
    # scale bytes keep a second sum: gate and up one after the other, or registers run out
    APART: tl.constexpr = GATED and LAYOUT == BYTES and HAS_SCALE
    row = pid_n * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    if APART and INTERLEAVED:
        offs_n = row + 2 * tl.arange(0, BLOCK_N // 2)
    elif APART:
        row = pid_n * (BLOCK_N // 2)
        offs_n = row + tl.arange(0, BLOCK_N // 2)
    acc = tile_products(
        x_ptrs, sx_ptrs, w_ptr, stride_wn, meta_ptr, stride_mg, stride_mn, offs_n, row, N, K, 0,
        tl.cdiv(K, 128), TILE_M, offs_n.shape[0], GATED and not INTERLEAVED and not APART, LAYOUT,
        TAIL, WHOLE, EVEN, False, x_ptr.dtype.element_ty, HAS_SCALE,
    )  # fmt: skip
    if APART:
        gate, to_up = acc, 1 if INTERLEAVED else N // 2
        up = tile_products(
            x_ptrs, sx_ptrs, w_ptr, stride_wn, meta_ptr, stride_mg, stride_mn, offs_n + to_up,
            row + to_up, N, K, 0, tl.cdiv(K, 128), TILE_M, offs_n.shape[0], False, LAYOUT, TAIL,
            WHOLE, EVEN, False, x_ptr.dtype.element_ty, HAS_SCALE,
        )  # fmt: skip
    elif GATED:
        gate, up = tl.split(tl.reshape(acc, (TILE_M, BLOCK_N // 2, 2)))
    # loaded again, past L1 and so not remembered: the loop needs the registers
    routes = tl.load(
        sorted_ptr + offs_m, mask=offs_m < BLOCK_M, other=num_routes, cache_modifier=".cg"
    )
    live = routes < num_routes
    weight = 1.0
    if route_weight_ptr is not None:
        weight_ptrs = route_weight_ptr + route_rows(routes, stride_rt, 1, TOPK)
        weight = tl.load(weight_ptrs, mask=live, other=0.0)[:, None]
    out_rows = out_ptr + route_rows(routes, stride_ot, stride_ok, OUT_TOPK)[:, None]
    if GATED:
        hidden = tl_clamped_swiglu(gate, up, limit) * weight
        offs_i = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = live[:, None] & (offs_i < N // 2)[None, :]
        if out_scale_ptr is not None:
            hidden = tl.where((offs_i < N // 2)[None, :], hidden, 0.0)
            hidden, code = tl_quantized_fp8(hidden.to(ROUNDED).to(tl.float32), 1)
            scale_ptrs = out_scale_ptr + routes.to(tl.int64) * stride_oc + pid_n
            tl.store(scale_ptrs, code.to(tl.uint8), mask=live)
        tl.store(out_rows + offs_i[None, :], hidden.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mask = live[:, None] & (offs_n < N)[None, :]
        out = (acc * weight).to(out_ptr.dtype.element_ty)
        columns = matrix_rows(offs_n, N, INTERLEAVED)
        tl.store(out_rows + columns[None, :], out, mask=mask)


def expert_weights(
    case: Case, *, device: str, seed: int, packed: bool = False, gated: bool = False,
    fold: bool = True,
) -> Pair:  # fmt: skip
    """Random FP4 experts of ``case`` (S, N, K) with scales of differing size."""
    slots, n, k = case["S"], case["N"], case["K"]
    size = (slots, n, k // 2)
    if torch.device(device).type == "meta":
        weight = torch.empty(size, dtype=torch.uint8, device=device)
        if packed and not fold:
            return weight, torch.empty(slots, k // GROUP, n, dtype=torch.uint8, device=device)
        if packed:
            return weight, torch.empty(slots, -(-k // 128), n, dtype=torch.int32, device=device)
        return weight, torch.empty(slots, n, k // GROUP, dtype=torch.uint8, device=device)
    made = {"dtype": torch.uint8, "generator": torch.Generator().manual_seed(seed)}
    weight = torch.randint(0, 256, size, **made)  # type: ignore[call-overload]
    scale = torch.randint(116, 124, (slots, n, k // GROUP), **made)  # type: ignore[call-overload]
    if packed:
        weight, scale = pack_fp4(weight, scale, gated=gated, fold=fold)
    return weight.to(device), scale.to(device)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, topk, experts, block_m = case["T"], case["topk"], case["S"], case["block_m"]
    gated, packed = bool(case.get("gated")), bool(case.get("packed"))
    num_routes = tokens * topk
    weight, scale = expert_weights(
        case, device=device, seed=seed, packed=packed, gated=gated, fold=case.get("fold", True)
    )
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
    kwargs = {
        "topk": topk, "num_routes": num_routes, "block_m": block_m, "packed": packed,
        "swiglu_limit": 10.0 if gated else None, "activation": case.get("activation", "fp8"),
    }  # fmt: skip
    return args, kwargs


def work(num_routes: int, n: int, k: int, has_scale: bool, config: Case) -> Work:
    """Of a launch whose routes fill their tiles; how full they are is not the kernel's doing."""
    rows = min(config["BLOCK_M"], config["TILE_M"])
    blocks = num_routes / rows * triton.cdiv(n, config["BLOCK_N"])
    apart = config["GATED"] and config["LAYOUT"] == BYTES.value and has_scale
    step = step_columns(config["LAYOUT"], has_scale)
    tile, count = config["TILE_M"] * config["BLOCK_N"] * step, 2 if apart else 1
    loop = even_loop(num_routes * n * k / count, blocks, k / step, tile // count)
    return Work(blocks, (loop,) * count)


def _work(case: Case, kernel: str, config: Case) -> Work | None:
    if kernel != _moe_gemm_fp4_kernel.__name__:
        return None
    has_scale = case.get("activation", "fp8") == "fp8"
    return work(case["T"] * case["topk"], case["N"], case["K"], has_scale, config)


_W13 = {"T": 3456, "topk": 6, "S": 256, "K": 4096, "gated": True, "packed": True}
_W2 = {"T": 20736, "topk": 1, "S": 256, "N": 4096, "packed": True}
_PRO = {"T": 3456, "topk": 6, "S": 384, "packed": True}

SPEC = KernelSpec(
    op=moe_gemm_fp4, reference=moe_gemm_fp4_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=5e-3,
    scratch=lambda *, T, K: scratch_bytes(T, K),
    launches=lambda case: 2 if case.get("activation", "fp8") == "fp8" else 1,
    cases=(
        {"name": "small", "T": 5, "topk": 2, "S": 3, "N": 66, "K": 96, "block_m": 4, "gated": True,
         "packed": True},
        {"name": "checkpoint", "T": 5, "topk": 2, "S": 3, "N": 64, "K": 160, "block_m": 16},
        {"name": "bf16", **_W13, "N": 4096, "block_m": 64, "activation": "bf16"},
        *({"name": f"flash-tp{tp}-m{m}", **_W13, "N": 4096 // tp, "block_m": m}
          for tp in (8, 4, 2, 1) for m in (64, 32, 16)),
        *({"name": f"flash-tp{tp}-w2-m{m}", **_W2, "K": 2048 // tp, "block_m": m}
          for tp in (8, 1) for m in (64, 32, 16)),
        *({"name": f"flash-tp{tp}-bytes-m{m}", **_W13, "N": 4096 // tp, "block_m": m,
           "fold": False} for tp in (8, 1) for m in (64, 32, 16)),
        *({"name": f"flash-tp{tp}-w2-bytes-m{m}", **_W2, "K": 2048 // tp, "block_m": m,
           "fold": False} for tp in (8, 1) for m in (64, 32, 16)),
        {"name": "pro-tp8-m64", **_PRO, "K": 7168, "N": 768, "block_m": 64, "gated": True},
        {"name": "pro-tp8-w2-m64", **_PRO, "K": 384, "N": 7168, "block_m": 64},
    ),
    bytes_moved=lambda c: c["S"] * c["N"] * c["K"] * 17 // 32,
    flops=lambda c: 2 * c["T"] * c["topk"] * c["N"] * c["K"], work=_work,
)  # fmt: skip
