"""The engine's view of the experts, over a cache that only counts.

Mutants run, each noticed: host memory released before the cache is closed, twice, or never; counts
lost at the end; a rate without a look-up; phases swapped; hints among what is resident; the
warm-up counted.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftruntime.engine.expert_store import ExpertStore

PLAN = SimpleNamespace(expert_slots=30, num_experts=96, min_expert_slots=4)
COUNTS = {
    "decode": {"hits": 30, "misses": 10, "bytes_h2d": 700, "prefetch_used": 3,
               "prefetch_wasted": 2, "evictions": 9},
    "prefill": {"hits": 0, "misses": 0, "bytes_h2d": 0, "prefetch_used": 0,
                "prefetch_wasted": 0, "evictions": 0},
    "layers": [],
}  # fmt: skip


class FakeCache:
    def __init__(self, log):
        self.log, self.broken, self.closed = log, False, False

    def stats(self):
        if self.closed:
            raise RuntimeError("closed")
        return COUNTS

    def check(self):
        if self.broken:
            raise RuntimeError("a slot is lost")

    def close(self):
        self.closed = True
        self.log.append("cache")


def test_nothing_is_counted_without_a_cache():
    stats = ExpertStore(PLAN).stats()
    assert (stats["num_slots"], stats["num_experts"], stats["min_slots"]) == (30, 96, 4)
    for phase in ("decode", "prefill"):
        assert stats[phase] == {
            "hits": 0, "misses": 0, "bytes_h2d": 0, "prefetch_used": 0, "prefetch_wasted": 0,
            "evictions": 0, "hit_rate": None, "resident_rate": None,
        }  # fmt: skip


def test_counts_by_phase_with_their_rate():
    stats = ExpertStore(PLAN, FakeCache([])).stats()
    assert stats["decode"] == {**COUNTS["decode"], "hit_rate": 0.75, "resident_rate": 0.675}
    assert stats["prefill"] == {**COUNTS["prefill"], "hit_rate": None, "resident_rate": None}


def test_the_warm_up_does_not_count():
    cache = FakeCache([])
    store = ExpertStore(PLAN, cache)
    store.begin()
    assert store.stats()["decode"]["misses"] == 0
    more = {name: value + 2 for name, value in COUNTS["decode"].items()}
    cache.stats = lambda: {**COUNTS, "decode": more}
    decode = store.stats()["decode"]
    assert (decode["hits"], decode["prefetch_used"], decode["hit_rate"]) == (2, 2, 0.5)
    assert decode["resident_rate"] == 0


def test_the_end_closes_the_cache_before_its_banks_and_keeps_the_counts():
    log = []
    store = ExpertStore(PLAN, FakeCache(log), release=lambda: log.append("banks"))
    store.close()
    store.close()
    assert log == ["cache", "banks"]
    assert store.stats()["decode"]["hits"] == 30
    store.check()


def test_a_broken_cache_is_told():
    cache = FakeCache([])
    store = ExpertStore(PLAN, cache)
    store.check()
    cache.broken = True
    with pytest.raises(RuntimeError, match="a slot is lost"):
        store.check()
