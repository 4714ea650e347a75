"""Compiles configs in parallel, and keeps what was found so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.compiler.errors import CompilationError

from autotune.search import Launch, Trial, User, traits
from ftkernels import KernelSpec, config, registry
from ftkernels.config import FrozenKey
from ftkernels.offline import Compiled, compile_launches
from ftkernels.spec import Case
from ftkernels.testing import sass

SCHEMA = 2
Score = Callable[[KernelSpec, Case, Sequence[Compiled]], float]


_LINE_START = b'{"id": '  # of every line of a state file


@dataclass(frozen=True)
class Job:
    """A config under one key of one op, to be compiled in the given cases.

    Args:
        score: modelled microseconds of a call, a function of a module.
        model: hash of the sources that the score follows from.
    """

    op: str
    key: FrozenKey
    record: Any
    users: tuple[User, ...]
    arch: int
    score: Score
    model: str

    @property
    def identity(self) -> str:
        """Hash of all that the result follows from: sources, sizes, versions."""
        specs = [_spec(name) for name in (self.op, *(op for op, _ in self.users))]
        sources = {config.source_hash(x) for spec in specs for x in (spec.default, spec.op) if x}
        follows_from = [
            SCHEMA, sorted(sources), self.model, triton.__version__, self.arch, self.op, self.key,
            sorted(vars(self.record).items()), self.users,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()[:24]


@cache
def _spec(name: str) -> KernelSpec:
    return next(spec for spec in registry() if spec.name == name)


def attempt(job: Job) -> Trial:
    """Compile a config for every case."""
    us: list[float] = []
    launches: list[Launch] = []
    can_tell = True
    for op, case in job.users:
        spec = _spec(op)
        try:
            with config.pin(job.op, job.record, key=job.key):
                compiled = compile_launches(spec, case, arch=job.arch)
        except (RuntimeError, ValueError, CompilationError):
            return Trial(error="does not compile")
        launches += [_launch(x) for x in compiled]
        can_tell = can_tell and all(_is_described(spec, case, x) for x in compiled)
        try:
            us.append(round(job.score(spec, case, compiled), 4))
        except ValueError:
            return Trial(launches=tuple(launches), error="has no modelled figure")
    return Trial(tuple(us), tuple(launches), can_tell=can_tell)


def _is_described(spec: KernelSpec, case: Case, compiled: Compiled) -> bool:
    """Whether the SPEC says how often the loops of a launch run, or there are none."""
    launch = compiled.launch
    if spec.work(case, launch.name, launch.config) is not None:
        return True
    return not sass.regions(launch.report.sass)[0]


def _launch(compiled: Compiled) -> Launch:
    report = compiled.launch.report
    mma, copies, wide = traits(report.ptx)
    return Launch(
        kernel=compiled.launch.name, registers=report.regs, spill_bytes=report.spill_bytes,
        shared_bytes=report.shared, warps_per_sm=report.blocks_per_sm * report.num_warps,
        fits=report.fits, mma=mma, copies=copies, wide=round(wide, 4),
    )  # fmt: skip


class State:
    """Results by identity in a file of one JSON line each, written as they come.

    Args:
        say: told in one sentence how many lines are damaged; those trials are made again.

    Raises:
        ValueError: the path is no file of this kind, which is left as it is; in one sentence.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path = path
        self._known: dict[str, Trial] = {}
        if path is None:
            return
        # the null device keeps nothing, and reads as nothing
        if path.exists() and not path.is_file() and str(path) != os.devnull:
            raise ValueError(f"--state is {path}, expected a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        except OSError as error:
            raise ValueError(
                f"--state is {path}, which cannot be used ({error.strerror})"
            ) from error
        good = [line for line in lines if self._take(line)]
        if lines and not good and not lines[-1].startswith(_LINE_START):
            raise ValueError(f"--state is {path}, expected a file that ft-autotune wrote")
        # a killed run may have left half of its last line
        num_damaged = sum(line.endswith(b"\n") for line in lines) - len(good)
        if num_damaged:
            say(f"state file {path}: {num_damaged} damaged lines, their trials are made again")
        if good != lines:
            path.write_bytes(b"".join(good))

    def _take(self, line: bytes) -> bool:
        """Whether the line is whole and a trial, which is then known."""
        if not line.endswith(b"\n"):
            return False
        try:
            entry = json.loads(line)
            self._known[str(entry["id"])] = _trial(entry["trial"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return False
        return True

    def get(self, identity: str) -> Trial | None:
        return self._known.get(identity)

    def put(self, identity: str, trial: Trial) -> None:
        self._known[identity] = trial
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"id": identity, "trial": asdict(trial)}) + "\n")


def _trial(data: Mapping[str, Any]) -> Trial:
    launches = tuple(Launch(**launch) for launch in data["launches"])
    us = tuple(float(us) for us in data["us"])
    if not all(one > 0 for one in us):
        raise ValueError(f"us is {us}, expected numbers above 0")
    return Trial(us, launches, str(data["error"]), bool(data["can_tell"]))


def run(
    jobs: Iterable[Job], state: State, *, num_workers: int, advance: Callable[[Job, Trial], None]
) -> list[Trial]:
    """The trial of every job, in their order; what the state knows is not compiled again.

    Args:
        num_workers: processes that compile; with 1 this process does.
        advance: told of each trial as it comes.
    """
    jobs = list(jobs)
    identities = [job.identity for job in jobs]
    open_jobs = {}
    for job, identity in zip(jobs, identities, strict=True):
        known = state.get(identity)
        if known is not None:
            advance(job, known)
        else:
            open_jobs[identity] = job
    for identity, trial in _attempted(open_jobs, num_workers):
        state.put(identity, trial)
        advance(open_jobs[identity], trial)
    found = [state.get(identity) for identity in identities]
    return [trial for trial in found if trial is not None]


def _attempted(open_jobs: Mapping[str, Job], num_workers: int) -> Iterable[tuple[str, Trial]]:
    if num_workers == 1 or len(open_jobs) < 2:
        for identity, job in open_jobs.items():
            yield identity, attempt(job)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_ignore_interrupts)
    try:
        futures = {pool.submit(attempt, job): identity for identity, job in open_jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    # the command ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
