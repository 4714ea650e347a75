"""Fields of the report, by hand, and what the steps of a server tell.

Mutants tried and seen red: slices counted as chunks, decodes counted that are not interleaved, a
missed record overlooked, gaps from the first piece.
"""

from __future__ import annotations

import asyncio
import io

from ftruntime.bench.report import StallReport, gaps, print_table, total, wall
from ftruntime.bench.steps import StepWatch

FIELDS = [
    "policy", "prefill_chunks", "attacker_wall_s", "victim_wall_s", "victim_tokens",
    "victim_alone_wall_s", "max_gap_s", "gaps_over_5s", "gaps_over_20s",
    "interleaved_decode_steps", "victim_tokens_during_prefill",
]  # fmt: skip


def report(**values: object) -> StallReport:
    fields = dict.fromkeys(FIELDS, None) | {"max_gap_s": 1.23456789, "gaps_over_5s": 0}
    return StallReport(**fields | values)  # type: ignore[arg-type]


def test_the_fields_are_those_of_the_contract_in_order():
    assert list(report().to_dict()) == [*FIELDS, "source"]
    assert report().to_dict()["source"] == "measured"
    assert report().to_dict()["max_gap_s"] == 1.2346


def test_gaps_and_walls_of_a_stream():
    times = [10.0, 10.5, 17.5, 17.75]
    assert gaps(times) == [0.5, 7.0, 0.25]
    assert wall(times) == 7.75
    assert (gaps([3.0]), gaps([]), wall([3.0]), wall([])) == ([], [], 0.0, 0.0)
    assert (total([3, 0, 4]), total([3, None]), total([])) == (7, None, 0)


def test_the_table_shows_every_field_and_what_is_unknown():
    policy = {"decode_interleave_every": None, "chunk_tokens": 128}
    stream = io.StringIO()
    print_table(report(policy=policy), "measured [here]", stream)
    lines = stream.getvalue().splitlines()
    rows = {line.split()[0]: line.split()[1] for line in lines if line}
    assert rows["policy"] == "chunk_tokens=128"
    assert rows["max_gap_s"] == "1.2346"
    assert rows["prefill_chunks"] == "-"
    assert set(FIELDS) < set(rows)
    assert "source" not in rows
    assert lines[-1].rstrip() == "measured [here]"


class Steps:
    """A server's `/v1/steps` that remembers its last `kept` records."""

    def __init__(self, kept: int = 100) -> None:
        self.records: list[dict[str, object]] = []
        self.kept = kept
        self.next: int | None = 0

    def add(self, *kinds: str, num_seqs: int = 1) -> None:
        """`p0` and so on: a slice of a chunk; `d` a decode, `i` an interleaved one."""
        for kind in kinds:
            first = int(kind[1:] or 0)
            self.records.append(
                {"index": len(self.records), "kind": "prefill" if kind[0] == "p" else "decode",
                 "layers": [first, first + 2], "interleaved": kind == "i", "num_tokens": num_seqs}
            )  # fmt: skip
        self.next = len(self.records)

    async def read_json(self, path: str, what: str) -> dict[str, object] | None:
        if self.next is None:
            return None
        since = int(path.partition("since=")[2])
        steps = [r for r in self.records[-self.kept :] if int(str(r["index"])) >= since]
        return {"steps": steps, "next": self.next}


def test_steps_are_counted_from_the_beginning_on():
    async def main() -> None:
        steps = Steps()
        steps.add("p0", "p0", "i", "d")
        watch = StepWatch(steps)  # type: ignore[arg-type]
        await watch.begin()
        await watch.poll()
        assert (watch.known, watch.chunks, watch.interleaved_steps) == (True, 0, 0)
        steps.add("d", "p0", "i", "p2", "i", "p4", num_seqs=8)
        await watch.poll()
        steps.add("p0", "p2", "p4", "i", "d", num_seqs=3)
        await watch.poll()
        assert (watch.known, watch.chunks, watch.interleaved_steps) == (True, 2, 3)
        assert watch.interleaved_tokens == 8 + 8 + 3

    asyncio.run(main())


def test_a_missed_record_makes_the_counts_unknown():
    async def main() -> None:
        steps = Steps(kept=3)
        watch = StepWatch(steps)  # type: ignore[arg-type]
        await watch.begin()
        steps.add("p0", "p0", "p0")
        await watch.poll()
        assert watch.known
        steps.add("p0", "i", "p0", "i")
        await watch.poll()
        assert not watch.known

    asyncio.run(main())


def test_a_server_without_steps_is_unknown():
    async def main() -> None:
        steps = Steps()
        steps.next = None
        watch = StepWatch(steps)  # type: ignore[arg-type]
        await watch.begin()
        await watch.poll()
        assert not watch.known

    asyncio.run(main())
