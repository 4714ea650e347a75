"""What an expert cache does, call by call, in plain Python: slow, obvious, with an LRU of its own.

A call of the model follows the same call of the cache and reads off the fake copier's log what that
did: kind and order of copies, waits and marks are the model's, not the cache's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from ftkernels import ExpertCache
from ftkernels.testing.fake_copier import FakeCopier


class Kernels:
    """Stand-ins that read slots: by the fake copier's rules, and byte by byte."""

    def __init__(self, cache: ExpertCache, fake: FakeCopier) -> None:
        self.fake = fake
        slots = [x for x in cache.slots(0) if x is not None]
        self.views = [list(x.unbind(0)) for x in slots]
        self.numpy = [x.numpy() for x in slots]

    def read(self, key: int, slot: int) -> None:
        self.fake.read(self.views[0][slot], self.views[-1][slot])
        for x in self.numpy:
            assert x[slot].flat[0] == x[slot].flat[-1] == key + 1, f"key {key} in slot {slot}"


@dataclass(eq=False)
class Flight:
    time: int
    keys: list[int]
    hints: int


@dataclass(eq=False)
class Held:
    """Experts handed out together, by slot."""

    slots: dict[int, int] = field(default_factory=dict)
    wait: Flight | None = None


class CacheModel:
    def __init__(self, num_layers: int, num_experts: int, num_slots: int, fake: FakeCopier) -> None:
        self.num_layers, self.num_experts, self.num_slots = num_layers, num_experts, num_slots
        self.fake, self.cursor = fake, 0
        self.where: dict[int, int] = {}
        self.order: list[int] = []  # least recently used first
        self.free = list(range(num_slots))
        self.holders: Counter[int] = Counter()
        self.flights: list[Flight] = []
        self.hints: set[int] = set()
        self.stats = {phase: Counter() for phase in ("decode", "prefill")}
        self.phase, self.in_step, self.held = "decode", False, []
        self.width, self.last_width = 0, {"decode": 0, "prefill": 0}
        self.is_read, self.truth, self.published, self.table_mark = False, {}, {}, 0
        self.last_use = [self.logged("mark")] * num_slots

    def logged(self, kind: str) -> int:
        """The next entry of the log is of this kind: its time."""
        entry = self.fake.log[self.cursor]
        assert entry[0] == kind, f"{entry} in the log, expected a {kind}"
        self.cursor += 1
        return int(entry[1])

    def settled(self) -> None:
        """The log holds nothing else."""
        assert self.cursor == len(self.fake.log), self.fake.log[self.cursor :]
        self.fake.log.clear()
        self.cursor = 0

    def room(self) -> int:
        return self.num_slots - sum(count > 0 for count in self.holders.values())

    def in_flight(self, key: int) -> bool:
        return any(key in flight.keys for flight in self.flights)

    def begin(self, phase: str) -> None:
        self.phase, self.in_step, self.width = phase, True, 0
        if self.is_read:
            self.land()
            self.published = dict(self.truth)

    def end(self) -> None:
        slots = [slot for group in self.held for slot in group.slots.values()]
        self.in_step, self.held = False, []
        self.last_width[self.phase] = self.width
        self.free_of_use(slots)

    def free_of_use(self, slots: list[int]) -> None:
        self.holders.subtract(slots)
        if slots or self.is_read:
            mark = self.logged("mark")
            for slot in slots:
                self.last_use[slot] = mark
            if self.is_read:
                self.table_mark = mark

    def release(self, group: Held) -> None:
        if group in self.held:
            self.held.remove(group)
            self.free_of_use(list(group.slots.values()))

    def needed(self, layer: int, experts: list[int]) -> int:
        keys = [layer * self.num_experts + e for e in experts]
        return sum(k not in self.where or not self.holders[self.where[k]] for k in keys)

    def ensure(self, layer: int, experts: list[int]) -> dict[int, int]:
        group = self.take(layer, experts)
        self.order_after(group.wait)
        return group.slots

    def take(self, layer: int, experts: list[int]) -> Held:
        group, base = Held(), layer * self.num_experts
        self.held.append(group)
        hits = [e for e in experts if base + e in self.where]
        misses = [e for e in experts if base + e not in self.where]
        for e in hits:
            key = base + e
            self.order.remove(key)
            self.order.append(key)
            if key in self.hints:
                self.hints.remove(key)
                self.stats[self.phase]["prefetch_used"] += 1
            group.slots[e] = self.where[key]
            self.holders[self.where[key]] += 1
        waits = [f for f in self.flights if any(base + e in f.keys for e in hits)]
        group.wait = waits[-1] if waits else None
        if misses:
            group.wait = self.bring(layer, misses, must=True)
            for e in misses:
                group.slots[e] = self.where[base + e]
                self.holders[self.where[base + e]] += 1
        self.stats[self.phase].update(hits=len(hits), misses=len(misses))
        return group

    def bring(
        self, layer: int, experts: list[int], *, must: bool, spared: Set[int] = frozenset()
    ) -> Flight | None:
        placed, withdrawn = [], False
        for e in experts:
            key = layer * self.num_experts + e
            if not self.free:
                victim = self.victim(spared | set(placed), must)
                while victim is None and must:
                    self.order_after(self.flights[0])
                    victim = self.victim(set(placed), must)
                if victim is None:
                    break
                withdrawn |= self.evict(victim)
            self.where[key] = self.free.pop(0)
            self.order.append(key)
            if not must:
                self.hints.add(key)
            placed.append(key)
        if not placed:
            return None
        if withdrawn:
            self.published = dict(self.truth)
            self.logged("mark")
        self.stats[self.phase]["copies"] += len(placed)
        flight = Flight(self.logged("copy"), placed, 0 if must else len(placed))
        self.flights.append(flight)
        return flight

    def victim(self, asked: Set[int], must: bool) -> int | None:
        if not must and self.is_read and self.in_step:
            return None  # a replay may read whatever the table names
        flying = {k for flight in self.flights for k in flight.keys}
        for key in self.order:
            slot = self.where[key]
            if self.holders[slot] or key in flying or key in asked:
                continue
            read = self.is_read and key in self.published
            last = max(self.last_use[slot], self.table_mark if read else 0)
            if must or last <= self.fake.computed:
                return key
        return None

    def evict(self, key: int) -> bool:
        self.order.remove(key)
        self.free.insert(0, self.where.pop(key))
        self.stats[self.phase]["evictions"] += 1
        self.stats[self.phase]["prefetch_wasted"] += key in self.hints
        self.hints.discard(key)
        self.truth.pop(key, None)
        return key in self.published

    def order_after(self, flight: Flight | None) -> None:
        if flight in self.flights:
            assert self.logged("wait") == flight.time
            while flight in self.flights:
                self.arrive()

    def land(self) -> None:
        while self.flights and self.flights[0].time <= self.fake.copied:
            self.arrive()

    def arrive(self) -> None:
        for key in self.flights.pop(0).keys:
            self.truth[key] = self.where[key]

    def prefetch(self, layer: int, experts: list[int]) -> None:
        self.land()
        width = max(8, self.last_width[self.phase], self.width if self.in_step else 0)
        bound = 2 * width - sum(flight.hints for flight in self.flights)
        wanted = [e for e in experts if layer * self.num_experts + e not in self.where]
        asked = {layer * self.num_experts + e for e in experts}
        self.bring(layer, wanted[: max(0, bound)], must=False, spared=asked)

    def groups(self, layer: int, experts: list[int]) -> Iterator[dict[int, int]]:
        base, room = layer * self.num_experts, self.room()
        if self.needed(layer, experts) <= room:
            first, rest = experts, []
        else:
            first = [e for e in experts if base + e in self.where]
            rest = [e for e in experts if base + e not in self.where]
        size = max(1, (room + 1) // 2)

        def more() -> Held | None:
            count = min(size, self.room())
            if rest and not count:
                raise ValueError("stuck")
            part = rest[:count]
            del rest[:count]
            return self.take(layer, part) if part else None

        now = self.take(layer, first) if first or not rest else more()
        after = None
        try:
            while now is not None:
                after = more() if self.room() else None
                self.order_after(now.wait)
                yield now.slots
                self.release(now)
                now, after = after or more(), None
        finally:
            for group in (now, after):
                if group is not None:
                    self.release(group)

    def lookup(self, layer: int) -> list[int]:
        self.is_read, self.published = True, dict(self.truth)
        base = layer * self.num_experts
        return [self.published.get(base + e, -1) for e in range(self.num_experts)]
