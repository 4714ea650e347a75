"""Experts on their way into slots: copies in order, and who was where when a kernel read it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ftkernels.moe.copier import Copier, Marks
from ftkernels.moe.expert_pool import ExpertPool
from ftkernels.moe.slot_map import Placed, SlotMap
from ftkernels.moe.slot_table import SlotTable

COUNTS = ("hits", "misses", "bytes_h2d", "prefetch_used", "prefetch_wasted", "evictions")
PHASES = ("decode", "prefill")


@dataclass(eq=False)
class Flight:
    """Copies issued together, which compute does not come after yet."""

    number: int
    event: Any
    slots: list[int]
    num_hints: int


class ExpertMoves:
    """Brings experts into the slots that the map gives, and counts.

    A copy into a slot comes after the mark of its last use, and where the device's table names what
    was in it, after the table is mended.
    """

    def __init__(
        self, slot_map: SlotMap, pool: ExpertPool, table: SlotTable, copier: Copier[Any],
        num_experts: int,
    ) -> None:  # fmt: skip
        self.map, self.pool, self.table, self._copier = slot_map, pool, table, copier
        self._num_experts = num_experts
        self.marks: Marks[Any] = Marks(copier)
        # the memory of the slots may have had other readers before
        self._last_use = [self.marks.take()] * slot_map.num_slots
        self._last_read_of_table = 0
        # slots whose reads have no mark yet, and those that the device's table may name wrongly
        self._unmarked: set[int] = set()
        self._withdrawn: set[int] = set()
        self._flights: deque[Flight] = deque()
        self._flight_of: dict[int, Flight] = {}
        self._num_flights = 0
        self._last_copy: Any = None  # its event: that of all copies
        self.hints_in_flight = 0
        self.counts = {phase: dict.fromkeys(COUNTS, 0) for phase in PHASES}
        self.layer_counts = [{"hits": 0, "misses": 0} for _ in pool.num_bytes]

    def count(self, layer: int, phase: str, hits: int, misses: int) -> None:
        for counts in (self.counts[phase], self.layer_counts[layer]):
            counts["hits"] += hits
            counts["misses"] += misses

    def use(self, key: int, phase: str) -> tuple[int, Flight | None]:
        """A step uses a resident key: its slot, and the flight it is still in."""
        if self.map.touch(key, phase):
            self.counts[phase]["prefetch_used"] += 1
        slot = self.map.slot(key)
        return slot, self._flight_of.get(slot)

    def bring(
        self, layer: int, experts: Sequence[int], phase: str, *, hint: bool = False,
        spare: Callable[[int], bool] | None = None,
    ) -> Flight | None:  # fmt: skip
        """Copy experts that are not resident into slots, all by one call of the copier.

        Args:
            hint: as many as find a slot; otherwise all find one, hints in flight giving way.
            spare: whether a resident key may go.

        Returns:
            The flight, None when nothing is copied.
        """
        base, moves = layer * self._num_experts, []
        try:
            for expert in experts:
                placed = self._place(base + expert, phase, hint, spare)
                if placed is None:
                    break
                moves.append((expert, placed.slot))
            if not moves:
                return None
            slots = [slot for _, slot in moves]
            after = self._after(slots)
            event = self._copier.copy(*self.pool.copies(layer, moves), after)
        except BaseException:
            self._take_back(base + expert for expert in experts)
            raise
        self._last_copy = event
        self.counts[phase]["bytes_h2d"] += len(moves) * self.pool.num_bytes[layer]
        self._num_flights += 1
        flight = Flight(self._num_flights, event, slots, len(moves) if hint else 0)
        self._flights.append(flight)
        self._flight_of.update(dict.fromkeys(slots, flight))
        self.hints_in_flight += flight.num_hints
        return flight

    def _place(
        self, key: int, phase: str, hint: bool, spare: Callable[[int], bool] | None
    ) -> Placed | None:
        """A slot for a key; for a step there is one, once flights have given way."""
        placed = self.map.place(key, phase, hint=hint, spare=spare)
        while placed is None and not hint:
            if not self._flights:
                raise RuntimeError(
                    "ExpertCache: policy gave None as a victim, "
                    "expected a resident expert that may go"
                )
            self.order(self._flights[0])
            placed = self.map.place(key, phase)
        if placed is not None and placed.evicted >= 0:
            self.counts[phase]["evictions"] += 1
            self.counts[phase]["prefetch_wasted"] += placed.wasted
            self._withdraw(placed.evicted, placed.slot)
        return placed

    def _withdraw(self, key: int, slot: int) -> None:
        if self.table.withdraw(key):
            self._withdrawn.add(slot)

    def _take_back(self, keys: Iterable[int]) -> None:
        """None of these is on its way after all, whatever the policy says to that."""
        for key in keys:
            slot = self.map.slot(key)
            if slot >= 0 and slot not in self._flight_of:
                with contextlib.suppress(Exception):
                    self.map.drop(key)
        for key, slot in self.table.entries().items():
            if self.map.slot(key) < 0:  # evicted by a call that failed before it said so
                self._withdraw(key, slot)

    def _after(self, slots: Sequence[int]) -> Any:
        """What a copy into these slots has to come after."""
        if self._withdrawn:
            self.table.publish()
            self._unmarked |= self._withdrawn
            self._withdrawn.clear()
        if self._unmarked:
            self._mark()
        return self.marks.event(max(self._last_use[slot] for slot in slots))

    def order(self, flight: Flight | None) -> None:
        """Compute comes after the flight, and so after those before it."""
        if flight is None or self._flight_of.get(flight.slots[0]) is not flight:
            return
        self._copier.wait(flight.event)
        while self._flights and self._flights[0].number <= flight.number:
            self._arrive(self._flights.popleft())

    def land(self) -> None:
        """See which flights have ended; compute issued from now on comes after them anyway."""
        while self._flights and self._flights[0].event.done():
            self._arrive(self._flights.popleft())

    def _arrive(self, flight: Flight) -> None:
        self.hints_in_flight -= flight.num_hints
        for slot in flight.slots:
            del self._flight_of[slot]
            self.table.enter(self.map.ready(slot), slot)

    def used(self, slots: Sequence[int]) -> None:
        """Kernels that are issued by now read these slots, and those that the table names."""
        self._unmarked.update(slots)
        if not self._unmarked and not self.table.is_read:
            return
        mark = self._mark()
        if self.table.is_read:
            self._last_read_of_table = mark

    def _mark(self) -> int:
        mark = self.marks.take()
        for slot in self._unmarked:
            self._last_use[slot] = mark
        self._unmarked.clear()
        return mark

    def is_idle(self, key: int) -> bool:
        """Whether the kernels that read the resident key are known to have run."""
        slot = self.map.slot(key)
        if slot in self._unmarked:
            return False
        last = self._last_use[slot]
        if self.table.is_read and self.table.is_published(key):
            last = max(last, self._last_read_of_table)
        return self.marks.is_passed(last)

    def check(self) -> None:
        """Flights, hints and the table agree with the map.

        Raises:
            AssertionError: they do not.
        """
        self.map.check()
        in_flight = [slot for flight in self._flights for slot in flight.slots]
        entries = self.table.entries()
        for holds, what in (
            (self.map.loading() == set(in_flight) == self._flight_of.keys(), "slots in flight"),
            (len(in_flight) == len(self._flight_of), "flights"),
            (self.hints_in_flight == sum(f.num_hints for f in self._flights), "hints in flight"),
            (entries == {key: self.map.slot(key) for key in entries}, "entries of the table"),
            (not self._flight_of.keys() & set(entries.values()), "entries in flight"),
        ):
            if not holds:
                raise AssertionError(f"ExpertCache: {what} do not add up")

    def close(self) -> None:
        """Wait on the host until no copy reads a bank any more, and let go of the memory."""
        if self._last_copy is not None:
            self._copier.wait(self._last_copy)
            while not self._last_copy.done():
                time.sleep(1e-4)
            self._last_copy = None
        self.pool.close()
