"""`--admission optimistic` over HTTP: streams that give way, one that leaves while it waits.

The pool holds 6 pages; streams of 200 tokens grow to 4, so two cannot both stay.
Mutants run, each noticed: promises that always grow; a resumed row whose last part draws at the end
of its prompt.
"""

from __future__ import annotations

import random
import re

from tests.support.live import Launcher, Stream, greedy, until

FLAGS = (
    "--numerics", "exact", "--admission", "optimistic", "--num-tokens", "768",
    "--max-running-requests", "3",
)  # fmt: skip


def ids(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 490), k=200)


def test_p06_streams_give_way_resume_and_leave_nothing(launcher: Launcher) -> None:
    with launcher.serving(*FLAGS) as live:
        streams = [Stream(live, greedy(ids(seed), 200)) for seed in (1, 2)]
        until(lambda: live.stats()["retractions"] >= 1, 60, "nobody gives way")
        for stream in streams:
            stream.join()
            assert (stream.status, stream.errors, stream.done) == (200, [], True)
            assert stream.choices[-1]["finish_reason"] == "length"
        stats = live.wait_idle()
        assert re.search(r"ftruntime_retractions_total [1-9]", live.http.get("/metrics").text)
        for seed, stream in zip((1, 2), streams, strict=True):
            alone = live.complete(ids(seed), 200)
            assert (alone["text"], alone["usage"]["completion_tokens"]) == (stream.text, 200)
        assert live.stats()["retractions"] == stats["retractions"], "one alone always fits"

        before = live.stats()["retractions"]
        with live.http.stream(
            "POST", "/v1/completions", json=greedy(ids(3), 300) | {"stream": True}
        ) as first:
            lines = [first.iter_lines()]  # closing one would close its connection
            next(lines[0])
            with live.http.stream(
                "POST", "/v1/completions", json=greedy(ids(4), 300) | {"stream": True}
            ) as second:
                lines.append(second.iter_lines())
                next(lines[1])
                until(lambda: live.stats()["retractions"] > before, 60, "nobody gives way")
        live.wait_idle()
        assert live.stats()["aborted"] == 2
        assert "retracted request=" in live.log()
