"""Writes tuned entries where `ftkernels.config` finds them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ftkernels import config

Entry = Mapping[str, Any]


def read(path: Path, op: str, gpu: str) -> list[dict[str, Any]]:
    """The entries of a file; none when it is missing, damaged or for something else."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    wanted = {"op": op, "gpu": gpu, "schema": config.SCHEMA}
    if not isinstance(data, dict) or any(data.get(name) != x for name, x in wanted.items()):
        return []
    entries = data.get("entries")
    if not isinstance(entries, list):
        return []
    return [x for x in entries if isinstance(x, dict) and isinstance(x.get("key"), dict)]


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


def _whole(path: Path, op: str, gpu: str) -> list[dict[str, Any]]:
    """The entries of a file in which each is whole."""
    wanted = f"entries of {op} for {gpu}, or no file"
    try:
        entries = config.read(path, op, gpu)
    except ValueError as error:
        raise ValueError(f"config file {path} is damaged ({error}), expected {wanted}") from None
    for number, entry in enumerate(entries, start=1):
        reason = config.damage(entry)
        if reason:
            raise ValueError(
                f"config file {path}: entry {number} is refused for {reason}, expected {wanted}"
            )
    return entries


def merged(old: Iterable[Entry], new: Iterable[Entry], source_hash: str) -> list[Entry]:
    """Old entries of this source with new ones in their place, by key.

    What was measured is not replaced by what is modelled.
    """
    kept = {_key(entry): entry for entry in old if entry.get("source_hash") == source_hash}
    for entry in new:
        before = kept.get(_key(entry), {})
        if (before.get("source"), entry["source"]) != ("measured", "modelled"):
            kept[_key(entry)] = entry
    return [kept[key] for key in sorted(kept)]


def _key(entry: Entry) -> config.FrozenKey:
    return config.entry_key(entry["key"])


def write(root: Path, gpu: str, op: str, new: Iterable[Entry], default: Callable[..., Any]) -> Path:
    """Merge entries into the file of an op; the file is replaced as a whole or not at all.

    Args:
        default: of the op, see `config.made_from`.

    Raises:
        OSError: the folder cannot be written.
    """
    path = root / gpu / f"{op}.json"
    entries = merged(read(path, op, gpu), new, config.made_from(op, default))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    head = f'  "op": {json.dumps(op)},\n  "gpu": {json.dumps(gpu)},\n  "schema": {config.SCHEMA},\n'
    half = path.with_suffix(".half")
    half.write_text(f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n')
    os.replace(half, path)
    config.forget()
    return path
