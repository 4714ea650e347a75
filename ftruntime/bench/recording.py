"""What one stream of an OpenAI-compatible server showed, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_SHOWN_CHARS: Final = 300
_LIMIT: Final = 2**53
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "text")
Json = Mapping[str, object]


@dataclass
class Recording:
    """What one stream showed so far. Times are seconds of the monotonic clock; a piece is an event
    with text; `num_tokens` is the server's own count, None when it gives none.
    """

    who: str
    sent_s: float = 0.0
    end_s: float | None = None
    piece_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: Json | None = None
    finish_reason: str | None = None
    done: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int | None:
        return integer(self.usage or {}, "completion_tokens")

    @property
    def first_piece_s(self) -> float:
        """When the first piece came, or the end of a stream without one."""
        return self.piece_s[0] if self.piece_s else self.end_s or self.sent_s

    @property
    def progress(self) -> str:
        """Whose stream, and how far it came."""
        return f"{self.who} after {len(self.piece_s)} pieces"

    def take(self, event: Json, now_s: float) -> None:
        """Add one event of the stream."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        text = ""
        for choice in objects(event, "choices"):
            text += _text(choice)
            reason = choice.get("finish_reason")
            self.finish_reason = reason if isinstance(reason, str) else self.finish_reason
        if text:
            self.piece_s.append(now_s)
            self.texts.append(text)
            self.started.set()


def objects(value: Json, name: str) -> list[Json]:
    """The objects of a list under `name`; empty when there is no such list."""
    items = value.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def integer(value: Json, name: str) -> int | None:
    """The integer under `name`, None when there is none below 2^53 (no count is as large)."""
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or abs(found) >= _LIMIT:
        return None
    return found


def short(text: str) -> str:
    """One line of bounded length that any terminal takes."""
    head = text[: 4 * _SHOWN_CHARS].encode(errors="replace").decode()
    line = " ".join(head.split()) or "no text"
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + " ..."


def _text(choice: Json) -> str:
    """Visible text of one choice of a chunk: content, reasoning or tool call."""
    delta = choice.get("delta")
    holder = delta if isinstance(delta, dict) else choice
    parts = [holder.get(name) for name in _TEXT_FIELDS]
    for call in objects(holder, "tool_calls"):
        function = call.get("function")
        parts += function.values() if isinstance(function, dict) else []
    return "".join(part for part in parts if isinstance(part, str))
