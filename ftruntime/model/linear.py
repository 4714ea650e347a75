"""Linear layers by the checkpoint's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import LinearWeight, Weights
from ftruntime.model.numerics import Numerics


def columns(weight: torch.Tensor) -> torch.Tensor:
    """A dense matrix (or a stack of them) on the host with its columns contiguous, for decode.

    A card keeps the checkpoint's layout, and so do quantized codes.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.mT.contiguous().mT


@dataclass(frozen=True)
class Fp8Linear:
    """A matrix that is FP8 in the checkpoint, raw or dequantized."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    numerics: Numerics

    @staticmethod
    def of(weights: Weights, name: str, numerics: Numerics) -> Fp8Linear:
        linear = weights.linears[name]
        return Fp8Linear(columns(linear.weight), linear.scale, numerics)

    @staticmethod
    def stacked(first: LinearWeight, second: LinearWeight, numerics: Numerics) -> Fp8Linear:
        """Both matrices as one, rows of ``first`` on top; FP8 rows come in blocks of 128."""
        scale = None
        if first.scale is not None and second.scale is not None:
            if first.weight.shape[0] % 128:
                raise ValueError(
                    f"an FP8 matrix has {first.weight.shape[0]} rows, expected a multiple of 128"
                )
            scale = torch.cat((first.scale, second.scale))
        return Fp8Linear(columns(torch.cat((first.weight, second.weight))), scale, numerics)

    def __call__(self, x: torch.Tensor, path: str) -> torch.Tensor:
        numerics = self.numerics
        return ftkernels.fp8_linear(
            x, self.weight, self.scale, activation=numerics.activation, path=path,
            out_dtype=numerics.dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class Fp32Linear:
    """A matrix whose product is taken in fp32 with an fp32 result."""

    weight: torch.Tensor

    @staticmethod
    def stacked(weights: list[torch.Tensor]) -> Fp32Linear:
        """All matrices as one, in fp32 if any of them is."""
        mixed = len({weight.dtype for weight in weights}) > 1
        return Fp32Linear(columns(torch.cat([w.float() if mixed else w for w in weights])))

    def __call__(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return ftkernels.linear(x, self.weight, out_dtype=torch.float32, path=path)
