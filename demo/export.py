"""Makes the checkpoint of a training state: ``python -m demo.export FOLDER DIR``.

Also writes ``FOLDER/held_out.txt``, the chapters that training never saw.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import Tensor

from demo import cli, shape, text
from ftruntime.checkpoint.names import expected_tensors, expert_name
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
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


def export(trained: cli.Trained, directory: Path, *, force: bool = False) -> None:
    """Write the checkpoint to `directory`.

    Raises:
        FileExistsError: the directory holds files and `force` is off, or files that are no demo's.
    """
    config = shape.config()
    weights = trained.state.weights
    with torch.no_grad():
        write_checkpoint(
            directory, config=config, tokenizer=trained.tokenizer,
            tensors=stored(ModelConfig.from_dict(config), weights), force=force,
        )  # fmt: skip


@click.command(context_settings=cli.SETTINGS)
@cli.trained_folder
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a demo checkpoint that is already there.")
@cli.unfinished_option
def main(folder: Path, directory: Path, force: bool, unfinished: bool) -> None:
    """Write the checkpoint of the run in FOLDER to DIR, and FOLDER/held_out.txt."""
    trained = cli.trained(folder, unfinished=unfinished)
    with refusals(FAILED):
        try:
            export(trained, directory, force=force)
        except FileExistsError as error:
            raise Failure(str(error), USAGE) from error
        text.write_held_out(folder, trained.held_out)


if __name__ == "__main__":
    sys.exit(cli.run(main))
