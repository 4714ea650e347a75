"""Replacement policies that the expert cache's own is compared with, all `SlotPolicy`.

S3-FIFO, 2Q, segmented LRU and LRU by layer know nothing of phases and hints, as published;
LRU of decode's uses is the shipped policy without its counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from ftkernels.moe.slot_policy import SlotPolicy, make_policy

Queue = OrderedDict[int, None]
Usable = Callable[[int], bool]


def first(keys: Iterable[int], usable: Usable) -> int | None:
    return next((key for key in keys if usable(key)), None)


class Blind:
    """A policy for which a use is a use; `_insert` and `_use` are told the key alone."""

    def begin(self, phase: str) -> None:
        pass

    def insert(self, key: int, phase: str, *, hint: bool) -> None:
        self._insert(key)

    def touch(self, key: int, phase: str) -> None:
        self._use(key)

    def _insert(self, key: int) -> None:
        raise NotImplementedError

    def _use(self, key: int) -> None:
        raise NotImplementedError


class Ghosts:
    """The keys that left last, at most ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: Queue = OrderedDict()

    def add(self, key: int) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._size:
            self._keys.popitem(last=False)

    def take(self, key: int) -> bool:
        """Whether ``key`` is among them; it is none of them then."""
        known = key in self._keys
        self._keys.pop(key, None)
        return known


class S3Fifo(Blind):
    """A small queue (10 %) filters keys used once; the main queue reinserts used keys (2 bits)."""

    def __init__(self, num_slots: int) -> None:
        self._small_size = max(1, num_slots // 10)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts = Ghosts(num_slots - self._small_size)
        self._uses: dict[int, int] = {}

    def _insert(self, key: int) -> None:
        (self._main if self._ghosts.take(key) else self._small)[key] = None
        self._uses[key] = 0

    def _use(self, key: int) -> None:
        self._uses[key] = min(3, self._uses[key] + 1)

    def remove(self, key: int) -> None:
        if key in self._small:
            self._ghosts.add(key)
        (self._small if key in self._small else self._main).pop(key)
        del self._uses[key]

    def victim(self, usable: Usable) -> int | None:
        if len(self._small) >= self._small_size:
            self._promote(usable)
        of_main = self._reinsert(usable) if len(self._small) < self._small_size else None
        if of_main is not None:
            return of_main
        return first((*self._small, *self._main), usable)

    def _promote(self, usable: Usable) -> None:
        """Keys used more than once leave the small queue's end for the main queue."""
        while self._small:
            oldest = next(iter(self._small))
            if self._uses[oldest] < 2:
                return
            del self._small[oldest]
            self._main[oldest], self._uses[oldest] = None, 0

    def _reinsert(self, usable: Usable) -> int | None:
        """The main queue's oldest unused key; used ones go round with a use less."""
        for _ in range(4 * len(self._main)):
            oldest = next(iter(self._main))
            if self._uses[oldest] == 0 and usable(oldest):
                return oldest
            self._uses[oldest] = max(0, self._uses[oldest] - 1)
            self._main.move_to_end(oldest)
        return None


class TwoQueues(Blind):
    """2Q: keys enter by a FIFO (25 %); those that return from its ghosts (50 %) join an LRU."""

    def __init__(self, num_slots: int) -> None:
        self._in_size = max(1, num_slots // 4)
        self._in: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts = Ghosts(max(1, num_slots // 2))

    def _insert(self, key: int) -> None:
        (self._main if self._ghosts.take(key) else self._in)[key] = None

    def _use(self, key: int) -> None:
        if key in self._main:
            self._main.move_to_end(key)

    def remove(self, key: int) -> None:
        if key in self._in:
            self._ghosts.add(key)
        (self._in if key in self._in else self._main).pop(key)

    def victim(self, usable: Usable) -> int | None:
        queues = (self._in, self._main) if len(self._in) > self._in_size else (self._main, self._in)
        return first((key for queue in queues for key in queue), usable)


class SegmentedLru(Blind):
    """A key used again is protected (80 %); the least recent of the others goes first."""

    def __init__(self, num_slots: int) -> None:
        self._protected_size = max(1, num_slots * 8 // 10)
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()

    def _insert(self, key: int) -> None:
        self._probation[key] = None

    def _use(self, key: int) -> None:
        self._probation.pop(key, None)
        self._protected[key] = None
        self._protected.move_to_end(key)
        if len(self._protected) > self._protected_size:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = None

    def remove(self, key: int) -> None:
        (self._probation if key in self._probation else self._protected).pop(key)

    def victim(self, usable: Usable) -> int | None:
        return first((key for part in (self._probation, self._protected) for key in part), usable)


class LayerLru(Blind):
    """LRU within the layer that has most slots: every layer keeps about the same number."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_experts = num_experts
        self._layers: list[Queue] = [OrderedDict() for _ in range(num_layers)]

    def _insert(self, key: int) -> None:
        self._layers[key // self._num_experts][key] = None

    def _use(self, key: int) -> None:
        self._layers[key // self._num_experts].move_to_end(key)

    def remove(self, key: int) -> None:
        del self._layers[key // self._num_experts][key]

    def victim(self, usable: Usable) -> int | None:
        fullest = max(self._layers, key=len)
        found = first(fullest, usable)
        return first(self._all(), usable) if found is None else found

    def _all(self) -> Iterator[int]:
        for queue in sorted(self._layers, key=len, reverse=True):
            yield from queue


class DecodeLru:
    """LRU of decode's uses; what decode has not used since it came goes first."""

    def __init__(self) -> None:
        self._brought: Queue = OrderedDict()
        self._used: Queue = OrderedDict()

    def begin(self, phase: str) -> None:
        pass

    def insert(self, key: int, phase: str, *, hint: bool) -> None:
        (self._used if phase == "decode" and not hint else self._brought)[key] = None

    def touch(self, key: int, phase: str) -> None:
        if phase == "decode":
            self.remove(key)
            self._used[key] = None

    def remove(self, key: int) -> None:
        (self._used if key in self._used else self._brought).pop(key)

    def victim(self, usable: Usable) -> int | None:
        return first((key for part in (self._brought, self._used) for key in part), usable)


def build(name: str, *, num_layers: int, num_experts: int, num_slots: int) -> SlotPolicy:
    """A policy of the library or of this file, by its name in `NAMES`."""
    if name == "s3-fifo":
        return S3Fifo(num_slots)
    if name == "2q":
        return TwoQueues(num_slots)
    if name == "segmented-lru":
        return SegmentedLru(num_slots)
    if name == "layer-lru":
        return LayerLru(num_layers, num_experts)
    if name == "decode-lru":
        return DecodeLru()
    return make_policy(name, num_layers=num_layers, num_experts=num_experts, num_slots=num_slots)


NAMES = ("lru", "s3-fifo", "2q", "segmented-lru", "layer-lru", "decode-lru", "scan-resistant")
