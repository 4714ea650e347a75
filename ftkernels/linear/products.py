"""Triton side of the fp32 products: tiles of ``x @ weight.T`` by blocks and by split sums.

A product of two bf16 values is exact in fp32, so two bf16 operands go to the tensor cores as they
are; any other pair is widened to fp32 and multiplied without them.
The order in which K is summed up is a function of the weight's shape, never of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ftkernels import backend  # noqa: F401  (first: it fixes interpretation)
from ftkernels.spec import COUNTER_BYTES, Case
from ftkernels.target import Target
from ftkernels.work import Work, even_loop

GEMV_ROWS = 64
"""Rows up to which an unpinned product takes the path "gemv"."""
MAX_ROWS = 256
"""Rows that one launch of the path "gemv" takes."""
_BLOCKS = 128  # one for each SM of the card in mind
_TALL = 16384  # rows of a weight that fill a card without sharing out K
_ENOUGH_BLOCKS = 100  # of a smaller tile's worth
_SLICES = 4
_UNIT = 64  # channels a slice is a multiple of


@dataclass(frozen=True)
class ProductConfig:
    """Tile of a product: ``block_t`` rows of x by ``block_n`` of the weight, ``block_k`` a step."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Pieces:
    """How a weight's shape cuts K: ``splits`` blocks of ``slices`` warps of ``size`` channels."""

    splits: int
    slices: int
    size: int

    @staticmethod
    def of(num_outputs: int, width: int) -> Pieces:
        if num_outputs >= _TALL:
            return Pieces(1, 1, _up(width, _UNIT))
        blocks = max(1, triton.cdiv(num_outputs, 16))
        most = max(1, width // (_SLICES * _UNIT))
        least = min(triton.cdiv(_BLOCKS, blocks), most)
        even = (s for s in range(least, 2 * least + 1) if width % (s * _SLICES * _UNIT) == 0)
        splits = next(even, least)
        return Pieces(splits, _SLICES, _up(triton.cdiv(width, splits * _SLICES), _UNIT))


def _up(n: int, unit: int) -> int:
    return max(1, triton.cdiv(n, unit)) * unit


def is_gemv(path: str | None, num_rows: int) -> bool:
    """Whether rows are multiplied by split sums: as pinned, else by their number."""
    return num_rows <= GEMV_ROWS if path is None else path == "gemv"


def is_even(width: int, pieces: Pieces | None, cfg: ProductConfig) -> bool:
    """Whether the steps of K end with it, in one go or in pieces."""
    if pieces is None or pieces.slices == 1:
        return width % cfg.block_k == 0
    return width == pieces.splits * pieces.slices * pieces.size


def product_key(x: torch.Tensor, weight: torch.Tensor, gemv: bool) -> dict[str, int]:
    """What a config is looked up by."""
    size = max(x.element_size(), weight.element_size())
    if x.dtype != weight.dtype:
        size = 4
    return {
        "T": x.shape[0], "N": weight.shape[0], "K": weight.shape[1], "bytes": size,
        "gemv": int(gemv),
    }  # fmt: skip


def default_config(key: Case) -> ProductConfig:
    """Used when no tuned entry fits."""
    if key["gemv"]:
        slices = Pieces.of(key["N"], key["K"]).slices
        block_n = 64 if slices == 1 else 16
        if key["bytes"] == 4:
            return ProductConfig(8, block_n, 32, 4, 2)
        block_t = min(64, max(8, triton.next_power_of_2(key["T"])))
        # two blocks on an SM, whose slices stage many rows of x
        stages = 2 if block_t >= 32 and slices > 1 else 3
        return ProductConfig(block_t, block_n, 64, 4, stages)
    if key["bytes"] == 4:
        return ProductConfig(64, 64, 32, 4, 2)
    for block_t in (128, 64):
        if triton.cdiv(key["T"], block_t) * triton.cdiv(key["N"], 128) >= _ENOUGH_BLOCKS:
            return ProductConfig(block_t, 128, 64, 8, 3)
    return ProductConfig(64, 64, 64, 4, 3)


def candidates(key: Case, target: Target) -> Iterable[ProductConfig]:
    base = default_config(key)
    if key["gemv"]:
        for stages in (2, 3, 4):
            yield ProductConfig(base.block_t, base.block_n, base.block_k, base.num_warps, stages)
        return
    for block_t, block_n, warps in ((64, 64, 4), (64, 128, 8), (128, 128, 8)):
        for stages in (2, 3, 4):
            yield ProductConfig(block_t, block_n, base.block_k, warps, stages)


def work(rows: int, num_outputs: int, width: int, config: Case) -> Work:
    """What `block_tile` does as a kernel of its own, or `gemv_block` where K has `SPLITS`."""
    blocks = triton.cdiv(rows, config["BLOCK_T"]) * triton.cdiv(num_outputs, config["BLOCK_N"])
    tile, depth = config["BLOCK_T"] * config["BLOCK_N"] * config["BLOCK_K"], width
    if "SPLITS" in config:
        blocks *= config["SPLITS"]
        if config["SLICES"] > 1:
            tile, depth = tile * config["SLICES"], config["SIZE"]
    passes = triton.cdiv(depth, config["BLOCK_K"])
    return Work(blocks, (even_loop(rows * num_outputs * width, blocks, passes, tile),))


def operand_type(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Element type that is multiplied: bf16 on tensor cores, fp32 without them."""
    return tl.bfloat16 if x.dtype == weight.dtype == torch.bfloat16 else tl.float32


def sums_bytes(num_rows: int, num_outputs: int, width: int) -> int:
    """Scratch of the path "gemv" behind the counters; none where K is not split."""
    splits = Pieces.of(num_outputs, width).splits
    return 4 * num_rows * num_outputs * splits if splits > 1 else 0


def gemv_call(
    cfg: ProductConfig, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor,
    scratch: torch.Tensor | None, counters: int = 0, first_byte: int = COUNTER_BYTES,
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid ``(weight tiles, row tiles, splits)``, arguments and constexprs of `gemv_block`.

    ``scratch`` is free from the given counter and byte on; None where K is not split.
    """
    (num_tokens, width), num_outputs = x.shape, weight.shape[0]
    pieces, free, sums = Pieces.of(num_outputs, width), None, None
    if scratch is not None:
        free = scratch[:COUNTER_BYTES].view(torch.int32)[counters:]
        sums = scratch[first_byte:][: sums_bytes(num_tokens, num_outputs, width)]
        sums = sums.view(torch.float32)
    grid = (
        triton.cdiv(num_outputs, cfg.block_n), triton.cdiv(num_tokens, cfg.block_t), pieces.splits
    )  # fmt: skip
    arguments = (
        x, x.stride(0), weight, weight.stride(0), weight.stride(1), out, out.stride(0),
        num_tokens, num_outputs, width, free, sums,
    )  # fmt: skip
    constants = {
        "BLOCK_T": cfg.block_t, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k,
        "EVEN_K": is_even(width, pieces, cfg), "SPLITS": pieces.splits, "SLICES": pieces.slices,
        "SIZE": pieces.size, "DTYPE": operand_type(x, weight),
    }  # fmt: skip
    return grid, arguments, constants


@triton.jit
def block_tile(
    a_ptr, stride_ar, stride_ak, offs_a, num_a, b_ptr, stride_br, stride_bk, offs_b, num_b, K,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 ``a @ b.T [BLOCK_A, BLOCK_B]`` over all of K; what lies outside repeats row 0."""
    a_ptrs = a_ptr + (tl.where(offs_a < num_a, offs_a, 0).to(tl.int64) * stride_ar)[:, None]
    b_ptrs = b_ptr + (tl.where(offs_b < num_b, offs_b, 0).to(tl.int64) * stride_br)[None, :]
    acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        a_at, b_at = a_ptrs + (offs_k * stride_ak)[None, :], b_ptrs + (offs_k * stride_bk)[:, None]
        if EVEN_K:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(offs_k < K)[None, :], other=0.0)
            b = tl.load(b_at, mask=(offs_k < K)[:, None], other=0.0)
        acc = tl.dot(a.to(DTYPE), b.to(DTYPE), acc, input_precision="ieee")
    return acc


@triton.jit
def split_tile(
    x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, offs_t, offs_n, split, T, N, K,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SLICES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 ``weight @ x.T [BLOCK_N, BLOCK_T]`` over one split of K: a slice a warp, then added."""
    mask_t, mask_n = (offs_t < T)[None, None, :], (offs_n < N)[None, :, None]
    x_ptrs = x_ptr + (offs_t.to(tl.int64) * stride_xt)[None, None, :]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[None, :, None]
    starts = (split * SLICES + tl.arange(0, SLICES)) * SIZE
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        offs_k = (starts[:, None] + (k + tl.arange(0, BLOCK_K))[None, :]).to(tl.int64)
        x_mask, w_mask = mask_t, mask_n
        if not EVEN_K:
            x_mask = mask_t & (offs_k < K)[:, :, None]
            w_mask = mask_n & (offs_k < K)[:, None, :]
        x = tl.load(x_ptrs + offs_k[:, :, None], mask=x_mask, other=0.0)
        w = tl.load(w_ptrs + (offs_k * stride_wk)[:, None, :], mask=w_mask, other=0.0)
        acc = tl.dot(w.to(DTYPE), x.to(DTYPE), acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def gemv_tile(
    x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, offs_t, offs_n, split, T, N, K,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SLICES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 ``weight @ x.T [BLOCK_N, BLOCK_T]``, the weight on the long side of the MMA."""
    if SLICES == 1:
        return block_tile(
            w_ptr, stride_wn, stride_wk, offs_n, N, x_ptr, stride_xt, 1, offs_t, T, K,
            BLOCK_N, BLOCK_T, BLOCK_K, EVEN_K, DTYPE,
        )  # fmt: skip
    else:
        return split_tile(
            x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, offs_t, offs_n, split, T, N, K,
            BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, SLICES, SIZE, DTYPE,
        )  # fmt: skip


@triton.jit
def is_last(counter_ptr, count):
    """Whether this block is the last of `count` to arrive; the counter then goes back to zero."""
    # all threads' sums are in memory before the block counts as finished
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def gemv_block(
    pid_n, tiles_n, pid_t, split,
    x_ptr, stride_xt,  # [T, K]
    w_ptr, stride_wn, stride_wk,  # [N, K]
    out_ptr, stride_ot,  # [T, N]
    T, N, K,
    counters_ptr,  # [row tiles, weight tiles]
    partial_ptr,  # [SPLITS, T, N]
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr, SLICES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One split of one tile of ``out``; the last of its splits adds them all, in order."""
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = gemv_tile(
        x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, offs_t, offs_n, split, T, N, K,
        BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, SLICES, SIZE, DTYPE,
    )  # fmt: skip
    mask = (offs_n < N)[:, None] & (offs_t < T)[None, :]
    out_ptrs = out_ptr + (offs_t.to(tl.int64) * stride_ot)[None, :] + offs_n[:, None]
    if SPLITS == 1:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partial_ptrs = partial_ptr + offs_n[:, None]
        rows = (split * T + offs_t).to(tl.int64) * N
        tl.store(partial_ptrs + rows[None, :], acc, mask=mask)
        if is_last(counters_ptr + pid_t * tiles_n + pid_n, SPLITS):
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for s in tl.static_range(SPLITS):
                ptrs = partial_ptrs + ((s * T + offs_t).to(tl.int64) * N)[None, :]
                total += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
