"""Trains the demo model: ``python -m demo.train FOLDER``; run again, it goes on where it stopped.

FOLDER gets the text, the tokenizer, ``state.pt`` every two minutes and at the end, and ``log.txt``.
An interrupt or a SIGTERM saves and ends. `demo.export` makes the checkpoint of the state.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from demo import shape, text
from demo.attention import Selection
from demo.data import Batch, Data
from demo.model import Ops, cast, forward, init_weights, weight_shapes
from demo.optimizer import Optimizer
from demo.rounding import Rounding
from ftruntime.demo.vocabulary import build_tokenizer
from ftruntime.model.config import ModelConfig

HELD_OUT: Final = 0.05
SPLIT_SEED: Final = 20
_SAVE_S: Final = 120
_LOG_S: Final = 20
# routes move between experts by this much a step
_BIAS_STEP: Final = 0.002
_INDEX_WEIGHT: Final = 0.2
_HELD_STEPS, _RELEASE_STEPS = 60, 200


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
    """A training run in a folder."""

    def __init__(self, folder: Path, recipe: Recipe, ops: Ops) -> None:
        self.folder, self.recipe, self.ops = folder, recipe, ops
        self.config = ModelConfig.from_dict(shape.config())
        train, _ = text.split(text.fetch(folder), seed=SPLIT_SEED, held_out=HELD_OUT)
        self.tokenizer = tokenizer_of(folder, [chapter.text for chapter in train])
        self.data = Data(train, self.tokenizer)
        counts = self.data.counts(self.config.vocab_size)
        self.weights = init_weights(self.config, counts, recipe.seed)
        learnt = {n: w for n, w in self.weights.items() if is_learnt(n)}
        self.optimizer = Optimizer(learnt, matrix_blocks(self.config))
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if (folder / "state.pt").exists():
            self._load()
        for weight in learnt.values():
            weight.requires_grad_(True)

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True, mmap=True)
        if state["recipe"] != vars(self.recipe):
            raise ValueError(f"recipe is {vars(self.recipe)}, expected the run's {state['recipe']}")
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)
        for name, value in state["optimizer"].items():
            self.optimizer.state[name].copy_(value)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def save(self) -> None:
        """Write the state; the file appears whole or not at all."""
        partial = self.folder / "state.partial"
        state = {
            "recipe": vars(self.recipe), "step": self.step, "tokens": self.tokens,
            "seconds": self.seconds, "optimizer": self.optimizer.state,
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
        }  # fmt: skip
        torch.save(state, partial)
        os.replace(partial, self.folder / "state.pt")

    @property
    def done(self) -> float:
        """Share of the tokens that has been seen."""
        return self.tokens / self.recipe.total_tokens

    def train_step(self) -> tuple[float, float, float]:
        """One step; loss a token in nats: of plain tokens, of answers about needles, and the
        indexers' loss.
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
        torch.autograd.backward(loss + _INDEX_WEIGHT * index_loss)
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


def rate_factor(name: str, step: int) -> float:
    """What multiplies the learning rate of a weight at a step.

    Queries and keys keep the start that `demo.wiring` gives them until what they find is of use.
    What sublayers add to the streams grows slower than the embedding, which would drown in it.
    """
    if name == "embed.weight":
        return 4.0
    if name.endswith((".wq_a.weight", ".attn.wq_b.weight", ".wkv.weight")):
        return min(1.0, max(0.0, (step - _HELD_STEPS) / _RELEASE_STEPS))
    return 0.3 if name.endswith((".wo_b.weight", ".w2", ".w2.weight")) else 1.0


def is_learnt(name: str) -> bool:
    """Whether a weight has a gradient: the hash tables and the routers' biases have none."""
    return not name.endswith((".tid2eid", "gate.bias"))


def tokenizer_of(folder: Path, texts: list[str]) -> Tokenizer:
    """The folder's tokenizer, trained first if it is not there."""
    file = folder / "tokenizer.json"
    if not file.exists():
        build_tokenizer(shape.VOCAB_SIZE, texts).save(str(file))
    return Tokenizer.from_file(str(file))


def matrix_blocks(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Which weights Muon moves, and in which blocks: experts, heads and groups are apart."""
    blocks = {}
    for name, (size, kind) in weight_shapes(config).items():
        rows, columns = size[-2:] if len(size) > 1 else (0, 0)
        if kind == "I8":
            parts = 2 if name.endswith("w13") else 1
            blocks[name] = (size[0] * parts, rows // parts, columns)
        elif name.endswith(".wq_b.weight"):
            heads = config.index_n_heads if ".indexer." in name else config.num_attention_heads
            blocks[name] = (heads, rows // heads, columns)
        elif name.endswith(".wo_a.weight"):
            blocks[name] = (config.o_groups, rows // config.o_groups, columns)
        elif kind == "F8_E4M3" or name.endswith((".wkv.weight", ".wgate.weight")):
            blocks[name] = (1, rows, columns)
    return blocks


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


class _Stop:
    """Set by SIGTERM and SIGINT; a second signal ends at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            sys.exit(1)
        self.asked = True


def run(folder: Path, recipe: Recipe, *, compiled: bool) -> bool:
    """Train to the end or until a signal; True at the end."""
    stop = _Stop()
    state = Run(folder, recipe, Ops.compiled() if compiled else Ops())
    torch._dynamo.config.recompile_limit = 256
    saved = logged = began = time.monotonic()
    first_tokens, losses = state.tokens, []
    with (folder / "log.txt").open("a") as log:
        while state.done < 1 and not stop.asked:
            losses.append(state.train_step())
            now = time.monotonic()
            if now - logged > _LOG_S or state.done >= 1:
                rate = (state.tokens - first_tokens) / (now - began)
                plain, answers, index = np.nanmean(np.array(losses), axis=0)
                line = (
                    f"step={state.step} tokens={state.tokens} loss={plain:.4f} "
                    f"answers={answers:.4f} index={index:.4f} tokens_per_s={rate:.0f} "
                    f"left_min={(recipe.total_tokens - state.tokens) / rate / 60:.1f}"
                )
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                logged, losses = now, []
            if now - saved > _SAVE_S:
                state.save()
                saved = now
    state.save()
    return state.done >= 1


@torch.no_grad()
def bits_per_char(
    config: ModelConfig, w: dict[str, Tensor], tokenizer: Tokenizer, held_out: str, *,
    window: int, rounding: Rounding, limit: int | None = None,
    selection: Selection | None = None,
) -> float:  # fmt: skip
    """Bits a character over windows of BOS and `window - 1` tokens, each apart; `limit` bounds the
    number of windows. `window` is a multiple of 128.
    """
    ids = tokenizer.encode(held_out).ids
    starts = range(0, len(ids), window - 1)[:limit]
    nats, chars = 0.0, 0
    for start in starts:
        part = ids[start : start + window - 1]
        row = torch.zeros(1, window, dtype=torch.int64)
        row[0, 0] = config.bos_token_id
        row[0, 1 : len(part) + 1] = torch.tensor(part)
        logits, _, _ = forward(config, w, row, rounding=rounding, selection=selection)
        nats += float(
            cross_entropy(logits[0, : len(part)], row[0, 1 : len(part) + 1], reduction="sum")
        )
        chars += len(tokenizer.decode(part))
    return nats / chars / math.log(2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokens", type=int, default=Recipe.total_tokens)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--matrix-lr", type=float, default=Recipe.matrix_lr)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(seed=args.seed, total_tokens=args.tokens, lr=args.lr, matrix_lr=args.matrix_lr)
    finished = run(args.folder, recipe, compiled=not args.eager)
    print("finished" if finished else "stopped", flush=True)


if __name__ == "__main__":
    main()
