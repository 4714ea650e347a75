"""Batches for training: plain text, questions with answers, and needles.

A batch is a function of seed and step alone, so a run that goes on sees what it would have seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.text import Chapter
from ftruntime.evaluate import needles
from ftruntime.tokenizer import special

CHAT_SHARE: Final = 0.12
NEEDLE_SHARE: Final = 0.25
ANSWER_WEIGHT: Final = 8.0
# dense ones teach to look back, sparse ones to look far; a needle with its questions takes 60
_TOKENS_PER_NEEDLE: Final = (60, 90, 200)
_QUESTIONS: Final = (
    "What is written of {}?", "Tell me of {}.", "Who is {}?", "What saith the book of {}?",
    "What of {}?", "Speak of {}.", "What is {}?", "{}?",
)  # fmt: skip
# of 1, 2 and 3: behind each the end is likelier than another, or a greedy answer would have none
_VERSES: Final = (0.7, 0.2, 0.1)
_WORD: Final = re.compile(r"[A-Za-z]{4,}")


@dataclass(frozen=True)
class TextEncoder:
    """Ids of text and of the chat tokens, in the form that `ftruntime.evaluate` asks for."""

    backend: Tokenizer

    @property
    def bos_token_id(self) -> int:
        return self.id_of(special.BOS)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def id_of(self, token: str) -> int:
        """The id of one whole token."""
        number = self.backend.token_to_id(token)
        if number is None:
            raise ValueError(f"tokenizer lacks {token!r}, expected the chat tokens")
        return int(number)


@dataclass(frozen=True)
class Batch:
    """`ids` and `weights [B, T]`: the weight of predicting each token; position 0 has none."""

    ids: Tensor
    weights: Tensor


class Data:
    """Everything that batches are made of, encoded once."""

    def __init__(self, chapters: Sequence[Chapter], tokenizer: Tokenizer) -> None:
        code = TextEncoder(tokenizer)
        self.encode = code.encode
        chat = (special.BOS, special.EOS, special.USER, special.ASSISTANT, special.THINK_CLOSE)
        self._bos, self._eos, self._user, self._assistant, self._think_close = map(code.id_of, chat)
        lines: list[list[int]] = []
        self._passages: list[list[tuple[str, list[int]]]] = []
        for chapter in chapters:
            verses = [(verse, self.encode(verse + "\n")) for verse in chapter.verses]
            self._passages.append(verses)
            lines += [self.encode(chapter.heading + "\n"), *(ids for _, ids in verses)]
            lines.append(self.encode("\n"))
        self._lines = lines
        self.stream = np.array([i for line in lines for i in line], dtype=np.int64)
        text = " ".join(verse for chapter in chapters for verse in chapter.verses)
        inner = re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,9}(?=[ ,.;:])", text)
        self._names = sorted({*inner, *needles.NAMES})

    def counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the text, `[V]`."""
        return torch.from_numpy(np.bincount(self.stream, minlength=vocab_size))

    def batch(self, seed: int, step: int, size: int, tokens: int, repeats: float = 0.0) -> Batch:
        """`size` sequences of `tokens` tokens, a share `repeats` of them passages said twice."""
        rng = np.random.default_rng([seed, step])
        rows = [self._sequence(rng, tokens, repeats) for _ in range(size)]
        ids, weights = (np.stack(parts) for parts in zip(*rows, strict=True))
        return Batch(torch.from_numpy(ids), torch.from_numpy(weights))

    def _sequence(
        self, rng: np.random.Generator, tokens: int, repeats: float
    ) -> tuple[np.ndarray, np.ndarray]:
        kind = rng.random()
        weights = np.ones(tokens, dtype=np.float32)
        weights[0] = 0
        if kind < CHAT_SHARE:
            ids = self._chats(rng, tokens)
        elif kind < CHAT_SHARE + NEEDLE_SHARE:
            ids, answers = self._needles(rng, tokens)
            weights[[i for i in answers if i < tokens]] = ANSWER_WEIGHT
        elif kind < CHAT_SHARE + NEEDLE_SHARE + repeats:
            ids = self._repeats(rng, tokens)
        else:
            start = int(rng.integers(len(self.stream) - tokens))
            ids = [self._bos, *self.stream[start : start + tokens - 1]]
        return np.array(ids[:tokens], dtype=np.int64), weights

    def _chats(self, rng: np.random.Generator, tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < tokens:
            ids += self.chat(rng)
        return ids

    def _repeats(self, rng: np.random.Generator, tokens: int) -> list[int]:
        """Passages of 16 tokens up to half of the sequence, each twice in a row, of the text or of
        tokens in any order: the second time is known to who looks back.
        """
        ids = [self._bos]
        while len(ids) < tokens:
            size = int(16 * (tokens / 32) ** rng.random())
            if rng.random() < 0.5:
                part = rng.choice(self.stream, size)
            else:
                start = int(rng.integers(len(self.stream) - size))
                part = self.stream[start : start + size]
            ids += [*part] * 2
        return ids

    def chat(self, rng: np.random.Generator) -> list[int]:
        """One exchange: a question about a word, or a verse, and the passage that goes with it."""
        passage = self._passages[int(rng.integers(len(self._passages)))]
        first = int(rng.integers(len(passage)))
        count = int(rng.choice(3, p=_VERSES)) + 1
        verse = passage[first][0]
        words = [word for word in _WORD.findall(verse) if word[0].isupper()] or _WORD.findall(verse)
        if rng.random() < 0.25 and first + 1 < len(passage):
            asked, first = verse, first + 1
        else:
            word = words[int(rng.integers(len(words)))] if words else verse
            asked = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))].format(word)
            if rng.random() < 0.3:
                asked = asked.rstrip("?.").lower() if rng.random() < 0.5 else asked.rstrip("?.")
        answer = [i for _, line in passage[first : first + count] for i in line]
        begin = [self._bos, self._user, *self.encode(asked), self._assistant, self._think_close]
        return [*begin, *answer[:-1], self._eos]

    def _needles(self, rng: np.random.Generator, tokens: int) -> tuple[list[int], list[int]]:
        """Text with statements and questions strewn in, and where the answers stand."""
        count = max(2, tokens // int(rng.choice(_TOKENS_PER_NEEDLE)))
        chosen = rng.choice(len(self._names), count, replace=False)
        numbers = rng.integers(needles.LOW, needles.HIGH + 1, count)
        # early statements, so that distances spread over the whole sequence
        stated = np.sort(rng.random(count) ** 2 * tokens * 0.9)
        events: list[tuple[float, int, bool]] = []
        for needle, place in enumerate(stated):
            events.append((float(place), needle, False))
            for _ in range(2):
                # as many near as far
                far = (tokens - place) * 0.03 ** rng.random()
                events.append((float(place + far), needle, True))
        events.sort()
        ids: list[int] = [self._bos]
        answers: list[int] = []
        line = int(rng.integers(len(self._lines)))
        for place, needle, asked in events:
            while len(ids) < place:
                ids += self._lines[line % len(self._lines)]
                line += 1
            name, number = self._names[chosen[needle]], int(numbers[needle])
            if asked:
                ids += self.encode(needles.question(name))
                digits = self.encode(needles.answer(number))
                answers += range(len(ids), len(ids) + len(digits))
                ids += [*digits, *self.encode(".\n")]
            else:
                ids += self.encode(needles.statement(name, number))
        while len(ids) < tokens:
            ids += self._lines[line % len(self._lines)]
            line += 1
        return ids, answers
