"""Which round trips of the official numerics a forward goes through, gradients straight through."""

from __future__ import annotations

import torch
from torch import Tensor

import ftkernels
from ftruntime.demo.write import quantize_blocks


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of `x`."""
    return x + (rounded.to(x.dtype) - x).detach()


class Rounding:
    """The round trips of activations and rows; none unless `on`."""

    def __init__(self, on: bool = False) -> None:
        self.on = on

    def activation(self, x: Tensor) -> Tensor:
        """Input `[N, K]` of an FP8 or FP4 matrix: FP8 in groups of 128."""
        return self._fp8(x, 128, x.shape[-1])

    def row(self, kv: Tensor, rope_dim: int) -> Tensor:
        """Window or compressed row `[..., d]`: FP8 in groups of 64, but the rotated channels."""
        return self._fp8(kv, 64, kv.shape[-1] - rope_dim)

    def index(self, x: Tensor) -> Tensor:
        """Index query or row `[..., d]`: Hadamard, then FP4 in groups of 32."""
        if not self.on:
            return x
        turned = ftkernels.hadamard_reference(x.detach().float())
        rounded = ftkernels.quant_round_trip_reference(turned, fmt="fp4", group=32)
        # the rotation is its own inverse: in this basis products are what they are in the other
        return straight(x, ftkernels.hadamard_reference(rounded))

    def _fp8(self, x: Tensor, group: int, channels: int) -> Tensor:
        if not self.on:
            return x
        rounded = ftkernels.quant_round_trip_reference(
            x.detach(), fmt="fp8", group=group, channels=channels
        )
        return straight(x, rounded)


def fp8_matrix(weight: Tensor) -> Tensor:
    """`[N, K]` through FP8 in blocks of 128 x 128."""
    codes, scale = quantize_blocks(weight.detach().float())
    rounded = ftkernels.dequantize_fp8_reference(
        codes, scale, group=(128, 128), dtype=torch.float32
    )
    return straight(weight, rounded)


def fp4_matrix(weight: Tensor) -> Tensor:
    """`[..., N, K]` through FP4 in groups of 32 along K."""
    flat = weight.detach().float().flatten(0, -2)
    codes, scale = ftkernels.quantize_fp4_reference(flat, group=32)
    rounded = ftkernels.dequantize_fp4_reference(codes, scale, group=32, dtype=torch.float32)
    return straight(weight, rounded.view(weight.shape))
