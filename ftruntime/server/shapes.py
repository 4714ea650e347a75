"""Answers in the two shapes of the OpenAI protocol, whole and in chunks, from the same pieces."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from ftruntime.server.choice import Piece, ScoredToken
from ftruntime.server.generation import Usage
from ftruntime.tokenizer.parse import Delta
from ftruntime.tokenizer.tokenizer import Tokenizer

Json = dict[str, object]

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


class Shape(Protocol):
    """One endpoint's answers for one request."""

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first piece, if the endpoint has one."""
        ...

    def chunk(self, index: int, piece: Piece) -> Json: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> Json:
        """The answer that is not streamed; ``choices[i]`` are the pieces of choice ``i``."""
        ...


class _Base:
    """What both shapes share. In a stream with usage every chunk but the last says null."""

    _prefix: str
    _object: str
    _chunk_object: str

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, cache_report: bool, null_usage: bool
    ) -> None:
        self._id = f"{self._prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._cache_report = cache_report
        self._null_usage = null_usage

    def usage_chunk(self, usage: Usage) -> Json:
        return self._frame(self._chunk_object, [], self._usage(usage))

    def _chunk_frame(self, choice: Json) -> Json:
        frame = self._frame(self._chunk_object, [choice], None)
        if not self._null_usage:
            del frame["usage"]
        return frame

    def _frame(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Json:
        shown: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._cache_report:
            shown["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        return shown


class ChatShape(_Base):
    """``chat.completion`` and its chunks."""

    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        return self._chunk_frame(
            _chat_choice(index, "delta", {"role": "assistant", "content": ""}, None, None)
        )

    def chunk(self, index: int, piece: Piece) -> Json:
        delta = _message(piece.deltas, with_index=True)
        logprobs = self._logprobs(piece.scored) if piece.scored else None
        return self._chunk_frame(_chat_choice(index, "delta", delta, logprobs, piece.finish_reason))

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> Json:
        shown = []
        for index, pieces in enumerate(choices):
            message: Json = {"role": "assistant", "content": None}
            message |= _message((d for p in pieces for d in p.deltas), with_index=False)
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            scored = [token for piece in pieces for token in piece.scored]
            logprobs = self._logprobs(scored) if scored else None
            shown.append(_chat_choice(index, "message", message, logprobs, _finish(pieces)))
        return self._frame(self._object, shown, self._usage(usage))

    def _logprobs(self, scored: Iterable[ScoredToken]) -> Json:
        content = []
        for token in scored:
            entry = self._token(token.scores.token_id, token.scores.logprob)
            entry["top_logprobs"] = [self._token(i, value) for i, value in token.scores.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


class CompletionShape(_Base):
    """``text_completion``, whole and in chunks."""

    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, index: int, piece: Piece) -> Json:
        return self._chunk_frame(self._choice(index, [piece]))

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> Json:
        shown = [self._choice(index, pieces) for index, pieces in enumerate(choices)]
        return self._frame(self._object, shown, self._usage(usage))

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        scored = [token for piece in pieces for token in piece.scored]
        return {
            "index": index,
            "text": "".join(delta.text for piece in pieces for delta in piece.deltas),
            "logprobs": self._logprobs(scored) if scored else None,
            "finish_reason": _finish(pieces),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json:
        return {
            "tokens": [self._text(token.scores.token_id) for token in scored],
            "token_logprobs": [_finite(token.scores.logprob) for token in scored],
            "top_logprobs": [self._top(token) for token in scored],
            "text_offset": [token.offset for token in scored],
        }

    def _top(self, token: ScoredToken) -> dict[str, float]:
        """Text -> log-probability, best first; the token itself is always among them."""
        top = {self._text(i): _finite(value) for i, value in token.scores.top}
        top.setdefault(self._text(token.scores.token_id), _finite(token.scores.logprob))
        return top

    def _text(self, token_id: int) -> str:
        """A token as a key; bytes that are no text are written out, so that no two look alike."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_choice(
    index: int, part: str, message: Json, logprobs: Json | None, finish: str | None
) -> Json:
    return {"index": index, part: message, "logprobs": logprobs, "finish_reason": finish}


def _finish(pieces: Sequence[Piece]) -> str | None:
    return pieces[-1].finish_reason if pieces else None


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def _message(deltas: Iterable[Delta], *, with_index: bool) -> Json:
    """What the deltas fill in a message, or in a delta, whose tool calls carry their index."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, tuple[str | None, list[str]]] = {}
    for delta in deltas:
        if delta.kind == "tool_name":
            calls[delta.index] = (delta.text, [])
        elif delta.kind == "tool_arguments":
            calls.setdefault(delta.index, (None, []))[1].append(delta.text)
        else:
            name = "reasoning_content" if delta.kind == "reasoning" else "content"
            texts.setdefault(name, []).append(delta.text)
    message: Json = {name: "".join(parts) for name, parts in texts.items()}
    if calls:
        message["tool_calls"] = [
            _call(index if with_index else None, name, "".join(arguments))
            for index, (name, arguments) in calls.items()
        ]
    return message


def _call(index: int | None, name: str | None, arguments: str) -> Json:
    """One tool call; without a name it is a later part of a streamed one."""
    call: Json = {} if index is None else {"index": index}
    function: Json = {"arguments": arguments}
    if name is not None:
        call |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        function = {"name": name, **function}
    call["function"] = function
    return call
