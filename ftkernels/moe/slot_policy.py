"""Which expert leaves its slot when another needs one.

A key is ``layer * num_experts + expert``. Policies know keys and phases; slots, copies and what is
in use belong to the cache, which asks for a victim and tells which keys it could take.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

# decode steps after which a use of an expert counts half
HALF_LIFE_STEPS = 64.0


class SlotPolicy(Protocol):
    """The order in which resident experts give up their slots; one thread at a time."""

    def begin(self, phase: str) -> None:
        """A step of ``phase``, "decode" or "prefill", begins."""

    def insert(self, key: int, phase: str, *, hint: bool) -> None:
        """``key`` became resident: a miss of a step, or a hint that no step has used yet."""

    def touch(self, key: int, phase: str) -> None:
        """A step of ``phase`` uses the resident ``key``; also its first use after a hint."""

    def remove(self, key: int) -> None:
        """``key`` left its slot."""

    def victim(self, usable: Callable[[int], bool]) -> int | None:
        """The least wanted resident key for which ``usable(key)``; None if there is none."""


def make_policy(name: str, *, num_layers: int, num_experts: int, num_slots: int) -> SlotPolicy:
    """A policy that knows no resident key yet.

    Args:
        name: "lru" or "scan-resistant".
        num_layers, num_experts: keys are below their product.
        num_slots: slots of all layers together.

    Raises:
        ValueError: another name, or a count below 1.
    """
    counts = {"num_layers": num_layers, "num_experts": num_experts, "num_slots": num_slots}
    for argument, count in counts.items():
        if count < 1:
            raise ValueError(f"make_policy: {argument} is {count}, expected >= 1")
    if name == "lru":
        return Lru()
    if name == "scan-resistant":
        return ScanResistant(num_layers * num_experts, num_experts, num_slots)
    raise ValueError(f'make_policy: name is {name!r}, expected "lru" or "scan-resistant"')


class Lru:
    """The key used longest ago goes first, whatever used it."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def begin(self, phase: str) -> None:
        pass

    def insert(self, key: int, phase: str, *, hint: bool) -> None:
        self._order[key] = None

    def touch(self, key: int, phase: str) -> None:
        self._order.move_to_end(key)

    def remove(self, key: int) -> None:
        del self._order[key]

    def victim(self, usable: Callable[[int], bool]) -> int | None:
        return next((key for key in self._order if usable(key)), None)


class ScanResistant:
    """What only a prefill or an unused hint brought goes first; decode's uses rank the rest.

    A use counts half after ``HALF_LIFE_STEPS`` decode steps, and an evicted key keeps its count. So
    a prefill sweep streams through as few slots as it has in use at a time.
    """

    def __init__(self, num_keys: int, num_experts: int, num_slots: int) -> None:
        # log2 of the decayed count, taken at step 0: it only grows, and its order needs no ageing
        self._rank = [-math.inf] * num_keys
        self._decode_clock = 0.0  # in half-lives
        self._steps = 0
        # oldest first: brought by prefill or a stale hint; hints that the next steps may use
        self._streamed: OrderedDict[int, None] = OrderedDict()
        self._hinted: OrderedDict[int, int] = OrderedDict()
        self._ranked: set[int] = set()
        # one entry a key at most, its rank a lower bound: entries are mended when they come up
        self._heap: list[tuple[float, int]] = []
        self._has_entry = bytearray(num_keys)
        self._max_hinted = max(1, min(num_experts, num_slots // 4))
        self._max_streamed = max(1, min(2 * num_experts, num_slots // 2))

    def begin(self, phase: str) -> None:
        self._steps += 1
        if phase == "decode":
            self._decode_clock += 1 / HALF_LIFE_STEPS
        # a hint may come before the step that it is for
        while self._hinted and next(iter(self._hinted.values())) < self._steps - 1:
            self._drop_hint()

    def insert(self, key: int, phase: str, *, hint: bool) -> None:
        if hint:
            self._hinted[key] = self._steps
            if len(self._hinted) > self._max_hinted:
                self._drop_hint()
        elif phase == "decode":
            self._count(key)
            self._keep(key)
        else:
            self._stream(key)

    def touch(self, key: int, phase: str) -> None:
        if phase == "decode":
            self._count(key)
            if key not in self._ranked:
                self.remove(key)
                self._keep(key)
        elif key in self._hinted:
            del self._hinted[key]
            self._stream(key)

    def remove(self, key: int) -> None:
        if key in self._ranked:
            self._ranked.remove(key)
        elif key in self._streamed:
            del self._streamed[key]
        else:
            del self._hinted[key]

    def victim(self, usable: Callable[[int], bool]) -> int | None:
        for key in self._streamed:
            if usable(key):
                return key
        found = self._least_ranked(usable)
        if found is None:
            found = next((key for key in self._hinted if usable(key)), None)
        return found

    def _least_ranked(self, usable: Callable[[int], bool]) -> int | None:
        heap, found, passed = self._heap, None, []
        while heap and found is None:
            rank, key = heap[0]
            if key not in self._ranked:
                heapq.heappop(heap)
                self._has_entry[key] = False
            elif rank < self._rank[key]:
                heapq.heapreplace(heap, (self._rank[key], key))
            elif usable(key):
                found = key
            else:
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _count(self, key: int) -> None:
        """Add a decode use of now: ``log2(2**rank + 2**clock)``."""
        low, high = sorted((self._rank[key], self._decode_clock))
        self._rank[key] = high + math.log2(1 + 2.0 ** (low - high))

    def _keep(self, key: int) -> None:
        self._ranked.add(key)
        if not self._has_entry[key]:
            heapq.heappush(self._heap, (self._rank[key], key))
            self._has_entry[key] = True

    def _stream(self, key: int) -> None:
        """Last in the line of those that go first; who is too far from its end is ranked."""
        self._streamed[key] = None
        if len(self._streamed) > self._max_streamed:
            oldest, _ = self._streamed.popitem(last=False)
            self._keep(oldest)

    def _drop_hint(self) -> None:
        key, _ = self._hinted.popitem(last=False)
        self._stream(key)
