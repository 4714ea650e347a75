"""Clients against a loop under the virtual clock: who asked when, and when each token came."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from ftruntime.sim.clock import VirtualClock
from ftruntime.types import Request, RequestRejectedError, SamplingParams, TokenEvent


class Loop(Protocol):
    """What a run needs of the engine's step loop."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def submit(self, request: Request) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def idle(self) -> None: ...


@dataclass(frozen=True)
class Arrival:
    """One request of one client."""

    name: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int


@dataclass
class ClientLog:
    """What a client saw. `token_times` are seconds on the run's clock."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    refusal: str | None = None

    @property
    def first_token_s(self) -> float:
        """From the request to its first token."""
        return self.token_times[0] - self.arrival.arrival_s

    @property
    def wall_s(self) -> float:
        """From the request to its last token."""
        return self.token_times[-1] - self.arrival.arrival_s

    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [late - early for early, late in pairwise(self.token_times)]


def run_clients(
    loop: Loop,
    clock: VirtualClock,
    arrivals: Iterable[Arrival],
    *,
    progress: Callable[[float], None] | None = None,
) -> dict[str, ClientLog]:
    """Run until every request has ended; a request joins the queue between two steps.

    Args:
        arrivals: in any order, names differ.
        progress: called with the share of all tokens that has been drawn, in [0, 1].

    Returns:
        One log for each arrival, by name, in order of arrival.

    Raises:
        RuntimeError: the loop has work and takes no step.
    """
    pending = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    logs = {arrival.name: ClientLog(arrival) for arrival in pending}
    total = sum(arrival.max_tokens for arrival in pending)
    # a token id of its own keeps a prompt from sharing pages with another
    token_ids = {arrival.name: number for number, arrival in enumerate(pending, 1)}
    pending.reverse()
    num_done = 0
    while pending or loop.has_work:
        while pending and pending[-1].arrival_s <= clock.now():
            name = pending.pop().name
            num_done += _submit(loop, logs[name], token_ids[name])
        if not loop.has_work:
            loop.idle()
            if pending:
                clock.wait_until(pending[-1].arrival_s)
            continue
        num_steps = loop.num_steps
        for event in loop.step():
            assert event.token_id is not None, event.error
            logs[event.request_id].token_times.append(clock.now())
            num_done += 1
        if loop.num_steps == num_steps:
            raise RuntimeError("requests are waiting and the scheduler plans no step")
        if progress is not None:
            progress(num_done / total)
    loop.idle()
    return logs


def _submit(loop: Loop, log: ClientLog, token_id: int) -> int:
    """Tokens that will not come because the server refused the request."""
    arrival = log.arrival
    params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, seed=0, ignore_eos=True)
    prompt = (token_id,) * arrival.prompt_tokens
    try:
        loop.submit(Request(arrival.name, prompt, params, arrival.arrival_s))
    except RequestRejectedError as error:
        log.refusal = str(error)
        return arrival.max_tokens
    return 0
