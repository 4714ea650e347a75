"""Changes single logits: penalties, logit bias and banned tokens in one pass.

Formula, for each listed ``(row, token)``: ``l = l / repetition if l > 0 else l * repetition``, then
``l += offset``; an offset of -inf bans the token. All other logits are copied.
Numerics: fp32, one rounding.
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


def adjust_logits(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, *, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale and shift the listed logits.

    Args:
        logits: ``[S, V]``, bf16/fp16/fp32, rows may be strided.
        row_ids: ``[N]`` int32; -1 skips the entry.
        token_ids: ``[N]`` int32. No ``(row, token)`` is listed twice.
        repetition: ``[N]`` fp32 factor, 1 for none.
        offset: ``[N]`` fp32 added afterwards, 0 for none, -inf to ban.
        out: ``[S, V]`` in ``logits.dtype``, may be ``logits``; allocated when omitted.

    Returns:
        ``out``; with ``N == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch, after a copy unless
    ``out`` is ``logits``.
    """
    out = _checked(logits, row_ids, token_ids, repetition, offset, out)
    _copy(logits, out)
    if row_ids.shape[0] == 0 or logits.numel() == 0:
        return out
    if backend.use_reference(logits):
        return _reference(row_ids, token_ids, repetition, offset, out)
    return out


def _checked(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, int32, fp32 = "adjust_logits", (torch.int32,), (torch.float32,)
    check.tensor(op, "logits", logits, check.FLOATS, (None, None), "[S, V]")
    check.tensor(op, "row_ids", row_ids, int32, (None,), "[N]", logits)
    entries = (row_ids.shape[0],)
    check.tensor(op, "token_ids", token_ids, int32, entries, "[N]", logits)
    check.tensor(op, "repetition", repetition, fp32, entries, "[N]", logits)
    check.tensor(op, "offset", offset, fp32, entries, "[N]", logits)
    inputs = (row_ids, token_ids, repetition, offset)
    return check.output(op, out, logits.shape, like=logits, may_alias=True, inputs=inputs)


def _copy(logits: torch.Tensor, out: torch.Tensor) -> None:
    if out is not logits and logits.numel():
        out.copy_(logits)


def adjust_logits_reference(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, *, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(logits, row_ids, token_ids, repetition, offset, out)
    _copy(logits, out)
    return _reference(row_ids, token_ids, repetition, offset, out)


def _reference(
    row_ids: torch.Tensor, token_ids: torch.Tensor, repetition: torch.Tensor, offset: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    used = row_ids >= 0
    place = (row_ids[used].long(), token_ids[used].long())
    values = out[place].float()
    factor = repetition[used]
    values = torch.where(values > 0, values / factor, values * factor) + offset[used]
    return out.index_put_(place, values.to(out.dtype))
