"""Experts of one layer on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftkernels.quant.pack import foldable, pack_fp4


@dataclass(frozen=True)
class ExpertBank:
    """Weights of all routed experts of a layer; scales are None when the weights are dequantized.

    Args:
        w13: `[E, 2I, C/2]` uint8, or `[E, 2I, C]` bf16/fp32; w1 rows, then w3 rows.
        w13_scale: `[E, 2I, C/32]` uint8 UE8M0 codes.
        w2: `[E, C, I/2]` uint8, or `[E, C, I]`.
        w2_scale: `[E, C, I/32]` uint8.
        packed: weights and scales are `pack_fp4`'s, those of `w13` with `gated`.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    packed: bool = False

    def pack(self) -> ExpertBank:
        """The same experts in the order of the kernels; scales that do not fold stay bytes.

        Raises:
            ValueError: the experts are packed already, or dequantized.
        """
        if self.packed or self.w13_scale is None or self.w2_scale is None:
            form = "packed" if self.packed else "dequantized"
            raise ValueError(f"ExpertBank.pack: the bank is {form}, expected checkpoint codes")
        experts, rows, half = self.w13.shape
        down = (experts, 2 * half, rows // 4)
        if tuple(self.w2.shape) != down:
            raise ValueError(
                f"ExpertBank.pack: w2 is {tuple(self.w2.shape)}, expected {down} beside a w13 of "
                f"{tuple(self.w13.shape)}"
            )
        w13 = pack_fp4(self.w13, self.w13_scale, gated=True, fold=foldable(self.w13_scale))
        w2 = pack_fp4(self.w2, self.w2_scale, fold=foldable(self.w2_scale))
        return ExpertBank(*w13, *w2, packed=True)
