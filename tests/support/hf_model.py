"""The model of a checkpoint directory in transformers, with dequantized weights: the oracle of the
whole project.

Reads the files with the safetensors library and dequantizes by the formulas of the format; nothing
of ours is used.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

_E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
_LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
_GLOBAL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_COMPRESSOR = {
    "ape": "position_bias",
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "kv_norm.weight",
}
_LAYER = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    **{f"attn.compressor.{a}": f"self_attn.compressor.{b}" for a, b in _COMPRESSOR.items()},
    **{
        f"attn.indexer.compressor.{a}": f"self_attn.compressor.indexer.{b}"
        for a, b in _COMPRESSOR.items()
    },
    **{f"hc_{s}_{p}": f"{s}_hc.{p}" for s in ("attn", "ffn") for p in ("fn", "base", "scale")},
}


def build_hf(directory: str | Path, dtype: torch.dtype = torch.float32) -> DeepseekV4ForCausalLM:
    """The transformers model of `directory` in eval mode, eager attention, every weight in
    `dtype`."""
    directory = Path(directory)
    config = hf_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    tensors = read_dequantized(directory)
    state = {_GLOBAL[name]: tensors.pop(name) for name in _GLOBAL}
    for layer in range(config.num_hidden_layers):
        state.update(_layer_state(tensors, layer, config.n_routed_experts))
    assert not tensors, f"tensors without a place: {sorted(tensors)[:5]}"
    model = DeepseekV4ForCausalLM._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()


def hf_config(official: dict) -> DeepseekV4Config:
    """Map the official `config.json` fields; the rotary parameters are spelled out rather than
    guessed."""
    layers = official["num_hidden_layers"]
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "q_lora_rank", "num_key_value_heads", "o_groups", "o_lora_rank", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "moe_intermediate_size", "scoring_func", "norm_topk_prob",
        "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
        "rms_norm_eps", "rope_theta", "compress_rope_theta", "max_position_embeddings",
        "bos_token_id", "eos_token_id", "tie_word_embeddings",
    )  # fmt: skip
    rotary = official["qk_rope_head_dim"] / official["head_dim"]
    yarn = {key: value for key, value in official["rope_scaling"].items() if key != "type"}
    config = DeepseekV4Config(
        **{name: official[name] for name in same},
        layer_types=[_LAYER_TYPES[ratio] for ratio in official["compress_ratios"][:layers]],
        mlp_layer_types=[
            "hash_moe" if layer < official["num_hash_layers"] else "moe" for layer in range(layers)
        ],
        partial_rotary_factor=rotary,
        rope_parameters={
            "main": {
                "rope_type": "default",
                "rope_theta": official["rope_theta"],
                "partial_rotary_factor": rotary,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": official["compress_rope_theta"],
                "partial_rotary_factor": rotary,
                "attention_factor": 1.0,
                **yarn,
            },
        },
        dtype="float32",
    )
    assert config.qk_rope_head_dim == official["qk_rope_head_dim"]
    return config


def read_dequantized(directory: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor by official name, `mtp.*` left out; floats as fp32, scales folded into their
    weights."""
    directory = Path(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(directory / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, no iterator of its own
                if not name.startswith("mtp."):
                    raw[name] = shard.get_tensor(name)
    tensors = {}
    for name, value in raw.items():
        if name.endswith(".scale"):
            continue
        scale = (
            raw.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        )
        if scale is not None:
            tensors[name] = _dequantize(value, scale)
        else:
            tensors[name] = value.float() if value.is_floating_point() else value
    return tensors


def _dequantize(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    if value.dtype == torch.float8_e4m3fn:
        rows, columns = value.shape
        factor = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return value.float() * factor
    assert value.dtype == torch.int8
    codes = value.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)  # low nibble: even channel
    return _E2M1[pairs.flatten(1).long()] * factor.repeat_interleave(32, 1)


def _layer_state(
    tensors: dict[str, torch.Tensor], layer: int, num_experts: int
) -> dict[str, torch.Tensor]:
    source, target = f"layers.{layer}.", f"model.layers.{layer}."
    state = {
        target + theirs: tensors.pop(source + ours)
        for ours, theirs in _LAYER.items()
        if source + ours in tensors
    }
    experts = {
        matrix: torch.stack(
            [tensors.pop(f"{source}ffn.experts.{e}.{matrix}.weight") for e in range(num_experts)]
        )
        for matrix in ("w1", "w2", "w3")
    }
    state[f"{target}mlp.experts.gate_up_proj"] = torch.cat((experts["w1"], experts["w3"]), dim=1)
    state[f"{target}mlp.experts.down_proj"] = experts["w2"]
    return state
