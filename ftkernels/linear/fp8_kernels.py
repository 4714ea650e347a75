"""Kernels of products of rows with block-scaled FP8 matrices, and their configs.

All take ``weight [G, R, K]`` e4m3 with a UE8M0 code per 128x128 block of the flat ``[G*R, K]``
matrix, and rows ``[T, G, K]``: e4m3 with a code per 128 channels, or plain. Plain rows may be gate
and up of an activation, be RMS-normed and be quantized on the way in.

* `gemm_kernel`: tiles of 128 by 128, one factor per 128 channels on the sum, rows as they are.
* `gemv_kernel`: a block takes 512 channels and some weight rows. A warp owns 128 of the channels,
  so the rows are prepared once, in registers. Sums of the splits go to scratch; the block that
  arrives last adds them in order.

Numerics: fp32 sums; the four warps' and the splits' parts are added in an order fixed by ``K``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from ftkernels.backend import INTERPRET
from ftkernels.linear.products import is_last
from ftkernels.quant.formats import (
    tl_absbits,
    tl_clamped_swiglu,
    tl_e4m3_round,
    tl_group_code,
    tl_ue8m0_decode,
    tl_ue8m0_inverse,
)
from ftkernels.spec import Case
from ftkernels.target import Target
from ftkernels.work import Work, even_loop

BLOCK = 128


@dataclass(frozen=True)
class LinearConfig:
    """``block_t`` tokens and ``block_n`` weight rows a tile; none of it changes a result's bits.

    ``tiles`` is how many weight tiles a block takes after one another ("gemv", whose warps follow
    from the width), or how many token tiles run before the next weight tile ("gemm").
    """

    block_t: int
    block_n: int
    tiles: int
    num_warps: int
    num_stages: int


def default_config(key: Case) -> LinearConfig:
    """Used when no tuned entry fits."""
    if not key["gemv"]:
        if key["bits"] == 32:
            return LinearConfig(32, 32, 32, 4, 1)
        if key["K"] % BLOCK:
            return LinearConfig(32, 32, 32, 4, 1)
        blocks = triton.cdiv(key["T"], 128) * triton.cdiv(key["N"], 128) * key["G"]
        # a short prompt has few large tiles, and four times as many small ones
        return LinearConfig(64, 64, 64, 4, 4) if blocks <= 64 else LinearConfig(128, 128, 32, 8, 3)
    slices = num_slices(key["K"])
    # enough blocks to keep two on each of 128 SMs busy, and none that does little else than start
    blocks = triton.cdiv(key["G"] * key["N"], 32) * triton.cdiv(key["K"], slices * BLOCK)
    tiles = 1
    while tiles < 8 and blocks >= 2 * 192 * tiles:
        tiles *= 2
    if key["bits"] == 32:
        return LinearConfig(8, 16, tiles, slices, 3)
    return LinearConfig(8 if key["T"] <= 8 else 16, 32, tiles, slices, 3)


def candidates(key: Case, target: Target) -> Iterable[LinearConfig]:
    base = default_config(key)
    if key["bits"] == 32 or (key["K"] % BLOCK and not key["gemv"]):
        return
    if key["gemv"]:
        # a block's rows cut otherwise, half and twice as many, and a stage less: tiles of tokens
        # stay, since wider ones hold idle tokens and narrower ones read the weight again
        n, tiles = base.block_n, base.tiles
        yield replace(base, num_stages=2)
        pairs = ((n // 2, 2 * tiles), (2 * n, tiles // 2), (n, tiles // 2), (n, 2 * tiles))
        for rows, count in pairs:
            if 1 <= count <= 8:
                yield replace(base, block_n=rows, tiles=count)
        return
    yield replace(base, tiles=8)
    for block_t, block_n, warps in ((64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 128, 8)):
        for stages in (3, 4):
            yield LinearConfig(block_t, block_n, 32, warps, stages)


def work(rows: int, groups: int, n: int, k: int, kernel: str, config: Case) -> Work | None:
    """What the kernel of that name does."""
    if kernel == "prepare_kernel":
        return None
    tiles, tile = triton.cdiv(rows, config["BLOCK_T"]), config["BLOCK_T"] * config["BLOCK_N"]
    if kernel == "gemm_kernel":
        blocks = tiles * groups * triton.cdiv(n, config["BLOCK_N"])
        passes, tile = triton.cdiv(k, config["BLOCK_K"]), tile * config["BLOCK_K"]
    else:
        chunks = triton.cdiv(n, config["BLOCK_N"] * config["TILES"])
        blocks = tiles * groups * chunks * config["SPLITS"]
        passes, tile = config["TILES"], tile * config["SLICES"] * BLOCK
    return Work(blocks, (even_loop(rows * groups * n * k, blocks, passes, tile),))


def num_slices(k: int) -> int:
    """Warps of a block, each with 128 channels of a split."""
    return min(4, triton.next_power_of_2(triton.cdiv(max(k, 1), BLOCK)))


def num_splits(k: int) -> int:
    return triton.cdiv(k, num_slices(k) * BLOCK)


@triton.jit
def _load_rows(x_ptr, stride_xt, tokens, live, k, K, limit, SWIGLU: tl.constexpr):
    """fp32 ``x[tokens, k]``, activated where asked for and rounded to the dtype of ``x``."""
    ptrs = x_ptr + tokens.to(tl.int64) * stride_xt + k
    mask = live & (k < K)
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(ptrs + K, mask=mask, other=0.0).to(tl.float32)
        x = tl_clamped_swiglu(x, up, limit).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _inverse_rms(x_ptr, stride_xt, tokens, live, K, eps):
    """``[T]`` of whole rows; the columns' chunks are as wide for any number of tokens."""
    WIDTH: tl.constexpr = 1024
    total = tl.zeros(tokens.shape, tl.float32)
    for start in range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)[None, :]
        x = _load_rows(x_ptr, stride_xt, tokens[:, None], live[:, None], k, K, 0.0, False)
        total += tl.sum(x * x, axis=1)
    return tl.rsqrt(total / K + eps)


@triton.jit
def _prepared(
    x_ptr, stride_xt, tokens, live, k, K, norm_ptr, eps, limit,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, QUANTIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``[SLICES, T, 128]`` in DTYPE, and their scale codes ``[SLICES, T]``."""
    x = _load_rows(
        x_ptr, stride_xt, tokens[None, :, None], live[None, :, None], k, K, limit, SWIGLU
    )
    if NORM:
        inverse = _inverse_rms(x_ptr, stride_xt, tokens, live, K, eps)
        x *= inverse[None, :, None]
        x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    code = tl.full((x.shape[0], x.shape[1]), 127, tl.int32)
    if QUANTIZE:
        # FLOOR_BITS is 1e-4, INVERSE 1/448
        code = tl_group_code(tl.max(tl_absbits(x), axis=2), 0x38D1B717, 1.0 / 448.0)
        x *= tl_ue8m0_inverse(code)[:, :, None]
        # 16-bit values under a power of two are cast right by every Triton
        if x_ptr.dtype.element_ty == tl.float32:
            x = tl_e4m3_round(x)
    return x.to(DTYPE), code


@triton.jit(do_not_specialize=["T"])
def prepare_kernel(
    x_ptr, stride_xt,  # [T, K] or [T, 2*K]
    out_ptr, stride_ot,  # [T, K]
    scale_ptr, stride_st,  # [T, num_groups]
    T, K, num_groups, norm_ptr, eps, limit,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, QUANTIZE: tl.constexpr, DTYPE: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    groups = tl.program_id(1) * SLICES + tl.arange(0, SLICES)
    live, k = tokens < T, groups[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    x, code = _prepared(
        x_ptr, stride_xt, tokens, live, k, K, norm_ptr, eps, limit, NORM, SWIGLU, QUANTIZE, DTYPE
    )
    rows = tokens.to(tl.int64)
    mask = live[None, :, None] & (k < K)
    tl.store(out_ptr + rows[None, :, None] * stride_ot + k, x, mask=mask)
    if QUANTIZE:
        ptrs = scale_ptr + rows[None, :] * stride_st + groups[:, None]
        mask_s = live[None, :] & (groups[:, None] < num_groups)
        tl.store(ptrs, code.to(tl.uint8), mask=mask_s)


@triton.jit
def _prefetch(ptrs):
    """Start bringing the lines of ``ptrs`` into L2; nothing waits for them."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _block_scales(scale_ptr, stride_s, row, columns, last):
    """fp32 scales of blocks ``columns`` (past ``last``: of no account) for a flat weight row."""
    ptrs = scale_ptr + (row // 128).to(tl.int64) * stride_s + columns
    return tl_ue8m0_decode(tl.load(ptrs, mask=columns < last, other=0).to(tl.int32))


@triton.jit
def _repeated(x, COUNT: tl.constexpr):
    """``[S, T, I]`` to ``[S, COUNT, I]``, the tokens again and again."""
    TIMES: tl.constexpr = COUNT // x.shape[1]
    x = tl.broadcast_to(x[:, None], (x.shape[0], TIMES, x.shape[1], x.shape[2]))
    return tl.reshape(x, (x.shape[0], COUNT, x.shape[3]))


@triton.jit
def _halved(x):
    """``[S, N, T]`` to ``[S/2, N, T]``: slice ``i`` and slice ``i + S/2`` together."""
    halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
    low, high = tl.split(tl.permute(halves, (1, 2, 3, 0)))
    return low + high


@triton.jit
def _slice_sum(x):
    """Sum of ``[SLICES, N, T]`` over up to four slices, in an order of its own making."""
    if x.shape[0] == 4:
        x = _halved(x)
    if x.shape[0] == 2:
        x = _halved(x)
    return tl.reshape(x, (x.shape[1], x.shape[2]))


@triton.jit
def _add_splits(
    sums_ptr, stride_us, stride_ut, out_ptr, stride_ot, tokens, live, first, R,
    SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the splits of ``ROWS`` weight rows, in order, rounded to ``out[tokens]``."""
    offs_n = first + tl.arange(0, ROWS)
    mask = live[:, None] & (offs_n < R)[None, :]
    rows = tokens.to(tl.int64)[:, None]
    ptrs = sums_ptr + rows * stride_ut + offs_n[None, :]
    total = tl.zeros(mask.shape, tl.float32)
    for _ in range(0, SPLITS):
        total += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        ptrs += stride_us
    ptrs_o = out_ptr + rows * stride_ot + offs_n[None, :]
    tl.store(ptrs_o, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gemv_block(
    tile_t, tiles_t, chunk, split,
    x_ptr, stride_xt, stride_xg,  # [T, G, K] or [T, G, 2*K]
    x_scale_ptr, stride_st,  # [T, ceil(K/128)]
    weight_ptr, stride_wg, stride_wr,  # [G, R, K]
    scale_ptr, stride_s,  # [ceil(G*R/128), ceil(K/128)]
    out_ptr, stride_ot, stride_og,  # [T, G, R]
    counters_ptr,  # [G*chunks, token tiles]
    sums_ptr, stride_us, stride_ut,  # [SPLITS, T, G*R]
    T, R, K, chunks, norm_ptr, eps, limit,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, QUANTIZE: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr,
    EVEN_K: tl.constexpr, ROW_SCALES: tl.constexpr, BLOCK_T: tl.constexpr, LIVE_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile ``tile_t`` of the rows times chunk ``chunk`` of the weight, over one split of K."""
    group, first = chunk // chunks, chunk % chunks * (TILES * BLOCK_N)
    tokens = tile_t * BLOCK_T + tl.arange(0, LIVE_T)
    live = tokens < T
    columns = split * SLICES + tl.arange(0, SLICES)
    k = columns[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    last = tl.cdiv(K, 128)
    x_ptr += group.to(tl.int64) * stride_xg
    weight_ptr += group.to(tl.int64) * stride_wg
    # the weight is on its way while the rows are prepared
    lines = tl.minimum(first + tl.arange(0, TILES * BLOCK_N), R - 1).to(tl.int64) * stride_wr
    _prefetch(weight_ptr + lines[:, None] + tl.minimum(columns, last - 1)[None, :] * 128)
    x, code = _prepared(
        x_ptr, stride_xt, tokens, live, k, K, norm_ptr, eps, limit, NORM, SWIGLU, QUANTIZE, DTYPE
    )
    if SCALED:
        ptrs = x_scale_ptr + tokens.to(tl.int64)[None, :] * stride_st + columns[:, None]
        mask_s = live[None, :] & (columns[:, None] < last)
        code = tl.load(ptrs, mask=mask_s, other=0).to(tl.int32)
    x = tl.permute(_repeated(x, BLOCK_T), (0, 2, 1))
    factor = tl.permute(_repeated(tl_ue8m0_decode(code)[:, :, None], BLOCK_T), (0, 2, 1))
    offs_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # columns past LIVE_T repeat others, and T is not past it
    mask_t = offs_t < T
    sums_ptr += group * R
    sums_rows = split.to(tl.int64) * stride_us + offs_t.to(tl.int64)[None, :] * stride_ut
    out_ptr += group.to(tl.int64) * stride_og
    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = first + tile * BLOCK_N
        offs_n = start + tl.arange(0, BLOCK_N)
        # rows past the matrix repeat its last one
        rows = tl.minimum(offs_n, R - 1)
        ptrs_w = weight_ptr + rows.to(tl.int64)[None, :, None] * stride_wr + k
        weight = tl.load(ptrs_w) if EVEN_K else tl.load(ptrs_w, mask=k < K, other=0.0)
        part = tl.dot(weight.to(DTYPE), x, input_precision="ieee", max_num_imprecise_acc=0)
        if ROW_SCALES:
            flat = (group * R + rows)[None, :]
            by_row = _block_scales(scale_ptr, stride_s, flat, columns[:, None], last)
            part *= by_row[:, :, None] * factor
        else:
            flat = group * R + tl.minimum(start, R - 1)
            scales = _block_scales(scale_ptr, stride_s, flat, columns, last)
            part *= scales[:, None, None] * factor
        total = _slice_sum(part)
        mask = (offs_n < R)[:, None] & mask_t[None, :]
        if SPLITS == 1:
            ptrs_o = out_ptr + offs_t.to(tl.int64)[None, :] * stride_ot + offs_n[:, None]
            tl.store(ptrs_o, total.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(sums_ptr + sums_rows + offs_n[:, None], total, mask=mask)
    if SPLITS > 1:
        last_split = is_last(counters_ptr + chunk * tiles_t + tile_t, SPLITS)
        if last_split:
            _add_splits(
                sums_ptr, stride_us, stride_ut, out_ptr, stride_ot, tokens, live, first, R,
                SPLITS, TILES * BLOCK_N,
            )  # fmt: skip


@triton.jit
def gemv_kernel(
    x_ptr, stride_xt, stride_xg,  # [T, G, K] or [T, G, 2*K]
    x_scale_ptr, stride_st,  # [T, ceil(K/128)]
    weight_ptr, stride_wg, stride_wr,  # [G, R, K]
    scale_ptr, stride_s,  # [ceil(G*R/128), ceil(K/128)]
    out_ptr, stride_ot, stride_og,  # [T, G, R]
    counters_ptr,  # [G*chunks, token tiles]
    sums_ptr, stride_us, stride_ut,  # [SPLITS, T, G*R]
    T, R, K, chunks, norm_ptr, eps, limit,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, QUANTIZE: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr,
    EVEN_K: tl.constexpr, ROW_SCALES: tl.constexpr, BLOCK_T: tl.constexpr, LIVE_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    gemv_block(
        tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2),
        x_ptr, stride_xt, stride_xg, x_scale_ptr, stride_st, weight_ptr, stride_wg, stride_wr,
        scale_ptr, stride_s, out_ptr, stride_ot, stride_og, counters_ptr, sums_ptr, stride_us,
        stride_ut, T, R, K, chunks, norm_ptr, eps, limit, NORM, SWIGLU, QUANTIZE, DTYPE, SCALED,
        SPLITS, SLICES, TILES, EVEN_K, ROW_SCALES, BLOCK_T, LIVE_T, BLOCK_N, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "tiles_t"])
def gemm_kernel(
    x_ptr, stride_xt, stride_xg,  # [T, G, K]
    x_scale_ptr, stride_st,  # [T, ceil(K/128)]
    weight_ptr, stride_wg, stride_wr,  # [G, R, K]
    scale_ptr, stride_s,  # [ceil(G*R/128), ceil(K/128)]
    out_ptr, stride_ot, stride_og,  # [T, G, R]
    T, R, K, tiles_t, tiles_n,
    SCALED: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr, ROW_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    # weight tiles in turn, each for all token tiles of a band whose rows stay in L2
    band, inside = tl.program_id(0) // (GROUP_T * tiles_n), tl.program_id(0) % (GROUP_T * tiles_n)
    in_band = tl.minimum(tiles_t - band * GROUP_T, GROUP_T)
    first_t = (band * GROUP_T + inside % in_band) * BLOCK_T
    first_n = inside // in_band * BLOCK_N
    offs_t, offs_n = first_t + tl.arange(0, BLOCK_T), first_n + tl.arange(0, BLOCK_N)
    # rows past an end repeat the last one
    tokens, rows = tl.minimum(offs_t, T - 1).to(tl.int64), tl.minimum(offs_n, R - 1)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + group.to(tl.int64) * stride_xg + tokens[:, None] * stride_xt + offs_k[None, :]
    weight_ptrs = weight_ptr + group.to(tl.int64) * stride_wg
    weight_ptrs += rows.to(tl.int64)[:, None] * stride_wr + offs_k[None, :]
    if SCALED:
        x_scale_ptrs = x_scale_ptr + tokens * stride_st
    if ROW_SCALES:
        scale_ptrs = scale_ptr + ((group * R + rows) // 128).to(tl.int64) * stride_s
    else:
        scale_ptrs = scale_ptr + ((group * R + first_n) // 128).to(tl.int64) * stride_s
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            x, weight = tl.load(x_ptrs), tl.load(weight_ptrs)
        else:
            mask = (step * BLOCK_K + offs_k < K)[None, :]
            x = tl.load(x_ptrs, mask=mask, other=0.0)
            weight = tl.load(weight_ptrs, mask=mask, other=0.0)
        column = step * BLOCK_K // 128
        scales = tl_ue8m0_decode(tl.load(scale_ptrs + column).to(tl.int32))
        weight = tl.trans(weight.to(DTYPE))
        part = tl.dot(x, weight, input_precision="ieee", max_num_imprecise_acc=0)
        if ROW_SCALES:
            part *= scales[None, :]
            scales = 1.0
        if SCALED:
            codes = tl.load(x_scale_ptrs + column).to(tl.int32)
            acc += part * (tl_ue8m0_decode(codes) * scales)[:, None]
        else:
            acc += part * scales
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    out_ptr += group.to(tl.int64) * stride_og
    ptrs_o = out_ptr + offs_t.to(tl.int64)[:, None] * stride_ot + offs_n[None, :]
    mask_o = (offs_t < T)[:, None] & (offs_n < R)[None, :]
    tl.store(ptrs_o, acc.to(out_ptr.dtype.element_ty), mask=mask_o)
