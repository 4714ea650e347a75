"""The processes of the other tensor-parallel ranks, as rank 0 starts and watches them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from torch._C._distributed_c10d import TCPStore

from ftruntime.config import RuntimeConfig
from ftruntime.engine.meeting import Meeting, meeting_for
from ftruntime.engine.tp import START_S, TensorParallel
from ftruntime.stopped import StoppedFor, is_stopped
from ftruntime.types import EngineFailedError

_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.05
_LOOK_S: Final = 1.0  # between two looks for ranks that are stopped
_END_S: Final = 5.0  # for a rank that was told to end


class RankProcesses:
    """Ranks 1 and up on this machine. They end with this process, whatever ends it."""

    def __init__(self, config: RuntimeConfig, port: int, device: str) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._given_up: str | None = None  # why a rank was killed
        self._stall_timeout_s = config.stall_timeout_s
        size = config.tensor_parallel_size
        try:
            for rank in range(1, size):
                start = {
                    "rank": rank, "size": size, "port": port, "device": device,
                    "log_level": "warning", "config": config.to_dict(),
                    # the kernel asks for the thread that started a process, not for its process
                    "dies_with_parent": threading.current_thread() is threading.main_thread(),
                }  # fmt: skip
                self._processes.append(self._spawn(json.dumps(start).encode() + b"\n"))
        except OSError:
            self.close()
            raise

    @staticmethod
    def _spawn(start: bytes) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ftruntime.engine.rank_process"], stdin=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `watch` tells
            process.stdin.write(start)
            process.stdin.flush()
        return process

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` with one sentence when a rank ends before `close`, or is stopped for longer
        than the stall timeout: not every wait for a rank has one, others may still be loading.
        """
        threading.Thread(
            target=self._look_for_stopped, args=(on_end,), name="stopped ranks", daemon=True
        ).start()
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(
                target=self._wait, args=(rank, process, on_end), name=f"rank {rank}", daemon=True
            ).start()

    def _wait(
        self, rank: int, process: subprocess.Popen[bytes], on_end: Callable[[str], None]
    ) -> None:
        status = process.wait()
        if not self._closing:
            on_end(self._sentence(rank, status))

    def _look_for_stopped(self, on_end: Callable[[str], None]) -> None:
        ranks = [StoppedFor(process.pid) for process in self._processes]
        while not self._closing:
            time.sleep(_LOOK_S)
            for rank, stopped in enumerate(ranks, start=1):
                if stopped.seconds() > self._stall_timeout_s and not self._closing:
                    self._given_up = self._stopped(rank)
                    self._closing = True
                    self._processes[rank - 1].kill()  # it cannot see that rank 0 ends
                    on_end(self._given_up)
                    return

    def ended(self, within_s: float) -> str | None:
        """The sentence on the first rank that is stopped or has ended, or soon has; else None."""
        if self._given_up is not None:
            return self._given_up
        deadline_s = time.monotonic() + within_s
        while True:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    return self._sentence(rank, process.returncode)
                if is_stopped(process.pid):
                    return self._stopped(rank)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_POLL_S)

    def _stopped(self, rank: int) -> str:
        return f"rank {rank} of {len(self._processes) + 1} is stopped"

    def _sentence(self, rank: int, status: int) -> str:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"rank {rank} of {len(self._processes) + 1} ended {how}"

    def close(self) -> None:
        """End every rank that has not ended by itself soon after."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # which a rank takes for its end
        for process in self._processes:
            try:
                process.wait(0 if is_stopped(process.pid) else _END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _local_store(size: int) -> TCPStore:
    """Where ranks on this machine leave their addresses; nobody else reaches it."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen()
        return TCPStore(
            _HOST, listener.getsockname()[1], size, is_master=True, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=START_S), master_listen_fd=listener.detach(),
        )  # fmt: skip


def start_ranks(
    config: RuntimeConfig, device: str, on_end: Callable[[str], None]
) -> tuple[TensorParallel, RankProcesses | None]:
    """Rank 0's side: start the other ranks, or meet those that torchrun started.

    Raises:
        EngineFailedError: they did not come in time.
        ValueError: torchrun starts another number of them, or this one is not the first.
    """
    timeout_s = config.stall_timeout_s
    size = config.tensor_parallel_size
    meeting = meeting_for(size, os.environ)
    if meeting is not None:
        if meeting.rank:
            raise ValueError(
                f"RANK is {meeting.rank}, expected 0: the others run `ftruntime serve`"
            )
        return TensorParallel(meeting, device=device, timeout_s=timeout_s), None
    store = _local_store(size)
    processes = RankProcesses(config, store.port, device)
    processes.watch(on_end)
    try:
        meeting = Meeting(0, size, _HOST, store.port, 0, size)
        parallel = TensorParallel(meeting, device=device, timeout_s=timeout_s, store=store)
    except EngineFailedError:
        processes.close()
        raise
    return parallel, processes
