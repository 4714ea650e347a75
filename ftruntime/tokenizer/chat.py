"""Chat prompt: a pure function of the message list and of the checkpoint's three fixed texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftruntime.tokenizer import special
from ftruntime.tokenizer.fixed_texts import FixedTexts, to_json
from ftruntime.tokenizer.messages import Block, JsonObject, ToolCall, Turn, attach, read_turns


@dataclass(frozen=True)
class ChatFormat:
    """Renders messages. Made by `from_dir`; immutable."""

    texts: FixedTexts

    @classmethod
    def from_dir(cls, path: Path) -> ChatFormat:
        """Read a checkpoint's fixed texts; the demo's, with a warning, without its `encoding`.

        Raises:
            ValueError: the encoding file is damaged; names the file.
        """
        return cls(FixedTexts.from_dir(path))

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        response_format: JsonObject | None = None,
        thinking: bool = False,
        effort_max: bool = False,
        drop: bool = True,
    ) -> str:
        """The prompt of an OpenAI-style message list.

        Args:
            messages: roles system, developer, user, assistant, tool and latest_reminder; contents
                are strings or lists of text parts. Also read: `tool_calls`, `tool_call_id`,
                `reasoning_content`, `task`, `wo_eos`, and `tools` and `response_format` of system
                and developer messages.
            tools, response_format: of the request; they go into the first system message.
            thinking: the prompt ends inside the reasoning, else after it.
            effort_max: puts the maximal-effort text first; needs `thinking`.
            drop: forget the reasoning before the last user message; off whenever there are tools.

        Raises:
            ValueError: an invalid message or tool; the sentence names the field.
        """
        if effort_max and not thinking:
            raise ValueError("effort_max is True without thinking, expected thinking as well")
        turns = attach(read_turns(messages), tools, response_format)
        drop = drop and not any(turn.tools for turn in turns)
        if thinking and drop:
            turns = _drop_developers(turns)
        last_user = _last_user(turns)
        out = [special.BOS]
        if effort_max:
            out.append(self.texts.effort_max())
        for i, turn in enumerate(turns):
            # reasoning of the turns from here on is kept
            reasons = thinking and (not drop or i >= last_user)
            after_task = i > 0 and turns[i - 1].task is not None
            out.append(self._turn(turn, with_reasoning=reasons and not after_task))
            following = turns[i + 1].role if i + 1 < len(turns) else None
            if following in (None, "assistant", "latest_reminder"):
                out.append(_opening(turn, thinking=thinking, reasons=reasons))
        return "".join(out)

    def _turn(self, turn: Turn, *, with_reasoning: bool) -> str:
        if turn.role == "user":
            return special.USER + "\n\n".join(_block(block) for block in turn.blocks)
        if turn.role == "latest_reminder":
            return special.LATEST_REMINDER + turn.content
        if turn.role == "assistant":
            reasoning = turn.reasoning + special.THINK_CLOSE if with_reasoning else ""
            end = "" if turn.without_eos else special.EOS
            return reasoning + turn.content + _tool_calls(turn.tool_calls) + end
        start = special.USER if turn.role == "developer" else ""
        return start + turn.content + self._suffixes(turn)

    def _suffixes(self, turn: Turn) -> str:
        out = ""
        if turn.tools:
            out += "\n\n" + self.texts.tools(turn.tools)
        if turn.response_format:
            out += "\n\n" + self.texts.response_format(turn.response_format)
        return out


def _last_user(turns: Sequence[Turn]) -> int:
    """Index of the last user or developer turn, -1 if there is none."""
    return max((i for i, t in enumerate(turns) if t.role in ("user", "developer")), default=-1)


def _drop_developers(turns: list[Turn]) -> list[Turn]:
    """Without the developer messages that a later user message has superseded."""
    last = _last_user(turns)
    return [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]


def _opening(turn: Turn, *, thinking: bool, reasons: bool) -> str:
    """What a turn that an answer follows ends with: the answer's first tokens."""
    if turn.task == "action":
        mark = special.THINK_OPEN if thinking else special.THINK_CLOSE
        return special.ASSISTANT + mark + special.TASK_TOKENS["action"]
    if turn.task is not None:
        return special.TASK_TOKENS[turn.task]
    if turn.role in ("user", "developer"):
        return special.ASSISTANT + (special.THINK_OPEN if reasons else special.THINK_CLOSE)
    return ""


def _block(block: Block) -> str:
    return f"<tool_result>{block.text}</tool_result>" if block.is_result else block.text


def _tool_calls(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    invokes = "\n".join(_invoke(call) for call in calls)
    return f"\n\n{special.TOOL_CALLS_OPEN}\n{invokes}\n{special.TOOL_CALLS_CLOSE}"


def _invoke(call: ToolCall) -> str:
    parameters = "\n".join(
        _parameter(key, value) for key, value in _arguments(call.arguments).items()
    )
    return f'{special.INVOKE_START}{call.name}">\n{parameters}\n{special.INVOKE_CLOSE}'


def _arguments(text: str) -> JsonObject:
    """Parameters of a call; text that is no JSON object becomes one parameter of its own."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _parameter(key: str, value: object) -> str:
    is_string = isinstance(value, str)
    text = value if isinstance(value, str) else to_json(value)
    flag = "true" if is_string else "false"
    return f'{special.PARAMETER_START}{key}" string="{flag}">{text}{special.PARAMETER_CLOSE}'
