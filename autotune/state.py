"""The file that keeps trials, so that a killed run goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_type_hints

from autotune.search import Launch, Trial
from autotune.workers import Stopped

_NAME = b'{"file": "trials of ft-autotune", '
_HEAD = _NAME + b'"schema": 1}\n'
_MOST = 1e12  # of any figure; microseconds, that is eleven days
_LINE_START = b'{"id": '
_KINDS = get_type_hints(Launch)


class State:
    """Results by identity in a file of one JSON line each, written as they come.

    The file is this object's alone until `close`, or until the process ends. What stands in it
    stays, but for half a last line.

    Args:
        say: told in one sentence how many lines are damaged; those trials are made again.

    Attributes:
        known: trials by identity.

    Raises:
        ValueError: the path is no file of this kind, which is left as it is, or another process
            has it; in one sentence.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self.known: dict[str, Trial] = {}
        self._path, self._say = path, say
        self._file: BinaryIO | None = None
        self._head = b""  # to be written before the next line
        if path is None:
            return
        # the null device keeps nothing, and reads as nothing
        is_null = str(path) == os.devnull
        try:
            if path.exists() and not path.is_file() and not is_null:
                raise ValueError(f"--state is {path}, expected a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            if not is_null:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            self._read(self._file.readlines())
        except BlockingIOError:
            raise ValueError(
                f"--state is {path}, which another ft-autotune uses, expected one of its own"
            ) from None
        except OSError as error:
            self.close()
            raise ValueError(
                f"--state is {path}, which cannot be used ({error.strerror})"
            ) from error
        except ValueError:
            self.close()
            raise

    @classmethod
    def glance(cls, path: Path) -> State:
        """What can be read of a file, whoever has it; nothing is kept there."""
        state = cls(None, lambda sentence: None)
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines(keepends=True):
                state._take(line)
        return state

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, lines: Sequence[bytes]) -> None:
        assert self._file is not None
        half = lines[-1] if lines and not lines[-1].endswith(b"\n") else b""
        whole = lines[:-1] if half else lines
        has_head = whole[:1] == [_HEAD]
        num_damaged = sum(not self._take(line) for line in (whole[1:] if has_head else whole))
        if not whole:
            self._head = _HEAD
        half_of = _LINE_START[: len(half)] if whole else _NAME
        is_ours = has_head or not (num_damaged or (half and not half.startswith(half_of)))
        if not is_ours:
            raise ValueError(f"--state is {self._path}, expected a file that ft-autotune wrote")
        if num_damaged:
            self._say_damaged(num_damaged)
        if half:  # of a killed run
            self._file.truncate(sum(map(len, whole)))

    def _say_damaged(self, count: int) -> None:
        self._say(f"state file {self._path}: {count} damaged lines, their trials are made again")

    def _take(self, line: bytes) -> bool:
        """Whether the line is a trial, which is then known."""
        try:
            entry = json.loads(line)
            self.known[_of(str, entry["id"])] = _trial(entry["trial"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        return True

    def get(self, identity: str, *, num_users: int) -> Trial | None:
        """What is known of a job with that many cases."""
        trial = self.known.get(identity)
        if trial is None or trial.error or len(trial.us) == num_users:
            return trial
        del self.known[identity]
        self._say_damaged(1)
        return None

    def put(self, identity: str, trial: Trial) -> None:
        """Keep a trial.

        Raises:
            Stopped: the file cannot be written.
        """
        self.known[identity] = trial
        if self._file is None:
            return
        line = json.dumps({"id": identity, "trial": asdict(trial)}).encode() + b"\n"
        left, self._head = memoryview(self._head + line), b""
        try:
            while left:  # a full disk takes a part and says so only then
                left = left[self._file.write(left) :]
        except OSError as error:
            raise Stopped(
                f"--state is {self._path}, which cannot be written ({error.strerror})"
            ) from error


def _trial(data: Any) -> Trial:
    """A trial as it was written.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    launches = tuple(
        Launch(**{name: _of(_KINDS[name], value) for name, value in _of(dict, launch).items()})
        for launch in _of(list, data["launches"])
    )
    us = tuple(float(_of(float, us)) for us in _of(list, data["us"]))
    error = _of(str, data["error"])
    if not all(us) or not (us or error):
        raise ValueError(f"us is {us}, expected numbers above 0")
    return Trial(us, launches, error, _of(bool, data["can_tell"]))


def _of(kind: Any, value: Any) -> Any:
    """The value, if it is one that a field of that kind may have."""
    kinds = (int, float) if kind is float else get_args(kind) or (kind,)
    if type(value) not in kinds:
        raise TypeError(f"it is {value!r}, expected {kind}")
    if type(value) in (int, float) and not 0 <= value < _MOST:
        raise ValueError(f"it is {value!r}, expected 0 to {_MOST}")
    return value
