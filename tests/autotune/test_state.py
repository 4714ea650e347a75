"""The file of trials: whose it is, what is read of it, and that nothing in it is lost.

Mutants tried: half a line taken for damage or left, damage taken for a result, a head that is not
needed or not written, trials without a head refused, a file rewritten, types or bounds of a field
not looked at, a result without times taken, a disk that is full unnoticed, two states of a file,
a glance that keeps or that needs the file for itself.
"""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import asdict
from pathlib import Path

import pytest

from autotune.search import Launch, Trial
from autotune.state import State
from autotune.workers import Stopped

LAUNCH = Launch("k", 64, 0, 1024, 12, True, "f32.bf16.bf16.f32", 3, 0.75)
TRIAL = Trial((2.5, 3.0), (LAUNCH, LAUNCH))
OTHERS = {
    "refused": Trial(error="does not compile"),
    "no figure": Trial(launches=(LAUNCH,), error="has no modelled figure"),
    "a guess": Trial((1e-3,), (Launch("k", 1, 0, 0, 1, False, None, 0, 0),), can_tell=False),
}
HEAD = b'{"file": "trials of ft-autotune", "schema": 1}\n'


def _line(trial: object, identity: object = "a") -> bytes:
    return json.dumps({"id": identity, "trial": trial}).encode() + b"\n"


def _opened(path: Path, *content: bytes) -> tuple[State, list[str]]:
    path.write_bytes(b"".join(content))
    said: list[str] = []
    return State(path, said.append), said


def test_what_is_kept_is_read_again(tmp_path):
    path = tmp_path / "folder" / "s"
    state = State(path, pytest.fail)
    for name, trial in {"a": TRIAL, **OTHERS}.items():
        state.put(name, trial)
    state.close()
    assert State(path, pytest.fail).known == {"a": TRIAL, **OTHERS}
    assert path.read_bytes().startswith(HEAD + b'{"id": "a", ')
    assert path.read_bytes().count(HEAD) == 1


def test_of_a_killed_run_the_last_line_alone_is_lost(tmp_path):
    whole = HEAD + _line(asdict(TRIAL))
    for cut in range(1, len(_line(asdict(TRIAL), "b")), 9):
        state, said = _opened(tmp_path / "s", whole, _line(asdict(TRIAL), "b")[:-cut])
        assert (tmp_path / "s").read_bytes() == whole
        state.put("c", TRIAL)
        state.close()
        assert (tmp_path / "s").read_bytes() == whole + _line(asdict(TRIAL), "c")
        assert (state.known, said) == ({"a": TRIAL, "c": TRIAL}, [])


def test_a_first_line_cut_off_is_a_fresh_start(tmp_path):
    for text in (b"", HEAD[:-1], HEAD[:35]):
        state, _ = _opened(tmp_path / "s", text)
        assert (tmp_path / "s").read_bytes() == b""
        state.put("a", TRIAL)
        state.close()
        assert (tmp_path / "s").read_bytes() == HEAD + _line(asdict(TRIAL))


def test_trials_alone_need_no_head(tmp_path):
    for half in (b"", b"{", b'{"id": "b", "tri'):
        state, said = _opened(tmp_path / "s", _line(asdict(TRIAL)), half)
        state.put("c", TRIAL)
        state.close()
        assert (tmp_path / "s").read_bytes() == _line(asdict(TRIAL)) + _line(asdict(TRIAL), "c")
        assert (state.known, said) == ({"a": TRIAL, "c": TRIAL}, [])


FOREIGN = {
    "notes": b"a\nb\n",
    "one letter": b"a",
    "half a line of JSON": b"{",
    "half a line as trials begin": b'{"id": "a", "tri',
    "JSON": b"{}\n",
    "nothing on a line": b"\n",
    "lines that begin as trials do": b'{"id": 1, "text": "x"}\n{"id": 2, "text": "y"}\n',
    "a trial among others": _line(asdict(TRIAL)) + b'{"id": "b", "text": "x"}\n',
    "a head that is not first": b"{}\n" + HEAD + _line(asdict(TRIAL)),
    "trials and half a line of others": _line(asdict(TRIAL)) + b"more",
    "bytes": b"\xff\xfe\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_something_else_is_refused_and_stays(content, tmp_path):
    with pytest.raises(ValueError, match=r"^--state is .*, expected a file that ft-autotune"):
        _opened(tmp_path / "notes", content)
    assert (tmp_path / "notes").read_bytes() == content


def _with(**fields: object) -> bytes:
    return _line({**asdict(TRIAL), **fields})


def _launch(**fields: object) -> bytes:
    return _with(launches=[{**asdict(LAUNCH), **fields}])


DAMAGED = {
    "no text": b"\xff\xfe\n",
    "no trial": b"{}\n",
    "a list": b"[1]\n",
    "half": b"{\n",
    "no line": b"\n",
    "a deep list": b"[" * 100_000 + b"\n",
    "a trial that is none": b'{"id": "a", "trial": {"us": 1}}\n',
    "a number for a name": _line(asdict(TRIAL), 1),
    "times that are text": _with(us=["1"]),
    "a time of zero": _with(us=[1.0, 0]),
    "a time below zero": _with(us=[-1.0]),
    "an endless time": _with(us=[float("inf")]),
    "no time at all": _with(us=[float("nan")]),
    "a long time": _with(us=[10**400]),
    "a truth for a time": _with(us=[True]),
    "no list of times": _with(us={"1": 2}),
    "no times and no error": _with(us=[]),
    "an error that is none": _with(error=None),
    "a number for a truth": _with(can_tell=1),
    "a list of something": _with(launches=[1]),
    "a wide share that is text": _launch(wide="x"),
    "registers that are text": _launch(registers="64"),
    "registers in parts": _launch(registers=64.5),
    "fewer than no spills": _launch(spill_bytes=-8),
    "an MMA that is a number": _launch(mma=3),
    "another field": _launch(blocks=3),
    "a field less": _with(launches=[{"kernel": "k"}]),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_damaged_lines_are_one_sentence_and_all_stays(line, tmp_path):
    content = HEAD + _line(asdict(TRIAL), "x") + line + _line(asdict(TRIAL), "y")
    state, said = _opened(tmp_path / "s", content)
    assert state.known == {"x": TRIAL, "y": TRIAL}
    assert said == [f"state file {tmp_path / 's'}: 1 damaged lines, their trials are made again"]
    state.put("z", TRIAL)
    assert (tmp_path / "s").read_bytes() == content + _line(asdict(TRIAL), "z")


def test_a_trial_of_other_cases_is_damage(tmp_path):
    """One time too many or too few for the job, which the line cannot show."""
    content = HEAD + _line(asdict(TRIAL)) + _line(asdict(OTHERS["refused"]), "refused")
    state, said = _opened(tmp_path / "s", content)
    assert state.get("a", num_users=2) == TRIAL
    assert state.get("refused", num_users=3) == OTHERS["refused"]
    assert state.get("never", num_users=1) is None
    assert said == []
    for count in (1, 3):
        assert _opened(tmp_path / "t", content)[0].get("a", num_users=count) is None
    assert state.get("a", num_users=3) is None
    assert len(said) == 1
    assert "1 damaged lines" in said[0]


def test_a_disk_that_is_full_ends_the_run_and_takes_nothing(tmp_path, monkeypatch):
    state, _ = _opened(tmp_path / "s", HEAD, _line(asdict(TRIAL)))
    written: list[bytes] = []

    class Full:
        """Takes ten bytes, then none."""

        def write(self, data: bytes) -> int:
            if written:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(bytes(data[:10]))
            return 10

    monkeypatch.setattr(state, "_file", Full())
    with pytest.raises(Stopped, match=r"^--state is .*, which cannot be written \(No space left"):
        state.put("b", TRIAL)
    assert written == [b'{"id": "b"']
    assert (tmp_path / "s").read_bytes() == HEAD + _line(asdict(TRIAL))


def test_nothing_is_written_when_a_state_is_opened(tmp_path):
    """A disk may be full then, and a process killed."""
    whole = HEAD + _line(asdict(TRIAL)) + b"damaged\n"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "s").write_bytes(whole + b'{"id": "b", "tri')
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        state = State(tmp_path / "s", lambda sentence: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state.known == {"a": TRIAL}
    assert (tmp_path / "s").read_bytes() == whole


def test_a_state_belongs_to_one(tmp_path):
    first = State(tmp_path / "s", pytest.fail)
    with pytest.raises(ValueError, match=r"^--state is .*/s, which another ft-autotune uses"):
        State(tmp_path / "s", pytest.fail)
    first.put("a", TRIAL)
    glanced = State.glance(tmp_path / "s")
    glanced.put("b", TRIAL)
    assert set(glanced.known) == {"a", "b"}
    first.close()
    assert set(State(tmp_path / "s", pytest.fail).known) == {"a"}


def test_a_state_that_is_no_file_is_refused(tmp_path):
    for path in (Path("/dev/full"), tmp_path):
        with pytest.raises(ValueError, match=f"^--state is {path}, expected a file$"):
            State(path, pytest.fail)
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match=r"^--state is .*, which cannot be used"):
        State(tmp_path / "x" / "y", pytest.fail)
    with pytest.raises(ValueError, match=r"^--state is .*, which cannot be used \(File name too"):
        State(tmp_path / ("x" * 256), pytest.fail)
    assert State.glance(tmp_path).known == {}


def test_the_null_device_keeps_nothing():
    for _ in range(2):
        state = State(Path("/dev/null"), pytest.fail)
        assert state.known == {}
        state.put("a", TRIAL)
        state.close()
