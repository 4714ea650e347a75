"""What the parts of the model are worth: ``python -m demo.ablations FOLDER``.

Bits per character of the held-out text and recall of needles by distance, in fp32 with the
weights as trained, whole and with one part taken away or wrong. A needle counts as found when
every token of its number is the most probable one behind those before.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import shape, text
from demo.attention import Selection
from demo.data import TextEncoder
from demo.model import cast, forward
from demo.rounding import Rounding
from demo.train import HELD_OUT, SPLIT_SEED, bits_per_char
from ftruntime.evaluate.score import DISTANCES, needle_prompt
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


def without_sink(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights whose sinks take nothing."""
    return {
        name: torch.full_like(weight, -1e4) if name.endswith("attn_sink") else weight
        for name, weight in weights.items()
    }


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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=10, help="needles at each distance")
    parser.add_argument("--windows", type=int, default=None, help="of 2048 tokens; all unless set")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = ModelConfig.from_dict(shape.config())
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    _, chapters = text.split(text.fetch(args.folder), seed=SPLIT_SEED, held_out=HELD_OUT)
    held_out = text.join(chapters)
    state = torch.load(args.folder / "state.pt", weights_only=True, mmap=True)
    weights = cast(state["weights"], config, torch.float32, False)
    print(f"{'':24s}bits/char  recall behind {', '.join(map(str, DISTANCES))} tokens")
    for name, selection in VARIANTS.items():
        w = without_sink(weights) if name == "no sink" else weights
        bits = bits_per_char(
            config, w, tokenizer, held_out, window=WINDOW, rounding=Rounding(),
            limit=args.windows, selection=selection,
        )  # fmt: skip
        shares = recall(config, w, tokenizer, held_out, selection, trials=args.trials)
        print(f"{name:24s}{bits:.4f}     {'  '.join(f'{s:.2f}' for s in shares)}", flush=True)


if __name__ == "__main__":
    main()
