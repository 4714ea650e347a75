"""The cache against a model in plain Python, under a copier that is as late as the rules allow.

Case O02 (what is in flight or in use is never a victim).
Mutants that these tests catch, besides the faults below: no mark after an entry is withdrawn, no
publishing of it, a lookup's reads not marked or not asked for by hints, the oldest mark of a batch
taken, hints in flight not counted down, a group or step that is not marked, an expert placed twice,
no copies ahead, resident experts in use counted as in need of a slot, the earlier of two flights
waited for, a hint that pushes out what it asks for or what is published, sources in another order.
"""

from __future__ import annotations

import random

import pytest
import torch

from ftkernels import ExpertCache
from ftkernels.moe.expert_moves import ExpertMoves
from ftkernels.moe.expert_steps import Step
from ftkernels.moe.slot_map import READY, SlotMap
from ftkernels.testing.fake_copier import FakeCopier
from tests.support.cache_model import CacheModel, Kernels
from tests.support.numbered_banks import SLOT_BYTES, E, L, numbered_banks


def table(slots):
    return [slots.get(e, -1) for e in range(E)]


def outcome(groups):
    """The next item, None at the end, "stuck" without a slot for the next group."""
    try:
        return next(groups, None)
    except ValueError:
        return "stuck"


class Walk:
    """Random calls of the cache, each followed by the model's."""

    def __init__(self, num_slots, seed, *, in_rows=True, cache_class=ExpertCache):
        self.random = random.Random(seed)
        self.fake = FakeCopier()
        banks = numbered_banks(in_rows=in_rows)
        self.cache = cache_class(
            L, E, num_slots, banks, device="cpu", policy="lru", copier=self.fake
        )
        del self.fake.log[:-1]  # up to the mark that all slots start from: copies that were tried
        self.model = CacheModel(L, E, num_slots, self.fake)
        self.kernels = Kernels(self.cache, self.fake)
        self.step, self.running, self.live = None, None, []
        self.calls = 0
        self.expert_bytes = SLOT_BYTES if in_rows else 18

    def run(self, calls):
        ways = [self.ensure] * 4 + [self.groups] * 2 + [self.next_group] * 4 + [self.prefetch] * 3
        ways += [self.lookup, self.finish, self.toggle, self.toggle, self.fail, self.reread]
        while self.calls < calls:
            if self.random.choice(ways)() is False:
                continue
            self.model.settled()
            self.calls += 1
            if self.calls % 8 == 0:
                self.cache.check()
                self.compare()
        if self.step:
            self.toggle()
        self.cache.check()
        self.compare()

    def compare(self):
        got = self.cache.stats()
        for phase, expected in self.model.stats.items():
            copies = expected["copies"]
            for name in ("hits", "misses", "evictions", "prefetch_used", "prefetch_wasted"):
                assert got[phase][name] == expected[name], (phase, name)
            assert got[phase]["bytes_h2d"] == copies * self.expert_bytes

    def ids(self, most):
        experts = sorted(self.random.sample(range(E), self.random.randint(0, most)))
        given = experts + self.random.choices([*experts, -1], k=2)
        self.random.shuffle(given)
        return experts, torch.tensor([given], dtype=torch.int32)

    def use(self, layer, slots):
        for expert, slot in slots.items():
            self.kernels.read(layer * E + expert, slot)

    def toggle(self):
        if self.step is None:
            phase = self.random.choice(["decode", "prefill"])
            self.step = self.cache.step(phase)
            self.step.__enter__()
            self.model.begin(phase)
        else:
            self.step.__exit__(None, None, None)
            self.model.end()
            self.step, self.live = None, []
            self.running = None

    def fail(self):
        if self.step is None or self.random.random() < 0.7:
            return False
        assert not self.step.__exit__(KeyError, KeyError("a kernel"), None), "it goes on"
        self.model.end()
        self.step, self.live, self.running = None, [], None
        return True

    def ensure(self):
        if self.step is None:
            return False
        layer = self.random.randrange(L)
        experts, ids = self.ids(3)
        self.model.width = max(self.model.width, len(experts))
        needed, room = self.model.needed(layer, experts), self.model.room()
        if needed > room:
            before = self.cache.stats()
            with pytest.raises(ValueError, match=f"need {needed} slots, expected at most {room},"):
                self.cache.ensure(layer, ids)
            assert self.cache.stats() == before
            return True
        got = self.cache.ensure(layer, ids)
        slots = self.model.ensure(layer, experts)
        assert got.tolist() == table(slots)
        self.use(layer, slots)
        self.live.append((layer, slots))
        return True

    def groups(self):
        if self.step is None or self.running is not None or not self.model.room():
            return False
        layer = self.random.randrange(L)
        experts, ids = self.ids(E)
        self.model.width = max(self.model.width, len(experts))
        self.running = (
            layer, self.cache.groups(layer, ids), self.model.groups(layer, list(experts)),
            set(experts),
        )  # fmt: skip
        return True

    def next_group(self):
        if self.running is None:
            return False
        layer, real, model, left = self.running
        if self.random.random() < 0.1:
            real.close()
            model.close()
            self.running = None
            return True
        got = outcome(real)
        slots = outcome(model)
        if got is None or isinstance(got, str):
            assert got == slots
            assert got == "stuck" or not left
            self.running = None
            return True
        assert got.tolist() == table(slots)
        assert set(slots) <= left
        left -= set(slots)
        self.use(layer, slots)
        return True

    def prefetch(self):
        layer = self.random.randrange(L)
        experts = self.random.sample(range(E), self.random.randint(0, E))
        self.cache.prefetch(layer, experts)
        self.model.prefetch(layer, experts)

    def lookup(self):
        if self.random.random() < 0.7:
            return False
        layer = self.random.randrange(L)
        _, ids = self.ids(E)
        row, missing = self.cache.lookup(layer, ids)
        expected = self.model.lookup(layer)
        assert row.tolist() == expected
        assert missing.tolist() == [sum(e >= 0 and expected[e] < 0 for e in ids[0].tolist())]
        self.use(layer, {e: s for e, s in enumerate(expected) if s >= 0})
        return True

    def finish(self):
        self.fake.finish()

    def reread(self):
        """What a step holds stays what it is, whatever came in between."""
        if not self.live:
            return False
        self.use(*self.random.choice(self.live))
        return True


@pytest.mark.parametrize(("num_slots", "in_rows"), [(1, True), (4, False), (7, True), (18, True)])
def test_a_random_walk_does_what_the_model_does(num_slots, in_rows, lane):
    calls = 25_000 if lane == "reference" else 500
    Walk(num_slots, seed=num_slots, in_rows=in_rows).run(calls)


def drive(cache, fake, seed, steps):
    """Steps as an engine makes them; every slot that is handed out or published is read."""
    rng, kernels = random.Random(seed), Kernels(cache, fake)

    def read(layer, slots):
        for expert, slot in enumerate(slots.tolist()):
            if slot >= 0:
                kernels.read(layer * E + expert, slot)

    for _ in range(steps):
        with cache.step(rng.choice(["decode", "prefill"])):
            held = []
            for layer in range(L):
                ids = torch.tensor([rng.sample(range(E), 2)], dtype=torch.int32)
                if rng.random() < 0.2:
                    for row in range(L):
                        read(row, cache.lookup(row, ids)[0])
                cache.prefetch((layer + 1) % L, rng.sample(range(E), 2))
                if rng.random() < 0.5:
                    held.append((layer, cache.ensure(layer, ids)))
                    read(*held[-1])
                else:
                    for slots in cache.groups(layer, torch.arange(E)):
                        read(layer, slots)
                for earlier in held:
                    read(*earlier)
        if rng.random() < 0.3:
            fake.finish()
        cache.prefetch(rng.randrange(L), rng.sample(range(E), 2))


def driven(num_slots, seed, steps=60):
    fake = FakeCopier()
    cache = ExpertCache(L, E, num_slots, numbered_banks(), device="cpu", copier=fake)
    drive(cache, fake, seed, steps)
    cache.check()


@pytest.mark.parametrize("num_slots", [7, 10])
def test_steps_read_what_they_asked_for(num_slots, lane):
    for seed in range(5):
        driven(num_slots, seed, steps=60 if lane == "reference" else 5)


def no_wait(patch):
    def order(self, flight):
        while flight is not None and self._flights and self._flights[0].number <= flight.number:
            self._arrive(self._flights.popleft())

    patch.setattr(ExpertMoves, "order", order)


def after_nothing(patch):
    patch.setattr(ExpertMoves, "_after", lambda self, slots: None)


def slots_in_use_go(patch):
    patch.setattr(SlotMap, "_may_go", lambda self, key: self._state[self._slot_of[key]] == READY)


def entry_before_its_copy(patch):
    bring = ExpertMoves.bring

    def early(self, layer, experts, phase, **kwargs):
        flight = bring(self, layer, experts, phase, **kwargs)
        for slot in flight.slots if flight else ():
            self.table.enter(self.map._key_of[slot], slot)
        return flight

    patch.setattr(ExpertMoves, "bring", early)


def group_before_its_copies(patch):
    in_groups = Step.in_groups

    def early(self, layer, experts):
        groups, copier = in_groups(self, layer, experts), self._moves._copier
        while True:
            copier.wait = lambda event: None
            group = next(groups, None)
            del copier.wait
            if group is None:
                return
            yield group

    patch.setattr(Step, "in_groups", early)


FAULTS = (no_wait, after_nothing, slots_in_use_go, entry_before_its_copy, group_before_its_copies)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fake_copier_catches(fault, monkeypatch):
    fault(monkeypatch)
    for seed in range(5):
        with pytest.raises(AssertionError, match=r"does not come after|in slot"):
            driven(7, seed)
