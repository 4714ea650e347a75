"""Bytes that a shape takes on one rank: weights, experts, KV pools, tables and room for a step.
Pure arithmetic.

On a GPU with official numerics weights keep their checkpoint form (FP8 and FP4 with scales). Where
ops run their reference, on CPU and under ``exact``, every matrix is widened to fp32 once at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ftruntime.checkpoint.names import TensorSpec, expected_tensors, num_shares
from ftruntime.model.config import ModelConfig
from ftruntime.types import PAGE_TOKENS

_FP32: Final = 4
_FP8_ROW_BYTES: Final = 584
_FP8_SINGLE_ROW_PAGE_BYTES: Final = 592  # page strides are multiples of 16 bytes
_INDEX_SCRATCH_BYTES: Final = 64 << 20
_COUNTER_BYTES: Final = 64 << 10
_DECODE_BLOCKS: Final = 256  # of one sequence, each of them up to 16 heads
# of the routed experts: sorted order, its padding, and the split sums of as many tokens as one
# launch takes, of which few rows make many splits
_ROUTE_BYTES: Final = 64
_EXPERT_BYTES: Final = 1024
_GEMV_TOKENS: Final = 64
_SPLIT_ROWS: Final = 8192
# launches of a layer's decode step, at most, and an assumed cost of each in a captured graph
_GRAPH_NODES: Final = 20
_GRAPH_NODE_BYTES: Final = 8 << 10


@dataclass(frozen=True)
class WeightBytes:
    """``dense``: everything of one rank but the routed experts; ``expert``: one routed expert's
    share on one rank.
    """

    dense: int
    expert: int
    num_experts: int  # all layers together


def element_bytes(numerics: str) -> int:
    """Bytes of an activation or a KV channel: bf16, or fp32 under ``exact``."""
    return _FP32 if numerics == "exact" else 2


@lru_cache(maxsize=64)  # walks every expert
def weight_bytes(shape: ModelConfig, *, widened: bool, ranks: int) -> WeightBytes:
    """Weights as they stay in memory.

    Args:
        widened: all matrices and vectors are fp32; else they keep the checkpoint's form.
        ranks: tensor-parallel ranks that share the sharded matrices.
    """
    dense = first_expert = 0
    for name, spec in expected_tensors(shape).items():
        size = _widened_bytes(spec) if widened else spec.num_bytes
        if ".ffn.experts." in name:
            first_expert += size if name.startswith("layers.0.ffn.experts.0.") else 0
            continue
        dense += -(-size // num_shares(name, ranks))
    return WeightBytes(
        dense=dense,
        expert=-(-first_expert // ranks),
        num_experts=shape.num_hidden_layers * shape.n_routed_experts,
    )


def _widened_bytes(spec: TensorSpec) -> int:
    if spec.dtype == "I64":
        return spec.num_bytes
    # a scale is gone once it is in its weight; an I8 holds two FP4 codes
    values = {"F8_E8M0": 0, "I8": 2}.get(spec.dtype, 1)
    return spec.num_elements * values * _FP32


def kv_row_bytes(shape: ModelConfig, *, kv_format: str, numerics: str) -> int:
    """One window or compressed row of one layer."""
    return _FP8_ROW_BYTES if kv_format == "fp8" else shape.head_dim * element_bytes(numerics)


def row_page_bytes(shape: ModelConfig, *, kv_format: str, numerics: str) -> int:
    """Compressed and index rows of one page of 128 tokens, all layers together."""
    row = kv_row_bytes(shape, kv_format=kv_format, numerics=numerics)
    csa, hca = shape.num_layers_of(4), shape.num_layers_of(128)
    index = shape.index_head_dim * element_bytes(numerics)
    single = _FP8_SINGLE_ROW_PAGE_BYTES if kv_format == "fp8" else row
    return csa * (PAGE_TOKENS // 4) * (row + index) + hca * single


def window_page_bytes(shape: ModelConfig, *, kv_format: str, numerics: str) -> int:
    """Window rows of one page of 128 tokens, all layers together."""
    row = kv_row_bytes(shape, kv_format=kv_format, numerics=numerics)
    return shape.num_hidden_layers * PAGE_TOKENS * row


def carry_bytes(shape: ModelConfig) -> int:
    """Open compressor windows of one running row, fp32: 8 slots of two series (ratio 4), two
    buffers of three sums (128).
    """
    csa = 2 * 8 * 2 * (shape.head_dim + shape.index_head_dim)
    hca = 2 * 3 * shape.head_dim
    return (shape.num_layers_of(4) * csa + shape.num_layers_of(128) * hca) * _FP32


def carry_snapshot_bytes(shape: ModelConfig) -> int:
    """Carry at the end of one window page, fp32: 4 tokens of one series (ratio 4), none (128)."""
    width = shape.head_dim + shape.index_head_dim
    return shape.num_layers_of(4) * 2 * 4 * width * _FP32


def rope_table_bytes(shape: ModelConfig, max_model_len: int) -> int:
    """Two pairs of cos and sin, plain and YaRN: ``[max_model_len, rope / 2]`` fp32 each."""
    return 4 * max_model_len * (shape.qk_rope_head_dim // 2) * _FP32


def activation_bytes(
    shape: ModelConfig, *, num_tokens: int, max_running: int, numerics: str, ranks: int
) -> int:
    """Upper estimate of the tensors of one step of ``num_tokens``.

    A chunk keeps two copies of the streams and its sublayer's input, and of one sublayer at a time
    the larger of attention (queries, output, group projections) and the shared expert. Decode rows
    add their logits twice. The routed experts work in the scratch of the ops.
    """
    step = num_tokens * _token_bytes(shape, numerics=numerics, ranks=ranks)
    return step + 2 * max_running * shape.vocab_size * _FP32


def _token_bytes(shape: ModelConfig, *, numerics: str, ranks: int) -> int:
    streams = (2 * shape.hc_mult + 2) * shape.hidden_size
    attention = (
        2 * shape.num_attention_heads * shape.head_dim + shape.o_groups * shape.o_lora_rank
    ) // ranks + shape.index_n_heads * shape.index_head_dim
    shared = 3 * shape.moe_intermediate_size // ranks + shape.hidden_size
    return (streams + max(attention, shared)) * element_bytes(numerics)


def graph_bytes(
    shape: ModelConfig, *, sizes: Sequence[int], max_model_len: int, numerics: str, ranks: int
) -> int:
    """Estimate of captured decode steps: inputs, tensors and logits of the largest, which the
    others share, and the driver's record of every launch of each.
    """
    if not sizes:
        return 0
    pages = -(-max_model_len // PAGE_TOKENS)
    row = _token_bytes(shape, numerics=numerics, ranks=ranks)
    row += 2 * shape.vocab_size * _FP32 + 2 * pages * 4  # block tables of rows and windows
    nodes = len(sizes) * shape.num_hidden_layers * _GRAPH_NODES
    return max(sizes) * row + nodes * _GRAPH_NODE_BYTES


def scratch_bound(
    shape: ModelConfig, *, num_tokens: int, max_running: int, numerics: str, ranks: int
) -> int:
    """Upper bound of what any op takes as scratch: row selection, the split results of a decode
    step, or gate and up, activation and output of every route of a step.
    """
    heads = 8 if shape.num_attention_heads <= 8 * ranks else 16
    decode = max_running * _DECODE_BLOCKS * heads * (shape.head_dim + 2) * _FP32
    index = _INDEX_SCRATCH_BYTES if shape.num_layers_of(4) else 0
    inter, hidden = -(-shape.moe_intermediate_size // ranks), shape.hidden_size
    topk = shape.num_experts_per_tok
    route = (3 * inter + hidden) * element_bytes(numerics) + _ROUTE_BYTES
    sums = _GEMV_TOKENS * topk * (2 * inter + hidden + _SPLIT_ROWS) * _FP32
    routed = num_tokens * (topk * route + 2 * hidden) + shape.n_routed_experts * _EXPERT_BYTES
    return _COUNTER_BYTES + max(index, decode, routed + sums)
