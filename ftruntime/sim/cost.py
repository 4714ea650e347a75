"""What a step costs, as four numbers or as a plan's modelled steps, and how its time scatters.

By four numbers a prefill step of `c` tokens at context `x` costs `a + c * (b + d * x)` seconds,
where `x` counts the tokens that stand before the part. Several prompts in one step share `a`, and
each adds its own `c * (b + d * x)`. A layer slice costs its share of all layers. A decode step
costs the same however many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NoReturn, Protocol

from ftruntime.flags import refuse
from ftruntime.step_model import StepModel
from ftruntime.types import StepPlan

_NUM_NUMBERS = 4
_MAX_S = 1e6
"""No number is larger: sums of a whole run stay far from infinity."""


class Cost(Protocol):
    """Seconds of steps."""

    @property
    def words(self) -> str:
        """What it is, for a caption."""
        ...

    def first_decode_s(self, rows: int) -> float:
        """The least that a decode step of this many rows takes."""
        ...

    def prefill_s(self, parts: Iterable[tuple[int, int]]) -> float:
        """A whole chunk of parts `(tokens, context)`."""
        ...

    def step_s(self, plan: StepPlan, num_layers: int) -> float:
        """A planned step of a model of `num_layers` layers."""
        ...


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
            ValueError: not four numbers in [0, 1e6].
        """
        words = text.split(",")
        if len(words) != _NUM_NUMBERS:
            _refuse(text)
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            _refuse(text)
        if not all(0 <= number <= _MAX_S for number in numbers):
            _refuse(text)
        return StepCost(*numbers)

    def __str__(self) -> str:
        numbers = (self.fixed_s, self.token_s, self.context_s, self.decode_s)
        return ",".join(f"{number:g}" for number in numbers)

    @property
    def words(self) -> str:
        return f"step cost {self} s (whatever the other flags)"

    def first_decode_s(self, rows: int) -> float:
        return self.decode_s

    def prefill_s(self, parts: Iterable[tuple[int, int]]) -> float:
        return self.fixed_s + sum(
            count * (self.token_s + self.context_s * context) for count, context in parts
        )

    def step_s(self, plan: StepPlan, num_layers: int) -> float:
        if plan.kind == "decode":
            return self.decode_s
        chunk_s = self.prefill_s((len(seq.token_ids), seq.start) for seq in plan.seqs)
        return chunk_s * _share_of_layers(plan, num_layers)


MODELLED: Final = ("sum", "overlapped")


@dataclass(frozen=True)
class ModelledCost:
    """The modelled steps of a plan: with nothing hidden, or with everything that can be."""

    model: StepModel
    total: Literal["sum", "overlapped"]

    @property
    def words(self) -> str:
        hidden = "nothing overlaps" if self.total == "sum" else "everything overlaps that can"
        return f"steps as `inspect` models them, where {hidden}"

    def first_decode_s(self, rows: int) -> float:
        return self._step_s([(1, 0)] * rows, decode=True)

    def prefill_s(self, parts: Iterable[tuple[int, int]]) -> float:
        return self._step_s(list(parts), decode=False)

    def step_s(self, plan: StepPlan, num_layers: int) -> float:
        parts = [(len(seq.token_ids), seq.start) for seq in plan.seqs]
        whole_s = self._step_s(parts, decode=plan.kind == "decode")
        return whole_s * _share_of_layers(plan, num_layers)

    def _step_s(self, parts: list[tuple[int, int]], *, decode: bool) -> float:
        step = self.model.step(parts, decode=decode)
        return step.sum_s if self.total == "sum" else step.overlapped_s


def _share_of_layers(plan: StepPlan, num_layers: int) -> float:
    first, last = plan.layers
    return (last - first) / num_layers


SEED_COST = StepCost(0.262, 0.200e-3, 1.08e-9, 0.0168)
"""DeepSeek-V4-Flash on 8 RTX 4090s, experts in host memory; given, nothing was timed here."""


class StepNoise:
    """Factors on the times of steps, each uniform between `1 - share` and `1 + share`.

    The same seed gives the same factors, one after another.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = Random(f"noise {seed}")

    def factor(self) -> float:
        return self._random.uniform(1 - self._share, 1 + self._share)


def _refuse(text: str) -> NoReturn:
    refuse(
        "cost", text,
        f"four numbers in [0, {_MAX_S:.0f}], seconds: a step, a token, a token and context token, "
        f"a decode step (for example {SEED_COST}), or {' or '.join(MODELLED)}",
    )  # fmt: skip
