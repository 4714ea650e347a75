"""The expert half of a layer: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import Fp8Linear, Input, columns
from ftruntime.model.numerics import Numerics


@dataclass(frozen=True)
class MoE:
    gate: torch.Tensor
    bias: torch.Tensor | None
    tid2eid: torch.Tensor | None
    bank: ftkernels.ExpertBank
    shared_w13: Fp8Linear
    shared_w2: Fp8Linear
    config: ModelConfig
    numerics: Numerics

    @staticmethod
    def of(weights: Weights, layer: int, config: ModelConfig, numerics: Numerics) -> MoE:
        prefix = f"layers.{layer}.ffn."
        hashed = layer < config.num_hash_layers
        w1, w3 = (weights.linears[f"{prefix}shared_experts.{name}"] for name in ("w1", "w3"))
        return MoE(
            gate=columns(weights.tensors[f"{prefix}gate.weight"]),
            bias=None if hashed else weights.tensors[f"{prefix}gate.bias"],
            tid2eid=weights.tensors[f"{prefix}gate.tid2eid"] if hashed else None,
            bank=_resident(weights.experts[layer], weights.tensors["embed.weight"].device),
            shared_w13=Fp8Linear.stacked((w1, w3), numerics),
            shared_w2=Fp8Linear.of(weights, f"{prefix}shared_experts.w2", numerics),
            config=config,
            numerics=numerics,
        )

    def __call__(self, x: Input, batch: ForwardBatch) -> torch.Tensor:
        """Normed input to the sublayer's output ``[T, C]``."""
        topk_weights, topk_ids = self._route(x.dense, batch)
        limit, bank = self.config.swiglu_limit, self.bank
        gate_up = self.shared_w13(x.operand, batch)
        codes, scale = (x.dense, None) if x.fp8 is None else x.fp8
        return ftkernels.moe_fp4(
            codes, bank.w13, bank.w13_scale, bank.w2, bank.w2_scale, topk_weights, topk_ids,
            swiglu_limit=limit, x_scale=scale,
            shared=self.shared_w2(gate_up, batch, swiglu_limit=limit),
            activation=self.numerics.activation, packed=bank.packed, path=batch.path,
            out_dtype=self.numerics.dtype, scratch=batch.scratch,
        )  # fmt: skip

    def _route(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
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


def _resident(bank: ftkernels.ExpertBank, device: torch.device) -> ftkernels.ExpertBank:
    """All experts of a layer where the layer runs; codes in the order of the kernels that read
    them, dequantized experts on the host by columns."""
    if bank.w13_scale is None or bank.w2_scale is None:
        w13, w2 = columns(bank.w13.to(device)), columns(bank.w2.to(device))
        return ftkernels.ExpertBank(w13, None, w2, None)
    bank = ftkernels.ExpertBank(
        bank.w13.to(device), bank.w13_scale.to(device), bank.w2.to(device), bank.w2_scale.to(device)
    )
    return bank if ftkernels.backend.use_reference(bank.w13) else bank.pack()
