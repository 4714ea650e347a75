"""Completion parser: reasoning, content and tool calls out of streamed text.

The text comes without BOS and EOS, and before any stop string is applied. What the parser gives
does not depend on how the text was split: the end of the text that may still become a marker is
held back. It is tolerant, since a completion may stop anywhere:

* In thinking mode everything up to `</think>` is reasoning; without that marker, all of it is.
* The tool marker ends the reasoning as well as the content, with up to two line feeds before it.
  A block in which not even one call can be read is no tool block: it is given back as the text it
  interrupted.
* Inside a block, text between the tags is skipped. A call that is closed by its tag, by the next
  call or by the end of the block has complete JSON arguments; one that the end of the text cuts
  off keeps them open, so that no client takes a half-written call for a whole one.
* Of two parameters with one name the first counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ftruntime.tokenizer import special
from ftruntime.tokenizer.markers import held_length
from ftruntime.tokenizer.values import Types, needs_whole_text, tool_types, value_json

DeltaKind = Literal["reasoning", "content", "tool_name", "tool_arguments"]
_State = Literal["reasoning", "content", "block", "invoke", "parameter"]

# a name goes up to the quote that ends its tag, and never over another tag
_NAME = f"((?:(?!{special.DSML}).)*?)"
_INVOKE = re.compile(re.escape(special.INVOKE_START) + _NAME + r'"\s*>', re.DOTALL)
_PARAMETER = re.compile(
    re.escape(special.PARAMETER_START) + _NAME + r'"(?:\s+string="(true|false)")?\s*>', re.DOTALL
)
_BLOCK_TAGS = (special.INVOKE_START, special.TOOL_CALLS_CLOSE)
_INVOKE_TAGS = (special.PARAMETER_START, special.INVOKE_CLOSE, *_BLOCK_TAGS)
_TOOL_MARKERS = tuple("\n" * n + special.TOOL_CALLS_OPEN for n in (2, 1, 0))


@dataclass(frozen=True)
class Delta:
    """A piece of the answer. `index` counts tool calls; a `tool_name` is whole and opens one."""

    kind: DeltaKind
    text: str
    index: int = 0


@dataclass(frozen=True)
class ParsedToolCall:
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True)
class Parsed:
    reasoning: str
    content: str
    tool_calls: tuple[ParsedToolCall, ...]


def parse_completion(
    text: str,
    *,
    thinking: bool,
    tools: bool,
    tool_schemas: Sequence[Mapping[str, object]] | None = None,
) -> Parsed:
    """Parse a whole completion; arguments as for `CompletionParser`."""
    parser = CompletionParser(thinking=thinking, tools=tools, tool_schemas=tool_schemas)
    return collect([*parser.push(text), *parser.finish()])


def collect(deltas: Sequence[Delta]) -> Parsed:
    """Join deltas into the answer they stream."""
    texts = {"reasoning": "", "content": ""}
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        if delta.kind == "tool_name":
            names.append(delta.text)
            arguments.append("")
        elif delta.kind == "tool_arguments":
            arguments[delta.index] += delta.text
        else:
            texts[delta.kind] += delta.text
    calls = tuple(ParsedToolCall(n, a) for n, a in zip(names, arguments, strict=True))
    return Parsed(texts["reasoning"], texts["content"], calls)


class CompletionParser:
    """Parser of one completion.

    Args:
        thinking: the prompt ended with `<think>`, so the text starts inside the reasoning.
        tools: read tool calls; when False their markup stays text.
        tool_schemas: the request's tools, used where markup and schema disagree on a type.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: bool,
        tool_schemas: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        self._tools = tools
        self._types = tool_types(tool_schemas or ())
        self._state: _State = "reasoning" if thinking else "content"
        self._text = ""  # received, not yet given out
        self._out: list[Delta] = []
        # where a false block goes back to
        self._resume: Literal["reasoning", "content"] = "content"
        self._raw = ""  # the block so far, while no call was read in it
        self._after_block = False  # only white space since the last block
        self._num_calls = 0
        self._tool = ""
        self._keys: set[str] = set()  # parameters of the open call
        self._key = ""
        self._is_string: bool | None = None
        self._whole: list[str] | None = None  # collects a value that cannot be streamed

    def push(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain by now."""
        self._text += text
        steps = {
            "reasoning": self._read_text,
            "content": self._read_text,
            "block": self._read_block,
            "invoke": self._read_invoke,
            "parameter": self._read_value,
        }
        while self._text and steps[self._state]():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """End of the text: give out what was held back; a cut-off call stays as it is."""
        if self._state == "block" and self._raw:
            self._give_back()
            self._emit(self._resume, self._text)
        elif self._state in ("reasoning", "content"):
            self._emit(self._state, self._text)
        self._text = ""
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _emit(self, kind: DeltaKind, text: str, index: int = 0) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else None
        if last is not None and (last.kind, last.index) == (kind, index):
            self._out[-1] = Delta(kind, last.text + text, index)
        else:
            self._out.append(Delta(kind, text, index))

    def _arguments(self, text: str) -> None:
        self._emit("tool_arguments", text, self._num_calls - 1)

    # each reader returns whether to go on with the rest of the text

    def _read_text(self) -> bool:
        """Reasoning or content, up to the marker that ends it."""
        kind: Literal["reasoning", "content"] = (
            "reasoning" if self._state == "reasoning" else "content"
        )
        if self._after_block:
            self._text = self._text.lstrip()
            self._after_block = not self._text
        close = (special.THINK_CLOSE,) if kind == "reasoning" else ()
        markers = (*close, *(_TOOL_MARKERS if self._tools else ()))
        # the variants of the tool marker overlap; the one with most line feeds starts first
        starts = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if not starts:
            keep = len(self._text) - held_length(self._text, markers)
            self._emit(kind, self._text[:keep])
            self._text = self._text[keep:]
            return False
        at, marker = min(starts)
        self._emit(kind, self._text[:at])
        self._text = self._text[at + len(marker) :]
        if marker in close:
            self._state = "content"
        else:
            self._state, self._resume, self._raw = "block", kind, marker
        return True

    def _read_block(self) -> bool:
        """Between calls: the next call or the end of the block."""
        rest = self._text.lstrip()
        if self._raw:
            self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if match := _INVOKE.match(rest):
            self._open_call(match)
            return True
        if rest.startswith(special.TOOL_CALLS_CLOSE):
            self._text = rest[len(special.TOOL_CALLS_CLOSE) :]
            self._state, self._raw, self._after_block = "content", "", True
            return True
        if _may_be_tag(rest, _BLOCK_TAGS):
            return False
        if self._raw:
            self._give_back()
            return True
        return self._skip_to_tag()

    def _read_invoke(self) -> bool:
        """Between the parameters of a call."""
        self._text = rest = self._text.lstrip()
        if match := _PARAMETER.match(rest):
            self._open_parameter(match)
            return True
        if rest.startswith(special.INVOKE_CLOSE):
            self._close_call()
            self._text = rest[len(special.INVOKE_CLOSE) :]
            return True
        if rest.startswith(_BLOCK_TAGS):  # the closing tag was forgotten
            self._close_call()
            return True
        return False if _may_be_tag(rest, _INVOKE_TAGS) else self._skip_to_tag()

    def _read_value(self) -> bool:
        """A parameter's value, streamed when it is surely a string."""
        at = self._text.find(special.PARAMETER_CLOSE)
        held = held_length(self._text, (special.PARAMETER_CLOSE,)) if at < 0 else 0
        end = at if at >= 0 else len(self._text) - held
        piece, self._text = self._text[:end], self._text[end:]
        if self._whole is None:
            self._stream_string(piece)
        else:
            self._whole.append(piece)
        if at < 0:
            return False
        self._text = self._text[len(special.PARAMETER_CLOSE) :]
        self._close_parameter()
        return True

    def _give_back(self) -> None:
        """No call could be read: the block was ordinary text."""
        self._emit(self._resume, self._raw)
        self._state, self._raw = self._resume, ""

    def _skip_to_tag(self) -> bool:
        at = self._text.find("<", 1)
        self._text = self._text[at:] if at > 0 else ""
        return bool(self._text)

    def _open_call(self, match: re.Match[str]) -> None:
        self._tool, self._text = match[1], self._text[match.end() :]
        self._out.append(Delta("tool_name", self._tool, self._num_calls))
        self._num_calls += 1
        self._state, self._raw, self._keys = "invoke", "", set()

    def _close_call(self) -> None:
        self._arguments("}" if self._keys else "{}")
        self._state = "block"

    def _parameter_types(self) -> Types | None:
        return self._types.get(self._tool, {}).get(self._key)

    def _open_parameter(self, match: re.Match[str]) -> None:
        self._key, self._text = match[1], self._text[match.end() :]
        self._is_string = None if match[2] is None else match[2] == "true"
        repeated = self._key in self._keys
        whole = repeated or needs_whole_text(self._is_string, self._parameter_types())
        self._whole = [] if whole else None
        if not whole:
            self._arguments(self._key_json() + '"')
        self._state = "parameter"

    def _key_json(self) -> str:
        return ("{" if not self._keys else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _stream_string(self, piece: str) -> None:
        # JSON escapes character by character, so pieces join to the escaped whole
        self._arguments(json.dumps(piece, ensure_ascii=False)[1:-1])

    def _close_parameter(self) -> None:
        if self._whole is None:
            self._arguments('"')
        elif self._key not in self._keys:
            value = value_json("".join(self._whole), self._is_string, self._parameter_types())
            self._arguments(self._key_json() + value)
        self._keys.add(self._key)
        self._state, self._whole = "invoke", None


def _may_be_tag(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is the beginning of a tag whose end has not come yet."""
    return any(
        tag.startswith(text) or (text.startswith(tag) and special.DSML not in text[len(tag) :])
        for tag in tags
    )
