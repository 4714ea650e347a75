"""Clients against a loop: when they join, what they see, what a refusal or a stuck loop does.

Mutants tried and seen red: arrivals taken in the order given, an idle clock that waits too long, a
refusal that is forgotten, prompts of equal tokens.
"""

from __future__ import annotations

import pytest

from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.run import Arrival, ClientLog, run_clients
from ftruntime.types import Request, RequestRejectedError, TokenEvent


class OneByOne:
    """Serves requests in order of arrival, one token in 1 s a step; refuses prompts above 100."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.queue, self.num_steps, self.num_idle = clock, [], 0, 0
        self.stuck = False
        self.joined: list[tuple[str, float]] = []
        self.prompts: set[tuple[int, ...]] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.queue)

    def submit(self, request: Request) -> None:
        assert request.params.ignore_eos
        assert request.params.seed is not None
        if len(request.prompt_token_ids) > 100:
            raise RequestRejectedError("too long", code="context_length_exceeded")
        self.prompts.add(request.prompt_token_ids)
        self.joined.append((request.request_id, self.clock.now()))
        self.queue.append([request.request_id, request.params.max_tokens])

    def step(self) -> list[TokenEvent]:
        if self.stuck:
            return []
        self.clock.advance(1.0)
        self.num_steps += 1
        head = self.queue[0]
        head[1] -= 1
        if head[1]:
            return [TokenEvent(head[0], 5)]
        self.queue.pop(0)
        return [TokenEvent(head[0], 5, finish_reason="length")]

    def idle(self) -> None:
        self.num_idle += 1


def test_clients_join_between_steps_and_see_their_tokens():
    clock = VirtualClock()
    loop = OneByOne(clock)
    arrivals = [Arrival("late", 10.0, 1, 1), Arrival("b", 0.5, 1, 2), Arrival("a", 0.0, 1, 2)]
    shares: list[float] = []
    logs = run_clients(loop, clock, arrivals, progress=shares.append)
    assert loop.joined == [("a", 0.0), ("b", 1.0), ("late", 10.0)]
    assert {name: log.token_times for name, log in logs.items()} == {
        "a": [1.0, 2.0], "b": [3.0, 4.0], "late": [11.0]
    }  # fmt: skip
    assert list(logs) == ["a", "b", "late"]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert loop.num_idle >= 2
    assert len(loop.prompts) == 3, "prompts of the same length share no page"
    assert logs["b"].first_token_s == 2.5
    assert logs["b"].wall_s == 3.5
    assert logs["b"].gaps() == [1.0]
    assert logs["late"].gaps() == []


def test_a_refused_client_is_remembered_and_the_others_go_on():
    clock = VirtualClock()
    shares: list[float] = []
    arrivals = [Arrival("big", 0.0, 101, 3), Arrival("small", 0.0, 100, 1)]
    logs = run_clients(OneByOne(clock), clock, arrivals, progress=shares.append)
    assert logs["big"].refusal == "too long"
    assert logs["big"].token_times == []
    assert logs["small"].refusal is None
    assert shares == [1.0]


def test_only_refusals_end_too():
    clock = VirtualClock()
    logs = run_clients(OneByOne(clock), clock, [Arrival("big", 4.0, 101, 3)])
    assert logs == {"big": ClientLog(Arrival("big", 4.0, 101, 3), [], "too long")}


def test_a_loop_without_a_step_is_an_error():
    clock = VirtualClock()
    loop = OneByOne(clock)
    loop.stuck = True
    with pytest.raises(RuntimeError, match="the scheduler plans no step"):
        run_clients(loop, clock, [Arrival("a", 0.0, 1, 1)])


def test_no_clients():
    clock = VirtualClock()
    assert run_clients(OneByOne(clock), clock, []) == {}
