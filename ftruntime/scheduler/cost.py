"""What a step will take, learned from the steps this server ran. Reads no clock.

A step of `tokens` tokens through a share of the layers is taken to cost
`share * (a + b * tokens + d * tokens * context)` seconds with non-negative a, b, d, where `context`
is the mean number of tokens before the parts of its sequences. The three are fitted to the last
chunks by least squares of the relative error. Nothing is trusted beyond what was seen: fewer tokens
than ever cost no less, more tokens cost their multiple.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

_WINDOW_STEPS = 64
_MARGIN_STEPS = 32
_LEAST_MARGIN = 0.05
_EARLY_STEPS, _EARLY_MARGIN = 8, 0.25
_MOST_MARGIN = 1.0
_LEAST_SECONDS = 1e-6
_WHOLE = 1.1  # shares of a chunk that were moved while it ran
_SHARE_STEP, _LEAST_WEIGHT = 0.7, 0.01
# while nobody asks for predictions a fit in this many steps keeps up with them
_FIT_STEPS = 16

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """What one step computes; a decode step has one token a row and all layers."""

    share: float  # of all layers, in (0, 1]
    tokens: int
    context: float = 0.0  # tokens before a token's part, on average

    def features(self) -> tuple[float, float, float]:
        scaled = self.share * self.tokens
        return self.share, scaled, scaled * self.context


class StepCost:
    """Predicts seconds of a kind of step.

    A prediction carries a margin: the largest share by which one of the last predictions fell
    short, between 5 % (25 % at first) and 100 %.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[Work, float]] = deque(maxlen=_WINDOW_STEPS)
        self._short: deque[float] = deque(maxlen=_MARGIN_STEPS)
        self._factors = np.zeros(3)
        self._num_unfitted = 0
        self._tokens = (0, 0)  # fewest and most of a step in the window
        self._context = 0.0  # the longest in the window

    @property
    def known(self) -> bool:
        """Whether any step was seen."""
        return bool(self._steps)

    @property
    def margin(self) -> float:
        least = _LEAST_MARGIN if len(self._short) >= _EARLY_STEPS else _EARLY_MARGIN
        return min(max(least, *self._short, 0.0), _MOST_MARGIN)

    def covers(self, work: Work) -> bool:
        """Whether steps of about this context were seen: at most twice as long, or a chunk on."""
        return self.known and work.context <= 2 * self._context + 2 * self._tokens[1]

    def observe(self, work: Work, seconds: float) -> None:
        """Take in a step that ran."""
        seconds = max(seconds, _LEAST_SECONDS)
        if self.covers(work):
            self._short.append(seconds / max(self._estimate(work), _LEAST_SECONDS) - 1.0)
        self._keep(work, seconds)
        tokens = [seen.tokens for seen, _ in self._steps]
        self._tokens = min(tokens), max(tokens)
        self._context = max(seen.context for seen, _ in self._steps)
        self._num_unfitted += 1
        if len(self._steps) <= _FIT_STEPS or self._num_unfitted >= _FIT_STEPS:
            self._refit()

    def least(self, work: Work) -> float:
        """Seconds that the step is sure to take: fewer tokens than ever cost at least their share,
        more tokens at least as much. 0 when nothing is known.
        """
        self._refit()
        fewest = self._tokens[0]
        return self._inside(work) * (min(1.0, work.tokens / fewest) if fewest else 0.0)

    def predict(self, work: Work) -> float:
        """Seconds, margin included; 0 when nothing is known."""
        self._refit()
        return self._estimate(work) * (1.0 + self.margin)

    def _refit(self) -> None:
        if self._num_unfitted:
            self._factors, self._num_unfitted = _fit(self._steps), 0

    def _keep(self, work: Work, seconds: float) -> None:
        """Slices of one chunk are one observation: the window then spans chunks, however cut."""
        if self._steps:
            last, spent = self._steps[-1]
            same = (last.tokens, last.context) == (work.tokens, work.context)
            if same and last.share + work.share <= _WHOLE:
                self._steps.pop()
                work, seconds = replace(work, share=last.share + work.share), spent + seconds
        self._steps.append((work, seconds))

    def _estimate(self, work: Work) -> float:
        most = self._tokens[1]
        return self._inside(work) * (max(1.0, work.tokens / most) if most else 0.0)

    def _inside(self, work: Work) -> float:
        """The formula at the nearest number of tokens that was seen."""
        fewest, most = self._tokens
        nearest = replace(work, tokens=min(max(work.tokens, fewest), most))
        return float(np.dot(self._factors, nearest.features()))


class LayerShares:
    """How the layers of a chunk share its time: evenly at first. Layers differ in kind, so the
    slices of each chunk move the shares of their layers towards what was measured.
    """

    def __init__(self, num_layers: int) -> None:
        self._weights = [1.0] * num_layers
        self._slices: list[tuple[int, int, float]] = []  # of the chunk under way

    def of(self, first: int, end: int) -> float:
        """Share of layers `first .. end - 1`."""
        return sum(self._weights[first:end]) / sum(self._weights)

    def observe(self, first: int, end: int, seconds: float) -> None:
        """These layers of a chunk ran."""
        if first == 0:
            self._slices = []
        self._slices.append((first, end, max(seconds, _LEAST_SECONDS)))
        if end == len(self._weights) and self._slices[0][0] == 0:
            self._move()

    def _move(self) -> None:
        total_s = sum(seconds for _, _, seconds in self._slices)
        steps = [
            (first, end, (seconds / total_s / self.of(first, end)) ** _SHARE_STEP)
            for first, end, seconds in self._slices
        ]
        for first, end, step in steps:
            for layer in range(first, end):
                self._weights[layer] = max(self._weights[layer] * step, _LEAST_WEIGHT)
        mean = sum(self._weights) / len(self._weights)
        self._weights = [weight / mean for weight in self._weights]


def _fit(steps: deque[tuple[Work, float]]) -> _Array:
    """Non-negative least squares over three columns: every subset of them is tried.

    Rows are divided by the measured time, so that all steps weigh alike. Of columns that cannot be
    told apart the solution of least norm shares the cost out.
    """
    seconds = np.array([time for _, time in steps])
    rows = np.array([work.features() for work, _ in steps]) / seconds[:, None]
    scale = np.sqrt((rows**2).sum(axis=0))
    used = [column for column in range(3) if scale[column] > 0]
    rows = rows / np.where(scale > 0, scale, 1.0)
    best, best_error = np.zeros(3), float("inf")
    for count in range(len(used), 0, -1):
        for columns in combinations(used, count):
            chosen = list(columns)
            solution, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(seconds)), rcond=1e-6)
            if (solution < 0).any():
                continue
            error = float(((rows[:, chosen] @ solution - 1.0) ** 2).sum())
            if error < best_error:
                best, best_error = np.zeros(3), error
                best[chosen] = solution / scale[chosen]
        if count == len(used) and best_error < float("inf"):
            break  # the whole set is the best when it is allowed
    return best
