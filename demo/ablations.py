"""What the parts of the model are worth: ``python -m demo.ablations FOLDER``.

Bits per character of the held-out text and recall of needles by distance, in fp32 with the
weights as trained, whole and with one part taken away or wrong. A needle counts as found when
every token of its number is the most probable one behind those before.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from demo import cli, shape
from demo.attention import Selection
from demo.data import TextEncoder
from demo.model import cast, forward
from demo.rounding import Rounding
from ftruntime.evaluate.score import DISTANCES, needle_prompt
from ftruntime.flags import FlagSpec
from ftruntime.model.config import ModelConfig

WINDOW: Final = 2048
VARIANTS: Final = {
    "whole": Selection(),
    "every compressed row": Selection(sparse=False),
    "no compressed rows": Selection(rows=False),
    "the worst rows selected": Selection(worst=True),
    "window of 64": Selection(window=64),
    "no sink": Selection(),
}
_TRIALS: Final = FlagSpec(
    kind="int", help="Needles at each distance.", default=10, low=1, high=1000
)  # fmt: skip
_WINDOWS: Final = FlagSpec(
    kind="int", help="Windows of 2048 tokens.", low=1, shown_default="all of the text"
)  # fmt: skip


def without_sink(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights whose sinks take nothing."""
    return {
        name: torch.full_like(weight, -1e4) if name.endswith("attn_sink") else weight
        for name, weight in weights.items()
    }


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


@torch.no_grad()
def recall(
    config: ModelConfig, w: dict[str, Tensor], tokenizer: Tokenizer, held_out: str,
    selection: Selection, *, trials: int, distances: Sequence[int] = DISTANCES,
) -> list[float]:  # fmt: skip
    """Share of needles found at each distance."""
    code = TextEncoder(tokenizer)
    filler, rng = code.encode(held_out), random.Random(0)
    shares = []
    for distance in distances:
        found = 0
        for _ in range(trials):
            prompt, answer = needle_prompt(code, filler, distance, rng)
            wanted = code.encode(answer)
            ids = torch.tensor([*prompt, *wanted])
            padded = torch.nn.functional.pad(ids, (0, -len(ids) % 128))
            logits, _, _ = forward(config, w, padded[None], selection=selection)
            best = logits[0, len(prompt) - 1 : len(ids) - 1].argmax(-1)
            found += best.tolist() == wanted
        shares.append(found / trials)
    return shares


@click.command(context_settings=cli.SETTINGS)
@cli.trained_folder
@cli.option("trials", _TRIALS)
@cli.option("windows", _WINDOWS)
@cli.option("threads", cli.THREADS)
@cli.unfinished_option
def main(
    folder: Path, trials: int, windows: int | None, threads: int, unfinished: bool
) -> None:  # fmt: skip
    """Score the run in FOLDER whole and without each of its parts."""
    trained = cli.trained(folder, unfinished=unfinished)
    torch.set_num_threads(threads)
    config = ModelConfig.from_dict(shape.config())
    tokenizer, held_out = trained.tokenizer, trained.held_out
    weights = cast(trained.state.weights, config, torch.float32, False)
    print(f"{'':24s}bits/char  recall behind {', '.join(map(str, DISTANCES))} tokens")
    for name, selection in VARIANTS.items():
        w = without_sink(weights) if name == "no sink" else weights
        bits = bits_per_char(
            config, w, tokenizer, held_out, window=WINDOW, rounding=Rounding(),
            limit=windows, selection=selection,
        )  # fmt: skip
        shares = recall(config, w, tokenizer, held_out, selection, trials=trials)
        print(f"{name:24s}{bits:.4f}     {'  '.join(f'{s:.2f}' for s in shares)}", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
