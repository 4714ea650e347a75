"""The slots that a step holds, all at once or in groups."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from ftkernels import check
from ftkernels.moe.expert_moves import ExpertMoves, Flight


@dataclass(eq=False)
class Group:
    """Experts of a layer that are handed out together, and the slots held for them."""

    experts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    flight: Flight | None = None  # the last one that compute has to come after


class Step:
    """What is in use until the step's kernels have run."""

    def __init__(self, moves: ExpertMoves, phase: str, num_experts: int) -> None:
        self.phase = phase
        self.width = 0  # most experts of one call
        self._moves, self._map, self._num_experts = moves, moves.map, num_experts
        self._groups: list[Group] = []
        self._is_over = False

    def all_at_once(self, layer: int, experts: list[int]) -> Group:
        """Hold slots for all of these until the step's end; nothing changes when they do not fit.

        Raises:
            ValueError: they do not.
        """
        hits, misses = self._split(layer, experts)
        needed, room = self._num_new(layer, hits) + len(misses), self._room()
        check.require(
            needed <= room,
            lambda: (
                f"ExpertCache.ensure: topk_ids is {len(experts)} experts that need {needed} slots, "
                f"expected at most {room}, those that earlier calls of the step do not use; "
                "`groups` takes fewer at a time, or give the cache more slots"
            ),
        )
        group = self._take(layer, hits, misses)
        self._moves.order(group.flight)
        return group

    def in_groups(self, layer: int, experts: list[int]) -> Generator[Group, None, None]:
        """Hold slots for one group at a time, and for the next while its copies run."""
        self._require_open()
        hits, rest = self._split(layer, experts)
        room = self._room()
        size, coming = max(1, -(-room // 2)), None
        present: Group | None
        if self._num_new(layer, hits) + len(rest) <= room:
            present, rest = self._take(layer, hits, rest), []
        elif hits:
            present = self._take(layer, hits, [])
        else:
            present = self._take_some(layer, rest, size)
        try:
            while present is not None:
                if self._room():
                    coming = self._take_some(layer, rest, size)
                self._moves.order(present.flight)
                yield present
                self._require_open()
                self._release(present)
                present, coming = coming or self._take_some(layer, rest, size), None
        finally:
            for group in (present, coming):
                if group is not None:
                    self._release(group)

    def end(self) -> None:
        """All kernels of the step are issued, or it failed."""
        self._is_over = True
        held = [slot for group in self._groups for slot in group.slots]
        self._groups.clear()
        for slot in held:
            self._map.release(slot)
        self._moves.used(held)

    def holders(self) -> list[int]:
        """How many groups hold each slot."""
        counts = [0] * self._map.num_slots
        for group in self._groups:
            for slot in group.slots:
                counts[slot] += 1
        return counts

    def _require_open(self) -> None:
        if self._is_over:
            raise RuntimeError(
                "ExpertCache.groups: the step has ended, expected the iterator's use within it"
            )

    def _take(self, layer: int, hits: list[int], misses: list[int]) -> Group:
        """Hold slots for experts that are resident and for others, whose copies are issued."""
        base, phase, moves = layer * self._num_experts, self.phase, self._moves
        group = Group()
        self._groups.append(group)
        for expert in hits:
            slot, flight = moves.use(base + expert, phase)
            self._hold(group, expert, slot)
            if flight is not None and (group.flight is None or flight.number > group.flight.number):
                group.flight = flight
        if misses:
            group.flight = moves.bring(layer, misses, phase)
            for expert in misses:
                self._hold(group, expert, self._map.slot(base + expert))
        moves.count(layer, phase, len(hits), len(misses))
        return group

    def _take_some(self, layer: int, rest: list[int], size: int) -> Group | None:
        """The next ``size`` of ``rest`` at most, which they leave; None when it is empty."""
        if not rest:
            return None
        room = self._room()
        check.require(
            room > 0,
            lambda: (
                f"ExpertCache.groups: topk_ids is {len(rest)} experts without a slot, expected one "
                "slot at least that earlier calls of the step do not use"
            ),
        )
        some = rest[: min(size, room)]
        del rest[: len(some)]
        # a hint may have brought one of them since
        return self._take(layer, *self._split(layer, some))

    def _hold(self, group: Group, expert: int, slot: int) -> None:
        self._map.hold(slot)
        group.experts.append(expert)
        group.slots.append(slot)

    def _release(self, group: Group) -> None:
        """The kernels that read the group are issued; nothing once the step has ended."""
        if group not in self._groups:
            return
        self._groups.remove(group)
        for slot in group.slots:
            self._map.release(slot)
        self._moves.used(group.slots)

    def _room(self) -> int:
        return self._map.num_slots - self._map.num_held

    def _num_new(self, layer: int, hits: list[int]) -> int:
        """How many resident experts are not in use yet."""
        base = layer * self._num_experts
        return sum(not self._map.is_held(self._map.slot(base + e)) for e in hits)

    def _split(self, layer: int, experts: list[int]) -> tuple[list[int], list[int]]:
        """Resident experts and the others."""
        base, slot = layer * self._num_experts, self._map.slot
        hits = [e for e in experts if slot(base + e) >= 0]
        if len(hits) == len(experts):
            return hits, []
        return hits, [e for e in experts if slot(base + e) < 0]
