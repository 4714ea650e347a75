"""From a request body to `SamplingParams`: defaults, room in the context, ids of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from ftruntime.server.errors import ApiError, bad_field, from_value_error
from ftruntime.server.openai import ChatBody, GenerationBody
from ftruntime.types import SamplingParams

T = TypeVar("T")


_COMPLETION_TOKENS = 16
_MAX_ID_DIGITS = 18


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against: tokens of prompt + output, and ids in the vocabulary."""

    max_model_len: int
    vocab_size: int

    @staticmethod
    def from_info(info: Mapping[str, object]) -> ModelLimits:
        """Read the engine's facts.

        Raises:
            ValueError: a fact is missing or no integer.
        """
        return ModelLimits(_integer(info, "max_model_len"), _integer(info, "vocab_size"))


def _integer(info: Mapping[str, object], name: str) -> int:
    value = info.get(name)
    if not isinstance(value, int):
        raise ValueError(f"{name} is {value!r} in the engine's info, expected an integer")
    return value


def build_params(body: GenerationBody, prompt_tokens: int, limits: ModelLimits) -> SamplingParams:
    """Validate everything but the prompt. ``max_tokens`` of the result is never None.

    Args:
        body: a parsed request.
        prompt_tokens: length of the (longest) prompt.
        limits: of the loaded model.

    Raises:
        ApiError: 400, naming the field.
    """
    limit_name, wanted = body.wanted_tokens
    if wanted is not None and wanted < 1:
        raise bad_field(limit_name, wanted, "an integer >= 1")
    room = _room(body, prompt_tokens, limits)
    if wanted is not None and wanted > room:
        raise bad_field(
            limit_name, wanted,
            f"at most {room}: the context of {limits.max_model_len} tokens (--max-model-len) "
            f"less {prompt_tokens} prompt tokens",
            code="context_length_exceeded",
        )  # fmt: skip
    renamed = {"max_tokens": limit_name}
    if isinstance(body, ChatBody):
        renamed["logprobs"] = "top_logprobs"
    try:
        params = _sampling(body, wanted or _default_tokens(body, room))
    except ValueError as error:
        raise from_value_error(error, rename=renamed) from error
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_ids("logit_bias", params.logit_bias, limits)
    return params


def _default_tokens(body: GenerationBody, room: int) -> int:
    """Chat runs to its end; a completion without `max_tokens` stops at 16, as the API documents."""
    if isinstance(body, ChatBody):
        return room
    return min(room, max(_COMPLETION_TOKENS, body.min_tokens or 0))


def _room(body: GenerationBody, prompt_tokens: int, limits: ModelLimits) -> int:
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            f"prompt has {prompt_tokens} tokens, expected at most {limits.max_model_len - 1}: the "
            f"context is {limits.max_model_len} tokens for prompt and output; a server started "
            "with a larger --max-model-len (and --num-tokens) takes longer ones",
            code="context_length_exceeded",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    return room


def _sampling(body: GenerationBody, max_tokens: int) -> SamplingParams:
    stop = body.stop if body.stop is not None else ()
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(_or(body.stop_token_ids, [])),
        ignore_eos=_or(body.ignore_eos, False),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_biases(_or(body.logit_bias, {})),
        logprobs=body.num_logprobs,
        n=_or(body.n, 1),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """JSON keys are strings; the ids they stand for are plain decimal numbers."""
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise bad_field(
                f"logit_bias[{key[:40]!r}]", bias, "a bias under a token id such as '42'"
            )
        biases[int(key)] = bias
    return biases


def _check_ids(name: str, ids: Mapping[int, float] | tuple[int, ...], limits: ModelLimits) -> None:
    for token_id in ids:
        if token_id >= limits.vocab_size:
            raise bad_field(name, token_id, f"token ids in [0, {limits.vocab_size})")
