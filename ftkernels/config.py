"""Finds a tuned entry, else the op's default. Memoized; never measures; the only reader of `configs/`."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import triton

from ftkernels import target

Key = Mapping[str, int]
Config = TypeVar("Config")
SCHEMA = 1
_ROOT = Path(__file__).with_name("configs")
_BUCKET_TOP = 8192
_pinned: dict[str, object] = {}


@dataclass(frozen=True)
class _Entry:
    key: tuple[tuple[str, int], ...]
    config: tuple[tuple[str, Any], ...]


def bucket(n: int) -> int:
    """The power of two at or above `n`, at most 8192."""
    return min(1 << max(0, int(n) - 1).bit_length(), _BUCKET_TOP)


def lookup(op: str, key: Key, default: Callable[[Any], Config], *, grows: str = "") -> Config:
    """The config of `op` for `key`: exact entry, else the bucket of `grows`, else `default(key)`."""
    pinned = _pinned.get(op)
    if pinned is not None:
        return pinned  # type: ignore[return-value]
    return _lookup(op, target.config_name(), tuple(sorted(key.items())), default, grows)


@contextlib.contextmanager
def pin(op: str, config: object) -> Iterator[None]:
    """Every lookup of `op` gives `config` while the context is open; for tests and the tuner."""
    before = _pinned.get(op)
    _pinned[op] = config
    try:
        yield
    finally:
        _pinned.pop(op)
        if before is not None:
            _pinned[op] = before


@lru_cache(maxsize=4096)
def _lookup(
    op: str, gpu: str, key: tuple[tuple[str, int], ...], default: Callable[[Any], Any], grows: str
) -> Any:
    base = default(dict(key))
    known = _entries(op, gpu, source_hash(default), type(base))
    wanted = dict(key)
    for candidate in (wanted, {**wanted, grows: bucket(wanted[grows])} if grows in wanted else None):
        entry = known.get(tuple(sorted(candidate.items()))) if candidate else None
        if entry is not None:
            return replace(base, **dict(entry.config))
    return base


@lru_cache(maxsize=256)
def source_hash(function: Callable[..., Any]) -> str:
    """Hash of the module that defines `function`; a tuned entry made from other source is stale."""
    module = sys.modules[function.__module__]
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16]


@lru_cache(maxsize=256)
def _entries(op: str, gpu: str, source: str, record: type) -> dict[tuple[tuple[str, int], ...], _Entry]:
    path = _ROOT / gpu / f"{op}.json"
    if not path.exists():
        return {}
    try:
        return _read(path, op, gpu, source, record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"config file {path} ignored: {error}", stacklevel=2)
        return {}


def _read(
    path: Path, op: str, gpu: str, source: str, record: type
) -> dict[tuple[tuple[str, int], ...], _Entry]:
    data = json.loads(path.read_text())
    if data["schema"] != SCHEMA or data["op"] != op or data["gpu"] != gpu:
        raise ValueError(f"schema, op or gpu differ from {SCHEMA}, {op}, {gpu}")
    known = {f.name for f in fields(record)} if is_dataclass(record) else set()
    tested = ".".join(triton.__version__.split(".")[:2])
    found, ignored = {}, []
    for entry in data["entries"]:
        minor = ".".join(str(entry["triton"]).split(".")[:2])
        if entry["source_hash"] != source or minor != tested or set(entry["config"]) - known:
            ignored.append(entry["key"])
            continue
        key = tuple(sorted(entry["key"].items()))
        found[key] = _Entry(key, tuple(entry["config"].items()))
    if ignored:
        warnings.warn(
            f"config file {path}: {len(ignored)} entries ignored (other source, Triton or fields)",
            stacklevel=2,
        )
    return found
