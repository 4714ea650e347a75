"""Runs the placing of experts, one by one or by several threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

Job = Callable[[], int | None]


def serial(jobs: Iterable[Job]) -> Generator[int | None]:
    """What each job returns, in order."""
    for job in jobs:
        yield job()


def parallel(jobs: Sequence[Job], threads: int) -> Generator[int | None]:
    """What each job returns, as they end; they start in order.

    The first error, also one at the consumer, ends it: jobs that run are waited for, the rest never
    start.
    """
    intra_op = torch.get_num_threads()
    # the threads of a job's own operations would stand in each other's way
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="expert-load")
    try:
        for future in as_completed([pool.submit(job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(intra_op)
