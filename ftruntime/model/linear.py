"""Linear layers by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import LinearWeight, Weights
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.numerics import Numerics

Quantized = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Input:
    """A sublayer's normed input: ``dense [T, C]``, and as ``quantize_fp8`` gives it where FP8
    products read it."""

    dense: torch.Tensor
    fp8: Quantized | None

    @staticmethod
    def of(dense: torch.Tensor, fp8: Sequence[torch.Tensor]) -> Input:
        """``fp8``: codes and scales, or nothing."""
        return Input(dense, (fp8[0], fp8[1]) if fp8 else None)

    @property
    def operand(self) -> torch.Tensor | Quantized:
        """What FP8 products take."""
        return self.dense if self.fp8 is None else self.fp8


def columns(weight: torch.Tensor) -> torch.Tensor:
    """A dense matrix (or a stack of them) on the host with its columns contiguous, for decode.

    A card keeps the checkpoint's layout, and so do quantized codes; what lies so already, as
    experts in the rows of a bank, is not copied.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    if weight.stride()[-2:] == (1, weight.shape[-2]):
        return weight
    return weight.mT.contiguous().mT


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All dense matrices as one, in fp32 if any of them is."""
    mixed = len({weight.dtype for weight in weights}) > 1
    return columns(torch.cat([w.float() if mixed else w for w in weights]))


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
    def stacked(parts: Sequence[LinearWeight], numerics: Numerics) -> Fp8Linear:
        """All matrices as one, the first's rows on top; FP8 rows come in blocks of 128."""
        scales = [part.scale for part in parts if part.scale is not None]
        for part in parts[:-1] if scales else ():
            if part.weight.shape[0] % 128:
                raise ValueError(
                    f"an FP8 matrix has {part.weight.shape[0]} rows, expected a multiple of 128"
                )
        weight = columns(torch.cat([part.weight for part in parts]))
        return Fp8Linear(weight, torch.cat(scales) if scales else None, numerics)

    def __call__(
        self, x: torch.Tensor | Quantized, batch: ForwardBatch, *,
        norm_weight: torch.Tensor | None = None, eps: float = 1e-6,
        swiglu_limit: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The product; a dense ``x`` is normed, or activated, on the way in."""
        numerics = self.numerics
        return ftkernels.fp8_linear(
            x, self.weight, self.scale, activation=numerics.activation, norm_weight=norm_weight,
            eps=eps, swiglu_limit=swiglu_limit, path=batch.path, out_dtype=numerics.dtype,
            scratch=batch.scratch,
        )  # fmt: skip

    def beside(
        self, dense: torch.Tensor, x: Input, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The products with this matrix and, in fp32, with ``dense``."""
        codes, scale = (None, None) if x.fp8 is None else x.fp8
        return ftkernels.mixed_linear(
            x.dense, self.weight, self.scale, dense, x_fp8=codes, x_scale=scale,
            activation=self.numerics.activation, path=batch.path, out_dtype=self.numerics.dtype,
            scratch=batch.scratch,
        )  # fmt: skip
