"""Routes of a step without sorting: which of them a block takes, and what the last block does.

Partial sums lie in ``[R, SPLITS, N]`` fp32, a row for each route and cut of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels import backend  # noqa: F401  (first: it fixes interpretation)
from ftkernels.moe.fp4_tiles import matrix_rows, route_rows
from ftkernels.quant.formats import tl_clamped_swiglu, tl_quantized_fp8


@triton.jit
def _slots(ids_ptr, stride_it, slot_ptr, routes, live, TOPK: tl.constexpr):
    """Expert and slot of routes, -1 where there is none."""
    row = (routes // TOPK).to(tl.int64)
    ids = tl.load(ids_ptr + row * stride_it + routes % TOPK, mask=live, other=-1)
    slots = ids
    if slot_ptr is not None:
        slots = tl.load(slot_ptr + ids, mask=ids >= 0, other=-1)
    return tl.where(slots >= 0, ids, -1), slots


@triton.jit
def counted(
    ids_ptr, stride_it, slot_ptr, expert, route, num_routes, TOPK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Routes of an expert before ``route``, and routes that have a slot."""
    rank, num_live = 0, 0
    for start in range(0, num_routes, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        ids, _ = _slots(ids_ptr, stride_it, slot_ptr, offs_r, offs_r < num_routes, TOPK)
        rank += tl.sum(((ids == expert) & (offs_r < route)).to(tl.int32), 0)
        num_live += tl.sum((ids >= 0).to(tl.int32), 0)
    return rank, num_live


@triton.jit
def taken(
    ids_ptr, stride_it, slot_ptr, expert, first, num_routes, COUNT: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """COUNT routes of an expert from its route number ``first`` on, and which of them exist."""
    routes = tl.zeros((COUNT,), tl.int32)
    found = tl.zeros((COUNT,), tl.int32)
    place = tl.arange(0, COUNT) + first
    for start in range(0, num_routes, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        ids, _ = _slots(ids_ptr, stride_it, slot_ptr, offs_r, offs_r < num_routes, TOPK)
        same = (ids == expert).to(tl.int32)
        hit = (same > 0)[None, :] & ((tl.cumsum(same, 0) - 1)[None, :] == place[:, None])
        routes += tl.sum(tl.where(hit, offs_r[None, :], 0), 1)
        found += tl.sum(hit.to(tl.int32), 1)
        place -= tl.sum(same, 0)
    return routes, found > 0


@triton.jit
def _summed(ptrs, stride_split, mask, SPLITS: tl.constexpr):
    """The cuts of a sum, added in order."""
    total = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    for _ in range(1, SPLITS):
        ptrs += stride_split
        total += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def finish_columns(
    partial_ptr, ids_ptr, stride_it, slot_ptr, expert, rank, pid_f, route_weight_ptr, stride_rt,
    out_ptr, stride_ot, stride_ok, out_scale_ptr, stride_oc, N, T, limit,
    BLOCK_F: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROUNDED: tl.constexpr, TOPK: tl.constexpr, OUT_TOPK: tl.constexpr, BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums, activation, weight and store of a tile of routes, eight at a time."""
    for first in range(0, COLUMNS, 8):
        routes, live = taken(
            ids_ptr, stride_it, slot_ptr, expert, rank + first, T * TOPK, 8, TOPK, BLOCK_R
        )
        weight = 1.0
        if route_weight_ptr is not None:
            weight_ptrs = route_weight_ptr + route_rows(routes, stride_rt, 1, TOPK)
            weight = tl.load(weight_ptrs, mask=live, other=0.0)[None, :]
        column_ptrs = partial_ptr + (routes.to(tl.int64) * SPLITS * N)[None, :]
        out_ptrs = out_ptr + route_rows(routes, stride_ot, stride_ok, OUT_TOPK)[None, :]
        if GATED:
            offs_i = pid_f * (BLOCK_F // 2) + tl.arange(0, BLOCK_F // 2)[:, None]
            mask = (offs_i < N // 2) & live[None, :]
            gate = _summed(column_ptrs + 2 * offs_i, N, mask, SPLITS)
            up = _summed(column_ptrs + 2 * offs_i + 1, N, mask, SPLITS)
            hidden = tl_clamped_swiglu(gate, up, limit) * weight
            if out_scale_ptr is not None:
                hidden, code = tl_quantized_fp8(hidden.to(ROUNDED).to(tl.float32), 0)
                scale_ptrs = out_scale_ptr + routes.to(tl.int64) * stride_oc + pid_f
                tl.store(scale_ptrs, code.to(tl.uint8), mask=live)
            tl.store(out_ptrs + offs_i, hidden.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            offs_n = pid_f * BLOCK_F + tl.arange(0, BLOCK_F)[:, None]
            mask = (offs_n < N) & live[None, :]
            out = _summed(column_ptrs + offs_n, N, mask, SPLITS) * weight
            out_ptrs += matrix_rows(offs_n, N, INTERLEAVED)
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_tokens(
    partial_ptr, ids_ptr, stride_it, slot_ptr, offs_n, shared_ptr, stride_st, out_ptr, stride_ot,
    N, T, TOPK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Each token's sum over its routes, eight tokens at a time."""
    mask_n = (offs_n < N)[:, None]
    for start in range(0, T, 8):
        tokens = start + tl.arange(0, 8)
        live = tokens < T
        acc = tl.zeros((offs_n.shape[0], 8), tl.float32)
        for k in range(0, TOPK):
            routes = tokens * TOPK + k
            _, slots = _slots(ids_ptr, stride_it, slot_ptr, routes, live, TOPK)
            mask = mask_n & (slots >= 0)[None, :]
            ptrs = partial_ptr + (routes.to(tl.int64) * SPLITS * N)[None, :] + offs_n[:, None]
            acc += _summed(ptrs, N, mask, SPLITS).to(out_ptr.dtype.element_ty).to(tl.float32)
        mask = mask_n & live[None, :]
        rows = tokens.to(tl.int64)[None, :]
        if shared_ptr is not None:
            ptrs = shared_ptr + rows * stride_st + offs_n[:, None]
            acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        ptrs = out_ptr + rows * stride_ot + offs_n[:, None]
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
