"""Writes tuned entries where `ftkernels.config` finds them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ftkernels import config

Entry = Mapping[str, Any]
_HALF = re.compile(r"\.\w+\.json\.([1-9]\d*)")


def check(root: Path, gpu: str, ops: Iterable[str]) -> None:
    """Refuse to write where a file is not one of entries of its op, or holds half an entry.

    Raises:
        ValueError: there is such a file, in one sentence.
        OSError: one cannot be read.
    """
    for op in ops:
        path = root / gpu / f"{op}.json"
        if path.exists():
            _whole(path, op, gpu)


def _whole(path: Path, op: str, gpu: str) -> list[Entry]:
    """The entries of a file in which each is whole."""
    try:
        entries = config.read(path, op, gpu)
        _require_whole(entries)
    except ValueError as error:
        raise ValueError(
            f"config file {path} is damaged ({error}), expected entries of {op} for {gpu}, "
            "or no file"
        ) from None
    return entries


def _require_whole(entries: Iterable[object]) -> None:
    for number, entry in enumerate(entries, start=1):
        reason = config.damage(entry)
        if reason:
            raise ValueError(f"entry {number} is ignored for {reason}")


def merged(old: Iterable[Entry], new: Iterable[Entry], source_hash: str) -> list[Entry]:
    """Entries of a file after `new` ones have come, by key and source.

    Of a key, a source ("measured", "modelled") and a minor version of Triton there is one entry:
    a new one takes its versions from old ones, which go when they have none left. What is measured
    and what is modelled stand side by side, and a lookup takes the measured where its version fits,
    so that no process loses what it would use. Entries made from other source go.

    Raises:
        ValueError: an entry is not whole.
    """
    old, new = list(old), list(new)
    _require_whole([*old, *new])
    entries = [left for entry in old if entry["source_hash"] == source_hash
               for left in _left(entry, new)]  # fmt: skip
    return sorted([*entries, *new], key=lambda entry: (*_place(entry), entry["triton"]))


def _left(old: Entry, new: Iterable[Entry]) -> Iterator[Entry]:
    """An old entry, good for the versions of Triton that no new one of its key and source has."""
    gone = {
        config.minor(version) for entry in new if _place(entry) == _place(old)
        for version in entry["triton"].split()
    }  # fmt: skip
    versions = [x for x in old["triton"].split() if config.minor(x) not in gone]
    if versions:
        yield {**old, "triton": " ".join(versions)}


def _place(entry: Entry) -> tuple[config.FrozenKey, str]:
    return config.entry_key(entry["key"]), entry["source"]


def write(root: Path, gpu: str, op: str, new: Iterable[Entry], default: Callable[..., Any]) -> Path:
    """Merge entries into the file of an op; the file is replaced as a whole or not at all.

    Others that write there at the same time wait; what killed ones left there goes.

    Args:
        default: of the op, see `config.made_from`.

    Raises:
        OSError: the folder cannot be written.
        ValueError: what is there is not the tuner's, see `check`.
    """
    path = root / gpu / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent):
        _clear_leftovers(path.parent)
        old = _whole(path, op, gpu) if path.exists() else []
        entries = merged(old, new, config.made_from(op, default))
        lines = ",\n".join(f"    {json.dumps(entry, allow_nan=False)}" for entry in entries)
        head = (f'  "op": {json.dumps(op)},\n  "gpu": {json.dumps(gpu)},\n'
                f'  "schema": {config.SCHEMA},\n')  # fmt: skip
        replace_whole(path, f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n')
    config.forget()
    return path


def leftover_pid(name: str) -> int | None:
    """The process that was to rename a file of this name, see `replace_whole`; None for others."""
    found = _HALF.fullmatch(name)
    return int(found[1]) if found else None


def _clear_leftovers(folder: Path) -> None:
    for path in folder.iterdir():
        pid = leftover_pid(path.name)
        if pid is not None and not _is_running(pid):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes and threads that ask for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds all of it or what was there before."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
