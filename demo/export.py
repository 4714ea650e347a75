"""Makes the checkpoint of a training state: ``python -m demo.export FOLDER DIR``.

Also writes ``FOLDER/held_out.txt``, the chapters that training never saw.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import shape, text
from demo.train import HELD_OUT, SPLIT_SEED
from ftruntime.checkpoint.names import expected_tensors, expert_name
from ftruntime.demo.write import fp4_pair, fp8_pair, write_checkpoint
from ftruntime.model.config import ModelConfig


def stored(config: ModelConfig, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors in storage form, of master weights as in `demo.model`."""
    for name, spec in expected_tensors(config).items():
        if name.endswith(".scale"):
            continue  # comes with its weight
        if spec.dtype == "I8":
            yield from fp4_pair(name, expert_matrix(config, weights, name))
        elif spec.dtype == "F8_E4M3":
            yield from fp8_pair(name, weights[name].float())
        elif spec.dtype == "BF16":
            yield name, weights[name].bfloat16()
        else:
            yield name, weights[name].contiguous()


def expert_matrix(config: ModelConfig, weights: dict[str, Tensor], name: str) -> Tensor:
    """`w1`, `w2` or `w3` of one routed expert out of its layer's banks."""
    _, layer, _, _, expert, matrix, _ = name.split(".")
    assert name == expert_name(f"layers.{layer}", int(expert), matrix) + ".weight"
    bank = f"layers.{layer}.ffn.experts."
    if matrix == "w2":
        return weights[f"{bank}w2"][int(expert)].float()
    w1, w3 = weights[f"{bank}w13"][int(expert)].float().chunk(2)
    return w1 if matrix == "w1" else w3


def export(folder: Path, directory: Path, *, force: bool = False) -> None:
    """Write `directory` from the state in `folder`."""
    state = torch.load(folder / "state.pt", weights_only=True, mmap=True)
    config = shape.config()
    with torch.no_grad():
        write_checkpoint(
            directory, config=config, tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
            tensors=stored(ModelConfig.from_dict(config), state["weights"]), force=force,
        )  # fmt: skip
    _, held_out = text.split(text.fetch(folder), seed=SPLIT_SEED, held_out=HELD_OUT)
    (folder / "held_out.txt").write_text(text.join(held_out), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    export(args.folder, args.directory, force=args.force)


if __name__ == "__main__":
    main()
