"""The attention half of a layer: projections, paged rows, compressors, output groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.kvcache.storage import LayerKV
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.compressor import Compressor, Indexer, Tables
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import Fp8Linear
from ftruntime.model.numerics import Numerics


@dataclass(frozen=True)
class Attention:
    wq_a: Fp8Linear
    q_norm: torch.Tensor
    wq_b: Fp8Linear
    wkv: Fp8Linear
    kv_norm: torch.Tensor
    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor | None
    wo_b: Fp8Linear
    sink: torch.Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    ratio: int
    config: ModelConfig
    numerics: Numerics

    @staticmethod
    def of(weights: Weights, layer: int, config: ModelConfig, numerics: Numerics) -> Attention:
        prefix, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
        t, output = weights.tensors, weights.linears[f"{prefix}.wo_a"]
        store = "kv" if numerics.round_trips else "raw"
        return Attention(
            wq_a=Fp8Linear.of(weights, f"{prefix}.wq_a", numerics),
            q_norm=t[f"{prefix}.q_norm.weight"],
            wq_b=Fp8Linear.of(weights, f"{prefix}.wq_b", numerics),
            wkv=Fp8Linear.of(weights, f"{prefix}.wkv", numerics),
            kv_norm=t[f"{prefix}.kv_norm.weight"],
            wo_a=output.weight.view(config.o_groups, config.o_lora_rank, -1),
            wo_a_scale=output.scale,
            wo_b=Fp8Linear.of(weights, f"{prefix}.wo_b", numerics),
            sink=t[f"{prefix}.attn_sink"],
            compressor=(
                Compressor.of(weights, f"{prefix}.compressor", ratio, store, config)
                if ratio else None
            ),
            indexer=(
                Indexer.of(weights, f"{prefix}.indexer", config, numerics) if ratio == 4 else None
            ),
            ratio=ratio, config=config, numerics=numerics,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, kv: LayerKV, tables: Tables
    ) -> torch.Tensor:
        """Normed input ``[T, C]`` to the sublayer's output ``[T, C]``."""
        config, eps = self.config, self.config.rms_norm_eps
        q_rank = ftkernels.rms_norm(self.wq_a(x), self.q_norm, eps=eps)
        q = self.wq_b(q_rank).view(-1, config.num_attention_heads, config.head_dim)
        q = ftkernels.apply_rope(
            ftkernels.rms_norm(q, None, eps=eps), batch.positions, *tables
        )
        ftkernels.store_kv(
            self.wkv(x), kv.window, batch.slot_mapping, kv_format=kv.kv_format,
            rope_dim=config.qk_rope_head_dim, round_trip=self.numerics.round_trips,
            norm_weight=self.kv_norm, eps=eps, positions=batch.positions,
            cos=tables[0], sin=tables[1],
        )  # fmt: skip
        picks = None
        if self.compressor is not None and kv.compressed is not None:
            self.compressor(x, batch, kv.compressed, tables)
        if self.indexer is not None and kv.index is not None:
            picks = self.indexer(x, q_rank, batch, kv.index, tables)
        mixed = self._attend(q, batch, kv, picks, tables)
        grouped = ftkernels.grouped_linear(
            mixed.view(mixed.shape[0], config.o_groups, -1), self.wo_a, weight_scale=self.wo_a_scale
        )
        return self.wo_b(grouped.reshape(mixed.shape[0], -1))

    def _attend(
        self, q: torch.Tensor, batch: ForwardBatch, kv: LayerKV, picks: torch.Tensor | None,
        tables: Tables,
    ) -> torch.Tensor:  # fmt: skip
        scale, rows = self.config.head_dim**-0.5, kv.compressed.rows if kv.compressed else None
        block_table = batch.block_table if self.ratio else None
        if batch.is_decode:
            out = ftkernels.mla_decode(
                q, kv.window, batch.window_block_table, batch.seq_lens, softmax_scale=scale,
                sink=self.sink, window=self.config.sliding_window, cmp_kv=rows,
                block_table=block_table, compress_ratio=self.ratio, index_topk=picks,
                kv_format=kv.kv_format, cos=tables[0], sin=tables[1],
            )  # fmt: skip
        else:
            out = ftkernels.mla_prefill(
                q, kv.window, batch.window_block_table, batch.cu_seqlens, batch.seq_lens,
                softmax_scale=scale, sink=self.sink, window=self.config.sliding_window,
                cmp_kv=rows, block_table=block_table, compress_ratio=self.ratio,
                index_topk=picks, kv_format=kv.kv_format, cos=tables[0], sin=tables[1],
            )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out
