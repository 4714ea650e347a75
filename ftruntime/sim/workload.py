"""Who asks for what: victims and an attacker, or a trace of many clients.

A trace has an arrival process and length distributions, or is replayed from a file.

Words of the command line:

- arrivals: `poisson:RATE` and `uniform:RATE` (requests a second), `burst:SIZE:PERIOD` (SIZE
  requests at once, every PERIOD seconds);
- lengths: `fixed:N`, `uniform:LOW:HIGH` (both included), `lognormal:MEDIAN:SIGMA`; whole tokens in
  [1, 10 million].
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import NoReturn

from ftruntime.flags import refuse, shown
from ftruntime.sim.cost import Cost
from ftruntime.sim.run import Arrival
from ftruntime.types import PAGE_TOKENS

MAX_TOKENS = 10_000_000
"""Longest prompt or output of a trace; far above any context, so that the server refuses it."""
_MIN_RATE = 1e-9
_ARRIVALS = (
    "poisson:RATE or uniform:RATE of at least 1e-9 a second, or burst:SIZE:PERIOD with SIZE >= 1"
)
_LENGTHS = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA in tokens, SIGMA in [0, 5]"


@dataclass(frozen=True)
class TraceSpec:
    """A random trace; the same seed gives the same requests."""

    num_requests: int
    arrivals: str
    prompt_lengths: str
    output_lengths: str
    seed: int


def make_trace(spec: TraceSpec) -> list[Arrival]:
    """Draw the requests of a trace.

    Raises:
        ValueError: words that name no process or distribution.
    """
    # streams of their own: lengths stay the same when the arrivals change
    prompt, output = Random(f"prompt {spec.seed}"), Random(f"output {spec.seed}")
    draw_prompt = _lengths("prompt_lengths", spec.prompt_lengths)
    draw_output = _lengths("output_lengths", spec.output_lengths)
    times = _times(spec.arrivals, Random(f"arrivals {spec.seed}"))
    return [
        Arrival(f"client-{number}", next(times), draw_prompt(prompt), draw_output(output))
        for number in range(spec.num_requests)
    ]


@dataclass(frozen=True)
class StallSpec:
    """Streams that decode from time 0, and a long prompt that arrives beside them."""

    num_victims: int
    victim_tokens: int
    prompt_tokens: int
    attack_after_s: float

    def arrivals(self, cost: Cost, chunk_tokens: int) -> tuple[list[Arrival], Arrival]:
        """Victims and attacker.

        The victims' own prompts, a page each or less where one chunk would not hold them all, are
        prefilled before time 0: their first tokens come at 0 and `victim_tokens` of each follow.
        The attacker asks for 3 tokens.
        """
        own = min(PAGE_TOKENS, chunk_tokens // self.num_victims)
        start_s = -cost.prefill_s([(own, 0)] * self.num_victims)
        names = [f"victim {number}" for number in range(self.num_victims)]
        victims = [
            Arrival(name, start_s, own, self.victim_tokens + 1)
            for name in (names if self.num_victims > 1 else ["victim"])
        ]
        return victims, Arrival("attacker", self.attack_after_s, self.prompt_tokens, 3)


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a JSONL file, `{"arrival_s", "prompt_tokens", "max_tokens"}` a line.

    Raises:
        ValueError: the file cannot be read, or a line is no such object; names the line.
    """
    arrivals: list[Arrival] = []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        refuse("trace", str(path), f"a file that can be read ({error.strerror})")
    # only a newline ends a line: strings may hold other separators unescaped
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            arrival_s, prompt_tokens, max_tokens = _record(line, path, number)
            name = f"client-{len(arrivals)}"
            arrivals.append(Arrival(name, arrival_s, prompt_tokens, max_tokens))
    if not arrivals:
        refuse("trace", str(path), "a file with at least one request")
    return arrivals


def _record(line: str, path: Path, number: int) -> tuple[float, int, int]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        _refuse_line(path, number, repr(line[:60]), "a JSON object")
    time_s: object = record.get("arrival_s")
    if not isinstance(time_s, int | float) or isinstance(time_s, bool) or not 0 <= time_s < 2**40:
        held = f"arrival_s {reprlib.repr(time_s)}"
        _refuse_line(path, number, held, "seconds in [0, 2^40)")
    return (
        float(time_s),
        _count(record, "prompt_tokens", path, number),
        _count(record, "max_tokens", path, number),
    )


def _count(record: Mapping[str, object], name: str, path: Path, number: int) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        held = f"{name} {reprlib.repr(value)}"
        _refuse_line(path, number, held, f"an integer in [1, {MAX_TOKENS}]")
    return value


def _refuse_line(path: Path, number: int, held: str, expected: str) -> NoReturn:
    place = f"{shown(str(path))} with {held} on line {number}"
    raise ValueError(f"--trace is {place}, expected {expected}")


def _times(text: str, random: Random) -> Iterator[float]:
    kind, numbers = _split("arrivals", text, _ARRIVALS)
    times: Iterator[float] | None = None
    match kind, numbers:
        case "poisson", [rate] if rate >= _MIN_RATE:
            times = _running_sum(lambda: random.expovariate(rate))
        case "uniform", [rate] if rate >= _MIN_RATE:
            times = _running_sum(lambda: 1 / rate)
        case "burst", [size, period] if size >= 1 and size == int(size) and period >= 0:
            times = (index // int(size) * period for index in count())
    if times is None:
        refuse("arrivals", text, _ARRIVALS)
    return times


def _running_sum(step: Callable[[], float]) -> Iterator[float]:
    """From 0 on, one step at a time."""
    time_s = 0.0
    while True:
        yield time_s
        time_s += step()


def _lengths(name: str, text: str) -> Callable[[Random], int]:
    kind, numbers = _split(name, text, _LENGTHS)
    whole = all(number == int(number) for number in numbers)
    draw: Callable[[Random], float] | None = None
    match kind, numbers:
        case "fixed", [length] if whole and 1 <= length <= MAX_TOKENS:
            draw = partial(Random.randint, a=int(length), b=int(length))
        case "uniform", [low, high] if whole and 1 <= low <= high <= MAX_TOKENS:
            draw = partial(Random.randint, a=int(low), b=int(high))
        case "lognormal", [median, sigma] if 1 <= median <= MAX_TOKENS and 0 <= sigma <= 5:
            draw = partial(Random.lognormvariate, mu=math.log(median), sigma=sigma)
    if draw is None:
        refuse(name, text, _LENGTHS)
    return lambda random: min(MAX_TOKENS, max(1, round(draw(random))))


def _split(name: str, text: str, expected: str) -> tuple[str, list[float]]:
    kind, *words = text.split(":")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        refuse(name, text, expected)
    if not all(math.isfinite(number) and number < 2**40 for number in numbers):
        refuse(name, text, expected)
    return kind, numbers
