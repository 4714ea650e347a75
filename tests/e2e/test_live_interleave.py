"""A victim stream and a long prompt on real servers, with N unset, 8 and 1.

Expectations are the policy's own words: unset, no decode between two chunks; with N, exactly one
decode after every N-th chunk. The victim decodes before the long prompt arrives.
Mutants tried: due one chunk late, a chunk counted twice, always due when unset, `interleaved`
always false, the burst line without its decodes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from tests.support.live import MAIN_FLAGS, Json, Launcher, Live, Stream, greedy

CHUNK = 128
NUM_CHUNKS = 33
PROMPT_TOKENS = 32 * CHUNK + 4
VICTIM_TOKENS = 120
VICTIM_PROMPT = "Once upon a time"
ATTACK_AFTER = 6


@dataclass(frozen=True)
class Run:
    """What one server showed: its steps from the victim's first, the victim, the burst's line."""

    steps: list[Json]
    victim: Stream
    attacker: Json
    line: re.Match[str]
    events_at_attack: int

    @property
    def kinds(self) -> str:
        """`p` and `d` from the long prompt's first chunk to its last."""
        chunks = [i for i, step in enumerate(self.steps) if step["kind"] == "prefill"]
        span = self.steps[chunks[-NUM_CHUNKS] : chunks[-1] + 1]
        return "".join(step["kind"][0] for step in span)


def attack(server: Live) -> Run:
    since, log_at = server.next_step(), len(server.log())
    victim = Stream(server, greedy(VICTIM_PROMPT, VICTIM_TOKENS, logprobs=2))
    victim.wait_events(ATTACK_AFTER)
    seen = len(victim.events)
    # a prompt that no other test sends: pages of an earlier one would be reused
    ids = random.Random("interleave").choices(range(3, 490), k=PROMPT_TOKENS)
    attacker = server.complete(ids, 3)
    victim.join()
    line = server.wait_log(
        rf"prefill burst done prefill_steps={NUM_CHUNKS} interleaved_decode_steps=(\d+) "
        r"prefill_tokens=(\d+) largest_gap_ms=([\d.]+)",
        after=log_at,
    )
    server.wait_idle()
    return Run(server.steps(since), victim, attacker, line, seen)


@pytest.fixture(scope="module")
def runs(launcher: Launcher, server: Live) -> dict[int | None, Run]:
    @contextmanager
    def serving(every: int | None) -> Iterator[Live]:
        if every is None:
            yield server
            return
        with launcher.serving(*MAIN_FLAGS, "--decode-interleave-every", str(every)) as live:
            yield live

    found = {}
    for every in (None, 8, 1):
        with serving(every) as live:
            found[every] = attack(live)
    return found


def test_s01_steps_follow_the_interleave_number(runs: dict[int | None, Run]) -> None:
    assert runs[None].kinds == "p" * NUM_CHUNKS
    assert runs[8].kinds == ("p" * 8 + "d") * 4 + "p"
    assert runs[1].kinds == "pd" * (NUM_CHUNKS - 1) + "p"


def test_s01_the_victim_decodes_before_during_and_after(runs: dict[int | None, Run]) -> None:
    for every, run in runs.items():
        kinds = "".join(step["kind"][0] for step in run.steps)
        before, _, after = kinds.rpartition(run.kinds)
        assert before.startswith("p" + "d" * (ATTACK_AFTER - 1)), kinds
        assert ATTACK_AFTER <= run.events_at_attack < VICTIM_TOKENS, every
        assert after.startswith("d" * 10), kinds
        assert run.attacker["usage"]["prompt_tokens"] == PROMPT_TOKENS


def test_s01_only_decodes_inside_the_burst_are_called_interleaved(
    runs: dict[int | None, Run],
) -> None:
    for run in runs.values():
        marked = [step for step in run.steps if step["interleaved"]]
        assert len(marked) == run.kinds.count("d")
        assert all(step["kind"] == "decode" and step["num_seqs"] == 1 for step in marked)


def test_s01_every_chunk_is_one_step_of_the_chunk_limit(runs: dict[int | None, Run]) -> None:
    for run in runs.values():
        sizes = [s["num_tokens"] for s in run.steps if s["kind"] == "prefill"][-NUM_CHUNKS:]
        assert sizes == [CHUNK] * (NUM_CHUNKS - 1) + [4]
        indices = [step["index"] for step in run.steps]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        ends = [step["start_s"] + step["duration_ms"] / 1e3 for step in run.steps]
        assert all(end <= step["start_s"] + 2e-6 for end, (_, step) in
                   zip(ends, pairwise(run.steps), strict=False))  # fmt: skip


def test_the_burst_line_counts_what_steps_shows(runs: dict[int | None, Run]) -> None:
    for every, run in runs.items():
        interleaved, tokens, gap_ms = run.line.groups()
        assert int(interleaved) == run.kinds.count("d"), every
        assert int(tokens) == PROMPT_TOKENS
        assert float(gap_ms) == pytest.approx(largest_gap_ms(run.steps), abs=5), every


def largest_gap_ms(steps: list[Json]) -> float:
    """From the end of one decode to the end of the next, over the burst and the decode after it."""
    last_chunk = max(i for i, step in enumerate(steps) if step["kind"] == "prefill")
    ends = [s["start_s"] * 1e3 + s["duration_ms"] for s in steps[: last_chunk + 2]
            if s["kind"] == "decode"]  # fmt: skip
    return max(b - a for a, b in pairwise(ends))


def test_s01_the_victim_reads_the_same_whatever_the_interleaving(
    runs: dict[int | None, Run],
) -> None:
    texts = {run.victim.text for run in runs.values()}
    scores = {tuple(run.victim.logprobs("token_logprobs")) for run in runs.values()}
    assert len(texts) == len(scores) == 1
    tokens = runs[None].victim.logprobs("tokens")
    assert len(tokens) == VICTIM_TOKENS
    assert len(set(tokens)) >= 50
    assert all(run.victim.done and not run.victim.errors for run in runs.values())


def test_s01_gaps_shrink_as_decodes_come_in(runs: dict[int | None, Run]) -> None:
    """What the client itself sees: its longest wait, and how much it read during the burst."""
    waits = {
        every: max(b - a for a, b in pairwise(run.victim.times)) for every, run in runs.items()
    }
    print()
    for every, run in runs.items():
        pattern = " ".join(f"{kind}{len(list(group))}" for kind, group in groupby(run.kinds))
        print(f"N={every}: longest wait {waits[every]:.2f} s, line: {run.line.group()}")
        print(f"  steps {pattern}")
    assert waits[None] > 1.5 * waits[8]
    assert waits[8] > 1.5 * waits[1]
