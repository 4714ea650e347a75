"""Hyper-connection head: the streams' weighted sum ahead of the output projection.

Formula: ``w = sigmoid((fn @ f) * rsqrt(mean(f^2) + norm_eps) * scale + base) + hc_eps`` with
``f = flatten(streams)``, ``out = sum_s w_s * streams[s]``.
Numerics: fp32 (no TF32), one rounding. With ``norm_weight``, the rounded sum is RMS-normed as
`rms_norm` would do it, with a second rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.mhc import sinkhorn
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def hc_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Collapse the residual streams into one hidden vector.

    Args:
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous.
        fn: ``[hc, hc*C]`` fp32.
        scale: ``[1]`` fp32.
        base: ``[hc]`` fp32.
        hc_eps: added to the weights, ``>= 0``.
        norm_eps: of the RMS statistics, ``>= 0``.
        norm_weight: ``[C]`` float; the result is RMS-normed with it.
        out: ``[T, C]`` in ``streams.dtype``; allocated when omitted.
        scratch: as ``scratch_bytes("hc_head", T=.., hc=.., C=..)`` says; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or eps outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. Two launches.
    """
    out = _checked(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(streams):
        return _reference(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    return out


def _checked(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, norm_weight: torch.Tensor | None, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, fp32 = "hc_head", (torch.float32,)
    check.tensor(op, "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    num_tokens, hc, width = streams.shape
    check.tensor(op, "fn", fn, fp32, (hc, hc * width), "[hc, hc*C]", streams)
    check.tensor(op, "scale", scale, fp32, (1,), "[1]", streams)
    check.tensor(op, "base", base, fp32, (hc,), "[hc]", streams)
    sinkhorn.check_common(op, streams, hc_eps, norm_eps, norm_weight)
    inputs = (fn, scale, base, norm_weight)
    return check.output(op, out, (num_tokens, width), like=streams, inputs=inputs)


def hc_head_reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch and, for few rows, plain Python; shares nothing with the kernel."""
    out = _checked(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    if out.numel() == 0:
        return out
    return _reference(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)


def _reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, norm_weight: torch.Tensor | None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    size = streams.shape[1] * streams.shape[2]
    mix, squares = sinkhorn.project_reference(streams, fn)
    if sinkhorn.few_rows(streams, norm_eps):
        scales, bases = scale.tolist(), base.tolist()
        values: list[float] = []
        for m, square in zip(mix.tolist(), squares.tolist()):
            rms = 1.0 / math.sqrt(square / size + norm_eps)
            values += sinkhorn.sigmoids(m, rms, scales[0], bases, 1.0, hc_eps)
        weights = sinkhorn.floats32(values).view(mix.shape)
    else:
        inverse = sinkhorn.inverse_rms_rows(squares, size, norm_eps)
        weights = sinkhorn.sigmoid_rows(
            mix.double(), inverse, scale.double(), base.double(), 1.0, hc_eps
        ).float()
    x = sinkhorn.combine_reference(weights, streams)
    if norm_weight is not None:
        x = sinkhorn.norm_reference(x.to(streams.dtype), norm_weight, norm_eps)
    return out.copy_(x)
