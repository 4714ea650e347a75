"""Norm, rotary embedding and the expert products, differentiable and for many tokens at once."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ftruntime.model.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x` over its last dimension, statistics in fp32, in `x`'s dtype."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(square * square / x.shape[-1] + eps).to(x.dtype)
    return x * scale if weight is None else x * scale * weight.to(x.dtype)


def rope_tables(config: ModelConfig, ratio: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[tokens, r/2]` of a layer with this compress ratio."""
    dim = config.qk_rope_head_dim
    pair = torch.arange(dim // 2, dtype=torch.float64)
    base = config.compress_rope_theta if ratio else config.rope_theta
    freq = base ** (-2 * pair / dim)
    yarn = config.rope_scaling
    if ratio and yarn is not None:
        length = yarn.original_max_position_embeddings

        def turn(turns: float) -> float:
            return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(turn(yarn.beta_fast)), 0)
        high = min(math.ceil(turn(yarn.beta_slow)), dim - 1)
        ramp = ((pair - low) / (high - low or 0.001)).clamp(0, 1)
        freq = freq * (1 - ramp) + freq / yarn.factor * ramp
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * freq.float()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [..., d]` with its last `2 * cos.shape[-1]` channels rotated in interleaved pairs; the
    tables broadcast against `x`'s leading dimensions.
    """
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float()
    even, odd = pairs.view(*pairs.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


class _Grouped(torch.autograd.Function):
    """Rows `[offset[e], offset[e+1])` of `x [R, K]` times `weight[e] [N, K]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], weight.shape[1])
        ctx.offsets = offsets.tolist()
        for expert, (a, b) in enumerate(pairwise(ctx.offsets)):
            torch.mm(x[a:b], weight[expert].t(), out=out[a:b])
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for expert, (a, b) in enumerate(pairwise(ctx.offsets)):
            torch.mm(grad[a:b], weight[expert], out=grad_x[a:b])
            torch.mm(grad[a:b].t(), x[a:b], out=grad_weight[expert])
        return grad_x, grad_weight, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`[R, N]`: each run of rows between two of `offsets [E + 1]` times its expert's matrix."""
    out: Tensor = _Grouped.apply(x, weight, offsets)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """Clamped activation of `[R, 2*I]`, times a weight a row."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = torch.nn.functional.silu(gate) * up
    return hidden if weights is None else hidden * weights[:, None].to(hidden.dtype)
