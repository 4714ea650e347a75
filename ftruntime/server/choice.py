"""One choice of an answer: token events in, pieces of visible text out. No I/O.

Order of the stages: bytes to characters, then markers (reasoning, content, tool calls), then stop
strings over the content alone, so that a stop string never splits a marker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ftruntime.tokenizer.detokenize import IncrementalDetokenizer
from ftruntime.tokenizer.parse import CompletionParser, Delta
from ftruntime.tokenizer.stop import StopMatcher
from ftruntime.types import TokenEvent, TokenLogprobs

ChoiceEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ScoredToken:
    """A token's log-probabilities, and the character of the choice's text where it starts."""

    scores: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class Piece:
    """What became visible at once. The last piece of a choice has its finish reason."""

    deltas: tuple[Delta, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: ChoiceEnd | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.deltas or self.scored or self.finish_reason)


class Choice:
    """State of one choice while it is generated.

    Args:
        detokenizer: fresh, for this choice.
        stops: stop strings; matched once ``min_tokens`` tokens are there.
        min_tokens: of the request.
        parser: of a chat answer; None for plain text.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        parser: CompletionParser | None = None,
    ) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: ChoiceEnd | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._parser = parser
        self._scored: deque[ScoredToken] = deque()
        self._num_chars = 0  # of the raw text
        self._num_held = 0  # characters the matcher holds back, or cut off when it matched
        self._has_calls = False

    def feed(self, event: TokenEvent) -> Piece:
        """Take one event; ``finish_reason`` of events is ``stop``, ``length`` or None here."""
        if self.finish_reason is not None:
            return Piece()
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        text = ""
        if event.token_id is not None:
            self.num_tokens += 1
            # the token that ends a request is no part of its text
            if event.finish_reason != "stop":
                if event.logprobs is not None:
                    self._scored.append(ScoredToken(event.logprobs, self._num_chars))
                text = self._detokenizer.push(event.token_id)
        deltas = self._advance(text)
        if event.finish_reason is not None and self.finish_reason is None:
            deltas += self._end("length" if event.finish_reason == "length" else "stop")
        return Piece(_merged(deltas), self._release(), self.finish_reason)

    def _advance(self, text: str) -> list[Delta]:
        self._num_chars += len(text)
        if self._parser is not None:
            return self._match(self._parser.push(text))
        return self._match([Delta("content", text)] if text else [])

    def _end(self, reason: Literal["stop", "length"]) -> list[Delta]:
        deltas = self._advance(self._detokenizer.flush())
        if self._parser is not None:
            deltas += self._match(self._parser.finish())
        if self.finish_reason is None:
            deltas += self._flush_matcher()
            self.finish_reason = "tool_calls" if reason == "stop" and self._has_calls else reason
        return deltas

    def _match(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Apply the stop strings; everything after a match is dropped."""
        out: list[Delta] = []
        for delta in deltas:
            if self.finish_reason is not None:
                break
            if delta.kind != "content":
                out += self._flush_matcher()
                self._has_calls = self._has_calls or delta.kind == "tool_name"
                out.append(delta)
                continue
            safe, matched = delta.text, None
            if self.num_tokens >= self._min_tokens:
                safe, matched = self._matcher.push(delta.text)
            self._num_held += len(delta.text) - len(safe)
            if safe:
                out.append(Delta("content", safe))
            if matched is not None:
                self.finish_reason = "stop"
        return out

    def _flush_matcher(self) -> list[Delta]:
        self._num_held = 0
        held = self._matcher.flush()
        return [Delta("content", held)] if held else []

    def _release(self) -> tuple[ScoredToken, ...]:
        """Scores of the tokens whose text is decided; those of cut-off text are never given."""
        visible = self._num_chars - self._num_held
        out = []
        while self._scored and self._scored[0].offset < visible:
            out.append(self._scored.popleft())
        if self.finish_reason is not None and not self._num_held:
            out += self._scored
            self._scored.clear()
        return tuple(out)


def _merged(deltas: list[Delta]) -> tuple[Delta, ...]:
    """Join neighbours of one kind and index."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index):
            out[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        else:
            out.append(delta)
    return tuple(out)
