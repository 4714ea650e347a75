"""Reports: fields of the contract, counted by hand on small logs.

Mutants tried and seen red: a gap of exactly 5 s counted as over, tokens at the edges of the prefill
counted in, percentiles off by one rank, throughput over refused clients, a wall from time 0, only
the first of several victims.
"""

from __future__ import annotations

import io
import json

from ftruntime.sim.executor import PrefillSpan
from ftruntime.sim.report import (
    policy_label,
    print_clients,
    print_reports,
    stall_report,
    trace_report,
)
from ftruntime.sim.run import Arrival, ClientLog

UNSET: dict[str, object] = {
    "decode_interleave_every": None, "max_decode_gap_ms": None, "prefill_layer_groups": None,
    "chunk_tokens": 256,
}  # fmt: skip
STATS = {"prefill_steps": 3, "decode_steps": 9, "interleaved_decode_steps": 2, "retractions": 4}
FIELDS = {
    "policy", "prefill_chunks", "attacker_wall_s", "victim_wall_s", "victim_tokens",
    "victim_alone_wall_s", "max_gap_s", "gaps_over_5s", "gaps_over_20s",
    "interleaved_decode_steps", "victim_tokens_during_prefill", "source",
}  # fmt: skip


def stall() -> dict[str, object]:
    return stall_of([0.0, 1.0, 6.0, 12.0, 13.0, 37.0], alone=[[0.0, 5.25]])


def stall_of(*victims: list[float], alone: list[list[float]]) -> dict[str, object]:
    attacker = ClientLog(Arrival("attacker", 2.0, 999, 3), [13.0, 14.0, 38.0])
    span = PrefillSpan(1.0, 13.0, num_chunks=4, num_slices=16)
    arrival = Arrival("victim", -1.0, 128, 7)
    logs, before = ([ClientLog(arrival, times) for times in each] for each in (victims, alone))
    return stall_report(UNSET, logs, attacker, span, alone=before, interleaved_decode_steps=2)


def test_stall_report():
    found = stall()
    assert found.keys() == FIELDS
    assert found == {
        "policy": UNSET, "prefill_chunks": 4, "attacker_wall_s": 36.0, "victim_wall_s": 37.0,
        "victim_tokens": 5, "victim_alone_wall_s": 5.25, "max_gap_s": 24.0, "gaps_over_5s": 2,
        "gaps_over_20s": 1, "interleaved_decode_steps": 2, "victim_tokens_during_prefill": 2,
        "source": "simulated",
    }  # fmt: skip
    json.dumps(found)


def test_stall_report_of_several_victims():
    found = stall_of([0.0, 1.0, 6.5, 12.0], [0.0, 7.0, 28.0], alone=[[0.0, 4.0], [0.0, 4.5]])
    # walls and the longest gap of the worst, counts of all
    assert (found["victim_wall_s"], found["victim_alone_wall_s"]) == (28.0, 4.5)
    assert (found["max_gap_s"], found["victim_tokens"]) == (21.0, 5)
    assert (found["gaps_over_5s"], found["gaps_over_20s"]) == (4, 1)
    assert found["victim_tokens_during_prefill"] == 3
    assert found["interleaved_decode_steps"] == 2


def many() -> dict[str, ClientLog]:
    times = [3.0 + step for step in range(101)]
    times[-1] += 9
    return {
        "a": ClientLog(Arrival("a", 1.0, 40, 101), times),
        "b": ClientLog(Arrival("b", 2.0, 60, 1), [5.0]),
        "c": ClientLog(Arrival("c", 2.5, 500, 1), [], "too long"),
    }


def test_trace_report():
    found = trace_report(UNSET, many(), STATS)
    # 1 s to 112 s: 100 prompt tokens, 102 output tokens
    assert found["wall_s"] == 111.0
    assert found["prompt_tokens_per_s"] == round(100 / 111, 6)
    assert found["output_tokens_per_s"] == round(102 / 111, 6)
    assert (found["clients"], found["refused"]) == (3, 1)
    assert found["source"] == "simulated"
    steps = ("prefill_steps", "decode_steps", "interleaved_decode_steps", "retractions")
    assert [found[name] for name in steps] == [3, 9, 2, 4]
    assert found["first_token_s"] == {"p50": 2.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    assert found["gap_s"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0, "max": 10.0}
    first, second, refused = found["per_client"]
    assert first["tokens"] == 101
    assert first["gap_s"]["max"] == 10.0
    assert (first["first_token_s"], first["wall_s"]) == (2.0, 111.0)
    assert second["gap_s"] is None
    assert (refused["first_token_s"], refused["wall_s"], refused["refusal"]) == (
        None, None, "too long"
    )  # fmt: skip
    json.dumps(found)


def test_percentiles_are_nearest_rank():
    # gaps 1 .. 200 s: the p-th percentile is the value at rank ceil(200 p / 100)
    times = [0.0]
    for gap in range(1, 201):
        times.append(times[-1] + gap)
    log = ClientLog(Arrival("a", 0.0, 1, 201), times)
    found = trace_report(UNSET, {"a": log}, STATS)
    assert found["gap_s"] == {"p50": 100.0, "p95": 190.0, "p99": 198.0, "max": 200.0}


def test_a_trace_of_refusals_has_no_rates():
    found = trace_report(UNSET, {"c": many()["c"]}, STATS)
    assert found["output_tokens_per_s"] is None
    assert found["gap_s"] is None
    assert found["wall_s"] == 0.0


def test_policy_labels():
    assert policy_label(UNSET) == "unset"
    assert policy_label({**UNSET, "decode_interleave_every": 8}) == "N=8"
    both = {**UNSET, "max_decode_gap_ms": 900, "prefill_layer_groups": 4}
    assert policy_label(both) == "gap<=900ms G=4"


def test_the_table_holds_every_field_of_every_run():
    stream = io.StringIO()
    other = {**stall(), "policy": {**UNSET, "decode_interleave_every": 3}, "max_gap_s": None}
    print_reports([stall(), other], "what it is", stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["simulated", "unset", "N=3"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:] if line}
    assert rows.keys() - {"what"} == FIELDS - {"policy", "source"}
    assert rows["max_gap_s"] == ["24.000", "-"]
    assert rows["gaps_over_5s"] == ["2", "2"]
    assert lines[-1] == "what it is"


def test_the_table_of_clients():
    stream = io.StringIO()
    print_clients(trace_report(UNSET, many(), STATS), stream)
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["client", "a", "b", "c"]
    assert "max 10.000" in lines[1]
    assert lines[3].rstrip().endswith("too long")
