"""Trials: what is compiled, what the file of a run before spares, and what that follows from.

Mutants tried: the state ignored, a number of times that is not the cases' taken, the key, config,
sources, model, Triton version, settings or card left out of the identity, results in the order in
which they came; an error of the machine kept as a verdict, a refusal of ptxas or a compile error
taken for the machine's, the reason below a compile error not looked at, what Triton prints left on
stdout, warnings of stale entries let through.
"""

from __future__ import annotations

import errno
import subprocess
import warnings
from dataclasses import replace

import pytest
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from autotune import trials
from autotune.search import Launch, Trial
from autotune.state import State
from autotune.trials import Job
from autotune.workers import Stopped
from ftkernels import config
from tests.autotune.toy import HOST, TOY, Tile

KEY = (("I", 128), ("T", 1))
CASE = {"name": "flash-t1", "T": 1, "I": 128}


def score(spec, case, launches) -> float:
    """A stand-in: the pinned block in microseconds."""
    return float(launches[0].block)


def _job(**changes: object) -> Job:
    job = Job("toy", KEY, Tile(16, 4), (("toy", CASE),), 89, score, "model")
    return replace(job, **changes)


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compiler; lists the configs that it was asked to compile."""
    done = []

    def compile_launches(spec, case, *, arch):
        sizes = {"T": case["T"], "I": case["I"]}
        record = config.lookup("toy", sizes, spec.default, grows="T")
        done.append(record)
        if record.block == 64:
            raise PTXASError("`ptxas` stderr:\nptxas error   : too much shared data")
        return [record]

    monkeypatch.setattr(trials, "_spec", {"toy": TOY, "host": HOST}.__getitem__)
    monkeypatch.setattr(trials, "compile_launches", compile_launches)
    monkeypatch.setattr(trials, "_is_described", lambda spec, case, x: x.num_warps == 4)
    launch = Launch("k", 1, 0, 0, 1, True, None, 0, 0)
    monkeypatch.setattr(trials, "_launch", lambda x: replace(launch, registers=x.block))
    return done


def _run(jobs, state=None) -> list[Trial]:
    told = []
    found = trials.run(
        jobs, state or State(None, print), num_workers=1, advance=lambda *x: told.append(x)
    )
    assert len(told) == len(jobs)
    return found


def test_the_config_is_pinned_in_every_case(compiled):
    users = [("toy", {**CASE, "T": t}) for t in (400, 512, 600)]
    key = config.entry_key({"T": 512, "I": 128})
    (trial,) = _run([_job(key=key, record=Tile(32, 4), users=tuple(users[:2]))])
    assert trial.us == (32.0, 32.0)
    _run([_job(key=key, record=Tile(32, 4), users=tuple(users))])
    assert compiled[2:] == [Tile(32, 4), Tile(32, 4), Tile(64, 4)]  # 600 is another key


def test_results_come_in_the_order_of_the_jobs(compiled):
    jobs = [_job(record=Tile(block, 4)) for block in (32, 16, 8)]
    assert [x.us for x in _run(jobs)] == [(32.0,), (16.0,), (8.0,)]


def test_what_cannot_be_compiled_or_modelled_is_dropped(compiled):
    def no_figure(spec, case, launches) -> float:
        raise ValueError("more work than the instructions do")

    failed, unmodelled = _run([_job(record=Tile(64, 4)), _job(score=no_figure, model="other")])
    assert failed == Trial(error="does not compile")
    assert unmodelled.error == "has no modelled figure"


def _compile_error(reason: Exception | None) -> CompilationError:
    """As Triton raises it at a line of a kernel."""
    try:
        raise CompilationError("x = 1", None, "at a line") from reason
    except CompilationError as error:
        return error


PTXAS = "`ptxas` failed with error code 255\n`ptxas` stderr:\n{}\nRepro command: ptxas a.ptx\n"
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
VERDICTS = {
    "too much shared": PTXASError(PTXAS.format("ptxas error   : Entry function 'k' uses too much")),
    "syntax": PTXASError(PTXAS.format("ptxas /tmp/a, line 9; error   : Not a name: 'rot'")),
    "crash": PTXASError("`ptxas` failed with error code -11\n`ptxas` stderr:\n"),
    "passes": RuntimeError("PassManager::run failed"),
    "static_assert": _compile_error(None),
    "value": _compile_error(ValueError("shape")),
    "resources": OutOfResources(200000, 101376, "shared memory"),
    "refused": ValueError("num_ctas"),
}
MACHINE = {
    "no space": NO_SPACE,
    "no tool": RuntimeError("Cannot find ptxas"),
    "no cache": RuntimeError("Could not create or locate cache dir"),
    "no memory": MemoryError(),
    "no ptx file": PTXASError(
        PTXAS.format("ptxas fatal   : Input file '/tmp/a' could not be opened")
    ),
    "ptxas killed": PTXASError("`ptxas` failed with error code -9\n`ptxas` stderr:\n"),
    "no cubin": subprocess.CalledProcessError(255, "cuobjdump"),
    "in a kernel": _compile_error(_compile_error(NO_SPACE)),
}


def _failing(monkeypatch, error: Exception) -> None:
    def compile_launches(spec, case, *, arch):
        print("the whole code of a kernel")
        warnings.warn("entries ignored", stacklevel=1)
        raise error

    monkeypatch.setattr(trials, "_spec", {"toy": TOY, "host": HOST}.__getitem__)
    monkeypatch.setattr(trials, "compile_launches", compile_launches)


@pytest.mark.parametrize("error", VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_of_the_compiler_is_kept(error, tmp_path, monkeypatch, capsys):
    _failing(monkeypatch, error)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _run([_job()], State(tmp_path / "s", pytest.fail))
    assert found == [Trial(error="does not compile")]
    assert (tmp_path / "s").read_bytes().count(b"\n") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", MACHINE.values(), ids=MACHINE)
def test_a_failure_of_the_machine_ends_the_run_and_is_not_kept(error, tmp_path, monkeypatch):
    _failing(monkeypatch, error)
    reason = rf"^toy \(block=16 num_warps=4\) cannot be compiled: {type(error).__name__}: "
    with pytest.raises(Stopped, match=reason) as end:
        _run([_job()], State(tmp_path / "s", pytest.fail))
    assert "\n" not in str(end.value)
    assert (tmp_path / "s").read_bytes() == b""


def test_a_result_of_other_cases_is_made_again(tmp_path, compiled):
    path, said = tmp_path / "s", []
    before = _run([_job()], State(path, pytest.fail))
    path.write_text(path.read_text().replace("[16.0]", "[16.0, 16.0]"))
    assert _run([_job()], State(path, said.append)) == before
    assert len(compiled) == 2
    assert said == [f"state file {path}: 1 damaged lines, their trials are made again"]
    assert _run([_job()], State(path, pytest.fail)) == before  # the last line of a job counts
    assert len(compiled) == 2


def test_a_guess_of_the_model_is_marked(compiled):
    sure, guess = _run([_job(), _job(record=Tile(16, 8))])
    assert (sure.can_tell, guess.can_tell) == (True, False)


def test_a_run_goes_on_where_one_was_killed(tmp_path, compiled):
    path = tmp_path / "folder" / "state.jsonl"
    jobs = [_job(record=Tile(block, 4)) for block in (32, 64, 16)]
    before = _run(jobs, State(path, pytest.fail))
    assert len(compiled) == 3
    half = path.read_bytes()[:-20]
    path.write_bytes(half)
    assert _run(jobs, State(path, pytest.fail)) == before
    assert len(compiled) == 4  # the one whose line was cut off
    assert _run(jobs, State(path, pytest.fail)) == before
    assert len(compiled) == 4


OTHER_JOBS = {
    "key": {"key": (("I", 128), ("T", 2))},
    "config": {"record": Tile(16, 8)},
    "cases": {"users": (("toy", {**CASE, "T": 2}),)},
    "card": {"arch": 90},
    "model": {"model": "another"},
    "inside": {"users": (("host", CASE),)},
}


@pytest.mark.parametrize("change", OTHER_JOBS.values(), ids=OTHER_JOBS)
def test_another_job_has_another_identity(change, compiled):
    assert _job(**change).identity != _job().identity
    assert _job().identity == _job().identity


def test_other_sources_and_versions_have_another_identity(compiled, monkeypatch):
    before = _job().identity
    monkeypatch.setattr(triton, "__version__", "9.9.0")
    other = _job().identity
    monkeypatch.setattr(config, "source_hash", lambda function: "0")
    source = _job().identity
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert len({before, other, source, _job().identity}) == 4


def test_a_real_kernel_is_read_off(tmp_path):
    from ftkernels import backend

    if backend.interpreted():
        pytest.skip("offline compiles need a process without TRITON_INTERPRET")
    spec = trials._spec("adjust_logits")
    case = next(x for x in spec.cases if x["name"] == "flash-t50")
    job = Job(
        "adjust_logits", config.entry_key({"N": 20000}, "N"), spec.default({"N": 20000}),
        (("adjust_logits", case),), 89, lambda spec, case, launches: 2.0, "",
    )  # fmt: skip
    trial = trials.attempt(job)
    (launch,) = trial.launches
    assert trial.us == (2.0,)
    assert (launch.kernel, launch.fits, launch.spill_bytes) == ("_adjust_logits_kernel", True, 0)
    assert 0 < launch.registers <= 255
    assert (launch.mma, launch.copies) == (None, 0)
    assert trial.can_tell
