"""Times of calls through a stand-in for the card; and how many sets of inputs outgrow its cache.

Mutants tried: the calls not run before the capture, every call captured twice, the end recorded
ahead of the replay, the mean in place of the median, milliseconds of all calls taken for one's,
warm-up replays counted, once the cache instead of twice, no upper bound on the sets.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ftkernels.testing.timer import REPLAYS, CudaTimer, median_us, num_bytes, num_sets

MIB = 1 << 20


@pytest.mark.parametrize(
    ("bytes_each", "l2_bytes", "expected"),
    [(4 * MIB, 72 * MIB, 36), (5 * MIB, 72 * MIB, 29), (1000 * MIB, 72 * MIB, 2), (1, 72 * MIB, 64),
     (0, MIB, 64), (72 * MIB, 72 * MIB, 2)],
    ids=str,
)  # fmt: skip
def test_sets_together_are_larger_than_the_cache(bytes_each, l2_bytes, expected):
    assert num_sets(bytes_each, l2_bytes) == expected
    assert expected in (2, 64) or expected * bytes_each >= 2 * l2_bytes


def test_bytes_are_those_of_all_tensors():
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert num_bytes(((x, 7, None), {"y": (x.float(), "a")})) == 30 + 60


def test_the_median_of_the_replays_is_shared_out_to_the_calls():
    seen = iter([900.0, 900.0, 900.0, *(0.006 for _ in range(12)), *(5.0 for _ in range(8))])
    assert median_us(lambda: next(seen), 3) == pytest.approx(2.0)
    assert REPLAYS == 20
    assert next(seen, None) is None
    few = iter([9.0, 9.0, 9.0, 1.0, 2.0, 30.0])
    assert median_us(lambda: next(few), 2, replays=3) == 1000.0


@pytest.fixture
def card(monkeypatch):
    """A card whose clock a call moves on, and a log of what it was asked."""
    card = SimpleNamespace(log=[], now=0.0, captured=[], capturing=False)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.at = None

        def record(self):
            self.at = card.now

        def synchronize(self):
            card.log.append("synchronize")

        def elapsed_time(self, end):
            return end.at - self.at

    class Graph:
        def replay(self):
            card.log.append("replay")
            for call in card.captured:
                call()

    @contextlib.contextmanager
    def capture(graph):
        card.capturing = True
        yield
        card.capturing = False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: card.log.append("synchronize"))
    properties = SimpleNamespace(L2_cache_size=72 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    return card


def _calls(card):
    def call(name, ms):
        def run():
            if card.capturing:
                card.captured.append(run)
            else:
                card.log.append(name)
                card.now += ms

        return run

    return [call("a", 2.0), call("b", 3.0)]


def test_a_graph_is_captured_after_a_first_run_and_timed_whole(card):
    timer = CudaTimer()
    assert timer.l2_bytes == 72 * MIB
    replay = timer.graph(_calls(card))
    assert card.log == ["a", "b", "synchronize"]
    assert replay() == 5.0
    assert card.log[3:] == ["replay", "a", "b", "synchronize"]


def test_what_no_graph_holds_is_timed_from_the_host(card):
    timed = CudaTimer().eager(_calls(card))
    assert (timed(), timed()) == (5.0, 5.0)
    assert card.log.count("a") == 3
    assert "replay" not in card.log
