"""What the HTTP front needs of an engine: `bridge.Bridge` fills it, and a fake does in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from ftruntime.types import SamplingParams, TokenEvent


class EngineHealth(Protocol):
    """How far the engine is. ``progress`` is the finished share of the current phase, 0 to 1."""

    @property
    def ready(self) -> bool: ...

    @property
    def phase(self) -> str: ...

    @property
    def progress(self) -> float: ...

    @property
    def detail(self) -> str: ...


class EngineClient(Protocol):
    """An engine in another process. Every method belongs to one event loop."""

    @property
    def info(self) -> Mapping[str, object] | None:
        """Facts of the loaded model, with ``max_model_len`` and ``vocab_size``; None before."""
        ...

    def health(self) -> EngineHealth: ...

    async def start(self) -> None:
        """Begin to load; returns before the engine is ready."""
        ...

    async def wait_ready(self) -> Mapping[str, object]:
        """Wait for the end of loading; the engine's info.

        Raises:
            EngineDeadError: it could not be built, or died; the text is one sentence.
        """
        ...

    async def wait_end(self) -> str:
        """Wait for an end that nobody asked for; the sentence that says how the engine ended."""
        ...

    async def stop(self, timeout_s: float) -> None: ...

    def generate(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams
    ) -> AsyncIterator[TokenEvent]:
        """Stream one sequence's events; closing the iterator before its end aborts the sequence.

        Raises, while iterating:
            RequestRejectedError: the engine will not run it, or not now.
            EngineDeadError: the engine is gone.
        """
        ...

    def finish(self, request_id: str) -> None:
        """End a sequence whose reader has all it wanted; not an abort."""
        ...

    async def stats(self) -> Mapping[str, object]: ...

    async def steps(self, since: int) -> Mapping[str, object]: ...
