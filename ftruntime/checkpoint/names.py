"""Every tensor a DeepSeek-V4 checkpoint must hold: name, storage dtype and shape.

FP8 matrices come as `X.weight` F8_E4M3 with `X.scale` F8_E8M0, one scale per 128 x 128 block.
Routed experts come as `X.weight` I8, two FP4 codes a byte, with `X.scale` F8_E8M0, one scale per 32
input channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ftruntime.model.config import ModelConfig

DRAFT_PREFIX: Final = "mtp."
"""Names of the draft (MTP) modules start with it; loaders ignore them."""

FP8_BLOCK: Final = 128
FP4_GROUP: Final = 32

DTYPE_BYTES: Final[dict[str, int]] = {
    "BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8,
}  # fmt: skip
"""Bytes of an element, for the safetensors dtypes the format uses."""

# matrices of which a rank holds its share, and the dimension that is shared out; everything else
# is replicated
_SHARED_OUT: Final[dict[str, int]] = {
    "embed.": 0, "head.": 0, ".attn.wq_b.": 0, ".attn.wo_a.": 0, ".attn.wo_b.": 1,
    ".attn.attn_sink": 0, ".shared_experts.w1.": 0, ".shared_experts.w2.": 1,
    ".shared_experts.w3.": 0,
}  # fmt: skip

Named = tuple[str, "TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """Storage of one tensor: safetensors dtype string and shape, as in the file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


def sharded_dim(name: str) -> int | None:
    """The dimension of a dense tensor that tensor-parallel ranks share out; None: each has it
    all."""
    return next((dim for mark, dim in _SHARED_OUT.items() if mark in f".{name}"), None)


def num_shares(name: str, ranks: int) -> int:
    """Ranks that share a dense tensor out: all, or 1 where each has it all."""
    return 1 if sharded_dim(name) is None else ranks


def fp8_tensors(name: str, rows: int, columns: int) -> Iterator[Named]:
    """Weight and scale of the FP8 matrix `name`, logical shape `[rows, columns]`."""
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns))
    yield f"{name}.scale", TensorSpec("F8_E8M0", blocks)


def fp4_tensors(name: str, rows: int, columns: int) -> Iterator[Named]:
    """Weight and scale of the FP4 matrix `name`, logical shape `[rows, columns]`."""
    yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, columns // FP4_GROUP))


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of the checkpoint of this shape, draft modules not among them."""
    hidden, streams, vocab = config.hidden_size, config.hc_mult, config.vocab_size
    tensors = {
        "embed.weight": TensorSpec("BF16", (vocab, hidden)),
        "norm.weight": TensorSpec("BF16", (hidden,)),
        "head.weight": TensorSpec("BF16", (vocab, hidden)),
        "hc_head_fn": TensorSpec("F32", (streams, streams * hidden)),
        "hc_head_base": TensorSpec("F32", (streams,)),
        "hc_head_scale": TensorSpec("F32", (1,)),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        hashed = layer < config.num_hash_layers
        tensors.update(block_tensors(config, f"layers.{layer}", ratio=ratio, hash_routed=hashed))
    return tensors


def block_tensors(
    config: ModelConfig, prefix: str, *, ratio: int, hash_routed: bool
) -> Iterator[Named]:
    """Tensors of one transformer block under `prefix` (no trailing dot)."""
    hidden, streams = config.hidden_size, config.hc_mult
    yield from _attention_tensors(config, f"{prefix}.attn", ratio)
    yield f"{prefix}.attn_norm.weight", TensorSpec("BF16", (hidden,))
    yield f"{prefix}.ffn_norm.weight", TensorSpec("BF16", (hidden,))
    yield from _moe_tensors(config, f"{prefix}.ffn", hash_routed)
    mixes = (2 + streams) * streams
    for site in ("attn", "ffn"):
        yield f"{prefix}.hc_{site}_fn", TensorSpec("F32", (mixes, streams * hidden))
        yield f"{prefix}.hc_{site}_base", TensorSpec("F32", (mixes,))
        yield f"{prefix}.hc_{site}_scale", TensorSpec("F32", (3,))


def expert_name(prefix: str, expert: int, matrix: str) -> str:
    """Name, without suffix, of a routed expert's matrix `w1`, `w2` or `w3` in the block
    `prefix`."""
    return f"{prefix}.ffn.experts.{expert}.{matrix}"


def _attention_tensors(config: ModelConfig, attn: str, ratio: int) -> Iterator[Named]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    rank, out_rank = config.q_lora_rank, config.o_groups * config.o_lora_rank
    yield from fp8_tensors(f"{attn}.wq_a", rank, hidden)
    yield f"{attn}.q_norm.weight", TensorSpec("BF16", (rank,))
    yield from fp8_tensors(f"{attn}.wq_b", heads * width, rank)
    yield from fp8_tensors(f"{attn}.wkv", width, hidden)
    yield f"{attn}.kv_norm.weight", TensorSpec("BF16", (width,))
    yield from fp8_tensors(f"{attn}.wo_a", out_rank, heads * width // config.o_groups)
    yield from fp8_tensors(f"{attn}.wo_b", hidden, out_rank)
    yield f"{attn}.attn_sink", TensorSpec("F32", (heads,))
    if ratio:
        yield from _compressor_tensors(f"{attn}.compressor", width, hidden, ratio)
    if ratio == 4:
        indexer, index_heads = f"{attn}.indexer", config.index_n_heads
        yield from fp8_tensors(f"{indexer}.wq_b", index_heads * config.index_head_dim, rank)
        yield f"{indexer}.weights_proj.weight", TensorSpec("BF16", (index_heads, hidden))
        yield from _compressor_tensors(
            f"{indexer}.compressor", config.index_head_dim, hidden, ratio
        )


def _compressor_tensors(name: str, width: int, hidden: int, ratio: int) -> Iterator[Named]:
    # ratio 4 keeps two series a token: one for its own window, one for the next
    channels = width * (2 if ratio == 4 else 1)
    yield f"{name}.ape", TensorSpec("F32", (ratio, channels))
    yield f"{name}.wkv.weight", TensorSpec("BF16", (channels, hidden))
    yield f"{name}.wgate.weight", TensorSpec("BF16", (channels, hidden))
    yield f"{name}.norm.weight", TensorSpec("BF16", (width,))


def _moe_tensors(config: ModelConfig, ffn: str, hash_routed: bool) -> Iterator[Named]:
    hidden, inter, experts = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
    )
    yield f"{ffn}.gate.weight", TensorSpec("BF16", (experts, hidden))
    if hash_routed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        yield f"{ffn}.gate.tid2eid", TensorSpec("I64", shape)
    else:
        yield f"{ffn}.gate.bias", TensorSpec("F32", (experts,))
    for expert in range(experts):
        yield from fp4_tensors(f"{ffn}.experts.{expert}.w1", inter, hidden)
        yield from fp4_tensors(f"{ffn}.experts.{expert}.w2", hidden, inter)
        yield from fp4_tensors(f"{ffn}.experts.{expert}.w3", inter, hidden)
    shared = inter * config.n_shared_experts
    yield from fp8_tensors(f"{ffn}.shared_experts.w1", shared, hidden)
    yield from fp8_tensors(f"{ffn}.shared_experts.w2", hidden, shared)
    yield from fp8_tensors(f"{ffn}.shared_experts.w3", shared, hidden)
