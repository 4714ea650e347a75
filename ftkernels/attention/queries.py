"""Queries on their way into attention: each head normed without a weight, then rotated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftkernels.norm.rms_norm import normed
from ftkernels.rope.rope import rotate


def prepared(
    q: torch.Tensor, positions: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """``q [T, H, D]`` normed and rotated by ``positions [T]``, each step rounded; a new tensor."""
    x = normed(q, None, eps).to(q.dtype)
    return rotate(x, positions, cos, sin, False, x)


@triton.jit
def prepare_queries(
    ptr, stride_h, out_ptr, heads, live, position, eps, cos_ptr, stride_cos, sin_ptr, stride_sin,
    D: tl.constexpr, D_P2: tl.constexpr, HALF: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One token's heads to memory, STRIDE apart, rounded as by `rms_norm` and `apply_rope`.

    Through memory, since a tile that was computed leaves the loop over KV rows without its copies
    ahead; the block's threads have it when this returns.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    PAIRS: tl.constexpr = D_P2 // 2
    offs_d = tl.arange(0, D_P2)[None, :]
    mask = live[:, None] & (offs_d < D)
    rows = heads.to(tl.int64)[:, None]
    x = tl.load(ptr + rows * stride_h + offs_d, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    x = (x * scale[:, None]).to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (heads.shape[0], PAIRS, 2)))
    angle = tl.arange(0, PAIRS) - (D // 2 - HALF)
    turned = (angle >= 0) & (angle < HALF) & (position >= 0)
    place = position.to(tl.int64)
    cos = tl.load(cos_ptr + place * stride_cos + angle, mask=turned, other=1.0)[None, :]
    sin = tl.load(sin_ptr + place * stride_sin + angle, mask=turned, other=0.0)[None, :]
    first = tl.where(turned[None, :], even * cos - odd * sin, even)
    second = tl.where(turned[None, :], even * sin + odd * cos, odd)
    x = tl.reshape(tl.join(first, second), (heads.shape[0], D_P2)).to(dtype)
    tl.store(out_ptr + rows * STRIDE + offs_d, x, mask=mask)
    tl.debug_barrier()
