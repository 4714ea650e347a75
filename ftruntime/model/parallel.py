"""What the model asks of the other tensor-parallel ranks; alone there are none."""

from __future__ import annotations

from typing import Protocol

import torch


class Parallel(Protocol):
    """Ranks that hold a share each of the same model and run the same steps."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, the same bits everywhere; may write into `x`."""
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

    def join(self, x: torch.Tensor) -> torch.Tensor | None:
        return x
