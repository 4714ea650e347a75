"""Hyper-connection output: ``out[k] = post[k]*y + sum_j comb[j, k]*streams[j]``.

Layout: the sum runs over the first index of ``comb``.
Numerics: fp32, ``post[k]*y`` first and then ``j = 0..hc-1``, one rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

_FEW_ELEMENTS = 1 << 16


def hc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Mix a sublayer's output into the residual streams.

    Args:
        y: ``[T, C]``, bf16/fp16/fp32, rows may be strided.
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous.
        post: ``[T, hc]`` fp32.
        comb: ``[T, hc, hc]`` fp32.
        out: ``[T, hc, C]`` in ``streams.dtype``, may be ``streams``; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(y, streams, post, comb, out)
    if streams.numel() == 0:
        return out
    if backend.use_reference(streams):
        return _reference(y, streams, post, comb, out)
    return out


def _checked(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, fp32 = "hc_post", (torch.float32,)
    check.tensor(op, "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    num_tokens, hc, width = streams.shape
    check.tensor(op, "y", y, check.FLOATS, (num_tokens, width), "[T, C]", streams)
    check.tensor(op, "post", post, fp32, (num_tokens, hc), "[T, hc]", streams)
    check.tensor(op, "comb", comb, fp32, (num_tokens, hc, hc), "[T, hc, hc]", streams)
    inputs = (y, post, comb)
    return check.output(op, out, streams.shape, like=streams, may_alias=True, inputs=inputs)


def hc_post_reference(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    return _reference(y, streams, post, comb, _checked(y, streams, post, comb, out))


def _reference(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    wide = streams.float()[:, :, None]  # [T, j, 1, C]
    weights = comb[..., None]  # [T, j, k, 1]
    total = post[:, :, None] * y[:, None]
    if streams.numel() <= _FEW_ELEMENTS:  # fewer calls, more memory; the same operations
        terms = (weights * wide).unbind(1)
    else:
        terms = tuple(weights[:, j] * wide[:, j] for j in range(streams.shape[1]))
    for term in terms:
        total = total + term
    return out.copy_(total)
