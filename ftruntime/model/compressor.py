"""Compressed rows and their selection: what a layer has beside its window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.kvcache.storage import CompressedPool
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import ModelConfig
from ftruntime.model.numerics import Numerics

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Compressor:
    """Pools the new tokens into rows and appends them."""

    wkv: torch.Tensor
    wgate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    ratio: int
    store: str
    eps: float

    @staticmethod
    def of(
        weights: Weights, prefix: str, ratio: int, store: str, config: ModelConfig
    ) -> Compressor:
        t = weights.tensors
        return Compressor(
            t[f"{prefix}.wkv.weight"], t[f"{prefix}.wgate.weight"],
            t[f"{prefix}.ape"], t[f"{prefix}.norm.weight"], ratio, store, config.rms_norm_eps,
        )  # fmt: skip

    def __call__(
        self, kv: torch.Tensor, gate: torch.Tensor, batch: ForwardBatch, pool: CompressedPool,
        tables: Tables,
    ) -> None:  # fmt: skip
        """Take in the projections ``wkv x`` and ``wgate x`` of the new tokens, fp32."""
        ftkernels.compress_kv(
            kv, gate, self.ape, self.norm, pool.state, batch.state_index,
            pool.rows, batch.block_table, batch.cu_seqlens, batch.seq_lens,
            compress_ratio=self.ratio, cos=tables[0], sin=tables[1], eps=self.eps,
            store=self.store, kv_format=pool.kv_format, **pool.snapshots(batch.window_block_table),
        )  # fmt: skip


@dataclass(frozen=True)
class Indexer:
    """Scores the index rows and picks the best for each new token."""

    weights_proj: torch.Tensor
    compressor: Compressor
    config: ModelConfig
    numerics: Numerics

    @staticmethod
    def of(weights: Weights, prefix: str, config: ModelConfig, numerics: Numerics) -> Indexer:
        # picks are the same under any positive factor: a power of two leaves bf16 rows exact
        factor = 2.0 ** round(math.log2(config.index_head_dim * config.index_n_heads) / -2)
        projection = weights.tensors[f"{prefix}.weights_proj.weight"] * factor
        store = "index" if numerics.round_trips else "raw"
        return Indexer(
            projection, Compressor.of(weights, f"{prefix}.compressor", 4, store, config), config,
            numerics,
        )  # fmt: skip

    def __call__(
        self, q: torch.Tensor, head_weights: torch.Tensor, batch: ForwardBatch,
        pool: CompressedPool, tables: Tables,
    ) -> torch.Tensor:  # fmt: skip
        """Projected queries and head weights of the new tokens to picks ``[T, index_topk]``."""
        config = self.config
        q = ftkernels.index_query(
            q.view(-1, config.index_n_heads, config.index_head_dim), batch.positions,
            *tables, round_trip=self.numerics.round_trips,
        )  # fmt: skip
        return ftkernels.index_select(
            q, head_weights, pool.rows, batch.block_table, batch.cu_seqlens,
            batch.seq_lens, topk=config.index_topk, index_format=pool.kv_format,
            scores="fp8" if self.numerics.round_trips else "exact", scratch=batch.scratch,
        )  # fmt: skip
