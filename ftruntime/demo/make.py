"""Writes the demo checkpoint: random weights, exactly the official directory format."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from ftruntime.demo.presets import GENERATION_CONFIG, VOCAB_SIZE, demo_config
from ftruntime.demo.vocabulary import build_tokenizer, readable_ids, tokenizer_config
from ftruntime.demo.weights import DemoWeights
from ftruntime.model.config import ModelConfig

_SHARD_BYTES = 6_000_000
_OWN_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json"
    r"|model-\d{5}-of-\d{5}\.safetensors"
)


def make_demo(
    directory: Path,
    *,
    seed: int = 0,
    preset: str = "small",
    force: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Write a demo checkpoint; equal arguments give equal bytes.

    The directory appears in one move, so an interrupted call leaves no half checkpoint under its
    name.

    Args:
        directory: created with its parents; must be absent or empty unless `force`.
        seed: of all weights, `>= 0`.
        preset: "small" (head 128, rope 64) or "tiny" (head 64, rope 16).
        force: replace a checkpoint of this kind that is already there.
        progress: called with the current shard and the share done, in [0, 1].

    Raises:
        ValueError: a bad preset or seed.
        FileExistsError: the directory holds files and `force` is off, or files that are not a
            demo's.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected an integer >= 0")
    config = demo_config(preset)
    directory = Path(directory).absolute()
    _check_target(directory, force)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write(partial, config, seed, progress)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_target(directory: Path, force: bool) -> None:
    if not directory.exists():
        above = next(parent for parent in directory.parents if parent.exists())
        if not above.is_dir():
            raise FileExistsError(f"{above} is a file, expected a directory to write {directory}")
        return
    if not directory.is_dir():
        raise FileExistsError(f"{directory} is a file, expected a directory to write to")
    names = sorted(entry.name for entry in directory.iterdir())
    if names and not force:
        raise FileExistsError(
            f"{directory} is not empty, expected a new directory (--force replaces a demo)"
        )
    for name in names:
        if not _OWN_FILES.fullmatch(name):
            raise FileExistsError(
                f"{directory} holds {name}, expected nothing but a demo checkpoint to replace"
            )


def _write(
    directory: Path,
    config: dict[str, object],
    seed: int,
    progress: Callable[[str, float], None] | None,
) -> None:
    model = ModelConfig.from_dict(config)
    tokenizer = build_tokenizer(VOCAB_SIZE)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", GENERATION_CONFIG)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = tokenizer_config(model.max_position_embeddings)
    _write_json(directory / "tokenizer_config.json", settings)

    weights = DemoWeights(model, seed, frozenset(readable_ids(tokenizer)))
    shards = list(_shards(weights.tensors()))
    weight_map: dict[str, str] = {}
    mode = stat.S_IMODE((directory / "config.json").stat().st_mode)  # what the umask leaves
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(mode)  # the library keeps it to its owner
        weight_map.update(dict.fromkeys(tensors, file))
        if progress is not None:
            progress(file, number / len(shards))
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _shards(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors, about `_SHARD_BYTES` a shard."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_json(file: Path, data: dict[str, object]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
