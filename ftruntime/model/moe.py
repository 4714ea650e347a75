"""The expert half of a layer: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftruntime.checkpoint.loader import Weights
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import ModelConfig
from ftruntime.model.experts import Experts
from ftruntime.model.linear import Fp8Linear, Input
from ftruntime.model.numerics import Numerics
from ftruntime.model.router import Router


@dataclass(frozen=True)
class MoE:
    router: Router
    experts: Experts
    shared_w13: Fp8Linear
    shared_w2: Fp8Linear
    swiglu_limit: float

    @staticmethod
    def of(
        weights: Weights, layer: int, router: Router, experts: Experts, config: ModelConfig,
        numerics: Numerics,
    ) -> MoE:  # fmt: skip
        prefix = f"layers.{layer}.ffn.shared_experts."
        parts = [weights.linears[f"{prefix}{name}"] for name in ("w1", "w3")]
        return MoE(
            router=router,
            experts=experts,
            shared_w13=Fp8Linear.stacked(parts, numerics),
            shared_w2=Fp8Linear.of(weights, f"{prefix}w2", numerics),
            swiglu_limit=config.swiglu_limit,
        )

    def __call__(self, x: Input, batch: ForwardBatch) -> torch.Tensor:
        """Normed input to the sublayer's output ``[T, C]``."""
        routes = self.router(x.dense, batch)
        gate_up = self.shared_w13(x.operand, batch)
        shared = self.shared_w2(gate_up, batch, swiglu_limit=self.swiglu_limit)
        return self.experts(x, routes, shared, batch)
