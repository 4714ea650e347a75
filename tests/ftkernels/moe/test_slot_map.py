"""Which slots are given to whom; a random walk against lists in which slots are searched.

Mutants that these tests catch: a held key that goes, a loading key that goes, a hint that stays one
after its use, a wasted hint taken for a used one, one holder that releases for all, a dropped key
whose slot is lost, an insert that the policy is not told of, `spare` not asked, a key left in its
slot by an insert that failed.
"""

from __future__ import annotations

import random

import pytest

from ftkernels.moe.slot_map import SlotMap
from ftkernels.moe.slot_policy import Lru


class Log(Lru):
    """An LRU that keeps what it was told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def insert(self, key, phase, *, hint):
        self.told.append(("insert", key, phase, hint))
        super().insert(key, phase, hint=hint)

    def touch(self, key, phase):
        self.told.append(("touch", key, phase))
        super().touch(key, phase)

    def remove(self, key):
        self.told.append(("remove", key))
        super().remove(key)


def placed(slots, *keys, phase="decode", **kwargs):
    for key in keys:
        slots.ready(slots.place(key, phase, **kwargs).slot)


def test_free_slots_first_then_the_policys_victim():
    policy = Log()
    slots = SlotMap(9, 2, policy)
    assert slots.place(4, "decode") == (0, -1, False)
    assert slots.place(7, "prefill", hint=True) == (1, -1, False)
    assert slots.place(8, "decode") is None, "both are loading"
    assert (slots.ready(0), slots.ready(1)) == (4, 7)
    assert not slots.touch(4, "decode")
    assert slots.place(8, "decode") == (1, 7, True)
    assert [slots.slot(key) for key in (4, 7, 8)] == [0, -1, 1]
    assert policy.told == [
        ("insert", 4, "decode", False), ("insert", 7, "prefill", True), ("touch", 4, "decode"),
        ("remove", 7), ("insert", 8, "decode", False),
    ]  # fmt: skip
    slots.check()


def test_a_hint_is_used_once():
    slots = SlotMap(9, 2, Lru())
    placed(slots, 3, hint=True)
    assert slots.touch(3, "decode")
    assert not slots.touch(3, "decode")
    placed(slots, 4)
    assert slots.place(5, "decode") == (0, 3, False), "not wasted"


def test_held_slots_stay_until_the_last_holder():
    slots = SlotMap(9, 2, Lru())
    placed(slots, 1, 2)
    for slot in (0, 0, 1):
        slots.hold(slot)
    assert slots.num_held == 2
    slots.release(0)
    assert slots.place(3, "decode") is None
    assert slots.is_held(0)
    slots.release(0)
    assert not slots.is_held(0)
    assert slots.num_held == 1
    assert slots.place(3, "decode") == (0, 1, False)
    assert slots.holders() == [0, 1]


def test_spare_is_asked_of_those_that_may_go():
    slots, asked = SlotMap(9, 3, Lru()), []
    placed(slots, 1, 2, 3)
    slots.hold(0)

    def spare(key):
        asked.append(key)
        return key != 2

    assert slots.place(4, "decode", spare=spare).evicted == 3
    assert asked == [2, 3, 3], "the victim once more"
    assert slots.place(5, "decode", spare=lambda key: False) is None


@pytest.mark.parametrize("method", ["insert", "remove", "victim"])
@pytest.mark.parametrize("late", [False, True])
def test_a_policy_that_fails_leaves_a_sound_map(method, late, monkeypatch):
    policy = Lru()
    slots = SlotMap(9, 2, policy)
    placed(slots, 1, 2)

    def fail(*args, **kwargs):
        if late:
            getattr(Lru, method)(policy, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(policy, method, fail)
        with pytest.raises(KeyboardInterrupt):
            slots.place(3, "decode", hint=True)
    slots.check()
    assert slots.slot(3) == -1
    assert slots.slot(1) == (0 if method == "victim" else -1), "the slot is free or as it was"
    assert slots.slot(2) == 1


def test_a_dropped_key_leaves_a_free_slot():
    slots = SlotMap(9, 2, Lru())
    placed(slots, 1, 2)
    slots.drop(1)
    slots.check()
    assert slots.slot(1) == -1
    assert slots.place(5, "decode") == (0, -1, False)
    assert slots.loading() == {0}
    assert slots.ready(1) == 2, "ready already"
    slots.check()


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_a_random_walk(num_slots):
    rng, num_keys = random.Random(num_slots), 12
    slots = SlotMap(num_keys, num_slots, Lru())
    content, loading, holds, order = [None] * num_slots, set(), [], []
    for _ in range(6000):
        key = rng.randrange(num_keys)
        way = rng.choice(["use", "use", "ready", "release", "drop"])
        if way == "use" and key in content:
            slots.touch(key, "decode")
            order.remove(key)
            order.append(key)
            slots.hold(content.index(key))
            holds.append(content.index(key))
        elif way == "use":
            may_go = [k for k in order if content.index(k) not in {*holds, *loading}]
            got = slots.place(key, "decode")
            if None not in content and not may_go:
                assert got is None
                continue
            if None not in content:
                assert got.evicted == may_go[0]
                assert content[got.slot] == may_go[0]
                order.remove(may_go[0])
            else:
                assert content[got.slot] is None
            content[got.slot] = key
            loading.add(got.slot)
            order.append(key)
        elif way == "ready" and loading:
            slot = loading.pop()
            assert slots.ready(slot) == content[slot]
        elif way == "release" and holds:
            slots.release(holds.pop(rng.randrange(len(holds))))
        elif way == "drop" and key in content and rng.random() < 0.2:
            slot = content.index(key)
            if slot not in holds:
                slots.drop(key)
                content[slot] = None
                loading.discard(slot)
                order.remove(key)
        slots.check()
        assert slots.loading() == loading
        assert slots.holders() == [holds.count(slot) for slot in range(num_slots)]
        assert slots.num_held == len(set(holds))
        for k in range(num_keys):
            assert slots.slot(k) == (content.index(k) if k in content else -1)


@pytest.mark.parametrize(
    ("what", "breaks"),
    [
        ("the free slots", lambda m: m._free.append(0)),
        ("the free slots", lambda m: m._state.__setitem__(0, 0)),
        ("the keys of free slots", lambda m: m._key_of.__setitem__(2, 5)),
        ("free and full slots", lambda m: m._key_of.__setitem__(1, -1)),
        ("slots and keys", lambda m: m._slot_of.__setitem__(1, 1)),
        ("resident keys", lambda m: m._slot_of.__setitem__(7, 2)),
        ("the held slots", lambda m: m.release(1)),
        ("the held slots", lambda m: setattr(m, "num_held", 2)),
        ("the keys of held slots", lambda m: m.hold(2)),
        ("the hints", lambda m: m._hints.add(7)),
    ],
)
def test_check_says_what_is_wrong(what, breaks):
    slots = SlotMap(9, 3, Lru())
    placed(slots, 1, 2)
    slots.hold(0)
    slots.check()
    breaks(slots)
    with pytest.raises(AssertionError, match=f"SlotMap: {what} do not add up"):
        slots.check()
