"""Processes that work through jobs, and end with the one that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import Connection
from threading import Thread
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Stopped(Exception):
    """Work cannot go on, for a reason that lies in the machine; a clause says which."""


def work_through(
    jobs: Sequence[Job], work: Callable[[Job], Result], done: Callable[[Job, Result], None], *,
    num_workers: int, name: Callable[[Job], str],
) -> None:  # fmt: skip
    """Do every job, in no order.

    Args:
        work: a function of a module; what it raises ends all work.
        done: told of each result as it comes, in this process.
        num_workers: processes; with 1 this process does the work.
        name: of a job, for a sentence.

    Raises:
        Stopped: a process was killed; it names the jobs that were under way.
    """
    if num_workers == 1 or len(jobs) < 2:
        for job in jobs:
            done(job, work(job))
        return
    waiting = iter(jobs)
    running: dict[Future[Result], Job] = {}
    try:
        with _workers(min(num_workers, len(jobs))) as pool:
            # no more than there are processes: what runs is then what was under way
            with _signals_wait():
                for job in islice(waiting, num_workers):
                    running[pool.submit(work, job)] = job
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                # results before failures, so that none is lost
                for future in sorted(finished, key=lambda x: x.exception() is not None):
                    done(running[future], future.result())
                    del running[future]
                    for job in islice(waiting, 1):
                        running[pool.submit(work, job)] = job
    except BrokenProcessPool as error:
        names = ", ".join(dict.fromkeys(map(name, running.values())))
        raise Stopped(
            f"a process at work on one of {names} was killed (where memory ran out, fewer --jobs "
            "need less)"
        ) from error


@contextlib.contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end at once when the body fails or this process is gone."""
    context = multiprocessing.get_context("spawn")
    life, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_live, initargs=(life,))
    try:
        yield pool
    except BaseException:
        held.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        life.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Processes that are started inside never see Ctrl-C and SIGTERM, which this one answers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _live(life: Connection) -> None:
    Thread(target=_end_with, args=(life,), daemon=True).start()


def _end_with(life: Connection) -> None:
    """End this process once nobody holds the other end, for which a death is enough."""
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)
