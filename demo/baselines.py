"""What simple models make of the held-out text: ``python -m demo.baselines FOLDER``.

A unigram of characters with one added to every count, and an interpolated 5-gram of characters
whose orders are weighed by how many different characters followed (Witten-Bell). Also writes
``FOLDER/held_out.txt``, which `ftruntime eval` scores.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import click

from demo import cli, text
from ftruntime.cli.group import FAILED, refusals

ORDER: Final = 5


def unigram(train: str, held_out: str) -> float:
    """Bits a character."""
    counts = Counter(train)
    alphabet = len(set(train) | set(held_out))
    total = len(train) + alphabet
    return -sum(math.log2((counts[c] + 1) / total) for c in held_out) / len(held_out)


def ngram(train: str, held_out: str, order: int = ORDER) -> float:
    """Bits a character when the `order - 1` characters before it are known."""
    alphabet = len(set(train) | set(held_out))
    followers: list[dict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]
    for length, table in enumerate(followers):
        for i in range(length, len(train)):
            table[train[i - length : i]][train[i]] += 1
    totals = [{context: c.total() for context, c in table.items()} for table in followers]
    bits = 0.0
    for i, char in enumerate(held_out):
        chance = 1 / alphabet
        for length in range(min(order - 1, i) + 1):
            context = held_out[i - length : i]
            seen = followers[length].get(context)
            if seen is None:
                break
            total, kinds = totals[length][context], len(seen)
            chance = (seen[char] + kinds * chance) / (total + kinds)
        bits -= math.log2(chance)
    return bits / len(held_out)


@click.command(context_settings=cli.SETTINGS)
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Bits a character of the held-out text under simple models; leaves that text in FOLDER."""
    cli.new_folder(folder)
    with refusals(FAILED):
        train, held_out = map(text.join, text.fetch(folder))
        text.write_held_out(folder, held_out)
    print(f"bits per character of {len(held_out)} held-out characters")
    print(f"unigram  {unigram(train, held_out):.4f}")
    print(f"{ORDER}-gram   {ngram(train, held_out):.4f}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
