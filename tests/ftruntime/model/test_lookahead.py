"""Hints for coming layers, with a cache that only takes notes.

Mutants run, each noticed: hints of the present layer; one layer too far; depth ignored in decode;
depth kept in prefill; a table read by position; all experts for a small chunk; an account that
never turns off, turns off at equal counts, or counts what is settled again; hints after that.
"""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from ftruntime.model.lookahead import HintAccount, Lookahead

NUM_EXPERTS, TOPK = 16, 2


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    num_experts_per_tok: int = TOPK


@dataclasses.dataclass
class FakeRouter:
    """Chooses expert ``token + shift``."""

    shift: int
    tid2eid: torch.Tensor | None = None
    config: FakeConfig = FakeConfig()
    calls: int = 0

    def __call__(self, x, batch):
        self.calls += 1
        ids = (x[:, :1].int() + self.shift + torch.arange(TOPK)) % NUM_EXPERTS
        return torch.ones(ids.shape), ids.int()


class FakeCache:
    num_experts = NUM_EXPERTS

    def __init__(self):
        self.hints = []
        self.counts = {"prefetch_used": 0, "prefetch_wasted": 0}

    def prefetch(self, layer, expert_ids):
        self.hints.append((layer, sorted({int(e) for e in expert_ids})))

    def stats(self):
        quiet = {"prefetch_used": 0, "prefetch_wasted": 0}
        return {"decode": dict(self.counts), "prefill": quiet, "layers": []}


@dataclasses.dataclass(frozen=True)
class FakeBatch:
    host_token_ids: torch.Tensor
    is_decode: bool

    @property
    def phase(self):
        return "decode" if self.is_decode else "prefill"


TABLE = (torch.arange(20 * TOPK) * 3 % NUM_EXPERTS).view(20, TOPK)


def made(depth, num_layers=6):
    cache = FakeCache()
    routers = [FakeRouter(n, TABLE if n < 2 else None) for n in range(num_layers)]
    return cache, routers, Lookahead(cache, routers, depth)


def batch(tokens, is_decode=True):
    return FakeBatch(torch.tensor(tokens), is_decode)


def rows(tokens):
    return torch.tensor(tokens, dtype=torch.float32)[:, None]


def run(lookahead, layer, given):
    lookahead.hint(lookahead.coming(layer, rows(given.host_token_ids.tolist()), given), given)


def test_hashed_layers_are_known_from_the_tokens():
    cache, _, lookahead = made(depth=1)
    lookahead.begin(batch([7, 3]))
    expected = sorted({int(e) for token in (7, 3) for e in TABLE[token]})
    assert cache.hints == [(0, expected), (1, expected)]
    cache.hints.clear()
    lookahead.begin(batch([7, 3], is_decode=False))
    assert cache.hints == [(0, expected)], "the second layer of a prompt waits for the first"


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
@pytest.mark.parametrize("layer", [1, 3, 5])
def test_decode_looks_as_far_as_it_was_told(depth, layer):
    cache, routers, lookahead = made(depth)
    run(lookahead, layer, batch([4, 9]))
    ahead = range(layer + 1, min(layer + 1 + depth, 6))
    assert cache.hints == [(n, sorted({(t + n + k) % 16 for t in (4, 9) for k in range(2)}))
                           for n in ahead]  # fmt: skip
    assert [router.calls for router in routers] == [int(n in ahead) for n in range(6)]


def test_a_hashed_layer_ahead_needs_no_router():
    cache, routers, lookahead = made(depth=1)
    run(lookahead, 0, batch([5]))
    assert cache.hints == [(1, sorted(int(e) for e in TABLE[5]))]
    assert not any(router.calls for router in routers)


def test_a_replay_hints_what_its_own_tokens_choose():
    """A captured step gathers once; the host then knows other tokens each time."""
    cache, _, lookahead = made(depth=1)
    coming = lookahead.coming(0, rows([5]), batch([5]))
    lookahead.hint(coming, batch([9]))
    assert cache.hints == [(1, sorted(int(e) for e in TABLE[9]))]


def test_a_replay_hints_nothing_once_hints_are_off():
    cache, _, lookahead = made(depth=1)
    coming = lookahead.coming(2, rows([5]), batch([5]))
    cache.counts = {"prefetch_used": 10, "prefetch_wasted": 600}
    for _ in range(70):
        lookahead.begin(batch([1]))
    cache.hints.clear()
    lookahead.hint(coming, batch([5]))
    assert cache.hints == []


def test_a_chunk_of_a_prompt_hints_one_layer():
    """All experts once its routes are twice as many as they, else those its tokens choose."""
    cache, routers, lookahead = made(depth=3)
    run(lookahead, 2, batch(list(range(16)), is_decode=False))
    assert cache.hints == [(3, list(range(NUM_EXPERTS)))]
    assert not any(router.calls for router in routers)
    cache.hints.clear()
    run(lookahead, 2, batch([1, 2, 3], is_decode=False))
    assert cache.hints == [(3, [4, 5, 6, 7])]


@pytest.mark.parametrize(
    ("counts", "active"),
    [((0, 0), True), ((1, 6), True), ((4, 4), True), ((3, 5), False), ((0, 8), False)],
)
def test_an_account_gives_up_when_most_copies_are_wasted(counts, active):
    account = HintAccount(least=8)
    assert account.update(*counts) is (not active)
    assert account.active is active
    assert not account.update(100, 0), "off for good, and told once"
    assert account.active is active


def test_an_account_judges_what_came_since():
    account = HintAccount(least=8)
    assert not account.update(100, 0)
    assert not account.update(102, 5)
    assert account.update(103, 5)


def test_hints_that_lose_stop_with_one_line(caplog):
    cache, _, lookahead = made(depth=1)
    cache.counts = {"prefetch_used": 10, "prefetch_wasted": 600}
    with caplog.at_level(logging.INFO, logger="ftruntime"):
        for _ in range(200):
            lookahead.begin(batch([1]))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(
        "expert prefetch turned off until the next start phase=decode used=10 wasted=600"
    )
    cache.hints.clear()
    lookahead.begin(batch([1]))
    run(lookahead, 2, batch([1]))
    assert cache.hints == []
    run(lookahead, 2, batch([1], is_decode=False))
    assert cache.hints, "prompts have an account of their own"
