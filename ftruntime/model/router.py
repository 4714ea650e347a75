"""The router of a layer: scores against a table of token ids or of learned rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import columns


@dataclass(frozen=True)
class Router:
    """Chooses the experts of every token; by its id when there is ``tid2eid``."""

    gate: torch.Tensor
    bias: torch.Tensor | None
    tid2eid: torch.Tensor | None
    config: ModelConfig

    @staticmethod
    def of(weights: Weights, layer: int, config: ModelConfig) -> Router:
        prefix = f"layers.{layer}.ffn.gate."
        hashed = layer < config.num_hash_layers
        return Router(
            gate=columns(weights.tensors[f"{prefix}weight"]),
            bias=None if hashed else weights.tensors[f"{prefix}bias"],
            tid2eid=weights.tensors[f"{prefix}tid2eid"] if hashed else None,
            config=config,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed input ``[T, C]`` to weights fp32 and expert ids int32, ``[T, topk]`` each."""
        config = self.config
        if self.tid2eid is not None:
            return ftkernels.gate_hash(
                x, self.gate, batch.token_ids, self.tid2eid, path=batch.path,
                route_scale=config.routed_scaling_factor, score=config.scoring_func,
                scratch=batch.scratch,
            )  # fmt: skip
        return ftkernels.gate_topk(
            x, self.gate, self.bias, topk=config.num_experts_per_tok, path=batch.path,
            route_scale=config.routed_scaling_factor, score=config.scoring_func,
            scratch=batch.scratch,
        )  # fmt: skip
