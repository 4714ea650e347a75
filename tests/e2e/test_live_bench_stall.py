"""`bench-stall` against our own server under each policy: the prompt takes 31 chunks of one page.

Expectations are the policies' own words: unset, no decode between two chunks; N=8, one decode after
every eighth chunk; a bound or slices, decodes all along. A victim reads the same text in every run.
Mutants tried and seen red: the steps watched from the server's start, prefill steps counted instead
of chunks, the policy's names mixed up, one victim's prompt drawn anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftruntime.bench.settings import StallSettings
from ftruntime.bench.stall import StallResult, run_stall
from tests.support.live import MAIN_FLAGS, Launcher, Live

CHUNK = 128
ATTACKER_TOKENS = 3900
NUM_CHUNKS = 31
VICTIM_TOKENS = 60
GAP_MS = 300
POLICIES: dict[str, tuple[str, ...]] = {
    "unset": (),
    "every 8": ("--decode-interleave-every", "8"),
    "bound": ("--max-decode-gap-ms", str(GAP_MS)),
    "bound, slices": ("--max-decode-gap-ms", str(GAP_MS), "--prefill-layer-groups", "3"),
}
BOUNDED = ("bound", "bound, slices")
MANY = 8
slow = pytest.mark.skipif(os.environ.get("RUN_SLOW") != "1", reason="takes minutes, set RUN_SLOW=1")


def measure(live: Live, victims: int = 1, tokens: int = VICTIM_TOKENS) -> StallResult:
    settings = StallSettings(
        base_url=live.url, victims=victims, victim_tokens=tokens, attack_after=0.2,
        attacker_tokens=ATTACKER_TOKENS, timeout_s=60,
    )  # fmt: skip
    return asyncio.run(run_stall(settings))


@contextmanager
def serving(launcher: Launcher, server: Live, policy: str) -> Iterator[Live]:
    if not POLICIES[policy]:
        yield server
        return
    rows = ("--max-running-requests", str(MANY + 1))
    with launcher.serving(*MAIN_FLAGS, *rows, *POLICIES[policy]) as live:
        yield live


@pytest.fixture(scope="module")
def runs(launcher: Launcher, server: Live) -> dict[str, StallResult]:
    """One victim under each policy, and eight of them under the last."""
    found = {}
    for policy in POLICIES:
        with serving(launcher, server, policy) as live:
            found[policy] = measure(live)
            if policy == "bound, slices":
                found["eight victims"] = measure(live, MANY)
    for name, result in found.items():
        print(f"\n{name}: {result.report.to_dict()}")
    return found


def test_steps_tell_chunks_and_interleaved_decodes(runs: dict[str, StallResult]) -> None:
    unset, every_8 = runs["unset"].report, runs["every 8"].report
    assert (unset.prefill_chunks, unset.interleaved_decode_steps) == (NUM_CHUNKS, 0)
    assert (every_8.prefill_chunks, every_8.interleaved_decode_steps) == (NUM_CHUNKS, 3)
    assert (unset.victim_tokens_during_prefill, every_8.victim_tokens_during_prefill) == (0, 3)
    for policy in BOUNDED:
        report = runs[policy].report
        assert report.prefill_chunks == NUM_CHUNKS
        assert report.interleaved_decode_steps is not None
        assert report.interleaved_decode_steps > 3
        assert report.victim_tokens_during_prefill == report.interleaved_decode_steps
    many = runs["eight victims"].report
    assert many.prefill_chunks == NUM_CHUNKS
    assert many.interleaved_decode_steps is not None
    assert many.victim_tokens_during_prefill is not None
    assert many.victim_tokens_during_prefill > 4 * many.interleaved_decode_steps > 0


def test_the_prompt_has_the_wanted_length(runs: dict[str, StallResult]) -> None:
    for result in runs.values():
        assert result.attacker_prompt_tokens is not None
        assert (NUM_CHUNKS - 1) * CHUNK < result.attacker_prompt_tokens <= NUM_CHUNKS * CHUNK
        assert abs(result.attacker_prompt_tokens - ATTACKER_TOKENS) < 20


def test_the_report_says_the_policy(runs: dict[str, StallResult]) -> None:
    names = ("decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups")
    expected = {
        "unset": (None, None, None), "every 8": (8, None, None), "bound": (None, GAP_MS, None),
        "bound, slices": (None, GAP_MS, 3), "eight victims": (None, GAP_MS, 3),
    }  # fmt: skip
    for name, values in expected.items():
        flags = dict(zip(names, values, strict=True))
        assert runs[name].report.policy == {**flags, "chunk_tokens": CHUNK}


def test_victims_read_the_same_in_all_runs(runs: dict[str, StallResult]) -> None:
    texts = {}
    for name, result in runs.items():
        tokens = len(result.victims) * VICTIM_TOKENS
        assert result.report.victim_tokens == tokens, name
        for number, (alone, victim) in enumerate(zip(result.alone, result.victims, strict=True)):
            expected = texts.setdefault(number, alone.text)
            assert alone.text == victim.text == expected, f"{name}: victim {number}"
    assert len(set(texts.values())) == MANY
    assert all(len(text) > VICTIM_TOKENS / 2 for text in texts.values())


@slow
def test_the_longest_wait_shrinks_with_every_policy(runs: dict[str, StallResult]) -> None:
    """Ratios of one machine's times; the promise itself is asserted under a virtual clock."""
    unset = runs["unset"].report
    assert unset.max_gap_s > 0.8 * unset.attacker_wall_s
    assert unset.max_gap_s > 1.5 * runs["every 8"].report.max_gap_s
    for policy in BOUNDED:
        assert unset.max_gap_s > 2 * runs[policy].report.max_gap_s


@slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_the_advertised_bound_holds(policy: str, launcher: Launcher, server: Live) -> None:
    """On an idle machine, with slack for a step that another process delays."""
    with serving(launcher, server, policy) as live:
        for victims in (1, MANY):
            report = measure(live, victims, tokens=200).report
            print(f"\n{policy}, {victims} victims: {report.to_dict()}")
            assert report.max_gap_s <= 1.5 * GAP_MS / 1e3
            assert report.prefill_chunks == NUM_CHUNKS
            if policy == "bound, slices":  # one decode after every slice but the last
                assert report.interleaved_decode_steps == 3 * NUM_CHUNKS - 1


@slow
@pytest.mark.parametrize("policy", POLICIES)
def test_eight_victims_read_the_same(policy: str, launcher: Launcher) -> None:
    rows = ("--max-running-requests", str(MANY + 1))
    with launcher.serving(*MAIN_FLAGS, *rows, *POLICIES[policy]) as live:
        result = measure(live, MANY)
    print(f"\n{policy}, {MANY} victims: {result.report.to_dict()}")
    assert [v.text for v in result.victims] == [v.text for v in result.alone]
