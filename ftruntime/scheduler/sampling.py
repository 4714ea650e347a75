"""What a row's next draw looks like, and when a row has ended. Pure functions of the row.

Penalties and biases are folded into one sparse list: repetition first, as a factor over prompt and
generated tokens, then one offset `bias - presence - frequency * count` over generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ftruntime.scheduler.table import RequestRow
from ftruntime.types import FinishReason, SampleSpec

Adjustments = tuple[tuple[int, float, float], ...]


def sample_spec(row: RequestRow, *, eos_token_ids: Collection[int]) -> SampleSpec:
    """The draw of the token that will stand after all tokens the row has."""
    params = row.params
    return SampleSpec(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=row.seed,
        position=len(row.token_ids),
        num_logprobs=params.logprobs,
        adjust=adjustments(row, eos_token_ids=eos_token_ids),
    )


def adjustments(row: RequestRow, *, eos_token_ids: Collection[int]) -> Adjustments:
    """`(token id, repetition factor, offset)` by rising id, each id once, no neutral ones."""
    params = row.params
    offsets = dict(params.logit_bias)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        for token_id, count in row.output_counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            offsets[token_id] = offsets.get(token_id, 0.0) - penalty
    if row.num_generated < params.min_tokens:
        for token_id in stop_ids(row, eos_token_ids=eos_token_ids):
            offsets[token_id] = -math.inf
    factor = params.repetition_penalty
    repeated = set(row.token_ids) if factor != 1 else set()
    merged = (
        (token_id, factor if token_id in repeated else 1.0, float(offsets.get(token_id, 0.0)))
        for token_id in sorted(repeated | offsets.keys())
    )
    return tuple(entry for entry in merged if entry[1:] != (1.0, 0.0))


def stop_ids(row: RequestRow, *, eos_token_ids: Collection[int]) -> set[int]:
    """Token ids that end this request."""
    ids = set(row.params.stop_token_ids)
    return ids if row.params.ignore_eos else ids | set(eos_token_ids)


def finish_reason(
    row: RequestRow, *, eos_token_ids: Collection[int], max_model_len: int
) -> FinishReason | None:
    """Why the row has ended with its newest token, or None.

    A stop token ends the row when at least `min_tokens` were generated before it; it goes before
    `length`.
    """
    newest = row.token_ids[-1]
    if row.num_generated > row.params.min_tokens and newest in stop_ids(
        row, eos_token_ids=eos_token_ids
    ):
        return "stop"
    if row.num_generated >= row.max_tokens or len(row.token_ids) >= max_model_len:
        return "length"
    return None
