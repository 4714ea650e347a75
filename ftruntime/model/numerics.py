"""Which roundings a forward pass applies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    """Element type of activations, streams and pools, and whether the trained round trips are
    applied.

    ``round_trips`` covers FP8 activations of FP8 and FP4 products, FP8 KV rows, and Hadamard with
    FP4 on
    the indexer's queries and rows.
    """

    dtype: torch.dtype
    round_trips: bool

    @staticmethod
    def of(name: str) -> Numerics:
        """The numerics behind ``--numerics``: "official" or "exact"."""
        if name == "official":
            return Numerics(torch.bfloat16, round_trips=True)
        if name == "exact":
            return Numerics(torch.float32, round_trips=False)
        raise ValueError(f"--numerics is {name!r}, expected 'official' or 'exact'")

    @property
    def activation(self) -> str:
        """The ``activation`` argument of the quantized products."""
        return "fp8" if self.round_trips else "bf16"
