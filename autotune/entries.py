"""The entries of a folder: what lookups take of them, what they ignore, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from autotune import store
from ftkernels import KernelSpec, config, registry

Entry = Mapping[str, Any]
_LEAST_US, _MOST_US = 0.1, 1_000_000  # of the calls of a key; a launch that does nothing takes more


@dataclass(frozen=True)
class Found:
    """Entries with the names of their ops.

    Args:
        taken: what lookups of this process take.
        spare: modelled ones behind a measured one of their key, for another Triton.
        keys: of all entries, good or not, by op.
        wrong: a sentence for each file that cannot be read and each entry that is ignored or has
            no figures.
        ignored: how many entries and files of each op lookups ignore, where they do.
    """

    taken: list[tuple[str, Entry]] = field(default_factory=list)
    spare: list[tuple[str, Entry]] = field(default_factory=list)
    keys: dict[str, set[config.FrozenKey]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def read(root: Path, gpu: str, specs: Sequence[KernelSpec]) -> Found:
    """What the files of the named ops hold; an op may have none."""
    found = Found()
    for spec in specs:
        path = root / gpu / f"{spec.name}.json"
        if not path.exists():
            continue
        try:
            entries = config.read(path, spec.name, gpu)
        except (OSError, ValueError) as error:
            found.wrong.append(f"{path.name}: ignored, {error}")
            found.ignored[spec.name] += 1
            continue
        if not entries:
            found.wrong.append(f"{path.name}: no entries")
        found.keys[spec.name] = set(_keys(entries))
        assert spec.default is not None
        source, record = config.made_from(spec.name, spec.default), get_type_hints(spec.default)
        taken, reasons = config.taken(entries, source, record["return"])
        is_taken = {id(entry) for entry in taken.values()}
        for number, (entry, reason) in enumerate(zip(entries, reasons, strict=True), start=1):
            found.ignored.update([spec.name] if reason else [])
            wrong = f"ignored for {reason}" if reason else _wrong_figures(entry)
            if wrong:
                found.wrong.append(f"{path.name}: {_name(entry, number)}: {wrong}")
            else:
                (found.taken if id(entry) in is_taken else found.spare).append((spec.name, entry))
    return found


def _keys(entries: Iterable[Any]) -> Iterator[config.FrozenKey]:
    """Those that are whole."""
    for key in (entry["key"] for entry in entries if _has_key(entry)):
        if all(type(size) is int for size in key.values()):
            yield config.entry_key(key)


def _has_key(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("key"), dict)


def _name(entry: Any, number: int) -> str:
    return _pairs(entry["key"].items()) if _has_key(entry) else f"entry {number}"


def _pairs(sizes: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes)


def _wrong_figures(entry: Entry) -> str:
    """What is wrong with the times of an entry; lookups do not read them."""
    for name in ("us", "default_us"):
        us: Any = entry.get(name)
        is_time = type(us) in (int, float) and _LEAST_US <= us <= _MOST_US
        # without a sound default there is none
        if not is_time and (name == "us" or us is not None):
            return f"{name} is {us!r}, expected {_LEAST_US} to {_MOST_US} microseconds"
    return ""


def require_folder(root: Path, gpu: str) -> Path:
    """The folder of a card.

    Raises:
        ValueError: it is missing or holds nothing.
    """
    folder = root / gpu
    if not folder.is_dir() or not any(folder.iterdir()):
        wrong = "empty" if folder.is_dir() else "missing"
        raise ValueError(f"config folder {folder} is {wrong}, expected a file for each op")
    return folder


def lost(folder: Path, ops: Collection[str]) -> list[str]:
    """A sentence for each file that is missing, and for each that no op has.

    Args:
        ops: those that should have one.
    """
    there = {path.name for path in folder.iterdir()}
    known = {f"{spec.name}.json" for spec in registry() if spec.kernel}
    missing = [op for op in ops if f"{op}.json" not in there]
    return [
        *(f"{name}: {_stray(name)}" for name in sorted(there - known)),
        *(f"{op}.json: missing, {_written_by(op)}" for op in missing),
    ]


def _stray(name: str) -> str:
    if store.leftover_pid(name) is not None:
        return "left over from a writer that was killed, it can be removed"
    return "no op of the library has this file"


def unserved(found: Found, needed: Iterable[tuple[str, config.FrozenKey]]) -> list[str]:
    """A sentence for each key without an entry, in files that can be read and have some.

    Args:
        needed: keys that should have one, by op.
    """
    return [
        f"{op}.json: {_pairs(key)}: no entry, {_written_by(op)}"
        for op, key in needed
        if found.keys.get(op) and key not in found.keys[op]
    ]


def _written_by(op: str) -> str:
    return f"expected what `ft-autotune tune {op}` writes"
