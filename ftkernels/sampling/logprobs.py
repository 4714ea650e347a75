"""Log-probabilities of given tokens and of the most likely ones: ``x - logsumexp(x)``.

Layout: one row of logits a token; the most likely tokens in falling order, lower id on ties.
Numerics: of the raw logits (temperature 1), fp32 results.
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

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, num_top: int, out: Logprobs | None = None
) -> Logprobs:
    """Report what the model thought of the tokens that were drawn or given.

    Args:
        logits: ``[S, V]``, bf16/fp16/fp32, rows may be strided.
        token_ids: ``[S]`` int32 or int64; -1 (no token) gets -inf.
        num_top: how many of the most likely tokens to list, ``0..V``.
        out: ``(logprob, top_ids, top_logprobs)``; allocated when omitted.

    Returns:
        ``logprob [S]`` fp32, ``top_ids [S, num_top]`` int32, ``top_logprobs [S, num_top]`` fp32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or num_top outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(logits, token_ids, num_top, out)
    if logits.numel() == 0:
        return out
    if backend.use_reference(logits):
        return _reference(logits, token_ids, num_top, out)
    return out


def _checked(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, out: Logprobs | None
) -> Logprobs:
    op = "top_logprobs"
    check.tensor(op, "logits", logits, check.FLOATS, (None, None), "[S, V]")
    rows, vocab = logits.shape
    check.require(
        vocab > 0 or rows == 0, lambda: f"{op}: logits is {(rows, vocab)}, expected V >= 1"
    )
    check.tensor(op, "token_ids", token_ids, check.INTS, (rows,), "[S]", logits)
    check.require(
        0 <= num_top <= vocab, lambda: f"{op}: num_top is {num_top}, expected 0 to {vocab}"
    )
    logprob, ids, top = (None, None, None) if out is None else out
    fp32, inputs = torch.float32, (token_ids,)
    return (
        check.output(op, logprob, (rows,), like=logits, dtype=fp32, name="logprob", inputs=inputs),
        check.output(op, ids, (rows, num_top), like=logits, dtype=torch.int32, name="top_ids",
                     inputs=inputs),
        check.output(op, top, (rows, num_top), like=logits, dtype=fp32, name="top_logprobs",
                     inputs=inputs),
    )  # fmt: skip


def top_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, *, num_top: int, out: Logprobs | None = None
) -> Logprobs:
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(logits, token_ids, num_top, out)
    return _reference(logits, token_ids, num_top, out) if logits.numel() else out


def _reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, out: Logprobs
) -> Logprobs:
    # fp64 inside, so that a value does not depend on its place in the tensor
    logprobs = logits.double().log_softmax(-1).float()
    index = token_ids.long()[:, None]
    chosen = logprobs.gather(1, index.clamp(min=0)).masked_fill(index < 0, float("-inf"))
    out[0].copy_(chosen[:, 0])
    if num_top:
        ids = logits.sort(dim=-1, descending=True, stable=True)[1][:, :num_top]
        out[1].copy_(ids)
        out[2].copy_(logprobs.gather(1, ids))
    return out
