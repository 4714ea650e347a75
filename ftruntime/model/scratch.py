"""How much scratch serves every op of any step, one after another."""

from __future__ import annotations

import ftkernels
from ftruntime.model.config import ModelConfig
from ftruntime.types import PAGE_TOKENS


def scratch_bytes(
    config: ModelConfig, *, num_tokens: int, num_seqs: int, max_positions: int,
    element_bytes: int = 2,
) -> int:  # fmt: skip
    """The most that any op asks for.

    Args:
        config: of what one rank computes.
        num_tokens: most new tokens of a step.
        num_seqs: most sequences of a decode step.
        max_positions: length of the longest sequence.
        element_bytes: of an activation.
    """
    tokens = max(num_tokens, num_seqs)
    pages = -(-max_positions // PAGE_TOKENS)
    return max(
        _attention_bytes(config, tokens, num_seqs, pages),
        _linear_bytes(config, tokens, num_seqs),
        _streams_bytes(config, tokens),
        _expert_bytes(config, tokens, element_bytes),
    )


def _attention_bytes(config: ModelConfig, tokens: int, num_seqs: int, pages: int) -> int:
    sizes = [0]
    for ratio in set(config.compress_ratios):
        rows = pages * (PAGE_TOKENS // ratio) if ratio else 0
        topk = config.index_topk if ratio == 4 else 0
        mixed = ftkernels.scratch_bytes(
            "mla_decode", S=num_seqs, H=config.num_attention_heads, D=config.head_dim,
            topk=topk, rows=rows, window=config.sliding_window,
        )  # fmt: skip
        sizes.append(mixed)
        if ratio == 4:
            sizes.append(ftkernels.scratch_bytes("index_select", T=tokens, rows=rows, topk=topk))
    return max(sizes)


def _linear_bytes(config: ModelConfig, tokens: int, num_seqs: int) -> int:
    hidden, dim, inter = config.hidden_size, config.head_dim, config.moe_intermediate_size
    index = config.index_n_heads * config.index_head_dim
    group = config.num_attention_heads * dim // config.o_groups
    latent = config.q_lora_rank + dim
    narrow = 2 * 2 * (dim + config.index_head_dim) + config.index_n_heads
    fp8 = (
        (latent, hidden),
        (config.num_attention_heads * dim + index, config.q_lora_rank),
        (hidden, config.o_groups * config.o_lora_rank), (2 * inter, hidden), (hidden, inter),
    )  # fmt: skip
    sizes = [ftkernels.scratch_bytes("fp8_linear", T=tokens, N=n, K=k) for n, k in fp8]
    sizes.append(
        ftkernels.scratch_bytes(
            "grouped_linear", T=tokens, G=config.o_groups, R=config.o_lora_rank, K=group
        )
    )
    sizes.append(ftkernels.scratch_bytes("mixed_linear", T=tokens, N=latent, N2=narrow, K=hidden))
    sizes.append(ftkernels.scratch_bytes("linear", T=num_seqs, N=config.vocab_size, K=hidden))
    return max(sizes)


def _streams_bytes(config: ModelConfig, tokens: int) -> int:
    size = {"T": tokens, "hc": config.hc_mult, "C": config.hidden_size}
    return max(ftkernels.scratch_bytes(op, **size) for op in ("hc_pre", "hc_post_pre", "hc_head"))


def _expert_bytes(config: ModelConfig, tokens: int, element_bytes: int) -> int:
    hidden, experts = config.hidden_size, config.n_routed_experts
    gate = ftkernels.scratch_bytes("gate_topk", T=tokens, E=experts, C=hidden)
    routed = ftkernels.scratch_bytes(
        "moe_fp4", T=tokens, topk=config.num_experts_per_tok, I=config.moe_intermediate_size,
        C=hidden, E=experts, bytes=element_bytes,
    )  # fmt: skip
    return max(gate, routed)
