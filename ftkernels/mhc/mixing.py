"""The one kernel of `hc_pre`, `hc_head` and `hc_post_pre`: product, coefficients, weighted sum.

A block takes a slice of channels of a tile of tokens: it writes their new streams (`hc_post_pre`)
and the slice's share of ``fn @ f`` and ``sum(f^2)`` to scratch. The last block of a tile to finish
adds the shares in order and goes on with its tokens: coefficients, Sinkhorn, weighted sum, norm and
quantization.
Numerics: fp32 (no TF32). Slices and the order of every sum depend on the weight's shape alone, so
that a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ftkernels import backend, check  # noqa: F401  (backend first: it fixes interpretation)
from ftkernels.linear.products import is_last
from ftkernels.quant.formats import tl_quantized_fp8
from ftkernels.spec import COUNTER_BYTES, Case, Inputs
from ftkernels.testing import randn

GROUP = 128
"""Channels under one scale of the quantized row."""
_MOST_SPLITS = 64
_TILE = 16
_FEW_TOKENS = 64  # up to here tiles are smaller: what ends a tile is one block's work
_FEW_ROWS = 4
MOST_TOKENS = COUNTER_BYTES // 4 * _TILE
"""Tokens of one call; a tile has its counter in scratch."""


@dataclass(frozen=True)
class MixConfig:
    """The same for every number of rows; ``block_k`` channels are multiplied at a time.

    Not for tuning: the ops that share the kernel owe each other their bits, and both fields set
    the order of sums.
    """

    block_k: int
    num_warps: int


def default_config(key: Case) -> MixConfig:
    """Slices whose loads are all in flight at once; whole rows at the end."""
    return MixConfig(block_k=64, num_warps=4 if key["C"] <= 4096 else 8)


def scratch_bytes(rows: int, hc: int, num_tokens: int) -> int:
    """Scratch for `rows` rows of ``fn``, at the largest number of slices."""
    return COUNTER_BYTES + num_tokens * _MOST_SPLITS * _block_n(rows, hc) * 4


def inputs(case: Case, *, rows: int, num_scales: int, device: str, seed: int) -> Inputs:
    """Seeded streams and parameters of `hc_pre` or `hc_head`: ``fn`` has `rows` rows."""
    num_tokens, hc, width = case["T"], case["hc"], case["C"]
    size = hc * width
    streams = randn(num_tokens, hc, width, dtype=torch.bfloat16, device=device, seed=seed)
    fn = randn(rows, size, device=device, scale=size**-0.5, seed=seed + 1)
    scale = 1.0 + randn(num_scales, device=device, scale=0.3, seed=seed + 2)
    base = randn(rows, device=device, scale=0.7, seed=seed + 3)
    kwargs: dict[str, object] = {}
    if case.get("norm"):
        kwargs["norm_weight"] = 1.0 + randn(width, device=device, scale=0.1, seed=seed + 4)
    if case.get("quantize"):
        kwargs["quantize"] = True
    return (streams, fn, scale, base), kwargs


def _block_n(rows: int, hc: int) -> int:
    # further columns: the sum of squares and the hc weights of the sum
    return max(16, triton.next_power_of_2(rows + 1 + hc))


def _strided(x: torch.Tensor | None, dims: int) -> tuple[Any, ...]:
    return (x, *((0,) * dims if x is None else x.stride()[:dims]))


def given_outputs(
    out: tuple[torch.Tensor, ...] | None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Outputs of a call by name, for the tensors that its scratch must not overlap."""
    if isinstance(out, tuple | list):
        for index, tensor in enumerate(out):
            yield f"out[{index}]", tensor if isinstance(tensor, torch.Tensor) else None


def launch(
    op: str, cfg: MixConfig, streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor,
    base: torch.Tensor, norm_weight: torch.Tensor | None, hc_eps: float, norm_eps: float,
    x: torch.Tensor, *, scratch: torch.Tensor | None, iters: int = 0,
    post: torch.Tensor | None = None, comb: torch.Tensor | None = None,
    quantized: tuple[torch.Tensor, ...] = (),
    previous: tuple[torch.Tensor, ...] | None = None,
) -> None:  # fmt: skip
    """Launches the kernel.

    Args:
        streams: what is read; written first where `previous` is given.
        iters: Sinkhorn's column steps; `post` and `comb` are written unless it is 0.
        quantized: ``(x_fp8, x_scale)`` to write, or nothing.
        previous: ``(y, streams, post, comb)`` of the sublayer before.
    """
    num_tokens, hc, width = streams.shape
    rows = fn.shape[0]
    if scratch is None:  # a given one has been checked
        scratch = check.scratch(op, None, scratch_bytes(rows, hc, num_tokens), streams)
    split = max(cfg.block_k, triton.next_power_of_2(triton.cdiv(width, _MOST_SPLITS)))
    num_splits, block_n = triton.cdiv(width, split), _block_n(rows, hc)
    used = COUNTER_BYTES + num_tokens * num_splits * block_n * 4
    tile = _FEW_ROWS if num_tokens <= _FEW_TOKENS else _TILE
    y, old, post_in, comb_in = previous or (None, None, None, None)
    x_fp8, x_scale = quantized or (None, None)
    _hc_mix_kernel[(num_splits, triton.cdiv(num_tokens, tile))](
        *_strided(y, 1), *_strided(old, 2), *_strided(post_in, 1), *_strided(comb_in, 2),
        *_strided(streams, 2),
        fn, fn.stride(0), scale, base, norm_weight,
        *_strided(x, 1), *_strided(post, 1), *_strided(comb, 2),
        *_strided(x_fp8, 1), *_strided(x_scale, 1),
        scratch[:COUNTER_BYTES].view(torch.int32),
        scratch[COUNTER_BYTES:used].view(torch.float32),
        num_tokens, width, hc_eps, norm_eps,
        HC=hc, N=rows, BLOCK_N=block_n, ITERS=iters, TILE=tile, BLOCK_T=_TILE,
        BLOCK_K=cfg.block_k, BLOCKS=split // cfg.block_k, NUM_SPLITS=num_splits,
        HAS_POST=previous is not None, HAS_NORM=norm_weight is not None,
        QUANTIZE=x_fp8 is not None, BLOCK_C=max(GROUP, triton.next_power_of_2(width)),
        num_warps=cfg.num_warps,
    )  # fmt: skip


@triton.jit
def appended(values, x):
    """The tuple with one more tensor."""
    return values + (x,)  # noqa: RUF005


@triton.jit
def new_stream(y, post, combs, streams, HC: tl.constexpr):
    """``post * y + sum_j combs[j] * streams[j]`` in fp32, in this order."""
    total = post * y
    for j in tl.static_range(HC):
        total = tl.fma(combs[j], streams[j], total)
    return total


@triton.jit
def _stream_tiles(ptr, stride_t, stride_h, offs_t, offs_c, mask, HC: tl.constexpr):
    tiles = ()
    ptrs = ptr + (offs_t * stride_t)[:, None] + offs_c[None, :]
    for _ in tl.static_range(HC):
        tiles = appended(tiles, tl.load(ptrs, mask=mask, other=0.0).to(tl.float32))
        ptrs += stride_h
    return tiles


@triton.jit
def _mixed_tiles(
    y_ptr, stride_yt, old_ptr, stride_ot, stride_oh, post_ptr, stride_pt, comb_ptr, stride_ct,
    stride_cj, streams_ptr, stride_st, stride_sh, offs_t, offs_c, mask_t, mask, HC: tl.constexpr,
):  # fmt: skip
    """The new streams' tiles, stored and as they read back."""
    y = tl.load(y_ptr + (offs_t * stride_yt)[:, None] + offs_c[None, :], mask=mask, other=0.0)
    y = y.to(tl.float32)
    old = _stream_tiles(old_ptr, stride_ot, stride_oh, offs_t, offs_c, mask, HC)
    # streams may be written in place: no store before every thread has read
    tl.debug_barrier()
    new = ()
    new_ptrs = streams_ptr + (offs_t * stride_st)[:, None] + offs_c[None, :]
    for k in tl.static_range(HC):
        post = tl.load(post_ptr + offs_t * stride_pt + k, mask=mask_t, other=0.0)[:, None]
        combs = ()
        comb_ptrs = comb_ptr + offs_t * stride_ct + k
        for _ in tl.static_range(HC):
            combs = appended(combs, tl.load(comb_ptrs, mask=mask_t, other=0.0)[:, None])
            comb_ptrs += stride_cj
        tile = new_stream(y, post, combs, old, HC).to(streams_ptr.dtype.element_ty)
        tl.store(new_ptrs, tile, mask=mask)
        new_ptrs += stride_sh
        new = appended(new, tile.to(tl.float32))
    return new


@triton.jit
def _sinkhorn(
    row_ptrs, live, base_ptr, rate, hc_eps, HC: tl.constexpr, ITERS: tl.constexpr
):  # fmt: skip
    """The doubly normalized matrices of a tile: HC*HC vectors over its tokens, row-major."""
    c = ()
    for j in tl.static_range(HC):
        first = (2 + j) * HC
        row = ()
        for k in tl.static_range(HC):
            mix = tl.load(row_ptrs + (first + k), mask=live, other=0.0, cache_modifier=".cg")
            row = appended(row, tl.fma(mix, rate, tl.load(base_ptr + (first + k))))
        top = tl.full(rate.shape, float("-inf"), tl.float32)
        for k in tl.static_range(HC):
            top = tl.maximum(top, row[k])
        total = tl.zeros_like(top)
        exps = ()
        for k in tl.static_range(HC):
            exps = appended(exps, tl.exp(row[k] - top))
            total += exps[k]
        for k in tl.static_range(HC):
            c = appended(c, exps[k] / total + hc_eps)
    c = _column_step(c, hc_eps, HC)
    for _ in range(ITERS - 1):
        c = _column_step(_row_step(c, hc_eps, HC), hc_eps, HC)
    return c


@triton.jit
def _row_step(c, hc_eps, HC: tl.constexpr):
    new = ()
    for j in tl.static_range(HC):
        total = c[j * HC]
        for k in tl.static_range(1, HC):
            total += c[j * HC + k]
        rate = 1.0 / (total + hc_eps)
        for k in tl.static_range(HC):
            new = appended(new, c[j * HC + k] * rate)
    return new


@triton.jit
def _column_step(c, hc_eps, HC: tl.constexpr):
    rates = ()
    for k in tl.static_range(HC):
        total = c[k]
        for j in tl.static_range(1, HC):
            total += c[j * HC + k]
        rates = appended(rates, 1.0 / (total + hc_eps))
    new = ()
    for j in tl.static_range(HC):
        for k in tl.static_range(HC):
            new = appended(new, c[j * HC + k] * rates[k])
    return new


@triton.jit
def _coefficients(
    partial_ptr, scale_ptr, base_ptr, post_ptr, stride_pt, comb_ptr, stride_ct, stride_cj,
    first, T, C, hc_eps, norm_eps,
    HC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ITERS: tl.constexpr,
    TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """A tile's coefficients; the weights of the sum go to columns N + 1 of the first share."""
    offs_t = first + tl.arange(0, TILE)
    live = offs_t < T
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    row_ptrs = partial_ptr + offs_t * (NUM_SPLITS * BLOCK_N)
    ptrs, mask = row_ptrs[:, None] + offs_n, live[:, None] & (offs_n <= N)
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for s in tl.static_range(NUM_SPLITS):
        total += tl.load(ptrs + s * BLOCK_N, mask=mask, other=0.0, cache_modifier=".cg")
    # every thread has read the first share before the sums take its place
    tl.debug_barrier()
    tl.store(ptrs, total, mask=mask)
    tl.debug_barrier()
    squares = tl.load(row_ptrs + N, mask=live, other=0.0, cache_modifier=".cg")
    rms = 1.0 / tl.sqrt_rn(squares / (HC * C) + norm_eps)
    for h in tl.static_range(HC):
        mix = tl.load(row_ptrs + h, mask=live, other=0.0, cache_modifier=".cg")
        pre = tl.sigmoid(tl.fma(mix, rms * tl.load(scale_ptr), tl.load(base_ptr + h))) + hc_eps
        tl.store(row_ptrs + (N + 1 + h), pre, mask=live)
    if ITERS > 0:
        for h in tl.static_range(HC):
            mix = tl.load(row_ptrs + (HC + h), mask=live, other=0.0, cache_modifier=".cg")
            rate = rms * tl.load(scale_ptr + 1)
            post = 2.0 * tl.sigmoid(tl.fma(mix, rate, tl.load(base_ptr + HC + h)))
            tl.store(post_ptr + offs_t * stride_pt + h, post, mask=live)
        comb = _sinkhorn(row_ptrs, live, base_ptr, rms * tl.load(scale_ptr + 2), hc_eps, HC, ITERS)
        comb_ptrs = comb_ptr + offs_t * stride_ct
        for j in tl.static_range(HC):
            for k in tl.static_range(HC):
                tl.store(comb_ptrs + k, comb[j * HC + k], mask=live)
            comb_ptrs += stride_cj


@triton.jit
def _mix_token(
    token, weights_ptr, streams_ptr, stride_sh, norm_ptr, x_ptr, x_fp8_ptr, stride_qt,
    x_scale_ptr, stride_gt, C, norm_eps,
    HC: tl.constexpr, HAS_NORM: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``sum_s weights[s] * streams[s]`` of one token, normed and quantized."""
    # 8 channels a thread, whether it stores bytes as well: the order of the norm's sum hangs on it
    offs_c = tl.max_contiguous(tl.arange(0, BLOCK_C), 8)
    mask_c = offs_c < C
    acc = tl.zeros((BLOCK_C,), tl.float32)
    for h in tl.static_range(HC):
        weight = tl.load(weights_ptr + h, cache_modifier=".cg")
        ptrs = streams_ptr + offs_c
        stream = tl.load(ptrs, mask=mask_c, other=0.0, cache_modifier=".cg").to(tl.float32)
        acc = tl.fma(stream, weight, acc)
        streams_ptr += stride_sh
    x = acc.to(x_ptr.dtype.element_ty)
    if HAS_NORM:
        wide = x.to(tl.float32)
        rms = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / C + norm_eps)
        gain = tl.load(norm_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        x = (wide * rms * gain).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + offs_c, x, mask=mask_c)
    if QUANTIZE:
        grouped = tl.reshape(x.to(tl.float32), (BLOCK_C // 128, 128))
        q, code = tl_quantized_fp8(grouped, 1)
        q = tl.reshape(q, (BLOCK_C,)).to(tl.float8e4nv)
        tl.store(x_fp8_ptr + token * stride_qt + offs_c, q, mask=mask_c)
        offs_g = tl.arange(0, BLOCK_C // 128)
        tl.store(x_scale_ptr + token * stride_gt + offs_g, code.to(tl.uint8), mask=offs_g * 128 < C)


@triton.jit(do_not_specialize=["T"])
def _hc_mix_kernel(
    y_ptr, stride_yt,  # [T, C]
    old_ptr, stride_ot, stride_oh,  # [T, HC, C]
    post_in_ptr, stride_it,  # [T, HC]
    comb_in_ptr, stride_nt, stride_nj,  # [T, HC, HC]
    streams_ptr, stride_st, stride_sh,  # [T, HC, C]
    fn_ptr, stride_fn,  # [N, HC*C]
    scale_ptr, base_ptr, norm_ptr,  # [1] or [3], [N], [C]
    x_ptr, stride_xt,  # [T, C]
    post_ptr, stride_pt,  # [T, HC]
    comb_ptr, stride_ct, stride_cj,  # [T, HC, HC]
    x_fp8_ptr, stride_qt, x_scale_ptr, stride_gt,  # [T, C], [T, ceil(C/128)]
    counters_ptr,  # [tiles]
    partial_ptr,  # [T, NUM_SPLITS, BLOCK_N]
    T, C, hc_eps, norm_eps,
    HC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ITERS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_POST: tl.constexpr, HAS_NORM: tl.constexpr,
    QUANTIZE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_s = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * TILE
    offs_n = tl.arange(0, BLOCK_N)
    # a token has the same row of the product in tiles of either size
    offs_t = first // BLOCK_T * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = (offs_t >= first) & (offs_t < first + TILE) & (offs_t < T)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for block in tl.static_range(BLOCKS):
        offs_c = (pid_s * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask_c = offs_c < C
        weights = ()
        for h in tl.static_range(HC):
            w_rows = fn_ptr + (offs_n.to(tl.int64) * stride_fn)[None, :]
            w_ptrs = w_rows + (h * C + offs_c)[:, None]
            w = tl.load(w_ptrs, mask=(offs_n < N)[None, :] & mask_c[:, None], other=0.0)
            weights = appended(weights, w)
        mask = mask_t[:, None] & mask_c[None, :]
        if HAS_POST:
            tiles = _mixed_tiles(
                y_ptr, stride_yt, old_ptr, stride_ot, stride_oh, post_in_ptr, stride_it,
                comb_in_ptr, stride_nt, stride_nj, streams_ptr, stride_st, stride_sh,
                offs_t, offs_c, mask_t, mask, HC,
            )  # fmt: skip
        else:
            tiles = _stream_tiles(streams_ptr, stride_st, stride_sh, offs_t, offs_c, mask, HC)
        for h in tl.static_range(HC):
            acc = tl.dot(tiles[h], weights[h], acc, input_precision="ieee")
            squares = tl.fma(tiles[h], tiles[h], squares)
    acc = tl.where((offs_n == N)[None, :], tl.sum(squares, 1)[:, None], acc)
    out_ptrs = partial_ptr + (offs_t[:, None] * NUM_SPLITS + pid_s) * BLOCK_N + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=mask_t[:, None] & (offs_n <= N)[None, :])
    if is_last(counters_ptr + tl.program_id(1), NUM_SPLITS):
        _coefficients(
            partial_ptr, scale_ptr, base_ptr, post_ptr, stride_pt, comb_ptr, stride_ct, stride_cj,
            first, T, C, hc_eps, norm_eps, HC, N, BLOCK_N, ITERS, TILE, NUM_SPLITS,
        )  # fmt: skip
        # the weights are in memory
        tl.debug_barrier()
        for i in range(0, tl.minimum(T - first, TILE).to(tl.int32)):
            token = first + i
            _mix_token(
                token, partial_ptr + token * (NUM_SPLITS * BLOCK_N) + (N + 1),
                streams_ptr + token * stride_st, stride_sh, norm_ptr, x_ptr + token * stride_xt,
                x_fp8_ptr, stride_qt, x_scale_ptr, stride_gt, C, norm_eps,
                HC, HAS_NORM, QUANTIZE, BLOCK_C,
            )  # fmt: skip
