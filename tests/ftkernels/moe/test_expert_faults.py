"""The cache when a copier or a policy fails, and policies that give what is no victim.

Case O02 (what is in flight or in use is never a victim).
Mutants that these tests catch: keys of a failed call left in their slots, or only after errors that
are no interrupt; entries of the table left behind by one; slots that lost an entry, or whose mark
failed, overwritten without a mark, forgotten by the next mark, or given to hints; a victim that is
not asked about, True for key 1, keys below 0, past the last or not resident that may go.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ftkernels import ExpertCache
from ftkernels.moe.slot_policy import Lru
from ftkernels.testing.fake_copier import FakeCopier
from tests.support.cache_model import Kernels
from tests.support.numbered_banks import E, L, numbered_banks

COPIER, POLICY = ("copy", "wait", "mark"), ("begin", "insert", "touch", "remove", "victim")


class Broken(BaseException):
    """As an interrupt from the keyboard, no ``Exception``."""


class Faults:
    """Raises at the given call of one method, before or after it has done its work."""

    def __init__(self, given, method, late):
        self.left, self.fired = None, False
        work = getattr(given, method)

        def called(*args, **kwargs):
            if self.left is not None:
                self.left -= 1
            fails = self.left == 0
            if fails and not late:
                self.fired = True
                raise Broken
            result = work(*args, **kwargs)
            if fails:
                self.fired = True
                raise Broken
            return result

        setattr(given, method, called)


def ids(*experts):
    return torch.tensor([experts], dtype=torch.int32)


def use(cache, kernels, fake, *, lookups):
    """Two steps with all calls; every slot that is handed out or published is read."""

    def read(layer, slots):
        for expert, slot in enumerate(slots.tolist()):
            if slot >= 0:
                kernels.read(layer * E + expert, slot)

    for phase in ("prefill", "decode"):
        cache.prefetch(0, [5])
        with cache.step(phase):
            read(1, cache.ensure(1, ids(0, 1)))
            cache.prefetch(2, [0, 1, 2, 3])
            for layer in range(L) if lookups else ():
                read(layer, cache.lookup(layer, ids(0))[0])
            for layer in (0, 2):
                for slots in cache.groups(layer, torch.arange(E)):
                    read(layer, slots)
                    cache.prefetch(0, [4])
        fake.finish()


@pytest.mark.parametrize("lookups", [False, True], ids=["eager", "lookups"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", [*COPIER, *POLICY])
def test_a_call_that_fails_leaves_a_cache_that_works(method, late, lookups, lane):
    few = (1, 4, 9)
    for number in itertools.count(1) if lane == "reference" else few:
        fake, policy = FakeCopier(), Lru()
        cache = ExpertCache(L, E, 4, numbered_banks(), device="cpu", policy=policy, copier=fake)
        kernels = Kernels(cache, fake)
        use(cache, kernels, fake, lookups=lookups)
        faults = Faults(fake if method in COPIER else policy, method, late)
        faults.left = number
        try:
            use(cache, kernels, fake, lookups=lookups)
        except Broken:
            cache.check()
        assert faults.fired or number > 1
        if not faults.fired:
            break
        use(cache, kernels, fake, lookups=lookups)
        cache.check()


def test_hints_leave_alone_what_a_failed_mark_says_nothing_of():
    fake = FakeCopier()
    cache = ExpertCache(L, E, 2, numbered_banks(), device="cpu", copier=fake)
    faults, step = Faults(fake, "mark", late=False), cache.step("decode")
    step.__enter__()
    cache.ensure(0, ids(0, 1))
    faults.left = 1
    with pytest.raises(Broken):
        step.__exit__(None, None, None)
    fake.finish()
    before = cache.stats()
    cache.prefetch(1, [0])
    assert cache.stats() == before
    with cache.step("decode"):
        cache.ensure(0, ids(0))
    fake.finish()
    cache.prefetch(1, [0])
    assert cache.stats() != before
    cache.check()


class Stubborn(Lru):
    """Gives what it is told to as a victim, whatever may go."""

    gives = ()

    def victim(self, usable):
        return self.gives[0] if self.gives else super().victim(usable)


@pytest.mark.parametrize("given", [99, -1, True, 1.0, "1", 17, 0, 6, None], ids=repr)
def test_what_is_no_victim_is_refused(given):
    """Keys 0 and 2 are in use, 6 in flight, 1 may go, 17 is not resident."""
    policy, fake = Stubborn(), FakeCopier()
    cache = ExpertCache(L, E, 4, numbered_banks(), device="cpu", policy=policy, copier=fake)
    with cache.step("decode"):
        cache.ensure(0, ids(1))
        fake.finish()
    with cache.step("decode"):
        cache.ensure(0, ids(0, 2))
        cache.prefetch(1, [0])
        policy.gives = (given,)
        text = rf"^ExpertCache: policy gave {given!r} as a victim, expected a resident expert that"
        with pytest.raises(RuntimeError, match=text):
            cache.ensure(2, ids(3))
        cache.check()
        policy.gives = ()
        cache.ensure(2, ids(3))
        cache.check()
    kernels = Kernels(cache, fake)
    use(cache, kernels, fake, lookups=True)
