"""State of one HTTP front: the engine's client, what runs, and whether new requests are taken."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftruntime.engine.request import choice_params
from ftruntime.metrics import ServerMetrics
from ftruntime.server.choice import Choice
from ftruntime.server.client import EngineClient
from ftruntime.server.errors import ApiError
from ftruntime.server.generation import ChoiceJob, Generation
from ftruntime.server.params import ModelLimits
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.detokenize import IncrementalDetokenizer
from ftruntime.tokenizer.parse import CompletionParser
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import SamplingParams

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the front. A time of 0 s means no limit."""

    served_model_name: str
    api_key: str | None = None
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 0.0
    shutdown_timeout_s: float = 30.0
    enable_cache_report: bool = False
    keep_alive_s: float = 2.0


@dataclass(frozen=True)
class ParserSpec:
    """How the answers of a chat are parsed."""

    thinking: bool
    tools: tuple[Mapping[str, object], ...]

    def make(self) -> CompletionParser:
        return CompletionParser(
            thinking=self.thinking, tools=bool(self.tools), tool_schemas=self.tools or None
        )


class Front:
    """What the routes share."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        settings: ServerSettings,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.chat = chat
        self.settings = settings
        self.metrics = ServerMetrics()
        self.running: set[Generation] = set()
        self.draining = False
        self._numbers = itertools.count()

    def require_ready(self) -> ModelLimits:
        """Limits of the loaded model.

        Raises:
            ApiError: 503 while the engine cannot take requests, or the server shuts down.
        """
        if self.draining:
            raise _shutting_down("the server is shutting down and takes no new requests")
        info = self.require_loaded()
        if not self.client.health().ready:
            raise self._not_ready()
        return ModelLimits.from_info(info)

    def require_loaded(self) -> Mapping[str, object]:
        """The engine's info; before there is one, it answers no questions either.

        Raises:
            ApiError: 503 while the model is being loaded.
        """
        info = self.client.info
        if info is None:
            raise self._not_ready()
        return info

    def check_model(self, name: str | None) -> None:
        """Accept the served model's name, or none.

        Raises:
            ApiError: 404 for any other.
        """
        served = self.settings.served_model_name
        if name is not None and name != served:
            raise ApiError(
                f"model is {name!r}, expected {served!r}", status=404, code="model_not_found",
                param="model",
            )  # fmt: skip

    def launch(
        self,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        parser: ParserSpec | None,
    ) -> Generation:
        """A generation of ``params[i].n`` choices of each prompt ``i``; not started, but listed."""
        jobs = []
        for prompt, given in zip(prompts, params, strict=True):
            for i in range(given.n):
                jobs.append(ChoiceJob(prompt, choice_params(given, i), self._choice(given, parser)))
        generation = Generation(
            self.client,
            self.metrics,
            f"{request_id}.{next(self._numbers)}",  # a client may use one id twice
            jobs,
            num_prompts=len(prompts),
            timeout_s=self.settings.request_timeout_s,
            on_end=self.running.discard,
        )
        self.running.add(generation)
        return generation

    def abort_all(self, reason: str) -> None:
        """End every running request; streams get an error event and their end."""
        for generation in tuple(self.running):
            generation.interrupt(_shutting_down(reason))

    def _not_ready(self) -> ApiError:
        health = self.client.health()
        return ApiError(
            f"engine is not ready: phase {health.phase}, progress {health.progress:.0%}"
            + (f", {health.detail}" if health.detail else ""),
            status=503, code="not_ready",
        )  # fmt: skip

    def _choice(self, params: SamplingParams, parser: ParserSpec | None) -> Choice:
        return Choice(
            IncrementalDetokenizer(self.tokenizer),
            stops=params.stop,
            min_tokens=params.min_tokens,
            parser=None if parser is None else parser.make(),
        )


def _shutting_down(message: str) -> ApiError:
    return ApiError(message, status=503, code="shutting_down")
