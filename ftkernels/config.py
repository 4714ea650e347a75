"""Finds a tuned entry, else the op's default. Memoized; never measures; only reader of `configs/`.

A file `configs/<gpu>/<op>.json` holds `op`, `gpu`, `schema` and a list of `entries`. An entry holds
`key` (sizes by name), `config` (fields that overlay the default record), `source` ("measured" or
"modelled"), `triton` (the versions it is good for, with blanks between) and `source_hash`. A key
may have a measured and a modelled entry; the measured goes first. What does not fit this process
is ignored with one warning.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import triton

from ftkernels import target
from ftkernels.source import source_hash as source_hash

Key = Mapping[str, int]
Config = TypeVar("Config")
FrozenKey = tuple[tuple[str, int], ...]
SCHEMA = 1
_ROOT = Path(__file__).with_name("configs")
_BUCKET_TOP = 8192
_MOST_WARPS = 32  # of a block: 1024 threads
_MOST = 1 << 20  # elements of a tensor in Triton
_SOURCES = ("measured", "modelled")
_STALE = "another source hash"


@dataclass(frozen=True)
class Found:
    """What a lookup gave; `source` is "default", "pinned", or the entry's own."""

    op: str
    key: Key
    config: Any
    source: str


@dataclass(frozen=True)
class _Entry:
    fields: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class _Pin:
    config: Any
    key: FrozenKey | None


_pinned: ContextVar[Mapping[str, _Pin]] = ContextVar("pinned", default=MappingProxyType({}))
_watcher: ContextVar[Callable[[Found], None] | None] = ContextVar("watcher", default=None)
_other_root: ContextVar[Path | None] = ContextVar("other_root", default=None)


def bucket(n: int) -> int:
    """The power of two at or above `n`, at most 8192."""
    return min(1 << max(0, int(n) - 1).bit_length(), _BUCKET_TOP)


def entry_key(key: Key, grows: str = "") -> FrozenKey:
    """The key of an entry for `key` and the sizes that share a bucket with it."""
    sizes = {**key, grows: bucket(key[grows])} if grows in key else key
    return tuple(sorted(sizes.items()))


def lookup(op: str, key: Key, default: Callable[[Any], Config], *, grows: str = "") -> Config:
    """The config of `op` for `key`: exact entry, else the bucket of `grows`, else `default(key)`.

    Args:
        key: sizes by name.
        default: gives the record that an entry's fields overlay; an entry must have been made
            from the source that `made_from` gives for it.
        grows: the field of `key` whose power-of-two bucket is tried when no entry is exact.
    """
    pinned = _pinned.get().get(op)
    if pinned is not None and pinned.key in (None, entry_key(key, grows)):
        found = Found(op, key, pinned.config, "pinned")
    else:
        found = _find(op, target.config_name(), tuple(sorted(key.items())), default, grows)
    watcher = _watcher.get()
    if watcher is not None:
        watcher(found)
    config: Config = found.config
    return config


@contextlib.contextmanager
def pin(op: str, config: object, *, key: FrozenKey | None = None) -> Iterator[None]:
    """Every lookup of `op` gives `config` while the context is open; for tests and the tuner.

    Args:
        key: only lookups that an entry of this key serves.
    """
    token = _pinned.set({**_pinned.get(), op: _Pin(config, key)})
    try:
        yield
    finally:
        _pinned.reset(token)


@contextlib.contextmanager
def watch(watcher: Callable[[Found], None]) -> Iterator[None]:
    """Tell `watcher` of every lookup while the context is open."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def folder() -> Path:
    """Where entries are read from: a folder for each card in it, a file for each op in those."""
    return _other_root.get() or _ROOT


@contextlib.contextmanager
def reading(root: Path) -> Iterator[None]:
    """Lookups read the entries of another folder while the context is open; for the tuner."""
    token = _other_root.set(root)
    forget()
    try:
        yield
    finally:
        _other_root.reset(token)
        forget()


def read(path: Path, op: str, gpu: str) -> list[Any]:
    """The entries of a file as they stand there, good or not.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or for something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_head(data, op, gpu)
    entries: list[Any] = data["entries"]
    return entries


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def damage(entry: object) -> str:
    """What an entry lacks to be one, whatever the process; empty when it is whole."""
    if not isinstance(entry, dict):
        return "not being an object"
    key = entry.get("key")
    if not isinstance(key, dict) or not all(type(size) is int for size in key.values()):
        return "a damaged key"
    texts = [entry.get(name) for name in ("source", "source_hash", "triton")]
    if not isinstance(entry.get("config"), dict) or not all(type(x) is str for x in texts):
        return "a damaged entry"
    return "" if entry["source"] in _SOURCES else "a damaged entry"


def forget() -> None:
    """Read `configs/` afresh from now on; for whoever has written there."""
    _find.cache_clear()
    _entries.cache_clear()


@lru_cache(maxsize=4096)
def _find(op: str, gpu: str, key: FrozenKey, default: Callable[[Any], Any], grows: str) -> Found:
    sizes = dict(key)
    base = default(sizes)
    record: Callable[..., Any] = type(base)
    known = _entries(op, gpu, made_from(op, default), record)
    entry = known.get(key) or known.get(entry_key(sizes, grows))
    if entry is None:
        return Found(op, sizes, base, "default")
    return Found(op, sizes, replace(base, **entry.fields), entry.source)


def made_from(op: str, default: Callable[..., Any]) -> str:
    """Hash of what an entry of `op` follows from; one made from other source is stale.

    Args:
        default: of the op; its module counts beside that of the op, where the library has it.
    """
    public = getattr(sys.modules[__package__], op, default)
    return source_hash(default, public)


@lru_cache(maxsize=256)
def _entries(
    op: str, gpu: str, source: str, record: Callable[..., Any]
) -> Mapping[FrozenKey, _Entry]:  # fmt: skip
    path = folder() / gpu / f"{op}.json"
    if not path.exists():
        return {}
    try:
        entries = read(path, op, gpu)
    except (OSError, ValueError) as error:
        warnings.warn(f"config file {path} ignored: {error}", stacklevel=5)
        return {}
    found, reasons = taken(entries, source, record)
    ignored = Counter(filter(None, reasons))
    if ignored:
        told = ", ".join(f"{count} for {reason}" for reason, count in ignored.items())
        remedy = f"; ft-autotune tune {op} makes them anew" if _STALE in ignored else ""
        warnings.warn(f"config file {path}: entries ignored, {told}{remedy}", stacklevel=5)
    return {key: _Entry(entry["config"], entry["source"]) for key, entry in found.items()}


def taken(
    entries: Iterable[Any], source: str, record: Callable[..., Any]
) -> tuple[dict[FrozenKey, Any], list[str]]:
    """What lookups of this process take of a file's entries, and what they ignore.

    Of a key the measured entry goes before the modelled one. Of two that are alike in that, the
    second is ignored.

    Args:
        source: see `made_from`.
        record: type of the configs.

    Returns:
        The entry of each key, and for every entry why it is ignored, empty where it is not.
    """
    by_place: dict[tuple[str, FrozenKey], Any] = {}
    reasons = []
    for entry in entries:
        reason = _refusal(entry, source, record)
        if not reason:
            place = (entry["source"], entry_key(entry["key"]))
            reason = "a key that an entry before it has" if place in by_place else ""
            by_place.setdefault(place, entry)
        reasons.append(reason)
    # "modelled" comes after "measured", and so first here
    found = {key: by_place[place, key] for place, key in sorted(by_place, reverse=True)}
    return found, reasons


def _check_head(data: object, op: str, gpu: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"it holds {type(data).__name__}, expected an object")
    for name, wanted in (("schema", SCHEMA), ("op", op), ("gpu", gpu)):
        if data.get(name) != wanted or type(data[name]) is not type(wanted):
            raise ValueError(f"{name} is {data.get(name)!r}, expected {wanted!r}")
    if not isinstance(data.get("entries"), list):
        raise ValueError("entries is missing, expected a list")


def _refusal(entry: object, source: str, record: Callable[..., Any]) -> str:
    """Why an entry does not apply here; empty when it does."""
    damaged = damage(entry)
    if damaged:
        return damaged
    assert isinstance(entry, dict)
    if entry["source_hash"] != source:
        return _STALE
    if minor(triton.__version__) not in map(minor, entry["triton"].split()):
        return f"a Triton other than {minor(triton.__version__)}"
    config, types = entry["config"], get_type_hints(record)
    if set(config) - set(types):
        return "an unknown field"
    if not all(_legal(name, value, types[name]) for name, value in config.items()):
        return "a value that no config has"
    return ""


def _legal(name: str, value: object, kind: Any) -> bool:
    """Whether a value may stand in a config: of the field's type, and a size Triton can launch."""
    if kind is not int:
        return type(value) is kind
    if type(value) is not int or value < 1:
        return False
    is_power = value & (value - 1) == 0
    if name.endswith("warps"):
        return is_power and value <= _MOST_WARPS
    return value <= _MOST and (is_power or not name.startswith("block_"))


def minor(version: str) -> str:
    """A version without what comes behind its second number."""
    return ".".join(version.split(".")[:2])
