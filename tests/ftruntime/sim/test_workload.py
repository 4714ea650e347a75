"""Traces: reproducible, distributed as they say, and refused in one sentence.

Mutants tried and seen red: a rate taken for a period, one random stream for times and lengths or
for prompts and outputs, the upper end of a uniform length left out, a burst that starts a period
late, a boolean taken for a count, a page for each victim whatever the chunk, no least rate, lines
split at every separator, a byte order mark kept, only a JSONDecodeError caught, values shown whole,
the line counted from 0, the flag not named.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest

from ftruntime.sim.cost import StepCost
from ftruntime.sim.run import Arrival
from ftruntime.sim.workload import (
    MAX_TOKENS,
    StallSpec,
    TraceSpec,
    make_trace,
    read_trace,
)


def trace(
    num_requests: int = 4, arrivals: str = "uniform:2", prompt: str = "fixed:7",
    output: str = "fixed:3", seed: int = 0,
) -> list[Arrival]:  # fmt: skip
    return make_trace(TraceSpec(num_requests, arrivals, prompt, output, seed))


def times(arrivals: str, num_requests: int = 4, seed: int = 0) -> list[float]:
    return [each.arrival_s for each in trace(num_requests, arrivals, seed=seed)]


def test_uniform_and_burst_arrivals():
    assert times("uniform:2") == [0, 0.5, 1, 1.5]
    assert times("burst:3:10", 7) == [0, 0, 0, 10, 10, 10, 20]
    assert times("burst:2:0") == [0, 0, 0, 0]


def test_poisson_arrivals_have_the_rate_and_no_memory():
    found = times("poisson:4", 20_001)
    gaps = [late - early for early, late in pairwise(found)]
    # mean and standard deviation of an exponential are both 1 / rate
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.015)


def test_length_distributions():
    lengths = [each.prompt_tokens for each in trace(4000, prompt="uniform:3:6")]
    assert {length: lengths.count(length) for length in lengths}.keys() == {3, 4, 5, 6}
    assert fmean(lengths) == pytest.approx(4.5, abs=0.1)
    skewed = [each.max_tokens for each in trace(8000, output="lognormal:500:0.8")]
    assert median(skewed) == pytest.approx(500, rel=0.05)
    assert pstdev(math.log(length) for length in skewed) == pytest.approx(0.8, rel=0.05)
    assert {each.prompt_tokens for each in trace(prompt="lognormal:64:0")} == {64}


def test_extreme_lengths_stay_in_range():
    lengths = {each.prompt_tokens for each in trace(2000, prompt="lognormal:1:5")}
    assert min(lengths) == 1
    assert max(lengths) <= MAX_TOKENS
    huge = {each.prompt_tokens for each in trace(2000, prompt=f"lognormal:{MAX_TOKENS}:5")}
    assert max(huge) == MAX_TOKENS


def test_a_seed_gives_the_same_trace_and_another_one_does_not():
    spec = ("poisson:1", "uniform:1:9999", "uniform:1:9999")
    assert trace(50, *spec, seed=3) == trace(50, *spec, seed=3)
    assert trace(50, *spec, seed=3) != trace(50, *spec, seed=4)


def test_prompts_do_not_depend_on_the_outputs():
    drawn, fixed = (
        trace(50, prompt="uniform:1:9999", output=o) for o in ("uniform:1:9", "fixed:3")
    )
    assert [each.prompt_tokens for each in drawn] == [each.prompt_tokens for each in fixed]


def test_lengths_do_not_depend_on_the_arrivals():
    first, second = (
        trace(50, arrivals, "uniform:1:9999", "uniform:1:9999")
        for arrivals in ("poisson:1", "uniform:1")
    )
    assert [each.prompt_tokens for each in first] == [each.prompt_tokens for each in second]
    assert [each.max_tokens for each in first] == [each.max_tokens for each in second]
    assert [e.prompt_tokens for e in first] != [e.max_tokens for e in first]


def test_names_differ():
    assert len({each.name for each in trace(300)}) == 300


@pytest.mark.parametrize(
    "text",
    ["poisson", "poisson:0", "poisson:-1", "poisson:x", "poisson:1:2", "uniform:0", "burst:0:1",
     "burst:1.5:1", "burst:2", "burst:2:-1", "poisson:nan", "poisson:inf", "often:1", "",
     "poisson:1e-320", "uniform:9e-10"],
)  # fmt: skip
def test_refused_arrivals(text):
    with pytest.raises(ValueError, match=r"^--arrivals is .*, expected poisson:RATE or "):
        trace(arrivals=text)


@pytest.mark.parametrize(
    "text",
    ["fixed", "fixed:0", "fixed:1.5", f"fixed:{MAX_TOKENS + 1}", "uniform:5:4", "uniform:0:4",
     "uniform:1", "lognormal:0:1", "lognormal:10:-1", "lognormal:10:6", "fixed:nan", "zipf:2"],
)  # fmt: skip
@pytest.mark.parametrize("flag", ["prompt", "output"])
def test_refused_lengths(text, flag):
    with pytest.raises(ValueError, match=rf"^--{flag}-lengths is .*, expected fixed:N, "):
        trace(**{flag: text})


def test_victim_and_attacker():
    spec = StallSpec(1, 699, 200_019, 6.0)
    (victim,), attacker = spec.arrivals(StepCost(0.25, 0.5, 9.0, 9.0), 3456)
    assert victim == Arrival("victim", -(0.25 + 128 * 0.5), 128, 700)
    assert attacker == Arrival("attacker", 6.0, 200_019, 3)


@pytest.mark.parametrize(
    ("num_victims", "chunk", "own"), [(2, 384, 128), (3, 384, 128), (4, 384, 96), (49, 128, 2)]
)
def test_many_victims_are_prefilled_in_one_chunk(num_victims, chunk, own):
    spec = StallSpec(num_victims, 10, 500, 1.5)
    victims, attacker = spec.arrivals(StepCost(0.25, 0.5, 9.0, 9.0), chunk)
    assert [each.name for each in victims] == [f"victim {n}" for n in range(num_victims)]
    assert {each.arrival_s for each in victims} == {-(0.25 + num_victims * own * 0.5)}
    assert {(each.prompt_tokens, each.max_tokens) for each in victims} == {(own, 11)}
    assert attacker == Arrival("attacker", 1.5, 500, 3)


def record(**changes: object) -> str:
    return json.dumps({"arrival_s": 1.5, "prompt_tokens": 20, "max_tokens": 3, **changes})


def test_replay_of_a_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{record()}\n\n{record(arrival_s=0, model='x')}\n")
    assert read_trace(path) == [Arrival("client-0", 1.5, 20, 3), Arrival("client-1", 0.0, 20, 3)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "'{' on line 2, expected a JSON object"),
        ("[1]", "'[1]' on line 2, expected a JSON object"),
        (record(arrival_s=-1), "arrival_s -1 on line 2, expected seconds in [0, 2^40)"),
        (record(arrival_s=True), "arrival_s True on line 2, expected seconds in [0, 2^40)"),
        (record(arrival_s=math.nan), "arrival_s nan on line 2, expected seconds in [0, 2^40)"),
        (record(prompt_tokens=0), "prompt_tokens 0 on line 2, expected an integer in [1, 100"),
        (record(prompt_tokens=1.0), "prompt_tokens 1.0 on line 2, expected an integer in"),
        (record(max_tokens=True), "max_tokens True on line 2, expected an integer in"),
        (record(max_tokens=None), "max_tokens None on line 2, expected an integer in"),
        (record(max_tokens=2**60), f"max_tokens {2**60} on line 2, expected an integer in"),
        ("[" * 100_000, f"'{'[' * 60}' on line 2, expected a JSON object"),
        ('{"arrival_s": ' + "1" * 5000 + "}", """'{"arrival_s": 1111"""),
        (record(arrival_s="x" * 9000), "arrival_s 'xxx"),
        (record(prompt_tokens=10**4000), "prompt_tokens 1000000"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_line_is_named(line, sentence, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{record()}\n{line}\n")
    with pytest.raises(ValueError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"--trace is {path} with {sentence}")
    assert str(refusal.value).count(" on line 2, expected ") == 1
    assert len(str(refusal.value)) < 200 + len(str(path))


def test_a_file_may_begin_with_a_mark_and_hold_odd_separators(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = record()[:-1] + ', "name": "a\u2028b\x85"}'
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}".encode())
    assert [each.prompt_tokens for each in read_trace(path)] == [20, 20]


@pytest.mark.parametrize("name", ["none", "."])
def test_a_file_that_cannot_be_read_names_the_flag(name, tmp_path):
    with pytest.raises(ValueError) as refusal:
        read_trace(tmp_path / name)
    assert str(refusal.value).startswith(f"--trace is {tmp_path / name}, expected a file that can ")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="expected a JSON object"):
        read_trace(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="expected a file with at least one request") as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"--trace is {path}, ")
