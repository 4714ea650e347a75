"""Request bodies of the OpenAI protocol, strictly typed, and the parameters that are refused.

A field's ``description`` is the "expected" half of its error sentence. Unknown fields are ignored;
a known one that is not implemented is refused when its value would change the output
(`refuse_unsupported`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ftruntime.server.errors import ApiError, bad_field, from_validation

_STRING = "a string"
_INTEGER = "an integer"
_NUMBER = "a number"
_BOOLEAN = "true or false"
_POSITIVE = "an integer >= 1"
_OBJECT = "an object"


class Body(BaseModel):
    """Anything that names a model."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = Field(None, description=_STRING)


class GenerationBody(Body):
    """What chat and text completions share."""

    stream: bool | None = Field(None, description=_BOOLEAN)
    stream_options: dict[str, object] | None = Field(None, description=_OBJECT)
    n: int | None = Field(None, description="an integer in [1, 128]")
    max_tokens: int | None = Field(None, description=_POSITIVE)
    min_tokens: int | None = Field(None, description="an integer >= 0")
    temperature: float | None = Field(None, description="a number in [0, 100]")
    top_p: float | None = Field(None, description="a number in (0, 1]")
    top_k: int | None = Field(None, description="an integer in [-1, 2147483647]")
    min_p: float | None = Field(None, description="a number in [0, 1]")
    seed: int | None = Field(None, description="a 64-bit integer")
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    stop_token_ids: list[int] | None = Field(None, description="a list of token ids")
    ignore_eos: bool | None = Field(None, description=_BOOLEAN)
    presence_penalty: float | None = Field(None, description="a number in [-2, 2]")
    frequency_penalty: float | None = Field(None, description="a number in [-2, 2]")
    repetition_penalty: float | None = Field(None, description="a number in [0.01, 100]")
    logit_bias: dict[str, float] | None = Field(
        None, description="an object of token ids with biases in [-100, 100]"
    )

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        """Name and value of the output limit the client set."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class PromptBody(Body):
    """What decides the prompt of a chat; `/v1/tokenize` counts exactly this."""

    tools: list[dict[str, object]] | None = Field(None, description="a list of function tools")
    tool_choice: object = Field(None, description="'auto' or 'none'")
    response_format: dict[str, object] | None = Field(None, description="an object with a type")
    reasoning_effort: Literal["none", "high", "max"] | None = Field(
        None, description="'none', 'high' or 'max'"
    )
    chat_template_kwargs: dict[str, object] | None = Field(None, description=_OBJECT)


class ChatBody(GenerationBody, PromptBody):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, object]] = Field(description="a non-empty list of messages")
    max_completion_tokens: int | None = Field(None, description=_POSITIVE)
    logprobs: bool | None = Field(None, description=_BOOLEAN)
    top_logprobs: int | None = Field(None, description="an integer in [0, 20]")

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists"
    )
    logprobs: int | None = Field(None, description="an integer in [0, 20]")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(PromptBody):
    """``POST /v1/tokenize``: one of ``prompt`` and ``messages``."""

    prompt: str | None = Field(None, description=_STRING)
    messages: list[dict[str, object]] | None = Field(
        None, description="a non-empty list of messages"
    )


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(raw: bytes, model: type[BodyT]) -> BodyT:
    """The body as ``model``, whatever its Content-Type said.

    Raises:
        ApiError: 400; not JSON, not an object, a field of the wrong type, or a refused parameter.
    """
    try:
        body: object = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"body is not valid JSON ({error}), expected a JSON object") from error
    if not isinstance(body, dict):
        raise bad_field("body", body, "a JSON object")
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, model, body) from error
    if isinstance(parsed, GenerationBody):
        refuse_unsupported(body)
        _check_together(parsed)
    return parsed


def _check_together(body: GenerationBody) -> None:
    """What single fields cannot say."""
    if body.stream_options is not None:
        if not body.stream:
            raise bad_field("stream_options", body.stream_options, "null unless stream is true")
        usage = body.stream_options.get("include_usage")
        if usage is not None and not isinstance(usage, bool):
            raise bad_field("stream_options.include_usage", usage, _BOOLEAN)
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_field("top_logprobs", body.top_logprobs, "null unless logprobs is true")
        limits = (body.max_tokens, body.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise bad_field("max_tokens", limits[0], f"max_completion_tokens ({limits[1]}) or null")


def _only(*neutral: object) -> Callable[[object], bool]:
    return lambda value: any(value == item and type(value) is type(item) for item in neutral)


def _empty(value: object) -> bool:
    return value in ([], {}, "", False)


_NEUTRAL: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "best_of": (_only(1), "1 or null: candidates are not ranked; use n"),
    "suffix": (_only(""), "null: insertion is not supported"),
    "echo": (_only(False), "false: the prompt is not echoed"),
    "prompt_logprobs": (_only(), "null: only the Python LLM gives them"),
    "functions": (_empty, "null: use tools"),
    "function_call": (_only("none", "auto"), "null: use tools"),
    "parallel_tool_calls": (_only(True), "true or null: the model decides how many calls it makes"),
    "modalities": (_only(["text"]), "['text']: this server gives text only"),
    "audio": (_empty, "null: this server gives text only"),
    "web_search_options": (_only(), "null: web search is not supported"),
    "verbosity": (_only("medium"), "null: verbosity is not supported"),
    "use_beam_search": (_only(False), "false: beam search is not supported"),
    "length_penalty": (_only(1, 1.0), "1: beam search is not supported"),
    "include_stop_str_in_output": (_only(False), "false: a stop string is never shown"),
    "skip_special_tokens": (_only(True), "true: special tokens are never shown"),
    "bad_words": (_empty, "null: use logit_bias"),
    "allowed_token_ids": (_only(), "null: use logit_bias"),
    "chat_template": (_only(), "null: the model's own encoding is always used"),
    "continue_final_message": (_only(False), "false: a message cannot be continued"),
    "add_generation_prompt": (_only(True), "true: an answer always begins a turn"),
    "documents": (_empty, "null: put documents into messages"),
    "truncate_prompt_tokens": (_only(), "null: a prompt is never cut"),
    "typical_p": (_only(1, 1.0), "1: typical sampling is not supported"),
    "logits_processors": (_empty, "null: not supported"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
         "json_schema", "regex", "ebnf"),
        (_only(), "null: output is not constrained to a grammar"),
    ),
}  # fmt: skip


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Refuse by name what is not implemented, when its value would change the output."""
    for name in _NEUTRAL.keys() & body.keys():
        is_neutral, expected = _NEUTRAL[name]
        if body[name] is not None and not is_neutral(body[name]):
            raise bad_field(name, body[name], expected, code="unsupported_parameter")
