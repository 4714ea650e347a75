"""What the steps of our own server say about a prefill, read while it runs."""

from __future__ import annotations

from typing import Final

from ftruntime.bench.client import Server
from ftruntime.bench.recording import Json, integer, objects

_NEVER: Final = 10**15  # a step number no server reaches


class StepWatch:
    """Counts what ``/v1/steps`` shows from a moment on; polled, for a server keeps only the last.

    `known` is False on a server without it, and once a record was missed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._next = 0
        self.known = False
        self.chunks = 0
        self.interleaved_steps = 0
        self.interleaved_tokens = 0

    async def begin(self) -> None:
        """Count from here on."""
        answer = await self._server.read_json(f"/v1/steps?since={_NEVER}", "the steps")
        start = integer(answer or {}, "next")
        self.known, self._next = start is not None, start or 0

    async def poll(self) -> None:
        """Take the steps since the last poll."""
        if not self.known:
            return
        answer = await self._server.read_json(f"/v1/steps?since={self._next}", "the steps") or {}
        steps, after = objects(answer, "steps"), integer(answer, "next")
        missed = bool(steps) and integer(steps[0], "index") != self._next
        if after is None or missed or (not steps and after != self._next):
            self.known = False
            return
        for step in steps:
            self._take(step)
        self._next = after

    def _take(self, step: Json) -> None:
        layers = step.get("layers")
        if step.get("kind") == "prefill":
            self.chunks += isinstance(layers, list) and layers[:1] == [0]
        elif step.get("interleaved") is True:
            self.interleaved_steps += 1
            self.interleaved_tokens += integer(step, "num_tokens") or 0
