"""Replacement policies against their definitions, recomputed from all that happened.

Mutants tried: a prefill use counted as a use; counts lost with the slot; a hint's use not counted;
a prefill step that ages counts; the most used key first; streamed keys after ranked ones, newest
first, without bound; hints that do not go stale, stale after one step, or without bound; keys of
the present step kept until all others are gone; a heap entry not mended, or its mark left behind
when it is dropped, or two for a key; unusable keys lost from the heap; the worst, the best or the
shortest good half-life chosen; squares that do not age; norms of the step's end; all layers
watched; the verdict not faded; LRU by insertion.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ftkernels.moe import slot_policy
from ftkernels.moe.slot_policy import make_policy

SHIPPED = "scan-resistant"
LAYERS, EXPERTS, SLOTS = 5, 4, 9
KEYS = LAYERS * EXPERTS


class NaiveLru:
    def __init__(self):
        self.last, self.now = {}, 0

    def begin(self, phase):
        pass

    def use(self, key, phase, hint):
        self.now += 1
        self.last[key] = self.now

    def remove(self, key):
        del self.last[key]

    def victims(self, usable):
        """The keys that may be named: several where they are equally wanted."""
        return sorted((k for k in self.last if usable(k)), key=self.last.get)[:1]


class NaiveScanResistant:
    """Every count is a sum over all uses so far; every queue is a list."""

    def __init__(self, layers, experts, slots):
        self.experts = experts
        self.bounds = {"streamed": min(2 * experts, slots // 2), "hinted": min(experts, slots // 4)}
        self.places = {"streamed": [], "ranked": [], "hinted": []}
        self.hinted_at, self.steps = {}, 0
        self.uses = []  # (decode step, key)
        self.ages = [0.0]  # ages[d]: half-lives that decode step d adds
        self.cosines = []  # of each decode step, one for each half-life

    def count(self, key):
        return sum(2.0 ** -sum(self.ages[d + 1 :]) for d, k in self.uses if k == key)

    def begin(self, phase):
        self.steps += 1
        if phase == "decode":
            self.ages.append(1 / self.half_life())
        for key in [k for k in self.places["hinted"] if self.hinted_at[k] < self.steps - 1]:
            self.move(key, "streamed")

    def half_life(self):
        """Of the step after ``ages``: by the faded sums of the cosines of the steps before."""
        now, scores = len(self.ages), []
        for h in slot_policy.HALF_LIVES:
            scores.append(sum(self.cosine(d, h) * 0.98 ** (now - d) for d in range(1, now)))
        least = 0.95 * max(scores) - 1e-12
        return max(h for h, x in zip(slot_policy.HALF_LIVES, scores, strict=True) if x >= least)

    def cosine(self, step, half_life):
        watched = [(d, k) for d, k in self.uses if k // self.experts % 4 == 0]
        norm2 = sum(
            sum(2.0 ** ((d - step) / half_life) for d, k in watched if k == key and d < step) ** 2
            for key in range(KEYS)
        )
        dot = 0.0
        for i, (d, key) in enumerate(watched):
            if d == step:
                dot += sum(2.0 ** ((e - step) / half_life) for e, k in watched[:i] if k == key)
        return dot / (math.sqrt(norm2) or 1.0)

    def move(self, key, place):
        for keys in self.places.values():
            if key in keys:
                keys.remove(key)
        self.places[place].append(key)
        if len(self.places[place]) > self.bounds.get(place, KEYS):
            self.move(self.places[place][0], {"hinted": "streamed", "streamed": "ranked"}[place])

    def use(self, key, phase, hint):
        resident = [place for place, keys in self.places.items() if key in keys]
        if hint:
            self.hinted_at[key] = self.steps
            self.move(key, "hinted")
        elif phase == "decode":
            self.uses.append((len(self.ages) - 1, key))
            if resident != ["ranked"]:
                self.move(key, "ranked")
        elif resident in ([], ["hinted"]):
            self.move(key, "streamed")

    def remove(self, key):
        for keys in self.places.values():
            if key in keys:
                keys.remove(key)

    def victims(self, usable):
        for place, keys in self.places.items():
            found = [k for k in keys if usable(k)]
            if found and place == "ranked":
                least = min(self.count(k) for k in found)
                return [k for k in found if self.count(k) <= least * (1 + 1e-9)]
            if found:
                return found[:1]
        return []


def naive(name):
    return NaiveLru() if name == "lru" else NaiveScanResistant(LAYERS, EXPERTS, SLOTS)


def build(name, layers=LAYERS, experts=EXPERTS, slots=SLOTS):
    return make_policy(name, num_layers=layers, num_experts=experts, num_slots=slots)


class Cache:
    """A policy with a number of slots, and no more of a cache."""

    def __init__(self, policy, num_slots):
        self.policy, self.num_slots, self.resident, self.phase = policy, num_slots, set(), "decode"
        self.asked = self.evicted = 0

    def begin(self, phase):
        self.phase = phase
        self.policy.begin(phase)

    def use(self, key, in_use=(), hint=False):
        """Whether it was a hit; keys ``in_use`` stay."""
        if key in self.resident:
            if not hint:
                self.policy.touch(key, self.phase)
            return True
        if len(self.resident) == self.num_slots:
            self.evict(in_use)
        self.resident.add(key)
        self.policy.insert(key, self.phase, hint=hint)
        return False

    def evict(self, in_use):
        def usable(key):
            self.asked += 1
            return key not in in_use

        victim = self.policy.victim(usable)
        self.policy.remove(victim)
        self.resident.remove(victim)
        self.evicted += 1

    def step(self, phase, keys):
        self.begin(phase)
        return [self.use(key) for key in keys]

    def sweep(self, layers, experts):
        """A prefill over all experts; a layer's are in use until the next one's have slots."""
        self.begin("prefill")
        hits, before = 0, set()
        for layer in range(layers):
            keys = range(layer * experts, (layer + 1) * experts)
            present = [k for k in keys if k in self.resident]
            for key in (*present, *(k for k in keys if k not in set(present))):
                hits += self.use(key, {*keys, *before})
            before = set(keys)
        return hits


OPS = st.lists(
    st.tuples(
        st.sampled_from(["decode", "prefill", "hint", "use", "use", "use", "evict", "remove"]),
        st.integers(0, KEYS - 1), st.integers(0, 2**KEYS - 1),
    ),
    min_size=60, max_size=160,
)  # fmt: skip


@pytest.mark.parametrize("name", ["lru", SHIPPED])
@settings(max_examples=60, deadline=None, phases=(Phase.reuse, Phase.generate))  # shrinks slowly
@given(ops=OPS)
def test_is_its_definition(name, ops):
    policy, model = build(name), naive(name)
    resident, phase = set(), "decode"
    for one in (policy, model):
        one.begin(phase)

    def evict(usable):
        expected, victim = model.victims(usable), policy.victim(usable)
        assert victim in expected if expected else victim is None
        if victim is not None:
            remove(victim)

    def remove(key):
        policy.remove(key)
        model.remove(key)
        resident.remove(key)

    for op, key, unusable in ops:
        if op in ("decode", "prefill"):
            phase = op
            policy.begin(op)
            model.begin(op)
        elif op == "evict":
            evict(lambda k, unusable=unusable: not unusable >> k & 1)
        elif op == "remove" and key in resident:
            remove(key)
        elif op == "use" and key in resident:
            policy.touch(key, phase)
            model.use(key, phase, False)
        elif op in ("use", "hint") and key not in resident:
            if len(resident) == SLOTS:
                evict(lambda k: True)
            resident.add(key)
            policy.insert(key, phase, hint=op == "hint")
            model.use(key, phase, op == "hint")
    while resident:
        evict(lambda k: True)
    assert policy.victim(lambda k: True) is None


def warm(cache, hot, steps=20):
    for _ in range(steps):
        cache.step("decode", hot)


def test_sweeps_leave_the_hot_experts():
    """64 hot experts in 100 slots, a sweep with two layers of 8 in use: 36 slots are enough."""
    hot = {5 * i for i in range(64)}
    lru, cache = Cache(build("lru", 40, 8, 100), 100), Cache(build(SHIPPED, 40, 8, 100), 100)
    for each in (lru, cache):
        warm(each, hot)
        for _ in range(3):
            each.sweep(40, 8)
    assert hot <= cache.resident
    assert lru.resident == set(range(220, 320))  # what the sweep used last


@pytest.mark.parametrize("decoded", [False, True])
def test_a_sweep_reads_in_place_what_the_last_one_left(decoded):
    """Of 320 experts 100 have slots; at most 2 layers of 8 and the streamed half pass through."""
    cache = Cache(build(SHIPPED, 40, 8, 100), 100)
    if decoded:
        warm(cache, range(0, 320, 4))
    cache.sweep(40, 8)
    assert [cache.sweep(40, 8) >= 80 for _ in range(3)] == [True] * 3
    lru = Cache(build("lru", 40, 8, 100), 100)
    lru.sweep(40, 8)
    assert lru.sweep(40, 8) == 0


def test_frequency_decides_and_fades():
    cache = Cache(build(SHIPPED, slots=3), 3)
    warm(cache, [0], 12)
    cache.step("decode", [1])
    cache.step("decode", [2])
    cache.step("decode", [3])
    assert 0 in cache.resident  # twelve uses ago, but twelve uses
    assert 1 not in cache.resident
    for step in range(20 * 16):  # twenty of the shortest half-lives
        cache.step("decode", [4 + step % 12])
    assert 0 not in cache.resident


def test_an_evicted_expert_keeps_its_count():
    cache = Cache(build(SHIPPED, slots=2), 2)
    warm(cache, [0], 8)
    cache.policy.remove(0)
    cache.resident.remove(0)
    cache.step("decode", [1, 0])
    cache.step("decode", [1])
    cache.step("decode", [2])
    assert 0 in cache.resident  # used 9 times against 2


def test_hints_wait_for_their_step_and_then_go_first():
    cache = Cache(build(SHIPPED, slots=8), 8)
    warm(cache, range(6))
    cache.use(10, hint=True)
    cache.use(11, hint=True)
    cache.step("decode", [12, 11])  # takes a slot from the others
    assert {10, 11, 12} <= cache.resident
    cache.step("decode", [13])
    assert 10 not in cache.resident  # its step is over
    assert 11 in cache.resident  # used


def test_a_flood_of_hints_leaves_the_hot_experts():
    cache = Cache(build(SHIPPED, 10, 40, 100), 100)
    warm(cache, range(60))
    for key in range(60, 400):
        cache.use(key, hint=True)
    assert set(range(60)) <= cache.resident


def test_the_half_life_follows_the_favourites():
    policy = build(SHIPPED, 1, 64, 64)
    cache = Cache(policy, 64)
    # which of a fixed set, changing from step to step; then a set that moves on every 12 steps
    for step in range(400):
        cache.step("decode", [(5 * step + 7 * i * i) % 20 for i in range(4)])
    assert policy._half_life.begin() == 256
    for step in range(250):
        cache.step("decode", [(step // 12 * 4 + i) % 64 for i in range(4)])
    assert policy._half_life.begin() == 16


def test_verdicts_are_faded_cosines():
    rng = np.random.default_rng(3)
    chooser = slot_policy._HalfLife(12)
    uses = np.zeros((80, 12))
    for used in uses:
        used[rng.choice(12, 3, replace=False, p=np.arange(1, 13) / 78)] = 1
        chooser.begin()
        for key in used.nonzero()[0]:
            chooser.use(int(key))
    for half_life, verdict in zip(slot_policy.HALF_LIVES, chooser._verdicts, strict=True):
        expected = 0.0
        for step in range(1, 80):
            counts = (2.0 ** (np.arange(-step, 0) / half_life)) @ uses[:step]
            cosine = counts @ uses[step] / np.linalg.norm(counts)
            expected += cosine * 0.98 ** (79 - step)
        assert verdict == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["lru", SHIPPED])
def test_no_call_walks_through_all_keys(name):
    """43 x 256 experts, half of them resident: few keys are asked about for each that goes."""
    num_slots = 43 * 128
    cache = Cache(build(name, 43, 256, num_slots), num_slots)
    for step in range(40):
        keys = [256 * l + (37 * step + 29 * i) % 256 for l in range(43) for i in range(6)]
        cache.begin("decode")
        for key in keys:
            cache.use(key, set(keys))
    cache.sweep(43, 256)
    asked, evicted = cache.asked, cache.evicted
    cache.sweep(43, 256)
    assert cache.evicted - evicted > 40 * 100
    assert cache.asked - asked < 6 * (cache.evicted - evicted)
    entries = [] if name == "lru" else [key for _, key in cache.policy._heap]
    assert len(entries) == len(set(entries))


@pytest.mark.parametrize("argument", ["num_layers", "num_experts", "num_slots"])
def test_refuses_a_count(argument):
    counts = {"num_layers": 2, "num_experts": 3, "num_slots": 4, argument: 0}
    with pytest.raises(ValueError, match=rf"^make_policy: {argument} is 0, expected >= 1$"):
        make_policy("lru", **counts)


def test_refuses_a_name():
    with pytest.raises(ValueError, match=r"^make_policy: name is 'mru', expected \"lru\" or"):
        build("mru")


@pytest.mark.parametrize("seed", range(3))
def test_a_step_wider_than_the_slots_still_finds_some(seed):
    """By recency it finds next to none: what is used last comes up last in the next step."""
    rng, hits = np.random.default_rng(seed), {}
    steps = [[rng.permutation(16)[:6] + 16 * layer for layer in range(5)] for _ in range(200)]
    for name in ("lru", SHIPPED):
        cache = Cache(build(name, 5, 16, 20), 20)
        found = 0
        for step in steps:
            cache.begin("decode")
            for keys in step:
                found += sum(cache.use(int(key), in_use=set(map(int, keys))) for key in keys)
        hits[name] = found / (200 * 30)
    assert hits[SHIPPED] > 0.15
    assert hits["lru"] < 0.05
