"""From messages or prompts to token ids, or a 400 that names what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftruntime.server.errors import ApiError, bad_field, from_value_error
from ftruntime.server.openai import PromptBody
from ftruntime.tokenizer import special
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")

Item = dict[str, object]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat, and what its answer is parsed for: ``thinking`` starts in the reasoning."""

    token_ids: tuple[int, ...]
    thinking: bool
    tools: tuple[Mapping[str, object], ...]


def chat_prompt(
    messages: Sequence[Item], body: PromptBody, tokenizer: Tokenizer, chat: ChatFormat
) -> ChatPrompt:
    """Render and encode a chat; the same for generating and for counting.

    Raises:
        ApiError: 400, naming the field or the message.
    """
    tools = _shown_tools(body)
    response_format = _checked_response_format(body)
    thinking = _thinking(body)
    try:
        text = chat.render(
            messages,
            tools=tools or None,
            response_format=response_format,
            thinking=thinking,
            effort_max=body.reasoning_effort == "max",
        )
        token_ids = tuple(tokenizer.encode(text))
    except ValueError as error:
        raise from_value_error(error) from error
    # an answer begins inside the reasoning only where the prompt ends there
    is_open = text.endswith(special.THINK_OPEN)
    return ChatPrompt(token_ids, is_open, (*tools, *_tools_of(messages)))


def _tools_of(messages: Sequence[Item]) -> Iterator[Item]:
    """Tools that system or developer messages carry themselves; the encoder has checked them."""
    for message in messages:
        tools = message.get("tools")
        if isinstance(tools, list) and message.get("role") in ("system", "developer"):
            yield from tools


def text_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer, vocab_size: int
) -> list[tuple[int, ...]]:
    """The prompts of a text completion.

    Text gets a BOS in front unless it begins with one; ids stay as they are.

    Raises:
        ApiError: 400; no prompt, an empty one, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        return [_encode("prompt", prompt, tokenizer)]
    if not prompt:
        raise bad_field("prompt", prompt, "at least one token or text")
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        return [_checked_ids("prompt", ids, vocab_size)]
    prompts = []
    for i, item in enumerate(prompt):
        name = f"prompt[{i}]"
        if isinstance(item, str):
            prompts.append(_encode(name, item, tokenizer))
        elif isinstance(item, list):
            prompts.append(_checked_ids(name, item, vocab_size))
    return prompts


def _encode(name: str, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise ApiError(f"{name}: {error}", param="prompt") from error
    bos = tokenizer.bos_token_id
    return tuple(ids) if ids[:1] == [bos] else (bos, *ids)


def _checked_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise bad_field(name, ids, "at least one token id")
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise bad_field(f"{name}[{i}]", token_id, f"a token id in [0, {vocab_size})")
    return tuple(ids)


def _thinking(body: PromptBody) -> bool:
    asked = (body.chat_template_kwargs or {}).get("thinking")
    if asked is not None and not isinstance(asked, bool):
        raise bad_field("chat_template_kwargs.thinking", asked, "true or false")
    if body.reasoning_effort is None:
        return bool(asked)
    wanted = body.reasoning_effort != "none"
    if asked is not None and asked != wanted:
        raise bad_field(
            "chat_template_kwargs.thinking", asked,
            f"{str(wanted).lower()} or null with reasoning_effort {body.reasoning_effort!r}",
        )  # fmt: skip
    return wanted


def _shown_tools(body: PromptBody) -> tuple[Item, ...]:
    """The request's tools as far as the model sees them: none when ``tool_choice`` is ``none``."""
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise bad_field(
            "tool_choice", choice, "'auto' or 'none': a call cannot be enforced",
            code="unsupported_parameter",
        )  # fmt: skip
    return tuple(body.tools or []) if choice != "none" else ()


def _checked_response_format(body: PromptBody) -> Mapping[str, object] | None:
    given = body.response_format
    if given is None:
        return None
    if given.get("type") not in _RESPONSE_FORMATS:
        expected = "'text', 'json_object' or 'json_schema'"
        raise bad_field("response_format.type", given.get("type"), expected)
    if given["type"] == "json_schema":
        _object("response_format.json_schema", given.get("json_schema"))
    return None if given["type"] == "text" else given


def _object(name: str, value: object) -> Item:
    if not isinstance(value, dict):
        raise bad_field(name, value, "an object")
    return value
