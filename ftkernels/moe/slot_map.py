"""Which expert sits in which slot, and which slot another expert may have.

A slot is free, loading (its copy is issued, compute does not come after it yet) or ready. One that
is loading or held is no victim; `SlotPolicy` decides among the others. No tensors, no copies.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable
from typing import NamedTuple

from ftkernels.moe.slot_policy import SlotPolicy

FREE, LOADING, READY = 0, 1, 2


class Placed(NamedTuple):
    """A slot for a key; ``evicted`` left it, -1 if it was free, ``wasted`` as a hint unused."""

    slot: int
    evicted: int
    wasted: bool


class SlotMap:
    """Keys, integers below ``num_keys``, in ``num_slots`` slots."""

    def __init__(self, num_keys: int, num_slots: int, policy: SlotPolicy) -> None:
        self.num_slots = num_slots
        self.num_held = 0
        self._policy = policy
        self._slot_of = [-1] * num_keys
        self._key_of = [-1] * num_slots
        self._state = [FREE] * num_slots
        self._holders = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._hints: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def slot(self, key: int) -> int:
        """Where ``key`` sits, -1 when it is not resident."""
        return self._slot_of[key]

    def is_held(self, slot: int) -> bool:
        return self._holders[slot] > 0

    def touch(self, key: int, phase: str) -> bool:
        """A step uses the resident ``key``; True when this is the first use of a hint."""
        self._policy.touch(key, phase)
        if key not in self._hints:
            return False
        self._hints.remove(key)
        return True

    def hold(self, slot: int) -> None:
        """One more holder keeps what is in ``slot``."""
        self.num_held += not self._holders[slot]
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """One holder fewer."""
        self._holders[slot] -= 1
        self.num_held -= not self._holders[slot]

    def place(
        self, key: int, phase: str, *, hint: bool = False,
        spare: Callable[[int], bool] | None = None,
    ) -> Placed | None:  # fmt: skip
        """A slot for ``key``, which is not resident; it is loading from then on.

        Args:
            hint: no step has asked for it yet.
            spare: whether a resident key may go, besides what the map itself asks.

        Returns:
            None, and nothing changed, when no slot is free and no key may go.

        Raises:
            RuntimeError: the policy names another victim than a resident key that may go.
        """
        evicted, wasted = -1, False
        if not self._free:
            victim = self._victim(spare)
            if victim is None:
                return None
            evicted, wasted = victim, victim in self._hints
            self.drop(victim)
        slot = self._free.pop()
        self._slot_of[key], self._key_of[slot], self._state[slot] = slot, key, LOADING
        if hint:
            self._hints.add(key)
        try:
            self._policy.insert(key, phase, hint=hint)
        except BaseException:
            with contextlib.suppress(Exception):  # it may know the key or not
                self.drop(key)
            raise
        return Placed(slot, evicted, wasted)

    def ready(self, slot: int) -> int:
        """Compute comes after the copy into ``slot``, which is not free; returns its key."""
        if self._state[slot] == LOADING:
            self._state[slot] = READY
        return self._key_of[slot]

    def drop(self, key: int) -> None:
        """``key`` leaves its slot, which is free then."""
        slot = self._slot_of[key]
        self._slot_of[key], self._key_of[slot], self._state[slot] = -1, -1, FREE
        self._hints.discard(key)
        self._free.append(slot)
        self._policy.remove(key)

    def check(self) -> None:
        """Every slot is in one state, the two maps are inverse, the counts add up.

        Raises:
            AssertionError: one of them does not hold.
        """
        free = sorted(self._free)
        _require(free == [s for s, x in enumerate(self._state) if x == FREE], "the free slots")
        _require(all(self._key_of[s] < 0 for s in free), "the keys of free slots")
        full = {s: k for s, k in enumerate(self._key_of) if k >= 0}
        _require(len(full) + len(free) == self.num_slots, "free and full slots")
        _require(all(self._slot_of[k] == s for s, k in full.items()), "slots and keys")
        _require(sum(s >= 0 for s in self._slot_of) == len(full), "resident keys")
        held = [s for s, count in enumerate(self._holders) if count]
        _require(min(self._holders) >= 0 and len(held) == self.num_held, "the held slots")
        _require(all(s in full for s in held), "the keys of held slots")
        _require(all(self._slot_of[k] >= 0 for k in self._hints), "the hints")

    def loading(self) -> set[int]:
        """The slots whose copies compute does not come after yet."""
        return {slot for slot, state in enumerate(self._state) if state == LOADING}

    def holders(self) -> list[int]:
        """How many hold each slot."""
        return list(self._holders)

    def _victim(self, spare: Callable[[int], bool] | None) -> int | None:
        def usable(key: int) -> bool:
            return self._may_go(key) and (spare is None or spare(key))

        victim = self._policy.victim(usable)
        if victim is None or (type(victim) is int and usable(victim)):
            return victim
        raise RuntimeError(
            f"ExpertCache: policy gave {reprlib.repr(victim)} as a victim, "
            "expected a resident expert that may go"
        )

    def _may_go(self, key: int) -> bool:
        slot = self._slot_of[key] if 0 <= key < len(self._slot_of) else -1
        return slot >= 0 and not self._holders[slot] and self._state[slot] == READY


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"SlotMap: {what} do not add up")
