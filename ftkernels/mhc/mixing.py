"""Triton side of the hyper-connection ops: product, coefficients, Sinkhorn, weighted sum.

One launch splits ``fn @ f`` and ``sum(f^2)`` over channels into partial sums in scratch; the op's
own launch adds them up in a fixed order and goes on per token.
Numerics: fp32 (no TF32). Tiles and splits depend on the weight's shape alone, so that a row's bits
do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend  # noqa: F401  (first: it fixes interpretation)
from ftkernels.spec import COUNTER_BYTES, Case, Inputs
from ftkernels.target import Target
from ftkernels.testing import randn

MAX_SPLITS = 32


@dataclass(frozen=True)
class MixConfig:
    """Both launches of `hc_pre` and `hc_head`; the same for every number of rows."""

    num_splits: int
    block_t: int
    block_k: int
    project_warps: int
    block_c: int
    num_warps: int


def default_config(key: Case) -> MixConfig:
    """At least 256 channels per split; whole rows where they are normed."""
    splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, key["hc"] * key["C"] // 256)))
    return MixConfig(
        num_splits=splits, block_t=16, block_k=32, project_warps=4,
        block_c=min(1024, triton.next_power_of_2(key["C"])), num_warps=4,
    )  # fmt: skip


def candidates(key: Case, target: Target) -> Iterable[MixConfig]:
    base = default_config(key)
    for num_splits in (8, 16, 32):
        for block_k, warps in ((16, 4), (32, 4), (32, 8), (64, 8)):
            for block_c, num_warps in ((512, 4), (1024, 4), (1024, 8)):
                yield MixConfig(num_splits, base.block_t, block_k, warps, block_c, num_warps)


def scratch_bytes(rows: int, num_tokens: int) -> int:
    """Scratch of `hc_pre` and `hc_head` for `rows` rows of ``fn``, at the largest split."""
    return COUNTER_BYTES + num_tokens * MAX_SPLITS * _block_n(rows) * 4


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
    return (streams, fn, scale, base), kwargs


def _block_n(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows + 1))  # one more column: the sum of squares


def project(
    streams: torch.Tensor, fn: torch.Tensor, scratch: torch.Tensor | None, cfg: MixConfig
) -> torch.Tensor:
    """Launches the mixing product; partial sums ``[T, num_splits, BLOCK_N]`` in scratch."""
    num_tokens, hc, width = streams.shape
    rows = fn.shape[0]
    if scratch is None:
        num_bytes = scratch_bytes(rows, num_tokens)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=streams.device)
    block_n = _block_n(rows)
    used = COUNTER_BYTES + num_tokens * cfg.num_splits * block_n * 4
    partial = scratch[COUNTER_BYTES:used].view(torch.float32)
    partial = partial.view(num_tokens, cfg.num_splits, block_n)
    _hc_project_kernel[(triton.cdiv(num_tokens, cfg.block_t), cfg.num_splits)](
        streams, streams.stride(0), streams.stride(1), fn, fn.stride(0), partial,
        num_tokens, width,
        HC=hc, N=rows, BLOCK_N=block_n, BLOCK_T=cfg.block_t, BLOCK_K=cfg.block_k,
        NUM_SPLITS=cfg.num_splits, num_warps=cfg.project_warps,
    )  # fmt: skip
    return partial


@triton.jit
def _hc_project_kernel(
    streams_ptr, stride_st, stride_sh,  # [T, hc, C]
    fn_ptr, stride_fn,  # [N, hc*C]
    partial_ptr,  # [T, NUM_SPLITS, BLOCK_N]
    T, C,
    HC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    pid_s = tl.program_id(1)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < T
    blocks_per_stream = tl.cdiv(C, BLOCK_K)
    num_blocks = HC * blocks_per_stream
    per_split = tl.cdiv(num_blocks, NUM_SPLITS)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for block in range(pid_s * per_split, tl.minimum((pid_s + 1) * per_split, num_blocks)):
        h = block // blocks_per_stream
        offs_c = (block - h * blocks_per_stream) * BLOCK_K + offs_k
        mask_c = offs_c < C
        row_ptrs = streams_ptr + offs_t * stride_st + h.to(tl.int64) * stride_sh
        x_ptrs = row_ptrs[:, None] + offs_c[None, :]
        x = tl.load(x_ptrs, mask=mask_t[:, None] & mask_c[None, :], other=0.0).to(tl.float32)
        w_ptrs = fn_ptr + (offs_n.to(tl.int64) * stride_fn)[None, :] + (h * C + offs_c)[:, None]
        w = tl.load(w_ptrs, mask=(offs_n < N)[None, :] & mask_c[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    acc = tl.where((offs_n == N)[None, :], squares[:, None], acc)
    out_ptrs = partial_ptr + (offs_t[:, None] * NUM_SPLITS + pid_s) * BLOCK_N + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=mask_t[:, None] & (offs_n <= N)[None, :])


@triton.jit
def inverse_rms(
    partial_ptr, C, norm_eps,
    HC: tl.constexpr, N: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of one token's flattened streams; `partial_ptr` is the token's partial sums."""
    squares = tl.sum(tl.load(partial_ptr + tl.arange(0, NUM_SPLITS) * BLOCK_N + N), 0)
    return 1.0 / tl.sqrt_rn(squares / (HC * C) + norm_eps)


@triton.jit
def mixed_sigmoid(
    partial_ptr, base_ptr, first, rms, scale,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``sigmoid(m * scale + base)`` of the rows from `first` on, [BLOCK_HC]."""
    offs_h = tl.arange(0, BLOCK_HC)
    ptrs = partial_ptr + tl.arange(0, NUM_SPLITS)[:, None] * BLOCK_N + first + offs_h[None, :]
    mix = tl.sum(tl.load(ptrs, mask=(offs_h < HC)[None, :], other=0.0), 0)
    base = tl.load(base_ptr + first + offs_h, mask=offs_h < HC, other=0.0)
    return tl.sigmoid(mix * rms * scale + base)


@triton.jit
def mixed_sinkhorn(
    partial_ptr, base_ptr, rms, scale, hc_eps,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    ITERS: tl.constexpr,
):  # fmt: skip
    """The doubly normalized matrix of one token, [BLOCK_HC, BLOCK_HC]; zero outside [HC, HC]."""
    offs_h = tl.arange(0, BLOCK_HC)
    mask = (offs_h < HC)[:, None] & (offs_h < HC)[None, :]
    rows = 2 * HC + offs_h[:, None] * HC + offs_h[None, :]  # [j, k]
    offs_s = tl.arange(0, NUM_SPLITS) * BLOCK_N
    ptrs = partial_ptr + offs_s[:, None, None] + rows[None, :, :]
    mix = tl.sum(tl.load(ptrs, mask=mask[None, :, :], other=0.0), 0)
    a = mix * rms * scale + tl.load(base_ptr + rows, mask=mask, other=0.0)
    a = tl.where(mask, a, float("-inf"))
    c = tl.where(mask, tl.exp(a - tl.max(a, 1)[:, None]), 0.0)
    c = tl.where(mask, c / tl.sum(c, 1)[:, None] + hc_eps, 0.0)
    c = tl.where(mask, c / (tl.sum(c, 0)[None, :] + hc_eps), 0.0)
    for _ in range(ITERS - 1):
        c = tl.where(mask, c / (tl.sum(c, 1)[:, None] + hc_eps), 0.0)
        c = tl.where(mask, c / (tl.sum(c, 0)[None, :] + hc_eps), 0.0)
    return c


@triton.jit
def store_mixed(
    weights, streams_ptr, stride_sh, norm_ptr, out_ptr, offs_c, C, norm_eps,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """``sum_s weights[s] * streams[s]`` of one token's channels; a normed row must be whole."""
    offs_h = tl.arange(0, BLOCK_HC)
    mask_c = offs_c < C
    acc = tl.zeros_like(offs_c).to(tl.float32)
    for h in tl.static_range(HC):
        weight = tl.sum(tl.where(offs_h == h, weights, 0.0), 0)
        acc += weight * tl.load(streams_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        streams_ptr += stride_sh
    x = acc.to(out_ptr.dtype.element_ty)
    if HAS_NORM:
        wide = x.to(tl.float32)
        rms = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / C + norm_eps)
        gain = tl.load(norm_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        x = (wide * rms * gain).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_c, x, mask=mask_c)
