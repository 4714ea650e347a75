"""The architecture for training: whole sequences, gradients, master weights in fp32.

Weights carry the checkpoint's names, with the routed experts of a layer as two banks:
``layers.L.ffn.experts.w13 [E, 2I, D]`` (w1 rows, then w3) and ``.w2 [E, D, I]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from demo import mhc
from demo.attention import Selection, attention
from demo.moe import moe
from demo.parts import rms_norm
from demo.rounding import Rounding, fp4_matrix, fp8_matrix
from demo.wiring import wire
from ftruntime.checkpoint.names import expected_tensors
from ftruntime.model.config import ModelConfig


@dataclass(frozen=True)
class Ops:
    """The pieces of a layer, as they are or compiled."""

    attention: Callable[..., Any] = attention
    moe: Callable[..., Any] = moe
    pre: Callable[..., Any] = mhc.pre
    post: Callable[..., Any] = mhc.post
    head: Callable[..., Any] = mhc.head

    @staticmethod
    def compiled() -> Ops:
        """Fused by torch.compile, which needs a C++ compiler: twice as fast, a minute to start."""
        pieces = (attention, moe, mhc.pre, mhc.post, mhc.head)
        return Ops(*(torch.compile(piece, dynamic=False) for piece in pieces))


def weight_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Logical shape and storage dtype of every weight, banks in place of experts."""
    shapes = {
        name: (spec.shape, spec.dtype)
        for name, spec in expected_tensors(config).items()
        if not name.endswith(".scale") and ".experts." not in name
    }
    hidden, inter, experts = (
        config.hidden_size, config.moe_intermediate_size, config.n_routed_experts,
    )  # fmt: skip
    for layer in range(config.num_hidden_layers):
        bank = f"layers.{layer}.ffn.experts."
        shapes[f"{bank}w13"] = ((experts, 2 * inter, hidden), "I8")
        shapes[f"{bank}w2"] = ((experts, hidden, inter), "I8")
    return shapes


def init_weights(config: ModelConfig, counts: Tensor, seed: int) -> dict[str, Tensor]:
    """Initial weights.

    Args:
        counts: `[V]`, how often each token occurs; the hash table spreads them evenly.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (shape, dtype) in weight_shapes(config).items():
        if dtype == "I64":
            weights[name] = hash_table(counts, config, generator)
        else:
            weights[name] = _initial(name, shape, config, generator)
    wire(weights, config, generator)
    return weights


def hash_table(counts: Tensor, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Distinct experts of each token `[V, topk]`: the most frequent token first, each to the
    experts that have the fewest tokens of the text so far.
    """
    topk, experts = config.num_experts_per_tok, config.n_routed_experts
    table = torch.empty(len(counts), topk, dtype=torch.int64)
    load = torch.rand(experts, generator=generator, dtype=torch.float64)
    for token in counts.argsort(descending=True, stable=True).tolist():
        table[token] = load.argsort()[:topk]
        load[table[token]] += float(counts[token]) + 1
    return table


def _initial(
    name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight") or name.endswith("_scale"):
        return torch.ones(shape)
    if name == "embed.weight":
        return noise * 2.0
    if name.endswith((".w2", ".w2.weight")):
        # experts begin as little beside the embedding, which later layers look things up by
        return noise * 0.15 / math.sqrt(shape[-1])
    if name.endswith(("head.weight", "gate.bias", "attn_sink", "hc_head_base")):
        return torch.zeros(shape)
    if name.endswith("_fn"):
        return noise * 0.3 / math.sqrt(shape[-1])
    if name.endswith("_base"):
        n = config.hc_mult
        pre, post, comb = noise[:n], noise[n : 2 * n], noise[2 * n :]
        eye = torch.eye(n).flatten()
        return torch.cat((0.3 * pre - 1.1, 0.3 * post, 0.1 * comb + 3 * eye))
    if name.endswith(".ape"):
        return noise * 0.1
    return noise / math.sqrt(shape[-1])


def cast(
    weights: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype, quantized: bool
) -> dict[str, Tensor]:
    """What a forward multiplies with: matrices in `dtype`, behind the checkpoint's round trips
    where `quantized`; small tensors as they are.
    """
    out = {}
    for name, (_, kind) in weight_shapes(config).items():
        weight = weights[name]
        if kind == "I64":
            out[name] = weight
            continue
        if quantized and kind == "I8":
            weight = fp4_matrix(weight)
        elif quantized and kind == "F8_E4M3":
            weight = fp8_matrix(weight)
        wide = kind == "F32" or name.endswith("ffn.gate.weight")
        out[name] = weight if wide else weight.to(dtype)
    return out


def forward(
    config: ModelConfig, w: dict[str, Tensor], ids: Tensor, *,
    selection: Selection | None = None, rounding: Rounding | None = None, ops: Ops | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Logits of every token.

    Args:
        w: as `cast` returns.
        ids: `[B, T]` int64, sequences from position 0, `T` a multiple of 128.

    Returns:
        Logits `[B, T, V]` fp32; routes of each expert `[E]`, one a layer; the indexers' losses.
    """
    selection, rounding, ops = selection or Selection(), rounding or Rounding(), ops or Ops()
    batch, eps = len(ids), config.rms_norm_eps
    flat = ids.flatten()
    hyper = {"iters": config.hc_sinkhorn_iters, "eps": config.hc_eps, "norm_eps": eps}
    streams = embedding(flat, w["embed.weight"])[:, None].expand(-1, config.hc_mult, -1)
    loads, losses = [], []
    for layer, ratio in enumerate(config.compress_ratios):
        inner = {name: t for name, t in _of_layer(w, layer)}
        attn = _below(inner, "attn.")
        x, post, comb = ops.pre(streams, *_mixes(inner, "attn"), **hyper)
        x = rms_norm(x, inner["attn_norm.weight"], eps)
        y, loss = ops.attention(config, attn, ratio, x, batch, selection, rounding)
        streams = ops.post(y, streams, post, comb)
        losses += [] if loss is None else [loss]
        x, post, comb = ops.pre(streams, *_mixes(inner, "ffn"), **hyper)
        x = rms_norm(x, inner["ffn_norm.weight"], eps)
        y, load = ops.moe(config, _below(inner, "ffn."), x, flat, rounding)
        streams = ops.post(y, streams, post, comb)
        loads.append(load)
    names = ("hc_head_fn", "hc_head_base", "hc_head_scale")
    last = ops.head(streams, *(w[name] for name in names), eps=config.hc_eps, norm_eps=eps)
    logits = linear(rms_norm(last, w["norm.weight"], eps), w["head.weight"]).float()
    return logits.view(*ids.shape, -1), loads, losses


def _of_layer(w: dict[str, Tensor], layer: int) -> Iterator[tuple[str, Tensor]]:
    prefix = f"layers.{layer}."
    return ((n.removeprefix(prefix), t) for n, t in w.items() if n.startswith(prefix))


def _below(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}


def _mixes(w: dict[str, Tensor], site: str) -> tuple[Tensor, Tensor, Tensor]:
    return w[f"hc_{site}_fn"], w[f"hc_{site}_base"], w[f"hc_{site}_scale"]
