"""Prompts of a wanted length for a tokenizer nobody has here.

A prompt is a head and then words, drawn as whole shuffles of one list. Tokenizers split at the
spaces, so every shuffle has the same number of tokens, and two short probes tell both numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

HEAD: Final = "Go on with this list of words, and do not stop:"
WORDS: Final = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
    "jacket", "kitchen", "ladder", "market", "needle", "ocean", "pencil", "quiet", "river",
    "silver", "table", "under", "valley", "window", "yellow", "animal", "bottle", "corner",
    "dinner", "eight", "flower", "green", "house", "inside", "jungle", "kind", "letter",
)  # fmt: skip
PROBE_SHUFFLES: Final = (1, 3)
_MOST_WORDS_A_TOKEN: Final = 4


def prompt(num_words: int, seed: int) -> str:
    """The head and `num_words` words; another seed differs from the first words on."""
    generator = random.Random(seed)
    parts = [HEAD]
    for first in range(0, num_words, len(WORDS)):
        shuffle = generator.sample(WORDS, len(WORDS))
        parts.append(" ".join(shuffle[: num_words - first]))
    return " ".join(parts)


def probe(number: int) -> str:
    """The shorter (0) or longer (1) probe."""
    return prompt(PROBE_SHUFFLES[number] * len(WORDS), seed=number)


@dataclass(frozen=True)
class Calibration:
    """How long prompts get: tokens of the head with what the server adds, and of one shuffle."""

    head_tokens: float
    shuffle_tokens: float

    @staticmethod
    def from_probes(short_tokens: int, long_tokens: int) -> Calibration:
        """From the server's count of each probe's tokens.

        Raises:
            ValueError: the longer probe is not longer, by a token for every few words at least.
        """
        few, many = PROBE_SHUFFLES
        least = (many - few) * len(WORDS) // _MOST_WORDS_A_TOKEN
        if short_tokens <= 0 or long_tokens - short_tokens < least:
            raise ValueError(
                f"usage.prompt_tokens is {short_tokens} for a prompt of {few * len(WORDS)} words "
                f"and {long_tokens} for one of {many * len(WORDS)}, expected to grow by at least "
                f"{least}"
            )
        shuffle = (long_tokens - short_tokens) / (many - few)
        return Calibration(short_tokens - few * shuffle, shuffle)

    def num_words(self, num_tokens: int) -> int:
        """Words that make a prompt of about `num_tokens` tokens; off by a few words' tokens."""
        words = (num_tokens - self.head_tokens) * len(WORDS) / self.shuffle_tokens
        return max(1, round(words))
