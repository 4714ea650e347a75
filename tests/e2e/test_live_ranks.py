"""`serve` on two ranks: what the user sees when one is killed or stopped, and that nothing stays.

A rank that dies ends the whole server with one sentence, within the timeout.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tests.support.live import (
    Launcher,
    Live,
    Stream,
    children_of,
    cli,
    greedy,
    is_alive,
    until,
)

FLAGS = (
    "--numerics", "exact", "--num-tokens", "2048", "--tensor-parallel-size", "2",
    "--stall-timeout-s", "6",
)  # fmt: skip


def processes(live: Live) -> tuple[int, int]:
    """Engine and the other rank."""
    (engine,) = live.engine_pids()
    (rank,) = children_of(engine)
    return engine, rank


def expect_end(live: Live, pids: tuple[int, ...], within_s: float, sentence: str) -> None:
    start_s = time.monotonic()
    assert live.process.wait(within_s) == 1
    until(lambda: not any(is_alive(pid) for pid in pids), 5, "a process is left")
    print(f"\nall gone after {time.monotonic() - start_s:.1f} s")
    assert sentence in live.log()
    assert "Traceback" not in live.log()


def test_a_rank_that_is_lost_ends_the_server(launcher: Launcher) -> None:
    live = launcher.spawn(*FLAGS)
    live.wait_ready()
    pids = processes(live)
    assert live.complete("Hello", 8)["finish_reason"] == "length"
    os.kill(pids[1], signal.SIGKILL)
    expect_end(live, pids, 10, "rank 1 of 2 ended by signal 9")

    again = launcher.spawn(*FLAGS, port=live.port)
    again.wait_ready()
    pids = processes(again)
    stream = Stream(again, greedy("Hello", 1500))
    stream.wait_events(3)
    os.kill(pids[1], signal.SIGSTOP)
    expect_end(again, pids, 25, "rank 1 of 2 is stopped")
    stream.join(5)
    assert stream.errors[0]["code"] == "engine_dead"


def test_ranks_end_with_the_front(launcher: Launcher) -> None:
    live = launcher.spawn(*FLAGS)
    live.wait_ready()
    pids = processes(live)
    live.process.kill()
    until(lambda: not any(is_alive(pid) for pid in pids), 10, "a rank outlives the front")


def test_the_ranks_must_be_those_that_torchrun_starts(demos) -> None:
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    ended = subprocess.run(
        [*cli(), "serve", str(demos["tiny"]), "--tp", "2"], env=env, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith(
        "--tensor-parallel-size is 2, expected 4, the ranks that torchrun starts"
    )
