"""`serve` on two ranks: what the user sees when one is killed or stopped, and that nothing stays.

A rank that dies ends the whole server with one sentence, within the timeout, and the next start on
the same port works at once (G02, G07, G09). RUN_SLOW=1: each rank in each phase.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.live import (
    START_S,
    Launcher,
    Live,
    Stream,
    children_of,
    cli,
    free_port,
    greedy,
    is_alive,
    until,
)

SLOW = os.environ.get("RUN_SLOW") == "1"
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


def expect_failed(stream: Stream) -> None:
    """Before the first event the answer is an error as a whole."""
    stream.join(5)
    codes = {error["code"] for error in stream.errors}
    assert (stream.status, codes) in [(503, set()), (200, {"engine_dead"})]


SENTENCES = {0: "the engine process ended", 1: "rank 1 of 2 ended by signal 9"}
PHASES = ("starting", "loading", "prefilling", "decoding", "idle")
MATRIX = [(phase, rank) for phase in PHASES for rank in (0, 1)]


def reach(live: Live, phase: str) -> tuple[tuple[int, int], Stream | None]:
    """The processes in a phase, and what a client waits for."""
    until(lambda: bool(live.engine_pids()), 30, "no engine")
    (engine,) = live.engine_pids()
    until(lambda: bool(children_of(engine)), 30, "no rank")
    pids = processes(live)
    if phase == "starting":
        return pids, None
    if phase == "loading":

        def is_loading() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return str(live.http.get("/health").json()["phase"]).startswith("load")
            return False

        until(is_loading, 30, "it does not load")
        return pids, None
    live.wait_ready()
    if phase == "idle":
        return pids, None
    if phase == "prefilling":
        stream = Stream(live, greedy([7] * 1900, 8))
        until(lambda: live.stats()["prefill_steps"] >= 2, 30, "no chunk")
        assert not stream.events
        return pids, stream
    stream = Stream(live, greedy("Hello", 1500))
    stream.wait_events(3)
    return pids, stream


@pytest.mark.parametrize(
    ("phase", "rank"), MATRIX if SLOW else [("starting", 1), ("loading", 0), ("prefilling", 1)]
)
def test_a_killed_rank_ends_the_server_in_any_phase(
    launcher: Launcher, phase: str, rank: int
) -> None:
    live = launcher.spawn(*FLAGS, "--max-prefill-length", "128")
    pids, stream = reach(live, phase)
    os.kill(pids[rank], signal.SIGKILL)
    expect_end(live, pids, 10, SENTENCES[rank])
    if stream is not None:
        expect_failed(stream)
    with launcher.serving(*FLAGS, port=live.port) as again:
        assert again.complete("Hello", 4)["finish_reason"] == "length"


def test_a_rank_that_is_lost_ends_the_server(launcher: Launcher) -> None:
    live = launcher.spawn(*FLAGS)
    live.wait_ready()
    pids = processes(live)
    assert live.complete("Hello", 8)["finish_reason"] == "length"
    os.kill(pids[1], signal.SIGKILL)
    expect_end(live, pids, 10, "rank 1 of 2 ended by signal 9")

    with launcher.serving(*FLAGS, port=live.port) as again:
        assert again.complete("Hello", 4)["finish_reason"] == "length"


STOPPED = {0: "the engine is stopped: the ranks are ended", 1: "rank 1 of 2 is stopped"}


@pytest.mark.parametrize(
    ("phase", "rank"), MATRIX if SLOW else [("loading", 0), ("loading", 1), ("decoding", 1)]
)
def test_a_stopped_rank_ends_the_server_in_any_phase(
    launcher: Launcher, phase: str, rank: int
) -> None:
    live = launcher.spawn(*FLAGS[:-1], "3", "--max-prefill-length", "128")
    pids, stream = reach(live, phase)
    launcher.also_kill(pids)
    os.kill(pids[rank], signal.SIGSTOP)
    loads = phase in ("starting", "loading")
    sentence = STOPPED[rank] if rank or loads else "the engine has not answered for"
    expect_end(live, pids, 20, sentence)
    if stream is not None:
        expect_failed(stream)


def test_a_rank_that_is_stopped_between_two_steps_ends_the_server(launcher: Launcher) -> None:
    """Rank 0 cannot tell it of the next. Fails when messages wait as long as an idle rank does."""
    live = launcher.spawn(*FLAGS)
    live.wait_ready()
    pids = processes(live)
    launcher.also_kill(pids)
    os.kill(pids[1], signal.SIGSTOP)
    stream = Stream(live, greedy("Hello", 1500))
    expect_end(live, pids, 25, STOPPED[1])
    expect_failed(stream)


def listening(pid: int) -> set[str]:
    """Addresses in hexadecimal, as /proc has them, that a process listens on."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                found.add(words[1].split(":")[0])
    return found


def test_a_rank_that_is_stopped_for_a_moment_does_no_harm(launcher: Launcher) -> None:
    """And ranks listen on no address of every network. Fails with the store that torch makes."""
    with launcher.serving(*FLAGS) as live:
        for pid in processes(live):
            assert not listening(pid) & {"0" * 8, "0" * 32}
        stream = Stream(live, greedy("Hello", 200))
        stream.wait_events(3)
        for pid in processes(live):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(pid, signal.SIGCONT)
            time.sleep(1.0)
        stream.join(60)
        assert (stream.status, stream.errors) == (200, [])
        assert stream.choices[-1]["finish_reason"] == "length"


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


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "ftruntime", "serve"]


def two_nodes(launcher: Launcher, *models: Path) -> list[Live]:
    """Two agents, as on two machines; each starts one rank."""
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    port = str(free_port())
    return [
        launcher.spawn(
            *FLAGS, model=model,
            command=torchrun(*nodes, "--master-port", port, "--node-rank", str(node)),
            env={"CUDA_VISIBLE_DEVICES": ""},
        )
        for node, model in enumerate(models or (None, None))
    ]  # fmt: skip


def test_two_nodes_meet_as_torchrun_has_them_meet(launcher: Launcher) -> None:
    """And a node that is gone is noticed while nobody asks for anything."""
    first, second = two_nodes(launcher)
    first.wait_ready()
    text = first.complete("Hello", 12)["text"]
    for pid in (*second.engine_pids(), second.process.pid):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not is_well(first), 12, "health says that all is well")
    assert first.process.wait(30) == 1, "torchrun's own status"
    assert "rank 0 of 2 lost the others" in first.log()
    with launcher.serving(*FLAGS) as one_node:
        assert one_node.complete("Hello", 12)["text"] == text


def is_well(live: Live) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return live.http.get("/health").status_code == 200
    return False


def test_torchrun_is_ended_after_what_runs(launcher: Launcher) -> None:
    """Rank 1 is told to end at the same time, and is needed until the stream is over."""
    live = launcher.spawn(*FLAGS, command=torchrun("--nproc-per-node", "2"))
    live.wait_ready()
    stream = Stream(live, greedy("Hello", 60))
    stream.wait_events(3)
    live.process.terminate()
    stream.join(60)
    assert stream.choices[-1]["finish_reason"] == "length"
    live.process.wait(30)
    assert "engine dead" not in live.log()


def test_ranks_with_other_weights_do_not_start(launcher: Launcher, tmp_path: Path) -> None:
    """Of the same shapes."""
    other = tmp_path / "other"
    made = subprocess.run(
        [*cli(), "make-demo", str(other), "--random", "--seed", "1"], capture_output=True
    )
    assert made.returncode == 0, made.stderr
    first, second = two_nodes(launcher, launcher.demo, other)
    second.wait_log("fingerprint of the weights is", timeout_s=START_S)
    assert first.process.wait(60) == 1
    assert "fingerprint of the weights is" in first.log()


def test_g02_a_rank_that_cannot_be_reached_ends_the_start(launcher: Launcher) -> None:
    port = str(free_port())
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    live = launcher.spawn(*FLAGS, "--stall-timeout-s", "3", env={**env, "MASTER_PORT": port})
    start_s = time.monotonic()
    assert live.process.wait(60) == 1
    print(f"\nended after {time.monotonic() - start_s:.1f} s")
    assert f"rank 0 of 2 did not meet the others at 127.0.0.1:{port} within 3 s" in live.log()
    assert "Traceback" not in live.log()
    assert live.engine_pids() == []


def test_a_taken_port_ends_the_start_before_a_rank(launcher: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        live = launcher.spawn(*FLAGS, port=taken.getsockname()[1])
        assert live.process.wait(60) == 1
    assert f"--port is {live.port}" in live.log()
    assert "Traceback" not in live.log()
