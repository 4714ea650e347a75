"""The shapes of the demo checkpoints, as the fields of their `config.json`."""

from __future__ import annotations

from typing import Final

PRESETS: Final = ("small", "tiny")
VOCAB_SIZE: Final = 512

# all three layer types twice; the last entry belongs to the draft layer
_RATIOS: Final = [0, 0, 4, 128, 4, 128, 0]

_COMMON: Final[dict[str, object]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": len(_RATIOS) - 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 128,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": _RATIOS,
    # enough heads that hardly a row scores exactly zero: ties have no order outside this project
    "index_n_heads": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # low enough to clamp about one activation in eight
    "swiglu_limit": 1.5,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 65536,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}

_SIZES: Final[dict[str, dict[str, object]]] = {
    "small": {
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "o_lora_rank": 128,
        "index_head_dim": 64,
        "index_topk": 64,
    },
    "tiny": {
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "o_lora_rank": 32,
        "index_head_dim": 32,
        "index_topk": 16,
    },
}

GENERATION_CONFIG: Final[dict[str, object]] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 1.0,
}


def demo_config(preset: str) -> dict[str, object]:
    """The `config.json` of `preset`: "small" (head 128, rope 64) or "tiny" (head 64, rope 16)."""
    if preset not in _SIZES:
        raise ValueError(f"preset is {preset!r}, expected one of {', '.join(PRESETS)}")
    return {**_COMMON, **_SIZES[preset]}
