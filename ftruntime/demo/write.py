"""Writes a checkpoint in the official directory format, in one move."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

import ftkernels
from ftruntime.checkpoint.names import FP4_GROUP, FP8_BLOCK
from ftruntime.demo.presets import GENERATION_CONFIG
from ftruntime.demo.vocabulary import tokenizer_config
from ftruntime.distribution import DEMO_DIRECTORY
from ftruntime.model.config import ModelConfig
from ftruntime.tokenizer.fixed_texts import FIXED_TEXTS_FILE

_SHARD_BYTES = 6_000_000
_OWN_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json"
    r"|model-\d{5}-of-\d{5}\.safetensors|NOTICE\.md"
)
_MOST_BYTES = 64_000_000  # of a demo: what is larger is somebody's model

Named = tuple[str, torch.Tensor]


def write_checkpoint(
    directory: Path,
    *,
    config: Mapping[str, object],
    tokenizer: Tokenizer,
    tensors: Iterable[Named],
    force: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Write a checkpoint; the directory appears in one move, so an interrupted call leaves no half
    checkpoint under its name.

    Args:
        directory: created with its parents; must be absent or empty unless `force`.
        config: the fields of ``config.json``.
        tensors: every tensor by its name, in storage form, in the order of the shards.
        force: replace a checkpoint of this kind that is already there.
        progress: called with the current shard and the share done, in [0, 1].

    Raises:
        ValueError: a bad field of `config`.
        FileExistsError: the directory holds files and `force` is off, or files that are not a
            demo's.
    """
    model = ModelConfig.from_dict(config)
    with new_directory(directory, force=force) as partial:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", GENERATION_CONFIG)
        tokenizer.save(str(partial / "tokenizer.json"))
        settings = tokenizer_config(model.max_position_embeddings)
        _write_json(partial / "tokenizer_config.json", settings)
        texts = partial / FIXED_TEXTS_FILE
        texts.parent.mkdir()
        shutil.copyfile(DEMO_DIRECTORY / FIXED_TEXTS_FILE, texts)
        _write_tensors(partial, tensors, progress)


@contextmanager
def new_directory(directory: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill, which then takes the name `directory` in one move; as `write_checkpoint`.

    Raises:
        FileExistsError: the directory holds files and `force` is off, or files that are not a
            demo's; or it is that of this installation, or around the current one.
    """
    directory = Path(directory).resolve()
    _check_target(directory, force)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_own(name: str) -> bool:
    """Whether a demo checkpoint has a file of that name, relative to its directory."""
    return name == FIXED_TEXTS_FILE or _OWN_FILES.fullmatch(name) is not None


def fp8_pair(name: str, matrix: torch.Tensor) -> Iterator[Named]:
    """Weight and scale of the FP8 matrix `name`, of an fp32 `matrix [N, K]`."""
    codes, scale = quantize_blocks(matrix)
    yield name, codes
    yield _scale_name(name), scale.view(torch.float8_e8m0fnu)


def fp4_pair(name: str, matrix: torch.Tensor) -> Iterator[Named]:
    """Weight and scale of the FP4 matrix `name`, of an fp32 `matrix [N, K]`."""
    packed, scale = ftkernels.quantize_fp4_reference(matrix, group=FP4_GROUP)
    yield name, packed.view(torch.int8)
    yield _scale_name(name), scale.view(torch.float8_e8m0fnu)


def quantize_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes `[N, K]` and UE8M0 scales `[ceil(N/128), ceil(K/128)]` uint8 of an fp32
    matrix.
    """
    tiles = in_blocks(matrix)
    blocks = tiles.shape[:2]
    flat = tiles.reshape(-1, FP8_BLOCK * FP8_BLOCK)
    codes, scale = ftkernels.quantize_fp8_reference(flat, group=FP8_BLOCK * FP8_BLOCK)
    weight = codes.view(torch.uint8).view(*blocks, FP8_BLOCK, FP8_BLOCK).transpose(1, 2)
    rows, columns = matrix.shape
    weight = weight.reshape(blocks[0] * FP8_BLOCK, -1)[:rows, :columns].contiguous()
    return weight.view(torch.float8_e4m3fn), scale.view(blocks)


def in_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """`[N, K]` as blocks `[ceil(N/128), ceil(K/128), 128, 128]`, padded with zeros."""
    rows, columns = matrix.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    padded = matrix.new_zeros(blocks[0] * FP8_BLOCK, blocks[1] * FP8_BLOCK)
    padded[:rows, :columns] = matrix
    return padded.view(blocks[0], FP8_BLOCK, blocks[1], FP8_BLOCK).transpose(1, 2)


def _scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight") + ".scale"


def _check_target(directory: Path, force: bool) -> None:
    own = DEMO_DIRECTORY.resolve()
    if directory.is_relative_to(own) or own.is_relative_to(directory):
        raise FileExistsError(
            f"{directory} is where this installation keeps its demo, expected another directory"
        )
    if Path.cwd().is_relative_to(directory):
        raise FileExistsError(f"{directory} is or holds the current directory, expected another")
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
    foreign = _foreign(directory, names)
    if foreign is not None:
        raise FileExistsError(
            f"{directory} holds {foreign}, expected nothing but a demo checkpoint to replace"
        )


def _foreign(directory: Path, names: list[str]) -> str | None:
    """What in the directory is not of a demo checkpoint, if anything."""
    folder = directory / Path(FIXED_TEXTS_FILE).parent
    inside = []
    if folder.is_dir() and not folder.is_symlink():
        names = [name for name in names if name != folder.name]
        inside = sorted(f"{folder.name}/{entry.name}" for entry in folder.iterdir())
    entries = [*names, *inside]
    for name in entries:
        if not is_own(name) or not (directory / name).is_file():
            return name
    if entries:
        try:
            ModelConfig.from_dir(directory)
        except (OSError, ValueError):
            return "a config.json of another model" if "config.json" in names else entries[0]
    if sum((directory / name).stat().st_size for name in entries) > _MOST_BYTES:
        return f"more than {_MOST_BYTES // 10**6} MB"
    return None


def _write_tensors(
    directory: Path, tensors: Iterable[Named], progress: Callable[[str, float], None] | None
) -> None:
    shards = list(_shards(tensors))
    weight_map: dict[str, str] = {}
    mode = stat.S_IMODE((directory / "config.json").stat().st_mode)  # what the umask leaves
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        try:
            save_file(shard, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{directory / file} cannot be written ({error})") from error
        (directory / file).chmod(mode)  # the library keeps it to its owner
        weight_map.update(dict.fromkeys(shard, file))
        if progress is not None:
            progress(file, number / len(shards))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _shards(tensors: Iterable[Named]) -> Iterator[dict[str, torch.Tensor]]:
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


def _write_json(file: Path, data: Mapping[str, object]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
