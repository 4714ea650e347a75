"""What the model asks of the other tensor-parallel ranks; alone there are none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch

# yields what one rank adds to a sum, is sent the sum of all ranks, and returns what it is for
Summands = Generator[torch.Tensor, torch.Tensor, torch.Tensor]


class Parallel(Protocol):
    """Ranks that hold a share each of the same model and run the same steps."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, the same bits everywhere; may write into `x`."""
        ...

    def begin_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As `sum`, beside what is computed before the result is called for."""
        ...

    def join(self, x: torch.Tensor) -> torch.Tensor | None:
        """All ranks' columns `[N, v]` side by side on rank 0, None on the others."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def begin_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: x

    def join(self, x: torch.Tensor) -> torch.Tensor | None:
        return x


def in_turn(parts: Sequence[Summands], parallel: Parallel) -> list[torch.Tensor]:
    """What each part returns. They take turns at every sum: while the ranks add up one part's, the
    others compute. All have as many sums, and what one computes before its n-th comes before what
    the next does.
    """
    if len(parts) == 1:
        return [_alone(parts[0], parallel)]
    sums = [parallel.begin_sum(next(part)) for part in parts]
    results: list[torch.Tensor] = []
    while not results:
        for number, part in enumerate(parts):
            try:
                y = part.send(sums[number]())
            except StopIteration as end:
                results.append(end.value)
            else:
                sums[number] = parallel.begin_sum(y)
    return results


def _alone(part: Summands, parallel: Parallel) -> torch.Tensor:
    y = next(part)
    while True:
        try:
            y = part.send(parallel.sum(y))
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
