"""Muon for matrices, Adam for the rest; both with weight decay apart from the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

# quintic iteration towards the nearest orthogonal matrix, steep at small singular values
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_STEPS: Final = 5


def orthogonal(update: Tensor) -> Tensor:
    """`[B, N, K]` with every singular value near 1, by Newton-Schulz steps in bf16."""
    a, b, c = _COEFFICIENTS
    x = update.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        x = a * x + torch.bmm(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x)
    turned: Tensor = x.mT if tall else x
    return turned.float()


class Optimizer:
    """One step for every weight; the state is a dict of tensors that a file can hold.

    Args:
        blocks: for each matrix that Muon moves, the shape `[B, N, K]` its blocks are taken in.
    """

    def __init__(self, weights: dict[str, Tensor], blocks: dict[str, tuple[int, int, int]]) -> None:
        self._weights, self._blocks = weights, blocks
        self.state: dict[str, Tensor] = {}
        for name, weight in weights.items():
            self.state[f"{name}:first"] = torch.zeros_like(weight)
            if name not in blocks:
                self.state[f"{name}:second"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(
        self, number: int, *, lr: float, matrix_lr: float, decay: float,
        factor: Callable[[str], float],
    ) -> None:  # fmt: skip
        """Apply and clear the gradients; `number` counts from 1, `factor` of a weight's name is one
        on its rate."""
        for name, weight in self._weights.items():
            if weight.grad is None:
                continue
            grad, weight.grad = weight.grad, None
            first = self.state[f"{name}:first"]
            if name in self._blocks:
                rows, columns = self._blocks[name][1:]
                first.lerp_(grad, 0.05)
                update = orthogonal(grad.lerp_(first, 0.95).view(self._blocks[name]))
                rate = matrix_lr * factor(name)
                weight.mul_(1 - rate * decay)
                size = -rate * math.sqrt(max(1, rows / columns))
                weight.add_(update.view(weight.shape), alpha=size)
            else:
                second = self.state[f"{name}:second"]
                first.lerp_(grad, 0.1)
                second.lerp_(grad.square(), 0.05)
                scale = second.div(1 - 0.95**number).sqrt_().add_(1e-10)
                weight.addcdiv_(first, scale, value=-lr * factor(name) / (1 - 0.9**number))
