"""Writes demo checkpoints, exactly in the official directory format: random weights, or a copy of
the trained ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ftruntime.checkpoint.index import open_checkpoint
from ftruntime.demo.presets import VOCAB_SIZE, demo_config
from ftruntime.demo.vocabulary import build_tokenizer, readable_ids
from ftruntime.demo.weights import DemoWeights
from ftruntime.demo.write import is_own, new_directory, write_checkpoint
from ftruntime.distribution import demo_directory
from ftruntime.model.config import ModelConfig
from ftruntime.tokenizer.fixed_texts import FIXED_TEXTS_FILE, FixedTexts
from ftruntime.tokenizer.tokenizer import Tokenizer


def make_demo(
    directory: Path,
    *,
    seed: int = 0,
    preset: str = "small",
    force: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Write a random demo checkpoint; equal arguments give equal bytes.

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
    tokenizer = build_tokenizer(VOCAB_SIZE)
    readable = frozenset(readable_ids(tokenizer))
    weights = DemoWeights(ModelConfig.from_dict(config), seed, readable)
    write_checkpoint(
        directory, config=config, tokenizer=tokenizer, tensors=weights.tensors(), force=force,
        progress=progress,
    )  # fmt: skip


def copy_demo(directory: Path, *, force: bool = False) -> None:
    """Write a copy of the trained demo checkpoint.

    Args:
        directory, force: as of `make_demo`.

    Raises:
        FileExistsError: as `make_demo`.
        FileNotFoundError, ValueError: this installation lacks the checkpoint, or a part of it.
    """
    source = demo_directory()
    open_checkpoint(source, ModelConfig.from_dir(source))
    Tokenizer.from_dir(source)
    FixedTexts.of_file(source / FIXED_TEXTS_FILE)
    with new_directory(directory, force=force) as partial:
        for file in source.rglob("*"):
            name = file.relative_to(source).as_posix()
            if is_own(name):
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, partial / name)
