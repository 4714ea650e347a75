"""Routing and the experts of one layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus

from demo.parts import grouped_linear, swiglu
from demo.rounding import Rounding
from ftruntime.model.config import ModelConfig


def moe(
    config: ModelConfig, w: dict[str, Tensor], x: Tensor, ids: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Routed and shared experts of `x [N, D]`.

    Args:
        w: the layer's tensors by their names behind ``ffn.``.
        ids: `[N]` int64, for layers that have ``gate.tid2eid``.

    Returns:
        The sum `[N, D]`, and how many routes each expert got, `[E]`.
    """
    scores = softplus(linear(x.float(), w["gate.weight"].float())).sqrt()
    if "gate.tid2eid" in w:
        chosen = w["gate.tid2eid"][ids]
    else:
        chosen = (scores.detach() + w["gate.bias"]).topk(config.num_experts_per_tok, dim=1).indices
    picked = scores.gather(1, chosen)
    weights = picked / picked.sum(1, keepdim=True) * config.routed_scaling_factor

    topk, experts = config.num_experts_per_tok, config.n_routed_experts
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    order = chosen.flatten().argsort(stable=True)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    x = rounding.activation(x)
    rows = x[order // topk]
    hidden = swiglu(
        grouped_linear(rows, w["experts.w13"], offsets), config.swiglu_limit,
        weights.flatten()[order],
    )  # fmt: skip
    routed = grouped_linear(rounding.activation(hidden), w["experts.w2"], offsets)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    out = routed[place].view(-1, topk, routed.shape[1]).sum(1)
    both = torch.cat((w["shared_experts.w1.weight"], w["shared_experts.w3.weight"]))
    shared = swiglu(linear(x, both), config.swiglu_limit)
    return out + linear(rounding.activation(shared), w["shared_experts.w2.weight"]), counts
