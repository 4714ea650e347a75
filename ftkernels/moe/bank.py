"""Experts of one layer on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertBank:
    """Weights of all routed experts of a layer; scales are None when the weights are dequantized.

    Args:
        w13: `[E, 2I, C/2]` uint8, or `[E, 2I, C]` bf16/fp32; w1 rows, then w3 rows.
        w13_scale: `[E, 2I, C/32]` uint8 UE8M0 codes.
        w2: `[E, C, I/2]` uint8, or `[E, C, I]`.
        w2_scale: `[E, C, I/32]` uint8.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
