"""Bits per character and token of a text, and recall of needles by distance, through an engine.

No torch: an engine is anything with `generate`, such as `ftruntime.LLM`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from ftruntime.completion import RequestOutput
from ftruntime.evaluate import needles
from ftruntime.types import SamplingParams

DISTANCES: Final = (300, 600, 1000, 1500, 2000, 3000)
# of other needles in one prompt, and the tokens in front of the first
_OTHERS: Final = 3
_LEAD_TOKENS: Final = 40
_ROOM_TOKENS: Final = 110  # the statement, question and answer, were a token a byte
TEXT_OVER: Final = DISTANCES[0] + _LEAD_TOKENS
"""A text with needles has more tokens."""
LEAST_LENGTH: Final = TEXT_OVER + _ROOM_TOKENS
"""Tokens that a prompt with a needle and its answer may have, at the least."""

Progress = Callable[[str, float], None]


class Engine(Protocol):
    """What runs prompts."""

    def generate(
        self, prompts: list[list[int]], sampling_params: SamplingParams
    ) -> list[RequestOutput]: ...


class Encoder(Protocol):
    """What cuts text into tokens."""

    @property
    def bos_token_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class TextScore:
    """How well a text was predicted; every token of it counts once."""

    characters: int
    tokens: int
    windows: int
    context: int
    bits: float

    @property
    def bits_per_character(self) -> float:
        return self.bits / self.characters

    @property
    def bits_per_token(self) -> float:
        return self.bits / self.tokens

    def to_dict(self) -> dict[str, float]:
        """All fields and both rates."""
        rates = {
            "bits_per_character": self.bits_per_character, "bits_per_token": self.bits_per_token,
        }  # fmt: skip
        return {**asdict(self), **rates}


@dataclass(frozen=True)
class Recall:
    """Needles asked for behind `distance` tokens: how many, and how many came back."""

    distance: int
    trials: int
    found: int

    def to_dict(self) -> dict[str, float | None]:
        """All fields and the share, None of no trials."""
        return {**asdict(self), "recall": self.found / self.trials if self.trials else None}


def windows(token_ids: Sequence[int], bos_token_id: int, context: int) -> list[list[int]]:
    """The text cut into windows of BOS and up to `context - 1` tokens, each token in one."""
    step = context - 1
    return [
        [bos_token_id, *token_ids[start : start + step]] for start in range(0, len(token_ids), step)
    ]


def score_text(
    engine: Engine, encoder: Encoder, text: str, *, context: int, together: int,
    progress: Progress | None = None,
) -> TextScore:  # fmt: skip
    """Score `text` in windows that do not overlap.

    Args:
        context: tokens of a window, BOS among them, `>= 2`.
        together: windows handed to the engine at once.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("--text is empty, expected a text to score")
    prompts = windows(encoder.encode(text), encoder.bos_token_id, context)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    nats = 0.0
    for start in range(0, len(prompts), together):
        part = prompts[start : start + together]
        for output in engine.generate(part, params):
            nats -= _prompt_logprob(output)
        if progress is not None:
            progress("text", min(1.0, (start + together) / len(prompts)))
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    return TextScore(len(text), tokens, len(prompts), context, nats / math.log(2))


def _prompt_logprob(output: RequestOutput) -> float:
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return math.fsum(entry[token] for token, entry in pairs if entry is not None)


def score_needles(
    engine: Engine, encoder: Encoder, text: str, *, trials: int, seed: int, longest: int,
    together: int, progress: Progress | None = None,
) -> list[Recall]:  # fmt: skip
    """Hide a name with a number in `text`, ask for it behind each of the `DISTANCES`.

    A prompt holds other names with numbers too. A needle is found when the greedy continuation
    begins with its number.

    Args:
        longest: tokens that a prompt and its answer may have.

    Returns:
        One for each distance that text and `longest` have room for.

    Raises:
        ValueError: that is none.
    """
    filler = encoder.encode(text)
    fitting = [d for d in DISTANCES if not any(short_of(d, len(filler), longest))]
    if not fitting:
        raise ValueError(
            f"there are {len(filler)} tokens of text and {longest} of a prompt, expected more than "
            f"{TEXT_OVER} and at least {LEAST_LENGTH}"
        )
    rng = random.Random(seed)
    results = []
    for number, distance in enumerate(fitting):
        made = [needle_prompt(encoder, filler, distance, rng) for _ in range(trials)]
        found = 0
        for start in range(0, trials, together):
            part = made[start : start + together]
            length = 2 + max(len(encoder.encode(answer)) for _, answer in part)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            outputs = engine.generate([prompt for prompt, _ in part], params)
            for output, (_, answer) in zip(outputs, part, strict=True):
                found += is_answer(output.outputs[0].text, answer)
            if progress is not None:
                progress("needles", (number + min(1.0, (start + together) / trials)) / len(fitting))
        results.append(Recall(distance, trials, found))
    return results


def short_of(distance: int, num_tokens: int, longest: int) -> tuple[bool, bool]:
    """Whether a text of so many tokens is too short for a needle so far back, and whether `longest`
    is, the tokens that a prompt and its answer may have.
    """
    needed = distance + _LEAD_TOKENS
    return num_tokens <= needed, longest < needed + _ROOM_TOKENS


def is_answer(text: str, answer: str) -> bool:
    """Whether `text` begins with the number of `answer`, and no longer one."""
    number = answer.strip()
    rest = text.strip()
    return rest.startswith(number) and not rest[len(number) :][:1].isdigit()


def needle_prompt(
    encoder: Encoder, filler: Sequence[int], distance: int, rng: random.Random
) -> tuple[list[int], str]:
    """A prompt whose question stands `distance` tokens behind the end of its statement, and the
    answer.
    """
    names = rng.sample(needles.NAMES, _OTHERS + 1)
    numbers = rng.sample(range(needles.LOW, needles.HIGH + 1), _OTHERS + 1)
    pairs = zip(names, numbers, strict=True)
    told = [encoder.encode("\n" + needles.statement(name, number)) for name, number in pairs]
    asked = encoder.encode("\n" + needles.question(names[0]))
    between = distance - sum(len(ids) for ids in told[1:])
    start = rng.randrange(len(filler) - between - _LEAD_TOKENS)
    body = list(filler[start + _LEAD_TOKENS : start + _LEAD_TOKENS + between])
    places = sorted(rng.sample(range(between), _OTHERS), reverse=True)
    for place, ids in zip(places, told[1:], strict=True):
        body[place:place] = ids
    lead = filler[start : start + _LEAD_TOKENS]
    return [encoder.bos_token_id, *lead, *told[0], *body, *asked], needles.answer(numbers[0])
