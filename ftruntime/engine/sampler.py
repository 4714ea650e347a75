"""Logits to tokens and log-probabilities, by the numbers each row's plan carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ftkernels
from ftruntime.types import SampleSpec, TokenLogprobs


def draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token for each row of ``logits [S, V]``; -1 where no logit is finite."""
    device = logits.device
    entries = [(row, *change) for row, spec in enumerate(specs) for change in spec.adjust]
    if entries:
        rows, tokens, factors, offsets = zip(*entries, strict=True)
        logits = ftkernels.adjust_logits(
            logits, torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(tokens, dtype=torch.int32, device=device),
            torch.tensor(factors, dtype=torch.float32, device=device),
            torch.tensor(offsets, dtype=torch.float32, device=device),
        )  # fmt: skip

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    drawn = ftkernels.sample(
        logits,
        temperature=column([spec.temperature for spec in specs], torch.float32),
        top_k=column([spec.top_k for spec in specs], torch.int32),
        top_p=column([spec.top_p for spec in specs], torch.float32),
        min_p=column([spec.min_p for spec in specs], torch.float32),
        seed=column([spec.seed for spec in specs], torch.int64),
        position=column([spec.position for spec in specs], torch.int64),
    )
    ids: list[int] = drawn.tolist()
    return ids


def logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Raw log-probability of one token per row of ``logits [N, V]``, and the ``num_top`` best."""
    chosen = torch.tensor(token_ids, dtype=torch.int32, device=logits.device)
    own, top_ids, top = ftkernels.top_logprobs(logits, chosen, num_top=num_top)
    rows = zip(token_ids, own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, best, strict=True)))
        for token, logprob, ids, best in rows
    )
