"""The attention half of a layer: projections, paged rows, compressors, output groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.kvcache.storage import LayerKV
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.compressor import Compressor, Indexer, Tables
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import Fp8Linear, Input, columns, stacked
from ftruntime.model.numerics import Numerics


@dataclass(frozen=True)
class Attention:
    wq_a_wkv: Fp8Linear
    q_norm: torch.Tensor
    wq_b: Fp8Linear
    kv_norm: torch.Tensor
    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor | None
    wo_b: Fp8Linear
    sink: torch.Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    projections: torch.Tensor | None
    widths: list[int]
    ratio: int
    config: ModelConfig
    numerics: Numerics

    @staticmethod
    def of(weights: Weights, layer: int, config: ModelConfig, numerics: Numerics) -> Attention:
        prefix, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
        t, output = weights.tensors, weights.linears[f"{prefix}.wo_a"]
        store = "kv" if numerics.round_trips else "raw"
        compressor = indexer = None
        parts: list[torch.Tensor] = []
        if ratio:
            compressor = Compressor.of(weights, f"{prefix}.compressor", ratio, store, config)
            parts += [compressor.wkv, compressor.wgate]
        if ratio == 4:
            indexer = Indexer.of(weights, f"{prefix}.indexer", config, numerics)
            inner = indexer.compressor
            parts += [inner.wkv, inner.wgate, indexer.weights_proj]
        # matrices over the same input are one product: those in FP8, and those in fp32
        latent = [weights.linears[f"{prefix}.{name}"] for name in ("wq_a", "wkv")]
        ranked = [f"{prefix}.wq_b"] + ([f"{prefix}.indexer.wq_b"] if indexer else [])
        return Attention(
            wq_a_wkv=Fp8Linear.stacked(latent, numerics),
            q_norm=t[f"{prefix}.q_norm.weight"],
            wq_b=Fp8Linear.stacked([weights.linears[name] for name in ranked], numerics),
            kv_norm=t[f"{prefix}.kv_norm.weight"],
            wo_a=columns(output.weight.view(config.o_groups, config.o_lora_rank, -1)),
            wo_a_scale=output.scale,
            wo_b=Fp8Linear.of(weights, f"{prefix}.wo_b", numerics),
            sink=t[f"{prefix}.attn_sink"],
            compressor=compressor, indexer=indexer,
            projections=stacked(parts) if parts else None,
            widths=[part.shape[0] for part in parts],
            ratio=ratio, config=config, numerics=numerics,
        )  # fmt: skip

    def __call__(
        self, x: Input, batch: ForwardBatch, kv: LayerKV, tables: Tables
    ) -> torch.Tensor:  # fmt: skip
        """Normed input to the sublayer's output ``[T, C]``."""
        config, eps = self.config, self.config.rms_norm_eps
        parts: Sequence[torch.Tensor] = ()
        if self.projections is None:
            latent = self.wq_a_wkv(x.operand, batch)
        else:
            latent, wide = self.wq_a_wkv.beside(self.projections, x, batch)
            parts = wide.split_with_sizes(self.widths, dim=1)
        latent, row = latent.split_with_sizes([config.q_lora_rank, config.head_dim], dim=1)
        queries = self.wq_b(latent, batch, norm_weight=self.q_norm, eps=eps)
        self._store(row, parts, batch, kv, tables)
        width = config.num_attention_heads * config.head_dim
        picks = None
        if self.indexer is not None and kv.index is not None:
            self.indexer.compressor(parts[2], parts[3], batch, kv.index, tables)
            picks = self.indexer(queries[:, width:], parts[4], batch, kv.index, tables)
        q = queries[:, :width].view(-1, config.num_attention_heads, config.head_dim)
        mixed = self._attend(q, batch, kv, picks, tables)
        grouped = ftkernels.grouped_linear(
            mixed.view(mixed.shape[0], config.o_groups, -1), self.wo_a,
            weight_scale=self.wo_a_scale, path=batch.path, scratch=batch.scratch,
        )  # fmt: skip
        return self.wo_b(grouped.reshape(mixed.shape[0], -1), batch)

    def _store(
        self, row: torch.Tensor, parts: Sequence[torch.Tensor], batch: ForwardBatch, kv: LayerKV,
        tables: Tables,
    ) -> None:  # fmt: skip
        """Window rows of the new tokens, and the compressed rows that they close."""
        pool, compressor, eps = kv.compressed, self.compressor, self.config.rms_norm_eps
        if compressor is None or pool is None:
            ftkernels.store_kv(
                row, kv.window, batch.slot_mapping, kv_format=kv.kv_format,
                rope_dim=self.config.qk_rope_head_dim, round_trip=self.numerics.round_trips,
                norm_weight=self.kv_norm, eps=eps, positions=batch.positions,
                cos=tables[0], sin=tables[1],
            )  # fmt: skip
            return
        ftkernels.append_kv(
            row, kv.window, batch.slot_mapping, parts[0], parts[1], compressor.ape,
            compressor.norm, pool.state, batch.state_index, pool.rows, batch.block_table,
            batch.cu_seqlens, batch.seq_lens, compress_ratio=self.ratio,
            row_norm_weight=self.kv_norm, positions=batch.positions, cos=tables[0], sin=tables[1],
            eps=eps, round_trip=self.numerics.round_trips, kv_format=kv.kv_format,
            **pool.snapshots(batch.window_block_table),
        )  # fmt: skip

    def _attend(
        self, q: torch.Tensor, batch: ForwardBatch, kv: LayerKV, picks: torch.Tensor | None,
        tables: Tables,
    ) -> torch.Tensor:  # fmt: skip
        """Raw queries ``[T, H, D]`` to mixed rows, rotated back."""
        scale, rows = self.config.head_dim**-0.5, kv.compressed.rows if kv.compressed else None
        block_table, eps = batch.block_table if self.ratio else None, self.config.rms_norm_eps
        if batch.is_decode:
            out = ftkernels.mla_decode(
                q, kv.window, batch.window_block_table, batch.seq_lens, softmax_scale=scale,
                sink=self.sink, window=self.config.sliding_window, cmp_kv=rows,
                block_table=block_table, compress_ratio=self.ratio, index_topk=picks,
                kv_format=kv.kv_format, cos=tables[0], sin=tables[1], q_norm_eps=eps,
                scratch=batch.scratch,
            )  # fmt: skip
        else:
            q = ftkernels.rms_norm(q, None, eps=eps)
            q = ftkernels.apply_rope(q, batch.positions, *tables, out=q)
            out = ftkernels.mla_prefill(
                q, kv.window, batch.window_block_table, batch.cu_seqlens, batch.seq_lens,
                softmax_scale=scale, sink=self.sink, window=self.config.sliding_window,
                cmp_kv=rows, block_table=block_table, compress_ratio=self.ratio,
                index_topk=picks, kv_format=kv.kv_format, cos=tables[0], sin=tables[1],
            )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out
