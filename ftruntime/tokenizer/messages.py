"""OpenAI-style messages, checked and merged into the turns a prompt is made of.

Tool results and the user text that directly follows them share one user turn. Every error is a
`ValueError` whose sentence names the field, such as `messages[2].content`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ftruntime.tokenizer import special

JsonObject = Mapping[str, object]
Role = Literal["system", "developer", "user", "assistant", "latest_reminder"]

ROLES: tuple[str, ...] = (
    "system", "developer", "user", "assistant", "tool", "latest_reminder",
)  # fmt: skip


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON text, as the client sent it
    call_id: str | None = None


@dataclass(frozen=True)
class Block:
    """A part of a user turn. `is_result`: the result of the tool call `call_id`."""

    text: str
    is_result: bool = False
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message ready to be rendered. Only user turns have `blocks`, the others `content`."""

    role: Role
    content: str = ""
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[JsonObject, ...] = ()  # inner function objects
    response_format: JsonObject | None = None
    task: str | None = None
    without_eos: bool = False


def read_turns(messages: Sequence[JsonObject]) -> list[Turn]:
    """Check messages and merge them into turns; tool results stand in the order of their calls."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages is {messages!r}, expected a non-empty list of messages")
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        turn = _read(message, f"messages[{i}]")
        before = turns[-1] if turns else None
        is_result = bool(turn.blocks) and turn.blocks[0].is_result
        joins = before is not None and before.role == "user" and (is_result or not before.task)
        if turn.role == "user" and before is not None and joins:
            turns[-1] = replace(before, blocks=before.blocks + turn.blocks)
        else:
            turns.append(turn)
    return _sort_results(turns)


def attach(
    turns: list[Turn], tools: Sequence[JsonObject] | None, response_format: JsonObject | None
) -> list[Turn]:
    """Put a request's tools and response format into the first system turn, made if there is none.

    The neutral format `{"type": "text"}` counts as none.
    """
    functions = read_tools(tools, "tools")
    form = _mapping_or_none(response_format, "response_format")
    if form is not None and form.get("type") == "text":
        form = None
    if not functions and form is None:
        return turns
    at = next((i for i, turn in enumerate(turns) if turn.role == "system"), None)
    if at is None:
        turns, at = [Turn(role="system"), *turns], 0
    turn = turns[at]
    if form is not None and turn.response_format is not None:
        raise ValueError("response_format is given both by the request and by a system message")
    changed = replace(
        turn, tools=turn.tools + functions, response_format=form or turn.response_format
    )
    return [*turns[:at], changed, *turns[at + 1 :]]


def read_tools(tools: object, field: str) -> tuple[JsonObject, ...]:
    """Inner function objects of an OpenAI tool list."""
    if tools is None:
        return ()
    functions = []
    for i, tool in enumerate(_list(tools, field)):
        name = f"{field}[{i}]"
        kind = _mapping(tool, name).get("type", "function")
        if kind != "function":
            raise ValueError(f"{name}.type is {kind!r}, expected 'function'")
        function = _mapping(_mapping(tool, name).get("function"), f"{name}.function")
        _string(function.get("name"), f"{name}.function.name")
        functions.append(function)
    return tuple(functions)


def _read(message: object, field: str) -> Turn:
    fields = _mapping(message, field)
    role = fields.get("role")
    if role == "user" or role == "tool":
        return _read_user(fields, field, is_result=role == "tool")
    if role == "assistant":
        return _read_assistant(fields, field)
    if role not in ("system", "developer", "latest_reminder"):
        raise ValueError(f"{field}.role is {role!r}, expected one of {', '.join(ROLES)}")
    with_suffixes = role != "latest_reminder"
    tools = fields.get("tools") if with_suffixes else None
    form = fields.get("response_format") if with_suffixes else None
    return Turn(
        role=role,
        content=_text(fields.get("content"), f"{field}.content"),
        tools=read_tools(tools, f"{field}.tools"),
        response_format=_mapping_or_none(form, f"{field}.response_format"),
        task=_task(fields, field),
    )


def _read_user(fields: JsonObject, field: str, *, is_result: bool) -> Turn:
    content = fields.get("content")
    if not is_result:
        block = Block(_text(content, f"{field}.content"))
        return Turn(role="user", blocks=(block,), task=_task(fields, field))
    text = _text(content, f"{field}.content", others=True)
    call_id = _string_or_none(fields.get("tool_call_id"), f"{field}.tool_call_id")
    return Turn(role="user", blocks=(Block(text, is_result=True, call_id=call_id),))


def _read_assistant(fields: JsonObject, field: str) -> Turn:
    calls = _tool_calls(fields.get("tool_calls"), f"{field}.tool_calls")
    reasoning = _string_or_none(fields.get("reasoning_content"), f"{field}.reasoning_content")
    content = fields.get("content")
    if content is None and (calls or reasoning):
        content = ""
    without_eos = fields.get("wo_eos", False)
    if not isinstance(without_eos, bool):
        raise ValueError(f"{field}.wo_eos is {without_eos!r}, expected true or false")
    return Turn(
        role="assistant",
        content=_text(content, f"{field}.content"),
        reasoning=reasoning or "",
        tool_calls=calls,
        task=_task(fields, field),
        without_eos=without_eos,
    )


def _tool_calls(value: object, field: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls = []
    for i, item in enumerate(_list(value, field)):
        name = f"{field}[{i}]"
        call = _mapping(item, name)
        function = _mapping(call.get("function"), f"{name}.function")
        calls.append(
            ToolCall(
                name=_string(function.get("name"), f"{name}.function.name"),
                arguments=_string(function.get("arguments"), f"{name}.function.arguments"),
                call_id=_string_or_none(call.get("id"), f"{name}.id"),
            )
        )
    return tuple(calls)


def _text(value: object, field: str, *, others: bool = False) -> str:
    """A content: a string, or text parts, joined by two line feeds.

    `others`: parts of another type are shown as `[Unsupported TYPE]` instead of being refused.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{field} is {value!r}, expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = _mapping(part, f"{field}[{i}]").get("type")
        if kind == "text":
            texts.append(_string(part.get("text"), f"{field}[{i}].text"))
        elif others and isinstance(kind, str):
            texts.append(f"[Unsupported {kind}]")
        else:
            raise ValueError(f"{field}[{i}].type is {kind!r}, expected 'text'")
    return "\n\n".join(texts)


def _sort_results(turns: list[Turn]) -> list[Turn]:
    """Tool results of a turn in the order of the calls before it; text blocks keep their places."""
    order: dict[str, int] = {}
    out = []
    for turn in turns:
        if turn.tool_calls:  # an answer without calls leaves the order as it is
            order = {c.call_id: i for i, c in enumerate(turn.tool_calls) if c.call_id}
        results = [block for block in turn.blocks if block.is_result]
        if order and len(results) > 1:
            results.sort(key=lambda block: order.get(block.call_id or "", 0))
            ordered = iter(results)
            blocks = tuple(next(ordered) if b.is_result else b for b in turn.blocks)
            turn = replace(turn, blocks=blocks)
        out.append(turn)
    return out


def _task(fields: JsonObject, field: str) -> str | None:
    task = fields.get("task")
    if task is None or (isinstance(task, str) and task in special.TASK_TOKENS):
        return task
    raise ValueError(f"{field}.task is {task!r}, expected one of {', '.join(special.TASK_TOKENS)}")


def _list(value: object, field: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{field} is {value!r}, expected a list")
    return list(value)


def _mapping(value: object, field: str) -> JsonObject:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} is {value!r}, expected an object")
    return value


def _mapping_or_none(value: object, field: str) -> JsonObject | None:
    return None if value is None else _mapping(value, field)


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} is {value!r}, expected a string")
    return value


def _string_or_none(value: object, field: str) -> str | None:
    return None if value is None else _string(value, field)
