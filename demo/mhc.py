"""Hyper-connections for training: coefficients, mixes, and Sinkhorn with its own gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Sinkhorn(torch.autograd.Function):
    """Softmax over the second index, then column and row steps in turn, `[n, n, N]` with tokens
    last: `2 * iters` normalizations, each a few operations forward and back.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        soft = torch.softmax(logits, dim=1)
        kept = [soft]
        c = soft + eps
        for step in range(2 * iters - 1):
            total = c.sum(step % 2, keepdim=True).add_(eps).reciprocal_()
            c = c * total
            kept += (c, total)
        # saved so, as kept on ctx the result would hold itself for ever
        ctx.save_for_backward(*kept)
        return c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        soft, *parts = ctx.saved_tensors
        for step in range(len(parts) // 2 - 1, -1, -1):
            c, inverse = parts[2 * step : 2 * step + 2]
            grad = (grad - (grad * c).sum(step % 2, keepdim=True)) * inverse
        return soft * (grad - (grad * soft).sum(1, keepdim=True)), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Mixing matrices `[n, n, N]` of `logits [n, n, N]`, fp32; rows are the first index."""
    mixed: Tensor = _Sinkhorn.apply(logits, iters, eps)  # type: ignore[no-untyped-call]
    return mixed


def mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """`fn` times the RMS-normed flat streams, `[rows, N]` fp32."""
    flat = streams.flatten(1).float()
    scale = torch.rsqrt(flat.square().mean(1) + norm_eps)
    return (fn @ flat.t()) * scale


def pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *,
    iters: int, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A sublayer's input `[N, D]`, `post [N, n]` and mix `[N, n, n]` of `streams [N, n, D]`."""
    n = streams.shape[1]
    m = mixes(streams, fn, norm_eps)
    weights = torch.sigmoid(m[:n] * scale[0] + base[:n, None]) + eps
    post = 2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n, None])
    logits = m[2 * n :] * scale[2] + base[2 * n :, None]
    comb = sinkhorn(logits.view(n, n, -1), iters, eps)
    x = torch.bmm(weights.t().unsqueeze(1).to(streams.dtype), streams).squeeze(1)
    return x, post.t(), comb.permute(2, 0, 1)


def post(y: Tensor, streams: Tensor, post_weights: Tensor, comb: Tensor) -> Tensor:
    """The streams behind a sublayer whose output is `y [N, D]`."""
    mix = torch.cat((comb.transpose(1, 2), post_weights.unsqueeze(2)), dim=2).to(streams.dtype)
    return torch.bmm(mix, torch.cat((streams, y.unsqueeze(1).to(streams.dtype)), dim=1))


def head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """The streams' weighted sum in front of the last norm, `[N, D]`."""
    weights = torch.sigmoid(mixes(streams, fn, norm_eps) * scale + base[:, None]) + eps
    return torch.bmm(weights.t().unsqueeze(1).to(streams.dtype), streams).squeeze(1)
