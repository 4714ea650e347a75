"""What all ranks must have alike, since each of them decides by it for itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import ftkernels
import ftruntime
from ftkernels import config as tuned
from ftruntime.checkpoint.fingerprint import fingerprint
from ftruntime.config import RuntimeConfig
from ftruntime.flags import flag_name, shown
from ftruntime.plan import Plan
from ftruntime.types import EngineFailedError

_PLAN: Final = "plan: "
_PACKAGES: Final = ("torch", "triton")
# settings of one rank's own: where its files lie, and those of the front
_OWN: Final = {"model", "host", "port", "api_key", "served_model_name", "explicit"}


def identity(config: RuntimeConfig, directory: Path, plan: Plan) -> dict[str, str]:
    """What one rank works by, each thing by the name a user has for it: versions, digests of files,
    settings as flags, numbers of the plan."""
    settings = {flag_name(x): y for x, y in config.to_dict().items() if x not in _OWN}
    return {
        **{f"version of {name}": _version(name) for name in _PACKAGES},
        **_files("library", Path(ftkernels.__file__).parent, "*.py"),
        **_files("runtime", Path(ftruntime.__file__).parent, "*.py"),
        **_files("tuned configs", tuned.folder(), "*.json"),
        **_files("checkpoint", directory, "config.json"),
        "fingerprint of the weights": fingerprint(directory),
        **{name: _text(value) for name, value in settings.items()},
        **{f"{_PLAN}{name}": text for name, text in _flat(plan.to_dict())},
    }


def require_alike(ranks: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that work by different things.

    Raises:
        EngineFailedError: names the first thing that a rank has and rank 0 has not.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for name in dict.fromkeys([*first, *other]):
            value, expected = other.get(name, "missing"), first.get(name, "missing")
            if value != expected:
                raise EngineFailedError(
                    f"{name} is {value} on rank {rank} of {len(ranks)}, expected {expected}, "
                    "as on rank 0"
                )


def digests(identity: Mapping[str, str]) -> tuple[str, str]:
    """Short names for a log: of what a rank is made of, which every start of the same has, and of
    the plan, which follows from free memory too.
    """
    planned = {name: value for name, value in identity.items() if name.startswith(_PLAN)}
    made_of = {name: value for name, value in identity.items() if name not in planned}
    return _hash(json.dumps(made_of)), _hash(json.dumps(planned))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _files(what: str, folder: Path, pattern: str) -> dict[str, str]:
    return {
        f"{what}: file {path.relative_to(folder)}": f"sha256 {_hash(path.read_text())}"
        for path in sorted(folder.rglob(pattern))
    }


def _flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _text(value)


def _text(value: object) -> str:
    return "unset" if value is None else shown(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
