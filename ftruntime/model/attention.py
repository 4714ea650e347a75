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
from ftruntime.model.linear import Fp8Linear, Fp32Linear, columns
from ftruntime.model.numerics import Numerics
from ftruntime.types import PAGE_TOKENS


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
    projections: Fp32Linear | None
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
        latent = (weights.linears[f"{prefix}.wq_a"], weights.linears[f"{prefix}.wkv"])
        return Attention(
            wq_a_wkv=Fp8Linear.stacked(*latent, numerics),
            q_norm=t[f"{prefix}.q_norm.weight"],
            wq_b=Fp8Linear.of(weights, f"{prefix}.wq_b", numerics),
            kv_norm=t[f"{prefix}.kv_norm.weight"],
            wo_a=columns(output.weight.view(config.o_groups, config.o_lora_rank, -1)),
            wo_a_scale=output.scale,
            wo_b=Fp8Linear.of(weights, f"{prefix}.wo_b", numerics),
            sink=t[f"{prefix}.attn_sink"],
            compressor=compressor, indexer=indexer,
            projections=Fp32Linear.stacked(parts) if parts else None,
            widths=[part.shape[0] for part in parts],
            ratio=ratio, config=config, numerics=numerics,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, kv: LayerKV, tables: Tables
    ) -> torch.Tensor:
        """Normed input ``[T, C]`` to the sublayer's output ``[T, C]``."""
        config, eps = self.config, self.config.rms_norm_eps
        latent, row = self.wq_a_wkv(x, batch.path).split_with_sizes(
            [config.q_lora_rank, config.head_dim], dim=1
        )
        q_rank = ftkernels.rms_norm(latent, self.q_norm, eps=eps)
        q = self.wq_b(q_rank, batch.path).view(-1, config.num_attention_heads, config.head_dim)
        q = ftkernels.rms_norm(q, None, eps=eps)
        q = ftkernels.apply_rope(q, batch.positions, *tables, out=q)
        ftkernels.store_kv(
            row, kv.window, batch.slot_mapping, kv_format=kv.kv_format,
            rope_dim=config.qk_rope_head_dim, round_trip=self.numerics.round_trips,
            norm_weight=self.kv_norm, eps=eps, positions=batch.positions,
            cos=tables[0], sin=tables[1],
        )  # fmt: skip
        picks = self._compress(x, q_rank, batch, kv, tables)
        mixed = self._attend(q, batch, kv, picks, tables)
        grouped = ftkernels.grouped_linear(
            mixed.view(mixed.shape[0], config.o_groups, -1), self.wo_a,
            weight_scale=self.wo_a_scale, path=batch.path,
        )  # fmt: skip
        return self.wo_b(grouped.reshape(mixed.shape[0], -1), batch.path)

    def _compress(
        self, x: torch.Tensor, q_rank: torch.Tensor, batch: ForwardBatch, kv: LayerKV,
        tables: Tables,
    ) -> torch.Tensor | None:  # fmt: skip
        """Append the rows that the new tokens close; the picks of a layer that selects."""
        if self.projections is None or self.compressor is None or kv.compressed is None:
            return None
        parts = self.projections(x, batch.path).split_with_sizes(self.widths, dim=1)
        self.compressor(parts[0], parts[1], batch, kv.compressed, tables)
        if self.indexer is None or kv.index is None:
            return None
        self.indexer.compressor(parts[2], parts[3], batch, kv.index, tables)
        return self.indexer(q_rank, parts[4], batch, kv.index, tables)

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
                kv_format=kv.kv_format, cos=tables[0], sin=tables[1], scratch=batch.scratch,
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


def scratch_bytes(
    config: ModelConfig, *, num_tokens: int, num_seqs: int, max_positions: int
) -> int:
    """Scratch that serves the attention ops of any step, one after another.

    Args:
        num_tokens: most new tokens of a step.
        num_seqs: most sequences of a decode step.
        max_positions: length of the longest sequence.
    """
    sizes, pages = [0], -(-max_positions // PAGE_TOKENS)
    for ratio in set(config.compress_ratios):
        rows = pages * (PAGE_TOKENS // ratio) if ratio else 0
        topk = config.index_topk if ratio == 4 else 0
        mixed = ftkernels.scratch_bytes(
            "mla_decode", S=num_seqs, H=config.num_attention_heads, D=config.head_dim,
            topk=topk, rows=rows, window=config.sliding_window,
        )  # fmt: skip
        sizes.append(mixed)
        if ratio == 4:
            most = max(num_tokens, num_seqs)
            sizes.append(ftkernels.scratch_bytes("index_select", T=most, rows=rows, topk=topk))
    return max(sizes)
