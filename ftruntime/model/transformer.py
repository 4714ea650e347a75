"""The whole model over paged pools, any layer slice of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.attention import Attention
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.compressor import Tables
from ftruntime.model.config import ModelConfig
from ftruntime.model.experts import CachedExperts, Experts, ResidentExperts, resident
from ftruntime.model.lookahead import Lookahead
from ftruntime.model.mhc import Head, HyperConnection
from ftruntime.model.moe import MoE
from ftruntime.model.numerics import Numerics
from ftruntime.model.parallel import Alone, Parallel, Summands, in_turn
from ftruntime.model.router import Router


@dataclass(frozen=True)
class Layer:
    attn_hc: HyperConnection
    attn: Attention
    ffn_hc: HyperConnection
    ffn: MoE


class Transformer:
    """Weights and constants; every tensor operation is a library call.

    Args:
        config: of the whole model.
        weights, numerics: this rank's share of what was loaded, and how it is rounded.
        max_positions: rows of the rope tables, the longest sequence that is served.
        cache: over the banks of ``weights``; without one all experts go to the device.
        prefetch_layers: layers ahead whose experts the cache is told of.
        parallel: the ranks that hold the other shares.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, numerics: Numerics, *, max_positions: int,
        cache: ftkernels.ExpertCache | None = None, prefetch_layers: int = 0,
        parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.parallel = parallel or Alone()
        self.config = config = config.share(self.parallel.size)
        self.numerics = numerics
        self.device = weights.tensors["embed.weight"].device
        self._embed = weights.tensors["embed.weight"].to(numerics.dtype)
        self._head = Head.of(weights, config)
        # dequantized matrices take dense rows, and round trip them themselves
        quantize = numerics.round_trips and all(
            linear.scale is not None for linear in weights.linears.values()
        )
        routers = [Router.of(weights, layer, config) for layer in range(config.num_hidden_layers)]
        self._cache = cache
        self._lookahead = None if cache is None else Lookahead(cache, routers, prefetch_layers)
        self._layers = [
            Layer(
                HyperConnection.of(weights, layer, "attn", quantize, config),
                Attention.of(weights, layer, config, numerics),
                HyperConnection.of(weights, layer, "ffn", quantize, config),
                MoE.of(
                    weights, layer, router, self._experts(weights, layer, cache), config, numerics
                ),
            )
            for layer, router in enumerate(routers)
        ]
        self._tables = _rope_tables(config, max_positions, self.device)

    def _experts(
        self, weights: Weights, layer: int, cache: ftkernels.ExpertCache | None
    ) -> Experts:
        bank, config, numerics = weights.experts[layer], self.config, self.numerics
        if cache is None or self._lookahead is None:
            return ResidentExperts(resident(bank, self.device), config, numerics)
        return CachedExperts(
            cache, self._lookahead, layer, packed=bank.packed, config=config, numerics=numerics
        )

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Token ids to identical streams ``[T, hc, C]``."""
        copies, ranks = self.config.hc_mult, self.parallel
        if ranks.size == 1:
            return ftkernels.embed(batch.token_ids, self._embed, hc=copies)
        # each rank knows the tokens of its rows, the others are zero there
        start = ranks.rank * self._embed.shape[0]
        rows = ranks.sum(ftkernels.embed(batch.token_ids, self._embed, vocab_start=start))
        return rows.expand(-1, copies, -1).contiguous()

    def forward(
        self, streams: torch.Tensor, batch: ForwardBatch, storage: KVStorage,
        layers: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        """Run layers ``[a, b)`` over the new tokens, updating pools and carry in place."""
        first, end = layers
        if first == end:
            return streams
        with self.step(batch, first):
            return self.run(streams, batch, storage, layers)

    @contextlib.contextmanager
    def step(self, batch: ForwardBatch, first: int = 0) -> Iterator[None]:
        """What the layers from ``first`` on run within, whether launched anew or again."""
        if self._cache is None or self._lookahead is None:
            yield
            return
        with self._cache.step(batch.phase):
            if first == 0:
                self._lookahead.begin(batch)
            yield

    def run(
        self, streams: torch.Tensor, batch: ForwardBatch, storage: KVStorage,
        layers: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        """As `forward`, within a `step` and of one layer at least."""
        if batch.halves is None:
            return in_turn([self._layers_of(streams, batch, storage, layers)], self.parallel)[0]
        out = torch.empty_like(streams)
        sizes = [half.token_ids.shape[0] for half in batch.halves]
        parts = zip(
            streams.split_with_sizes(sizes), out.split_with_sizes(sizes), batch.halves, strict=True
        )
        in_turn(
            [self._layers_of(rows, half, storage, layers, into) for rows, into, half in parts],
            self.parallel,
        )  # fmt: skip
        return out

    def _layers_of(
        self, streams: torch.Tensor, batch: ForwardBatch, storage: KVStorage,
        layers: tuple[int, int], out: torch.Tensor | None = None,
    ) -> Summands:  # fmt: skip
        """Yields what this rank adds to each sublayer's output, and is sent the sum."""
        first, end = layers
        x, mixes = self._layers[first].attn_hc.before(streams, batch)
        for number in range(first, end):
            layer, kv = self._layers[number], storage.layers[number]
            tables = self._tables[bool(self.config.compress_ratios[number])]
            y = yield layer.attn(x, batch, kv, tables)
            streams, x, mixes = layer.ffn_hc.between(y, streams, mixes, batch)
            y = yield layer.ffn(x, batch)
            if number + 1 < end:
                following = self._layers[number + 1].attn_hc
                streams, x, mixes = following.between(y, streams, mixes, batch)
        return HyperConnection.after(y, streams, mixes, out)

    @property
    def most_rows_at_once(self) -> int | None:
        """Rows of a decode step whose experts of a layer always fit the cache; None: any number."""
        if self._cache is None or self._cache.num_slots >= self._cache.num_experts:
            return None
        return self._cache.num_slots // self.config.num_experts_per_tok

    def logits(self, streams: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        """Streams ``[N, hc, C]`` of the rows of ``batch`` that are wanted to fp32 logits ``[N,
        V]``, on rank 0; None on the others."""
        return self.parallel.join(self._head(streams, batch))


def _rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device
) -> dict[bool, Tables]:
    """Tables of the sliding layers (False) and of the compressed ones (True)."""
    scaling = config.rope_scaling
    yarn = None
    if scaling is not None:
        yarn = {
            "factor": scaling.factor,
            "original_max_positions": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    dim = config.qk_rope_head_dim

    def tables(theta: float, yarn: dict[str, float] | None) -> Tables:
        return ftkernels.rope_tables(
            dim=dim, max_positions=max_positions, theta=theta, yarn=yarn, device=device
        )

    return {False: tables(config.rope_theta, None), True: tables(config.compress_rope_theta, yarn)}
