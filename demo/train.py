"""Trains the demo model: ``python -m demo.train FOLDER``; run again, it goes on where it stopped.

FOLDER gets the text, the tokenizer, ``state.pt`` every two minutes and at the end, and ``log.txt``.
An interrupt or a SIGTERM saves and ends with 128 and the signal's number as exit code.
`demo.export` makes the checkpoint of the state.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from demo import cli, shape, state, text, tokenizer
from demo.attention import Selection
from demo.data import Batch, Data
from demo.files import digest, locked
from demo.learning import is_learnt, matrix_blocks, rate_factor
from demo.model import Ops, cast, forward, init_weights
from demo.optimizer import Optimizer
from demo.rounding import Rounding
from demo.state import State
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.flags import FlagSpec
from ftruntime.model.config import ModelConfig

_SAVE_S: Final = 120
_LOG_S: Final = 20
# routes move between experts by this much a step
_BIAS_STEP: Final = 0.002
_INDEX_WEIGHT: Final = 0.2


@dataclass(frozen=True)
class Stage:
    """A part of the run: up to which share of all tokens, and how its steps are made."""

    until: float
    size: int
    tokens: int
    selection: Selection
    rounding: bool = False
    repeats: float = 0.0


STAGES: Final = (
    Stage(0.60, 8, 512, Selection(sparse=False), repeats=0.25),
    Stage(0.76, 4, 1024, Selection(sparse=False, learn=True)),
    Stage(0.86, 2, 2304, Selection(sparse=True, learn=True)),
    Stage(0.93, 2, 1792, Selection(sparse=True, learn=True), rounding=True),
    Stage(1.00, 1, 3584, Selection(sparse=True, learn=True), rounding=True),
)


@dataclass(frozen=True)
class Recipe:
    """What a run is made of besides its text."""

    seed: int = 0
    total_tokens: int = 5_000_000
    lr: float = 4e-3
    matrix_lr: float = 0.02
    decay: float = 0.1
    warmup_steps: int = 40
    cooldown: float = 0.6

    def rate(self, step: int, done: float) -> float:
        """Factor on both learning rates: up over the first steps, down to 0 over the last share."""
        return min(1.0, (step + 1) / self.warmup_steps, max(0.02, (1 - done) / self.cooldown))

    def stage(self, done: float) -> Stage:
        """The stage at this share of all tokens."""
        return next((stage for stage in STAGES if done < stage.until), STAGES[-1])


class Run:
    """A training run in a folder.

    Raises:
        OtherRecipe: the run in the folder began with another recipe.
        OSError: a file or a program cannot be used.
        ValueError: a file is not what it should be, or not the run's.
    """

    def __init__(self, folder: Path, recipe: Recipe, ops: Ops) -> None:
        self.folder, self.recipe, self.ops = folder, recipe, ops
        self.config = ModelConfig.from_dict(shape.config())
        found = state.load(folder) if (folder / state.FILE).exists() else None
        self.digests: dict[str, str] = {}
        if found is not None:
            found.check_recipe(vars(recipe))
        train, _ = text.fetch(folder)
        self._depend(folder / text.FILE, found)
        self.tokenizer = tokenizer.tokenizer_of(folder, [chapter.text for chapter in train])
        self._depend(folder / tokenizer.FILE, found)
        self.data = Data(train, self.tokenizer)
        longest = max(stage.tokens for stage in STAGES)
        if len(self.data.stream) <= longest:
            raise ValueError(
                f"{folder / text.FILE} has {len(self.data.stream)} tokens to train on, expected "
                f"more than {longest}"
            )
        counts = self.data.counts(self.config.vocab_size)
        self.weights = init_weights(self.config, counts, recipe.seed)
        learnt = {n: w for n, w in self.weights.items() if is_learnt(n)}
        self.optimizer = Optimizer(learnt, matrix_blocks(self.config))
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if found is not None:
            self._go_on(found)
        for weight in learnt.values():
            weight.requires_grad_(True)

    def _depend(self, file: Path, found: State | None) -> None:
        if found is not None:
            found.check_file(file)
        self.digests[file.name] = digest(file.read_bytes())

    def _go_on(self, found: State) -> None:
        for name, weight in found.weights.items():
            self.weights[name].copy_(weight)
        for name, value in found.optimizer.items():
            self.optimizer.state[name].copy_(value)
        self.step, self.tokens, self.seconds = found.step, found.tokens, found.seconds

    def save(self) -> None:
        """Write the state, see `demo.state.save`."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        now = State(
            vars(self.recipe), self.step, self.tokens, self.seconds, self.optimizer.state, weights,
            self.digests,
        )  # fmt: skip
        state.save(self.folder, now)

    @property
    def done(self) -> float:
        """Share of the tokens that has been seen."""
        return self.tokens / self.recipe.total_tokens

    def train_step(self) -> tuple[float, float, float]:
        """One step; loss a token in nats: of plain tokens, of answers about needles, and the
        indexers' loss.

        Raises:
            FloatingPointError: the loss is not finite; no weight has moved.
        """
        began = time.monotonic()
        stage, recipe = self.recipe.stage(self.done), self.recipe
        batch = self.data.batch(recipe.seed, self.step, stage.size, stage.tokens, stage.repeats)
        w = cast(self.weights, self.config, torch.bfloat16, stage.rounding)
        logits, loads, index = forward(
            self.config, w, batch.ids, selection=stage.selection,
            rounding=Rounding(stage.rounding), ops=self.ops,
        )  # fmt: skip
        loss, plain, answers = weighted_loss(logits, batch)
        index_loss = sum(index, torch.zeros(()))
        total = loss + _INDEX_WEIGHT * index_loss
        if not math.isfinite(total.item()):
            raise FloatingPointError(
                f"loss of step {self.step + 1} is {total.item()}, expected a finite number: "
                f"{state.FILE} is left as it was, begin anew with a lower --lr or --matrix-lr"
            )
        torch.autograd.backward(total)
        rate = recipe.rate(self.step, self.done)
        self.step += 1
        self.optimizer.step(
            self.step, lr=rate * recipe.lr, matrix_lr=rate * recipe.matrix_lr, decay=recipe.decay,
            factor=lambda name: rate_factor(name, self.step),
        )  # fmt: skip
        self._balance(loads, rate)
        self.tokens += batch.ids.numel()
        self.seconds += time.monotonic() - began
        return plain, answers, index_loss.item()

    def _balance(self, loads: list[Tensor], rate: float) -> None:
        for layer, load in enumerate(loads):
            bias = self.weights.get(f"layers.{layer}.ffn.gate.bias")
            if bias is not None:
                bias += _BIAS_STEP * rate * torch.sign(load.float().mean() - load)


def weighted_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, float, float]:
    """Mean over tokens, each with its weight, of the loss of predicting it from those before; and
    for the log the means of tokens with weight 1 and of others, NaN where there are none.
    """
    losses = cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    seen = losses.detach()
    plain, answers = seen[weights == 1].mean().item(), seen[weights > 1].mean().item()
    return (losses * weights).sum() / weights.sum(), plain, answers


def means(losses: list[tuple[float, float, float]]) -> list[float]:
    """Mean of each column over the rows that have it; NaN where none has."""
    values: list[float] = torch.tensor(losses, dtype=torch.float64).nanmean(0).tolist()
    return values


def train(run: Run) -> int:
    """Train to the end, 0, or until a signal, whose number is returned.

    Raises:
        FloatingPointError: a loss or a weight is not finite; ``state.pt`` is of an earlier step.
        OSError: the folder cannot be written.
    """
    saved = logged = began = time.monotonic()
    first_tokens, losses = run.tokens, []
    with (run.folder / "log.txt").open("a") as log, cli.stoppable() as stop:
        while run.done < 1 and not stop.signal:
            losses.append(run.train_step())
            now = time.monotonic()
            if now - logged > _LOG_S or run.done >= 1:
                rate = (run.tokens - first_tokens) / (now - began)
                plain, answers, index = means(losses)
                line = (
                    f"step={run.step} tokens={run.tokens} loss={plain:.4f} "
                    f"answers={answers:.4f} index={index:.4f} tokens_per_s={rate:.0f} "
                    f"left_min={(run.recipe.total_tokens - run.tokens) / rate / 60:.1f}"
                )
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                logged, losses = now, []
            if now - saved > _SAVE_S:
                run.save()
                saved = now
        run.save()
    return 0 if run.done >= 1 else stop.signal


_SEED: Final = FlagSpec(kind="int", help="Seed of weights and batches.", default=0, low=0)
_TOKENS: Final = FlagSpec(
    kind="int", help="Tokens of the whole run.", default=Recipe.total_tokens, low=1
)  # fmt: skip
_LR: Final = FlagSpec(
    kind="float", help="Highest rate of Adam.", default=Recipe.lr, low=0, low_open=True
)  # fmt: skip
_MATRIX_LR: Final = FlagSpec(
    kind="float", help="Highest rate of Muon.", default=Recipe.matrix_lr, low=0, low_open=True
)  # fmt: skip


@click.command(context_settings=cli.SETTINGS)
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@cli.option("seed", _SEED)
@cli.option("tokens", _TOKENS)
@cli.option("lr", _LR)
@cli.option("matrix_lr", _MATRIX_LR)
@cli.option("threads", cli.THREADS)
@click.option("--eager", is_flag=True, help="Without torch.compile.")
def main(
    folder: Path, seed: int, tokens: int, lr: float, matrix_lr: float, threads: int, eager: bool
) -> int:  # fmt: skip
    """Train the demo model in FOLDER, or go on where it stopped."""
    recipe = Recipe(seed=seed, total_tokens=tokens, lr=lr, matrix_lr=matrix_lr)
    cli.new_folder(folder)
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = 256
    with ExitStack() as stack:
        with refusals(FAILED):
            stack.enter_context(locked(folder))
            try:
                run = Run(folder, recipe, Ops() if eager else Ops.compiled())
            except state.OtherRecipe as error:
                raise Failure(str(error), USAGE) from error
        stopped = train(run)
    print("stopped" if stopped else "finished", flush=True)
    return 128 + stopped if stopped else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
