"""A scripted engine behind the front, and a small byte-level tokenizer in a directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from ftruntime.server.bridge import EngineDeadError, Health
from ftruntime.server.front import ServerSettings
from ftruntime.tokenizer import special
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import RequestRejectedError, SamplingParams, TokenEvent, TokenLogprobs

READY = Health(True, "ready", 1.0)
MODEL = "demo-model"


def write_tokenizer(path: Path) -> Path:
    """BOS 0, EOS 1, pad 2, then the bytes, some merges, and the chat's markers."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[special.BOS, special.EOS, special.PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["Hello there, the sailor and the other sailor Stop"] * 9, trainer
    )
    markers = (
        special.USER,
        special.ASSISTANT,
        special.THINK_OPEN,
        special.THINK_CLOSE,
        special.DSML,
    )
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in markers])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": special.BOS, "eos_token": special.EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def settings(**changes: object) -> ServerSettings:
    return ServerSettings(**({"served_model_name": MODEL} | changes))


Script = Callable[[str, tuple[int, ...], SamplingParams], list[int]]


@dataclass
class FakeEngine:
    """Gives the script's tokens, then EOS; `length` when `max_tokens` is reached first.

    `gate` holds back every token after the first `free_tokens` of each sequence.
    """

    tokenizer: Tokenizer
    chat: ChatFormat
    script: Script
    max_model_len: int = 256
    vocab_size: int = 512
    state: Health = READY
    free_tokens: int = 1 << 30
    gate: asyncio.Event | None = None
    reject: RequestRejectedError | None = None
    fail_after: int | None = None
    fail_with: str = "error"
    die_after: int | None = None
    cached: int = 0
    pause_s: float = 0.0
    started: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    stats_reply: Mapping[str, object] | None = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    start_error: Exception | None = None

    @property
    def info(self) -> Mapping[str, object] | None:
        if not self.state.ready:
            return None
        return {"max_model_len": self.max_model_len, "vocab_size": self.vocab_size}

    def health(self) -> Health:
        return self.state

    async def start(self) -> None:
        self.calls.append("start")

    async def wait_end(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def wait_ready(self) -> Mapping[str, object]:
        if self.start_error is not None:
            raise self.start_error
        return self.info or {}

    async def stop(self, timeout_s: float) -> None:
        self.calls.append("stop")

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    async def generate(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams
    ) -> AsyncIterator[TokenEvent]:
        assert params.n == 1
        if self.reject is not None:
            raise self.reject
        assert request_id not in self.running
        self.started.append((request_id, prompt_token_ids, params))
        self.running.add(request_id)
        tokens = [*self.script(request_id, prompt_token_ids, params), self.tokenizer.eos_token_id]
        given, over = 0, False
        try:
            while not over:
                if given >= self.free_tokens and self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(self.pause_s)
                event = self._event(request_id, params, tokens, given)
                over = event.finish_reason is not None
                given += event.token_id is not None
                yield event
        finally:
            self.running.discard(request_id)
            if not over and request_id not in self.finished:
                self.aborted.append((request_id, given))

    def _event(
        self, request_id: str, params: SamplingParams, tokens: list[int], given: int
    ) -> TokenEvent:
        if given == self.die_after:
            raise EngineDeadError("the engine process ended with exit code 9")
        if given == self.fail_after:
            return TokenEvent(request_id, None, self.fail_with, error="a step failed")
        token_id = tokens[given]
        reason = None
        if token_id == self.tokenizer.eos_token_id:
            reason = "stop"
        elif given + 1 == params.max_tokens:
            reason = "length"
        logprobs = None
        if params.logprobs is not None:
            logprobs = scores(token_id, given, params.logprobs)
        return TokenEvent(
            request_id, token_id, reason, logprobs=logprobs,
            num_cached_tokens=self.cached if given == 0 else 0,
        )  # fmt: skip

    async def stats(self) -> Mapping[str, object]:
        if self.stats_reply is None:
            raise EngineDeadError("the engine process ended")
        return self.stats_reply

    async def steps(self, since: int) -> Mapping[str, object]:
        return {"steps": [], "next": since}


def scores(token_id: int, position: int, count: int) -> TokenLogprobs:
    """Different at every position, so that a copied entry shows."""
    top = tuple((3 + (position * 7 + i) % 256, -0.25 - position - i) for i in range(count))
    return TokenLogprobs(token_id, -0.125 - position, top)
