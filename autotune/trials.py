"""Compiles configs in parallel; what a run before found is not compiled again."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources, PTXASError

from autotune import settings
from autotune.search import Launch, Trial, User, traits
from autotune.state import State
from autotune.workers import Stopped, work_through
from ftkernels import KernelSpec, config, registry
from ftkernels.config import FrozenKey
from ftkernels.offline import Compiled, compile_launches
from ftkernels.spec import Case
from ftkernels.testing import sass

SCHEMA = 3
COMPILE_ERRORS = (OSError, MemoryError, RuntimeError, TritonError, subprocess.SubprocessError)
Score = Callable[[KernelSpec, Case, Sequence[Compiled]], float]
# ptxas names errors of its input so; a crash on an input is one too
_PTXAS_VERDICT = re.compile(r"^ptxas .*\berror\s*:|raised SIGSEGV|error code -(?:6|11)\b", re.M)


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
        """Hash of all that the result follows from: sources, sizes, versions, settings."""
        specs = [_spec(name) for name in (self.op, *(op for op, _ in self.users))]
        sources = {config.source_hash(x) for spec in specs for x in (spec.default, spec.op) if x}
        follows_from = [
            SCHEMA, sorted(sources), self.model, triton.__version__, self.arch, self.op, self.key,
            sorted(vars(self.record).items()), self.users, settings.identity(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()[:24]

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in vars(self.record).items())
        return f"{self.op} ({settings})"


@cache
def _spec(name: str) -> KernelSpec:
    return next(spec for spec in registry() if spec.name == name)


def attempt(job: Job) -> Trial:
    """Compile a config for every case.

    Raises:
        Stopped: the machine failed, so that nothing is known of the config.
    """
    try:
        with silent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of stale entries
            return _attempt(job)
    except COMPILE_ERRORS as error:
        if _is_verdict(error):
            return Trial(error="does not compile")
        raise stopped(str(job), error) from None


def silent() -> contextlib.AbstractContextManager[object]:
    """Nothing is printed inside: Triton shows the whole code of what ptxas refuses."""
    return contextlib.redirect_stdout(io.StringIO())


def stopped(what: str, error: BaseException) -> Stopped:
    """That something cannot be compiled, and the first line of why."""
    said = str(error).strip().splitlines() or [""]
    return Stopped(f"{what} cannot be compiled: {type(error).__name__}: {said[0]}")


def _attempt(job: Job) -> Trial:
    us: list[float] = []
    launches: list[Launch] = []
    can_tell = True
    for op, case in job.users:
        spec = _spec(op)
        try:
            with config.pin(job.op, job.record, key=job.key):
                compiled = compile_launches(spec, case, arch=job.arch)
        except ValueError:
            return Trial(error="does not compile")
        launches += [_launch(x) for x in compiled]
        can_tell = can_tell and all(_is_described(spec, case, x) for x in compiled)
        try:
            us.append(round(job.score(spec, case, compiled), 4))
        except ValueError:
            return Trial(launches=tuple(launches), error="has no modelled figure")
    return Trial(tuple(us), tuple(launches), can_tell=can_tell)


def _is_verdict(error: BaseException) -> bool:
    """Whether an error is the compiler's about the kernel, which no other run would change."""
    if isinstance(error, PTXASError):
        return _PTXAS_VERDICT.search(error.error_message or "") is not None
    if isinstance(error, CompilationError):
        # it wraps whatever was raised at a line of the kernel
        cause = error.__cause__ or error.__context__
        return not isinstance(cause, OSError | MemoryError) and (
            not isinstance(cause, CompilationError) or _is_verdict(cause)
        )
    if isinstance(error, RuntimeError):
        return str(error) == "PassManager::run failed"
    return isinstance(error, OutOfResources)


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


def run(
    jobs: Iterable[Job], state: State, *, num_workers: int, advance: Callable[[Job, Trial], None]
) -> list[Trial]:
    """The trial of every job, in their order; what the state knows is not compiled again.

    Args:
        num_workers: processes that compile; with 1 this process does.
        advance: told of each trial as it comes.

    Raises:
        Stopped: the machine failed; the state has what was found.
    """
    jobs = list(jobs)
    identities = [job.identity for job in jobs]
    open_jobs = {}
    for job, identity in zip(jobs, identities, strict=True):
        known = state.get(identity, num_users=len(job.users))
        if known is not None:
            advance(job, known)
        else:
            open_jobs[identity] = job

    def done(job: Job, trial: Trial) -> None:
        state.put(job.identity, trial)
        advance(job, trial)

    work_through(list(open_jobs.values()), attempt, done, num_workers=num_workers, name=str)
    return [state.known[identity] for identity in identities]
