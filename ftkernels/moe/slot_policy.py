"""Which expert leaves its slot when another needs one.

A key is ``layer * num_experts + expert``. Policies know keys and phases; slots, copies and what is
in use belong to the cache, which asks for a victim and tells which keys it could take.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

# decode steps after which a use counts half: few where favourites change, many where they stay
HALF_LIVES = (16.0, 32.0, 64.0, 256.0)
# one layer in so many is watched to choose among them, and how much of a step's verdict is kept
WATCHED_LAYERS = 4
VERDICT_DECAY = 0.98
# seldom used experts, which decide about misses, need longer than the favourites that weigh most
VERDICT_MARGIN = 0.95


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
        return ScanResistant(num_layers, num_experts, num_slots)
    raise ValueError(f'make_policy: name is {name!r}, expected "lru" or "scan-resistant"')


def _first(keys: Iterable[int], usable: Callable[[int], bool]) -> int | None:
    return next((key for key in keys if usable(key)), None)


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
        return _first(self._order, usable)


class ScanResistant:
    """What only a prefill or an unused hint brought goes first; decode's uses rank the rest.

    A use counts half after a half-life, and an evicted key keeps its count. A prefill sweep streams
    through as few slots as it has in use at a time, and what stays is read in place by every sweep.

    Simulated (`bench_kernels/README.md`), half of all experts resident: 58 sweeps cost the decode
    steps behind them 0.2 points of hits, LRU's 9, and hit 47 % themselves, LRU's 0; S3-FIFO and 2Q
    lose 3. Where popularity stays, decode hits 83 % against 78 to 81 % of all of these.
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        num_keys = num_layers * num_experts
        self._num_experts = num_experts
        self._half_life = _HalfLife(num_keys)
        # log2 of the decayed count, taken at clock 0: it only grows, and its order needs no ageing
        self._rank = [-math.inf] * num_keys
        self._clock = 0.0  # decode steps in half-lives
        self._steps = 0
        # a resident key is in one of three, here by the order in which they go; queues oldest first
        self._streamed: OrderedDict[int, None] = OrderedDict()  # by a prefill or a stale hint
        self._ranked: set[int] = set()
        self._hinted: OrderedDict[int, int] = OrderedDict()  # for this step or the next
        # one entry a key at most, its rank a lower bound: entries are mended when they come up
        self._heap: list[tuple[float, int]] = []
        self._has_entry = bytearray(num_keys)
        self._max_hinted = max(1, min(num_experts, num_slots // 4))
        self._max_streamed = max(1, min(2 * num_experts, num_slots // 2))

    def begin(self, phase: str) -> None:
        self._steps += 1
        if phase == "decode":
            self._clock += 1 / self._half_life.begin()
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
        found = _first(self._streamed, usable)
        if found is None:
            found = self._least_ranked(usable)
        return _first(self._hinted, usable) if found is None else found

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
        """Add a decode use of now."""
        if key // self._num_experts % WATCHED_LAYERS == 0:
            self._half_life.use(key)
        count = 2.0 ** (self._rank[key] - self._clock)
        self._rank[key] = self._clock + math.log2(count + 1)

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


class _HalfLife:
    """The longest half-life whose decayed counts, taken before a step, point at what the step uses
    about as well as any.

    The measure is the cosine between the counts of all keys and the step's uses (1 or 0), faded
    over the last steps; it asks nothing about how large a count must be.
    """

    def __init__(self, num_keys: int) -> None:
        self._counts = [[0.0] * num_keys for _ in HALF_LIVES]  # as of the key's last use
        self._last_use = [0] * num_keys
        self._step = 0
        self._squares = [0.0 for _ in HALF_LIVES]  # sum of the squared counts of all keys
        self._norms = [1.0 for _ in HALF_LIVES]  # its root, when the step began
        self._verdicts = [0.0 for _ in HALF_LIVES]

    def begin(self) -> float:
        """A decode step begins; the half-life to count it with."""
        self._step += 1
        for i, half_life in enumerate(HALF_LIVES):
            self._squares[i] *= 4.0 ** (-1 / half_life)
            self._norms[i] = math.sqrt(self._squares[i]) or 1.0
            self._verdicts[i] *= VERDICT_DECAY
        least = VERDICT_MARGIN * max(self._verdicts)
        return max(h for h, x in zip(HALF_LIVES, self._verdicts, strict=True) if x >= least)

    def use(self, key: int) -> None:
        age = self._step - self._last_use[key]
        self._last_use[key] = self._step
        for i, half_life in enumerate(HALF_LIVES):
            count = self._counts[i][key] * 2.0 ** (-age / half_life)
            self._verdicts[i] += count / self._norms[i]
            self._squares[i] += 2 * count + 1
            self._counts[i][key] = count + 1
