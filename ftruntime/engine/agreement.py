"""What all ranks must have alike, since each of them decides by it for itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import ftkernels
from ftkernels import config as tuned
from ftruntime.config import RuntimeConfig
from ftruntime.plan import Plan
from ftruntime.types import EngineFailedError

_PACKAGES: Final = ("torch", "triton")
# settings of one rank's own: where its files lie, and those of the front
_OWN: Final = {"model", "host", "port", "api_key", "served_model_name", "explicit"}


def identity(config: RuntimeConfig, directory: Path, plan: Plan) -> dict[str, str]:
    """What one rank works by, in words: versions, and hashes of what is longer."""
    settings = {name: x for name, x in config.to_dict().items() if name not in _OWN}
    return {
        **{f"version of {name}": _version(name) for name in _PACKAGES},
        "library": _hash(_texts(Path(ftkernels.__file__).parent, "*.py")),
        "tuned configs": _hash(_texts(tuned.folder(), "*.json")),
        "config.json": _hash([(directory / "config.json").read_text()]),
        "settings": _hash([json.dumps(settings, sort_keys=True)]),
        "plan": _hash([json.dumps(plan.to_dict(), sort_keys=True)]),
    }


def require_alike(ranks: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that work by different things.

    Raises:
        EngineFailedError: names the first rank that does not have what rank 0 has.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for name, value in first.items():
            if other.get(name) != value:
                raise EngineFailedError(
                    f"rank {rank} of {len(ranks)} has {name} {other.get(name)}, expected {value}, "
                    "which rank 0 has"
                )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _texts(folder: Path, pattern: str) -> list[str]:
    files = sorted(folder.rglob(pattern))
    return [f"{path.relative_to(folder)}\n{path.read_text()}" for path in files]


def _hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}\n{text}".encode())
    return digest.hexdigest()[:12]
