"""From a prompt and its sampling parameters to the `Request` that an engine takes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace

from ftruntime.types import Request, RequestRejectedError, SamplingParams

_SEED_SPAN = 1 << 64
_SEED_MIN = -(1 << 63)


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of choice `index` of `params.n`: own seed, prompt log-probabilities only once."""
    seed = params.seed
    if seed is not None:
        seed = (seed + index - _SEED_MIN) % _SEED_SPAN + _SEED_MIN
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    arrival_s: float,
    eos_token_ids: Collection[int] = (),
) -> Request:
    """A request with `max_tokens` resolved to the context limit and `seed` to a random one.

    Raises:
        RequestRejectedError: an empty prompt, an id outside the vocabulary, prompt and output
            beyond `max_model_len`, or no token left to draw before `min_tokens`.
        ValueError: `params.n` is not 1.
    """
    if params.n != 1:
        raise ValueError(f"n is {params.n}, expected 1 for one sequence")
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestRejectedError(
            "prompt is empty, expected at least 1 token", code="invalid_value"
        )
    worst = min(prompt_token_ids), max(prompt_token_ids)
    if worst[0] < 0 or worst[1] >= vocab_size:
        bad = worst[0] if worst[0] < 0 else worst[1]
        raise RequestRejectedError(
            f"prompt holds token id {bad}, expected ids in [0, {vocab_size})", code="invalid_value"
        )
    _check_ids(params, vocab_size, eos_token_ids)
    room = max_model_len - num_prompt
    wanted = params.max_tokens
    least = max(1, params.min_tokens) if wanted is None else wanted
    if room < least:
        raise RequestRejectedError(
            f"the request needs {num_prompt + least} tokens ({num_prompt} in the prompt, "
            f"{least} to generate), but the context length here is {max_model_len} tokens",
            code="context_length_exceeded",
        )
    resolved = replace(
        params,
        max_tokens=room if wanted is None else wanted,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
    )
    return Request(request_id, tuple(prompt_token_ids), resolved, arrival_s)


def _check_ids(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        worst = max(ids, default=0)  # the parameters hold no negative one
        if worst >= vocab_size:
            raise RequestRejectedError(
                f"{name} is {worst}, expected token ids in [0, {vocab_size})", code="invalid_value"
            )
    ends = () if params.ignore_eos else eos_token_ids
    if params.min_tokens == 0 or len(params.stop_token_ids) + len(ends) < vocab_size:
        return
    if len({*params.stop_token_ids, *ends}) == vocab_size:
        raise RequestRejectedError(
            f"stop_token_ids is {vocab_size} ids with the end of sentence, the whole vocabulary, "
            f"expected an id left to draw: min_tokens is {params.min_tokens}",
            code="invalid_value",
        )
