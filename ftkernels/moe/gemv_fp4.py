"""Routed FP4 product without sorting, for few tokens: ``out[t*topk+k] = weight[slot] @ x``.

Layouts and numerics are those of ``moe_gemm_fp4``, but that scales which do not fold have one
factor with the rows' for each 32 columns. The block of a route leaves unless its route is the first
of its expert, or comes a full tile of routes after it; then it takes the tile's routes together, so
that a matrix is read once. K is cut by the weight's shape alone; the block that arrives last adds
the cuts in order.
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
    slots_of,
    widen_x,
)  # fmt: skip
from ftkernels.moe.experts import scratch_bytes as quantized_bytes
from ftkernels.moe.fp4_tiles import step_columns, tile_products
from ftkernels.moe.gemm_fp4 import (
    expert_weights,
    out_arguments,
    out_topk,
    triton_type,
    weight_arguments,
)  # fmt: skip
from ftkernels.moe.gemv_routes import counted, finish_columns, finish_tokens, taken
from ftkernels.moe.swiglu import clamp_bound
from ftkernels.quant.pack import TILE_ROWS
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn
from ftkernels.work import Work, even_loop

MAX_TOKENS = 64
_COUNTERS = COUNTER_BYTES // 4
_MOST_SPLITS = 16
_MOST_COLUMNS = 32


def moe_gemv_fp4(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    topk_ids: torch.Tensor, *, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    gated: bool | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
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
        gated: packed rows are interleaved, as ``pack_fp4(gated=True)`` does; with
            ``swiglu_limit`` they are unless this is False.
        out_dtype, out: of the result, and its tensor.
        scratch: as ``scratch_bytes("moe_gemv_fp4", T=.., topk=.., N=.., K=..)`` says; allocated
            when omitted.

    Returns:
        ``[R, N]``, or ``[R, N/2]`` with ``swiglu_limit``; routes without a slot are not written.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. One launch, and one to quantize a dense
    ``x``. Dense weights run the reference on every device.
    """
    experts, out = _checked(
        x, weight, weight_scale, topk_ids, x_scale, slot_of_expert, swiglu_limit, route_weights,
        activation, packed, gated, out_dtype, out,
    )  # fmt: skip
    if out.shape[0] == 0:
        return out
    num_routes, x_bytes = out.shape[0], quantized_bytes(*x.shape)
    num_bytes = x_bytes + partial_bytes(num_routes, experts.num_rows, experts.k)
    others = (
        ("x", x), ("x_scale", x_scale), ("weight", weight), ("weight_scale", weight_scale),
        ("topk_ids", topk_ids), ("slot_of_expert", slot_of_expert),
        ("route_weights", route_weights), ("out", out),
    )  # fmt: skip
    plain = experts.scale is None or backend.use_reference(x)
    if scratch is not None or not plain:
        scratch = check.scratch("moe_gemv_fp4", scratch, num_bytes, x, others)
    if plain:
        return _reference(
            x, experts, topk_ids, x_scale, slot_of_expert, swiglu_limit, route_weights, activation,
            out,
        )  # fmt: skip
    assert scratch is not None
    if x_scale is None and activation == "fp8":
        x, x_scale = quantized(x, scratch)
    launch(
        x, x_scale, experts, topk_ids, slot_of_expert, route_weights, swiglu_limit, out,
        counters(scratch), floats(scratch, x_bytes, num_bytes),
    )  # fmt: skip
    return out


def moe_gemv_fp4_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    topk_ids: torch.Tensor, *, x_scale: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, swiglu_limit: float | None = None,
    route_weights: torch.Tensor | None = None, activation: str = "fp8", packed: bool = False,
    gated: bool | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    experts, out = _checked(
        x, weight, weight_scale, topk_ids, x_scale, slot_of_expert, swiglu_limit, route_weights,
        activation, packed, gated, out_dtype, out,
    )  # fmt: skip
    if out.shape[0] == 0:
        return out
    return _reference(
        x, experts, topk_ids, x_scale, slot_of_expert, swiglu_limit, route_weights, activation, out
    )


def _checked(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    topk_ids: torch.Tensor, x_scale: torch.Tensor | None, slot_of_expert: torch.Tensor | None,
    swiglu_limit: float | None, route_weights: torch.Tensor | None, activation: str, packed: bool,
    gated: bool | None, out_dtype: torch.dtype, out: torch.Tensor | None,
) -> tuple[Experts, torch.Tensor]:  # fmt: skip
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
    interleaved = swiglu_limit is not None if gated is None else gated
    experts = check_experts(
        op, "weight", weight, weight_scale, x.shape[1], x, packed=packed, gated=interleaved
    )
    check_options(op, activation, swiglu_limit, experts, route_weights, num_routes, x)
    check_slots(op, slot_of_expert, x)
    width = experts.num_rows if swiglu_limit is None else experts.num_rows // 2
    check.out_dtype(op, out_dtype)
    inputs = (weight, weight_scale, x_scale, slot_of_expert, route_weights, topk_ids)
    out = check.output(op, out, (num_routes, width), like=x, dtype=out_dtype, inputs=inputs)
    return experts, out


def _reference(
    x: torch.Tensor, experts: Experts, topk_ids: torch.Tensor, x_scale: torch.Tensor | None,
    slot_of_expert: torch.Tensor | None, swiglu_limit: float | None,
    route_weights: torch.Tensor | None, activation: str, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    num_routes = out.shape[0]
    per_row = num_routes // x.shape[0]
    routes, products = expert_products(
        widen_x(x, x_scale, activation), [q // per_row for q in range(num_routes)],
        slots_of(topk_ids.flatten().tolist(), slot_of_expert), experts, path="gemv",
    )  # fmt: skip
    out[routes] = finish_routes(products, routes, swiglu_limit, route_weights).to(out.dtype)
    return out


@dataclass(frozen=True)
class GemvConfig:
    """``block_n`` weight rows a block."""

    block_n: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> GemvConfig:
    """Used when no tuned entry fits."""
    if key["bytes"] == 4:
        return GemvConfig(32, 4, 1)
    return GemvConfig(64, 2, 4)


def candidates(key: Case, target: Target) -> Iterable[GemvConfig]:
    """16 or 32 weight rows a warp."""
    for (block_n, warps), stages in itertools.product(
        ((32, 2), (64, 2), (64, 4), (128, 4)), (3, 4)
    ):
        yield GemvConfig(block_n, warps, stages)


def num_splits(num_rows: int, k: int) -> int:
    """Cuts of K; by the weight's shape alone, so that a row's bits depend on nothing else."""
    tiles, groups = triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(k, ACT_GROUP)
    wanted = min(_MOST_SPLITS, max(1, groups // 2), triton.cdiv(64, max(1, tiles)))
    return triton.cdiv(groups, triton.cdiv(groups, wanted)) if groups else 1


def partial_bytes(num_routes: int, num_rows: int, k: int) -> int:
    """Partial sums of every route: ``[R, splits, N]`` fp32."""
    return 4 * num_routes * num_splits(num_rows, k) * num_rows + 16


def counters(scratch: torch.Tensor) -> torch.Tensor:
    return scratch[:COUNTER_BYTES].view(torch.int32)


def floats(scratch: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The fp32 numbers between two places of a scratch, from the next 16-byte boundary on."""
    begin = -(-begin // 16) * 16
    return scratch[begin : begin + (end - begin) // 4 * 4].view(torch.float32)


@dataclass(frozen=True)
class Sum:
    """What the down projection does with its routes: each token's sum, with the shared expert's.

    Routes are rounded to the type of ``out [T, N]`` before they are added, ``k = 0..topk-1``.
    """

    shared: torch.Tensor | None


def launch(
    x: torch.Tensor, x_scale: torch.Tensor | None, experts: Experts, topk_ids: torch.Tensor,
    slot_of_expert: torch.Tensor | None, route_weights: torch.Tensor | None,
    swiglu_limit: float | None, out: torch.Tensor, counters: torch.Tensor, partial: torch.Tensor,
    *, out_scale: torch.Tensor | None = None, rounded: torch.dtype | None = None,
    combine: Sum | None = None,
) -> None:  # fmt: skip
    """Launches the product, in parts when the counters do not suffice.

    Args:
        out, out_scale: with ``out_scale [R, ceil(I/128)]`` the activated rows, rounded to
            ``rounded``, are quantized into ``out``, e4m3; with ``combine`` ``out`` is ``[T, N]``.
    """
    tokens, topk = topk_ids.shape
    num_rows, k = experts.num_rows, experts.k
    gated, quantizes = swiglu_limit is not None, out_scale is not None
    shared = None if combine is None else combine.shared
    key = {
        "N": num_rows, "K": k, "bytes": x.element_size(), "gated": int(gated),
        "layout": experts.layout,
    }  # fmt: skip
    with backend.on_device(x):
        cfg = config.lookup("moe_gemv_fp4", key, default_config)
        block_n = max(16, min(cfg.block_n, triton.next_power_of_2(num_rows)))
        block_f = max(block_n, 2 * ACT_GROUP) if quantizes else block_n
        tiles, blocks_f = triton.cdiv(num_rows, block_n), triton.cdiv(num_rows, block_f)
        splits = num_splits(num_rows, k)
        single = splits == 1 and block_f == block_n
        most = MAX_TOKENS
        if not (combine or single):
            most = min(MAX_TOKENS, max(1, _COUNTERS // (topk * blocks_f)))
        for first in range(0, tokens, most):
            ids = topk_ids[first : first + most]
            count, routes = ids.shape[0], slice(first * topk, (first + ids.shape[0]) * topk)
            per_row = tokens * topk // x.shape[0]
            part = slice(routes.start // per_row, routes.stop // per_row)
            by_token = combine is not None or out.ndim == 3
            whole = out[first : first + count] if by_token else out[routes]
            scale = None if out_scale is None else out_scale[routes]
            weights = route_weights
            if weights is not None:
                weights = weights[routes if weights.ndim == 1 else slice(first, first + count)]
            extra = None if shared is None else shared[first : first + count]
            x_part, x_codes = x[part], None if x_scale is None else x_scale[part]
            _moe_gemv_fp4_kernel[(tiles * splits, count * topk)](
                x_part, x_part.stride(0), x_codes, 0 if x_codes is None else x_codes.stride(0),
                *experts.arguments(), ids, ids.stride(0), slot_of_expert,
                *weight_arguments(weights, topk), *out_arguments(whole),
                scale, 0 if scale is None else scale.stride(0),
                extra, 0 if extra is None else extra.stride(0), counters, partial,
                num_rows, k, count, clamp_bound(swiglu_limit or 0.0),
                TOPK=topk, OUT_TOPK=out_topk(whole), PER_ROW=per_row,
                BLOCK_R=min(64, max(16, triton.next_power_of_2(count * topk))),
                COLUMNS=min(_MOST_COLUMNS, max(8, triton.next_power_of_2(count))),
                BLOCK_N=block_n, BLOCK_F=block_f, SPLITS=splits, GATED=gated,
                INTERLEAVED=experts.gated, LAYOUT=experts.layout, TAIL=k % ACT_GROUP // GROUP,
                WHOLE=num_rows % TILE_ROWS == 0, EVEN=num_rows % block_n == 0,
                COMBINE=combine is not None, ROUNDED=triton_type(rounded),
                # unbounded, ptxas spills rather than leave an occupancy
                num_warps=cfg.num_warps, num_stages=cfg.num_stages, maxnreg=255,
            )  # fmt: skip


@triton.jit
def _moe_gemv_fp4_kernel(
    x_ptr, stride_xt,  # [rows, K]
    x_scale_ptr, stride_xs,  # [rows, ceil(K/128)]
    w_ptr, stride_ws, stride_wn,  # [S, N, K/2]
    meta_ptr, stride_ms, stride_mg, stride_mn,
    ids_ptr, stride_it,  # [T, TOPK]
    slot_ptr,  # [E]
    route_weight_ptr, stride_rt,  # [T, TOPK]
    out_ptr, stride_ot, stride_ok,  # [R / OUT_TOPK, OUT_TOPK, N or N/2]; with COMBINE [T, N]
    out_scale_ptr, stride_oc,  # [R, ceil(N/2/128)]
    shared_ptr, stride_st,  # [T, N]
    counters_ptr,
    partial_ptr,  # [R, SPLITS, N]
    N, K, T, limit,
    TOPK: tl.constexpr, OUT_TOPK: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LAYOUT: tl.constexpr, TAIL: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, COMBINE: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    pid_n, split, route = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_ptr + (route // TOPK).to(tl.int64) * stride_it + route % TOPK)
    slot = expert
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + tl.maximum(expert, 0), mask=expert >= 0, other=-1)
    rank, num_live = counted(ids_ptr, stride_it, slot_ptr, expert, route, T * TOPK, TOPK, BLOCK_R)
    if slot < 0:
        # with no live route at all nobody arrives last
        if COMBINE and num_live + route + split == 0:
            finish_tokens(
                partial_ptr, ids_ptr, stride_it, slot_ptr, offs_n, shared_ptr, stride_st, out_ptr,
                stride_ot, N, T, TOPK, SPLITS,
            )  # fmt: skip
        return
    if rank % COLUMNS != 0:
        return
    routes, live = taken(
        ids_ptr, stride_it, slot_ptr, expert, rank, T * TOPK, COLUMNS, TOPK, BLOCK_R
    )
    x_rows = (routes // PER_ROW).to(tl.int64)
    HAS_SCALE: tl.constexpr = x_scale_ptr is not None
    sx_ptrs = x_rows
    if HAS_SCALE:
        sx_ptrs = x_scale_ptr + x_rows * stride_xs
    groups = tl.cdiv(K, 128)
    per_split = tl.cdiv(groups, SPLITS)
    slot = slot.to(tl.int64)
    acc = tile_products(
        x_ptr + (x_rows * stride_xt)[None, :] + tl.arange(0, 32)[:, None], sx_ptrs,
        w_ptr + slot * stride_ws, stride_wn, meta_ptr + slot * stride_ms, stride_mg, stride_mn,
        offs_n, pid_n * BLOCK_N, N, K, split * per_split,
        tl.minimum((split + 1) * per_split, groups), COLUMNS, BLOCK_N,
        GATED and not INTERLEAVED, LAYOUT, TAIL, WHOLE, EVEN, True,
        x_ptr.dtype.element_ty, HAS_SCALE,
    )  # fmt: skip
    ptrs = partial_ptr + ((routes.to(tl.int64) * SPLITS + split) * N)[None, :] + offs_n[:, None]
    tl.store(ptrs, acc, mask=(offs_n < N)[:, None] & live[None, :])
    # all threads' sums are in memory before the block counts as arrived
    tl.debug_barrier()
    if COMBINE:
        columns = tl.sum(live.to(tl.int32), 0)
        counter = counters_ptr + pid_n
        before = tl.atomic_add(counter, columns, sem="acq_rel")
        if before + columns == num_live * SPLITS:
            tl.store(counter, 0)
            finish_tokens(
                partial_ptr, ids_ptr, stride_it, slot_ptr, offs_n, shared_ptr, stride_st,
                out_ptr, stride_ot, N, T, TOPK, SPLITS,
            )  # fmt: skip
    elif SPLITS == 1 and BLOCK_F == BLOCK_N:
        finish_columns(
            partial_ptr, ids_ptr, stride_it, slot_ptr, expert, rank, pid_n, route_weight_ptr,
            stride_rt, out_ptr, stride_ot, stride_ok, out_scale_ptr, stride_oc, N, T, limit,
            BLOCK_F, SPLITS, GATED, INTERLEAVED, ROUNDED, TOPK, OUT_TOPK, BLOCK_R, COLUMNS,
        )  # fmt: skip
    else:
        pid_f = pid_n // (BLOCK_F // BLOCK_N)
        tiles = tl.minimum(tl.cdiv(N - pid_f * BLOCK_F, BLOCK_N), BLOCK_F // BLOCK_N)
        counter = counters_ptr + route * tl.cdiv(N, BLOCK_F) + pid_f
        if tl.atomic_add(counter, 1, sem="acq_rel") == tiles * SPLITS - 1:
            tl.store(counter, 0)
            finish_columns(
                partial_ptr, ids_ptr, stride_it, slot_ptr, expert, rank, pid_f, route_weight_ptr,
                stride_rt, out_ptr, stride_ot, stride_ok, out_scale_ptr, stride_oc, N, T, limit,
                BLOCK_F, SPLITS, GATED, INTERLEAVED, ROUNDED, TOPK, OUT_TOPK, BLOCK_R, COLUMNS,
            )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    gated, packed = bool(case.get("gated")), bool(case.get("packed"))
    weight, scale = expert_weights(case, device=device, seed=seed, packed=packed, gated=gated)
    rows = case["T"] if gated else case["T"] * case["topk"]
    x = randn(rows, case["K"], dtype=torch.bfloat16, device=device, seed=seed + 1)
    routes = torch.arange(case["T"] * case["topk"], dtype=torch.int32) % case["S"]
    ids = routes.view(case["T"], case["topk"]).to(device)
    kwargs = {
        "swiglu_limit": 10.0 if gated else None, "packed": packed,
        "activation": case.get("activation", "fp8"),
    }  # fmt: skip
    return (x, weight, scale, ids), kwargs


def _scratch(*, T: int, topk: int, N: int, K: int) -> int:
    return quantized_bytes(T * topk, K) + partial_bytes(T * topk, N, K)


def work(tokens: int, topk: int, slots: int, n: int, k: int, config: Case) -> Work:
    """Of a launch whose routes are spread evenly over the slots."""
    experts = min(tokens * topk, slots)
    groups = experts * triton.cdiv(triton.cdiv(tokens * topk, experts), config["COLUMNS"])
    blocks = groups * triton.cdiv(n, config["BLOCK_N"]) * config["SPLITS"]
    step = step_columns(config["LAYOUT"], False)
    tile = config["COLUMNS"] * config["BLOCK_N"] * step
    loop = even_loop(tokens * topk * n * k, blocks, k / step / config["SPLITS"], tile)
    return Work(blocks, (loop,))


def _work(case: Case, kernel: str, config: Case) -> Work | None:
    if kernel != _moe_gemv_fp4_kernel.__name__:
        return None
    return work(case["T"], case["topk"], case["S"], case["N"], case["K"], config)


_FLASH = {"topk": 6, "S": 256, "packed": True}

SPEC = KernelSpec(
    op=moe_gemv_fp4, reference=moe_gemv_fp4_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=5e-3, scratch=_scratch,
    launches=lambda case: 2 if case.get("activation", "fp8") == "fp8" else 1,
    cases=(
        {"name": "small", "T": 3, "topk": 2, "S": 4, "N": 66, "K": 96, "gated": True,
         "packed": True},
        {"name": "checkpoint", "T": 3, "topk": 2, "S": 4, "N": 64, "K": 160},
        {"name": "bf16", **_FLASH, "T": 1, "N": 4096, "K": 4096, "gated": True,
         "activation": "bf16"},
        *({"name": f"flash-tp{tp}-t{t}", **_FLASH, "T": t, "N": 4096 // tp, "K": 4096,
           "gated": True} for tp in (8, 4, 2, 1) for t in (1, 8, 32, 64)),
        *({"name": f"flash-tp{tp}-w2-t{t}", **_FLASH, "T": t, "N": 4096, "K": 2048 // tp}
          for tp in (8, 1) for t in (1, 8, 32, 64)),
        {"name": "pro-tp8-t8", **_FLASH, "S": 384, "T": 8, "N": 768, "K": 7168, "gated": True},
        {"name": "pro-tp8-w2-t8", **_FLASH, "S": 384, "T": 8, "N": 7168, "K": 384},
    ),
    bytes_moved=lambda c: min(c["T"] * c["topk"], c["S"]) * c["N"] * c["K"] * 17 // 32,
    flops=lambda c: 2 * c["T"] * c["topk"] * c["N"] * c["K"], work=_work,
)  # fmt: skip
