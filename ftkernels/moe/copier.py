"""Copies into slots, in order among themselves and against the kernels that read the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch


class Event(Protocol):
    """A point of the copies or of compute."""

    def done(self) -> bool:
        """Whether the device has passed it; never blocks."""
        ...


EventT = TypeVar("EventT", bound=Event)


class Copier(Protocol[EventT]):
    """One queue of copies beside compute.

    Copies run in the order of their calls: to come after one is to come after all before it.
    """

    def copy(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], after: EventT | None
    ) -> EventT:
        """Copy each of ``src`` into the tensor of ``dst`` beside it, once ``after`` is passed."""
        ...

    def wait(self, event: EventT) -> None:
        """Compute issued from here on comes after ``event``; the host does not wait."""
        ...

    def mark(self) -> EventT:
        """All compute issued so far."""
        ...


class Done:
    """An event that is passed."""

    def done(self) -> bool:
        return True


class CpuCopier:
    """Copies at once: on the host, compute runs when it is issued."""

    def copy(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], after: Done | None
    ) -> Done:
        for target, source in zip(dst, src, strict=True):
            target.copy_(source)
        return Done()

    def wait(self, event: Done) -> None:
        pass

    def mark(self) -> Done:
        return Done()


class CudaEvent:
    """A CUDA event that goes back to the spare ones with its last reference.

    Streams that wait for it took its place in the queue when they were told to, so that recording
    it again does not concern them.
    """

    def __init__(self, spare: list[torch.cuda.Event]) -> None:
        self.event = spare.pop() if spare else torch.cuda.Event()
        self._spare = spare

    def done(self) -> bool:
        return bool(self.event.query())

    def __del__(self) -> None:
        if hasattr(self, "event"):  # making one may fail
            self._spare.append(self.event)


class CudaCopier:
    """One stream of copies beside the current one, from pinned memory.

    ``record_stream`` is not called: slots and banks live until the copies have ended.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._spare: list[torch.cuda.Event] = []

    def copy(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], after: CudaEvent | None
    ) -> CudaEvent:
        event = CudaEvent(self._spare)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after.event)
            for target, source in zip(dst, src, strict=True):
                target.copy_(source, non_blocking=True)
            event.event.record(self._stream)
        return event

    def wait(self, event: CudaEvent) -> None:
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def mark(self) -> CudaEvent:
        event = CudaEvent(self._spare)
        event.event.record(torch.cuda.current_stream(self._device))
        return event


class Marks(Generic[EventT]):
    """Marks of compute by number, 1, 2, ...; those that are passed are forgotten."""

    def __init__(self, copier: Copier[EventT]) -> None:
        self._copier = copier
        self._open: deque[EventT] = deque()
        self._passed = 0

    def take(self) -> int:
        """Mark all compute issued so far."""
        self.sweep()
        self._open.append(self._copier.mark())
        return self._passed + len(self._open)

    def sweep(self) -> None:
        """Ask the device how far it is."""
        while self._open and self._open[0].done():
            self._open.popleft()
            self._passed += 1

    def is_passed(self, number: int) -> bool:
        """Whether the last `sweep` found the mark passed; number 0 is."""
        return number <= self._passed

    def event(self, number: int) -> EventT | None:
        """What a copy that comes after the mark waits for; None when there is nothing to."""
        return None if number <= self._passed else self._open[number - self._passed - 1]


def check_copies(
    copier: Copier[EventT], dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor]
) -> None:
    """Copy ``src``, integers, over its inverse and read it back.

    Raises:
        RuntimeError: the copy ends and the bytes differ.
    """
    for target, source in zip(dst, src, strict=True):
        target.copy_(~source)
    copier.wait(copier.copy(dst, src, copier.mark()))
    if not all(torch.equal(t.cpu(), s) for t, s in zip(dst, src, strict=True)):
        pinned = "pinned" if all(s.is_pinned() for s in src) else "pageable"
        raise RuntimeError(
            f"ExpertCache: a copy from {pinned} host memory to {dst[0].device} ended with other "
            "bytes than it was given, expected the same; the driver does not copy from such memory"
        )
