"""What a step costs, as four numbers.

A prefill step of `c` tokens at context `x` costs `a + c * (b + d * x)` seconds, where `x` counts
the tokens that stand before the part. Several prompts in one step share `a`, and each adds its own
`c * (b + d * x)`. A layer slice costs its share of all layers. A decode step costs the same however
many rows it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from ftruntime.flags import refuse
from ftruntime.types import StepPlan

_NUM_NUMBERS = 4


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, of a token, of a token for each token before it, and of a decode step."""

    fixed_s: float
    token_s: float
    context_s: float
    decode_s: float

    @staticmethod
    def parse(text: str) -> StepCost:
        """The cost behind `--cost a,b,d,decode`.

        Raises:
            ValueError: not four finite numbers >= 0.
        """
        words = text.split(",")
        if len(words) != _NUM_NUMBERS:
            _refuse(text)
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            _refuse(text)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            _refuse(text)
        return StepCost(*numbers)

    def __str__(self) -> str:
        numbers = (self.fixed_s, self.token_s, self.context_s, self.decode_s)
        return ",".join(f"{number:g}" for number in numbers)

    def prefill_s(self, num_tokens: int, context: int) -> float:
        """A whole chunk of one prompt, in seconds."""
        return self.fixed_s + num_tokens * (self.token_s + self.context_s * context)

    def step_s(self, plan: StepPlan, num_layers: int) -> float:
        """A planned step of a model of `num_layers` layers, in seconds."""
        if plan.kind == "decode":
            return self.decode_s
        parts = (
            len(seq.token_ids) * (self.token_s + self.context_s * seq.start) for seq in plan.seqs
        )
        first, last = plan.layers
        return (self.fixed_s + sum(parts)) * (last - first) / num_layers


SEED_COST = StepCost(0.262, 0.200e-3, 1.08e-9, 0.0168)
"""DeepSeek-V4-Flash on 8 RTX 4090s, experts in host memory; given, nothing was timed here."""


def _refuse(text: str) -> NoReturn:
    refuse(
        "cost", text,
        f"four numbers >= 0, seconds: a step, a token, a token and context token, a decode step "
        f"(for example {SEED_COST})",
    )  # fmt: skip
