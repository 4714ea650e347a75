"""Sum of a token's routed outputs and the shared expert: ``out = sum_k routed[:, k] + shared``.

Layout: ``routed`` is ``[T, topk, C]``, already multiplied by the route weights.
Numerics: fp32, ``k = 0..topk-1`` and then ``shared``, one rounding.
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


def moe_combine(
    routed: torch.Tensor, *, topk_ids: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Add up the routes of each token.

    Args:
        routed: ``[T, topk, C]``, bf16/fp16/fp32, last dimension contiguous.
        topk_ids: ``[T, topk]`` int32; routes with id -1 are skipped unread. None: all count.
        shared: ``[T, C]``, any float dtype, added last.
        out_dtype: element type of the result, that of ``routed`` when omitted.
        out: ``[T, C]``, not aliasing an input; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(routed, topk_ids, shared, out_dtype, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(routed):
        return _reference(routed, topk_ids, shared, out)
    num_tokens, topk, width = routed.shape
    cfg = config.lookup("moe_combine", {"T": num_tokens, "C": width}, default_config, grows="T")
    with backend.on_device(routed):
        _moe_combine_kernel[(num_tokens, triton.cdiv(width, cfg.block_c))](
            routed, routed.stride(0), routed.stride(1),
            topk_ids, 0 if topk_ids is None else topk_ids.stride(0),
            shared, 0 if shared is None else shared.stride(0),
            out, out.stride(0),
            width,
            TOPK=topk, HAS_IDS=topk_ids is not None, HAS_SHARED=shared is not None,
            BLOCK_C=cfg.block_c, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    routed: torch.Tensor, topk_ids: torch.Tensor | None, shared: torch.Tensor | None,
    out_dtype: torch.dtype | None, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "moe_combine"
    check.tensor(op, "routed", routed, check.FLOATS, (None, None, None), "[T, topk, C]")
    num_tokens, topk, width = routed.shape
    if topk_ids is not None:
        size = (num_tokens, topk)
        check.tensor(op, "topk_ids", topk_ids, (torch.int32,), size, "[T, topk]", routed)
    if shared is not None:
        check.tensor(op, "shared", shared, check.FLOATS, (num_tokens, width), "[T, C]", routed)
    dtype = out_dtype or routed.dtype
    if dtype not in check.FLOATS:
        raise TypeError(f"{op}: out_dtype is {dtype}, expected bfloat16, float16 or float32")
    inputs = (topk_ids, shared)
    return check.output(op, out, (num_tokens, width), like=routed, dtype=dtype, inputs=inputs)


def moe_combine_reference(
    routed: torch.Tensor, *, topk_ids: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    return _reference(routed, topk_ids, shared, _checked(routed, topk_ids, shared, out_dtype, out))


def _reference(
    routed: torch.Tensor, topk_ids: torch.Tensor | None, shared: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if topk_ids is not None:
        routed = routed.masked_fill((topk_ids < 0)[:, :, None], 0.0)
    terms = [*routed.unbind(1)] if shared is None else [*routed.unbind(1), shared]
    if not terms:
        return out.zero_()
    total = terms[0].float()
    for term in terms[1:]:  # one add at a time: the order is part of the contract
        total = total + term.float()
    return out.copy_(total)
