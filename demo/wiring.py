"""A start from which looking things up is learnt within a thousand steps.

The first layer's head h begins by looking h + 1 tokens back: embeddings share a direction, of which
queries and keys make a place. In the layers behind it a query begins by asking for tokens whose
last two were what it and the token before it are, so that attention finds what came next.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ftruntime.model.config import ModelConfig

_PAIRS: Final = 12  # rotated pairs that tell places apart, those that turn fastest
_SHARED: Final = 1.0  # root mean square of what all embeddings have in common
_NOISE: Final = 0.3  # what is left of weights that are given a start
_PLACE_KEY: Final = 0.4
_PLACE_QUERY: Final = 0.5


def wire(weights: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> None:
    """Change initial weights in place."""
    hidden = config.hidden_size
    shared = torch.randn(hidden, generator=generator)
    shared /= shared.norm()
    weights["embed.weight"] += _SHARED * math.sqrt(hidden) * shared
    for layer in range(config.num_hidden_layers):
        # keys tell tokens apart by what they do not share
        keys = _of(weights, layer)["wkv.weight"]
        keys -= torch.outer(keys @ shared, shared)
    read, written = _look_back(_of(weights, 0), config, shared, generator)
    for layer in range(1, config.num_hidden_layers):
        _look_up(_of(weights, layer), config, read, written)


def _of(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"layers.{layer}.attn."
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def _look_back(
    w: dict[str, Tensor], config: ModelConfig, shared: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns what heads read of a token `[R, D]`, and where each writes it `[heads, D, R]`."""
    hidden, heads, rope = config.hidden_size, config.num_attention_heads, config.qk_rope_head_dim
    rank, pairs = config.o_lora_rank, min(_PAIRS, rope // 2)
    freq = config.rope_theta ** (-2 * torch.arange(pairs) / rope)
    phase = torch.rand(pairs, generator=generator) * 2 * math.pi
    keys = w["wkv.weight"]
    keys[-rope:] = 0
    rows = keys[-rope:].view(rope // 2, 2, hidden)
    rows[:pairs, 0] = _PLACE_KEY * phase.cos()[:, None] * shared
    rows[:pairs, 1] = _PLACE_KEY * phase.sin()[:, None] * shared
    w["wq_a.weight"][0] = shared
    q = w["wq_b.weight"].view(heads, config.head_dim, -1)
    q *= _NOISE
    q[:, -rope:] = 0
    for head in range(heads):
        turn = phase - freq * (head + 1)
        part = q[head, -rope:].view(rope // 2, 2, -1)
        part[:pairs, 0, 0] = _PLACE_QUERY * turn.cos()
        part[:pairs, 1, 0] = _PLACE_QUERY * turn.sin()
    # all heads read the same of a token, and write it where it is not read
    down = w["wo_a.weight"].view(config.o_groups, rank, -1)
    down[:] = down[:1].clone()
    down[:, :, -rope:] = 0
    read = down[0, :, :-rope] @ w["wkv.weight"][:-rope]
    basis = torch.linalg.qr(torch.cat((read, shared[None])).T).Q
    up = w["wo_b.weight"]
    up -= basis @ (basis.T @ up)
    return read, up.view(hidden, heads, rank).permute(1, 0, 2)


def _look_up(w: dict[str, Tensor], config: ModelConfig, read: Tensor, written: Tensor) -> None:
    """Queries that are like keys of tokens whose past is the query's present."""
    heads, rope, rank = config.num_attention_heads, config.qk_rope_head_dim, read.shape[0]
    nope = w["wkv.weight"][:-rope]
    down = w["wq_a.weight"]
    down[:rank] = read / read.norm(dim=1, keepdim=True)
    back = written[0].T
    down[rank : 2 * rank] = back / back.norm(dim=1, keepdim=True)
    q = w["wq_b.weight"].view(heads, config.head_dim, -1)
    q *= _NOISE
    for place in range(2):
        wanted = nope @ written[place]
        columns = slice(place * rank, (place + 1) * rank)
        q[:, :-rope, columns] += wanted / wanted.norm() * math.sqrt(config.head_dim)
    rows = w.get("compressor.wkv.weight")
    if rows is not None and len(rows) == 2 * config.head_dim:
        # a compressed row begins as the mean of its tokens' keys
        rows.copy_(w["wkv.weight"].repeat(2, 1) + _NOISE * rows)
