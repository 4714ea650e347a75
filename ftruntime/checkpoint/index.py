"""Where every tensor of a checkpoint lies, and whether it is what the config asks for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from ftruntime.checkpoint.header import TensorEntry, read_header, storage_text
from ftruntime.checkpoint.names import DRAFT_PREFIX, expected_tensors
from ftruntime.model.config import ModelConfig

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointIndex:
    """Every tensor of a checkpoint directory by name, draft modules (`mtp.*`) left out."""

    source: Path  # the index file, or the single safetensors file
    entries: Mapping[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.start for entry in self.entries.values())


def open_checkpoint(directory: str | Path, config: ModelConfig) -> CheckpointIndex:
    """Read index and headers and check every tensor against `config`; no weight is read.

    Raises:
        FileNotFoundError: the directory, or both index and single file, do not exist.
        ValueError: a damaged file, or a tensor that is missing or of another shape or dtype; the
            sentence names file, tensor, what was found and what was expected.
    """
    index = read_index(directory)
    validate(index, config)
    return index


def read_index(directory: str | Path) -> CheckpointIndex:
    """Find every tensor; a shard that holds nothing but draft modules is not opened.

    Errors as `open_checkpoint`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory, expected a checkpoint")
    index_file, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index_file.is_file():
        shard_of = _read_weight_map(index_file)
    elif single.is_file():
        entries = {entry.name: entry for entry in read_header(single)}
        return CheckpointIndex(single, _without_drafts(entries))
    else:
        raise FileNotFoundError(f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}")
    shards: dict[str, dict[str, TensorEntry]] = {}
    found: dict[str, TensorEntry] = {}
    for name, shard in shard_of.items():
        if shard not in shards:
            file = directory / shard
            if not file.is_file():
                raise ValueError(
                    f"{file} does not exist, expected the shard that {INDEX_FILE} names for {name}"
                )
            shards[shard] = {entry.name: entry for entry in read_header(file)}
        if name not in shards[shard]:
            raise ValueError(
                f"{directory / shard}: tensor {name} is missing, expected it by {INDEX_FILE}"
            )
        found[name] = shards[shard][name]
    return CheckpointIndex(index_file, found)


def num_shards(directory: Path) -> int:
    """Files that hold the tensors of a checkpoint; errors as `open_checkpoint`."""
    index_file = directory / INDEX_FILE
    return len(set(_read_weight_map(index_file).values())) if index_file.is_file() else 1


def how_to_load(expert_load: str, shards: int) -> Literal["serial", "parallel"]:
    """How experts are placed: "auto" is parallel with more than one core and more than one shard.

    Args:
        expert_load: "auto", "serial" or "parallel".
    """
    several = shards > 1 and len(os.sched_getaffinity(0)) > 1
    asked = {"serial": False, "parallel": True}.get(expert_load, several)
    return "parallel" if asked else "serial"


def validate(index: CheckpointIndex, config: ModelConfig) -> None:
    """Compare every tensor with what `config` asks for; extra names are one log line.

    Errors as `open_checkpoint`.
    """
    expected = expected_tensors(config)
    for name, spec in expected.items():
        entry = index.entries.get(name)
        if entry is None:
            raise ValueError(
                f"{index.source}: tensor {name} is missing, "
                f"expected {storage_text(spec.dtype, spec.shape)}"
            )
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            raise ValueError(
                f"{entry.file}: tensor {name} is {storage_text(entry.dtype, entry.shape)}, "
                f"expected {storage_text(spec.dtype, spec.shape)}"
            )
    extra = [name for name in index.entries if name not in expected]
    if extra:
        _logger.warning("checkpoint tensors ignored count=%d first=%s", len(extra), extra[0])


def _read_weight_map(file: Path) -> dict[str, str]:
    """Shard file of every tensor, draft modules left out."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{file}: weight_map is {json.dumps(weight_map)[:80]}, "
            "expected tensor names and shard files"
        )
    for name, shard in weight_map.items():
        # a plain file name: the index must not lead out of the checkpoint
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ValueError(
                f"{file}: the shard of {name} is {shard!r}, "
                "expected a file name in the same directory"
            )
    return _without_drafts(weight_map)


def _without_drafts(named: Mapping[str, _T]) -> dict[str, _T]:
    return {name: value for name, value in named.items() if not name.startswith(DRAFT_PREFIX)}
