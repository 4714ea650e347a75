"""Logits to tokens and log-probabilities, by the numbers each row's plan carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ftkernels
from ftruntime.engine.arrays import together
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

    floats = list(zip(*((s.temperature, s.top_p, s.min_p) for s in specs), strict=True))
    temperature, top_p, min_p = together(floats, torch.float32, device)
    numbers = list(zip(*((s.seed, s.position) for s in specs), strict=True))
    seed, position = together(numbers, torch.int64, device)
    drawn = ftkernels.sample(
        logits, temperature=temperature, top_p=top_p, min_p=min_p, seed=seed, position=position,
        top_k=torch.tensor([spec.top_k for spec in specs], dtype=torch.int32, device=device),
    )  # fmt: skip
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
