"""A copier for tests, as late as the rules allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FakeEvent:
    time: int
    kind: str
    owner: FakeCopier

    def done(self) -> bool:
        passed = self.owner.copied if self.kind == "copy" else self.owner.computed
        return self.time <= passed


class FakeCopier:
    """Copies happen when somebody waits for them, or the device catches up (`finish`).

    A test tells by `read` what a kernel reads. A read before the wait for its copy, and a copy that
    does not come after the last read of what it overwrites, are errors.

    Attributes:
        log: ("copy", time, number of tensors), ("wait", time) and ("mark", time), in order.
        copied, computed: times that the copies and compute have passed.
    """

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.copied = self.computed = self._time = 0
        self._queue: deque[
            tuple[FakeEvent, list[torch.Tensor], list[torch.Tensor], FakeEvent | None]
        ] = deque()
        self._reads: dict[tuple[int, int], int] = {}

    def copy(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], after: FakeEvent | None
    ) -> FakeEvent:
        event = self._event("copy")
        before = self.computed if after is None else max(after.time, self.computed)
        for target in dst:
            for span, time in self._reads.items():
                if _meet(span, _span(target)) and time > before:
                    raise AssertionError(f"copy {event.time} does not come after the read {time}")
        self.log.append(("copy", event.time, len(dst)))
        self._queue.append((event, list(dst), list(src), after))
        return event

    def wait(self, event: FakeEvent) -> None:
        self.log.append(("wait", event.time))
        self._run(event.time)

    def mark(self) -> FakeEvent:
        event = self._event("mark")
        self.log.append(("mark", event.time))
        return event

    def read(self, *tensors: torch.Tensor) -> None:
        """A kernel that is issued now reads these."""
        self._time += 1
        for x in tensors:
            for event, targets, _, _ in self._queue:
                if any(_meet(_span(t), _span(x)) for t in targets):
                    raise AssertionError(f"read {self._time} does not come after copy {event.time}")
            self._reads[_span(x)] = self._time

    def finish(self) -> None:
        """The device catches up with all that is issued."""
        self._run(self._time)
        self.computed = self._time

    def _event(self, kind: str) -> FakeEvent:
        self._time += 1
        return FakeEvent(self._time, kind, self)

    def _run(self, time: int) -> None:
        while self._queue and self._queue[0][0].time <= time:
            event, dst, src, after = self._queue.popleft()
            for target, source in zip(dst, src, strict=True):
                target.copy_(source)
            self.copied = event.time
            if after is not None:
                self.computed = max(self.computed, after.time)


def _span(x: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
