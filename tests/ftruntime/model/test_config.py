"""The shape of a checkpoint: published values, and one sentence for every inconsistency.

Mutants tried and seen red: ratios not trimmed, the shapes of flash and pro swapped in one field, a
missing field defaulted to 0, the power-of-two check dropped, eos list reduced to its first entry.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ftruntime.model.config import ModelConfig, YarnConfig, builtin

# spec section 1, the column Flash, as an official config.json has it
FLASH: dict[str, object] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0], "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "bos_token_id": 0,
    "eos_token_id": 1, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "o_groups": 8, "compress_ratios": [0, 4, 128, 4, 0], "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "num_hash_layers": 1,
    "q_lora_rank": 128,
}  # fmt: skip


def test_flash_is_the_published_shape():
    config = ModelConfig.from_dict(FLASH)
    assert config == builtin("flash")
    assert len(config.compress_ratios) == 43
    assert [config.num_layers_of(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert config.rope_scaling == YarnConfig(
        factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0
    )
    assert (config.eos_token_id, config.eos_token_ids) == (1, (1,))


def test_pro_is_the_published_shape():
    config = builtin("pro")
    assert [config.num_layers_of(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert config.compress_ratios[:5] == (128, 128, 4, 128, 4)
    assert config.compress_ratios[-1] == 4
    values = (
        config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.o_groups,
        config.index_topk, config.n_routed_experts, config.moe_intermediate_size,
        config.routed_scaling_factor,
    )  # fmt: skip
    assert values == (7168, 128, 1536, 16, 1024, 384, 3072, 2.5)


@pytest.mark.parametrize(("head", "rope", "index"), [(128, 64, 64), (64, 16, 32)], ids=str)
def test_small_sizes_are_variables(head, rope, index):
    config = ModelConfig.from_dict(
        {**FLASH, **TINY, "head_dim": head, "qk_rope_head_dim": rope, "index_head_dim": index}
    )
    assert (config.head_dim, config.qk_rope_head_dim, config.index_head_dim) == (head, rope, index)
    assert config.compress_ratios == (0, 4, 128, 4)


def test_several_eos_ids_and_no_yarn():
    config = ModelConfig.from_dict({**FLASH, "eos_token_id": [1, 7], "rope_scaling": None})
    assert config.eos_token_ids == (1, 7)
    assert config.rope_scaling is None


REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "compress_ratios",
    "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "num_hash_layers", "routed_scaling_factor", "swiglu_limit", "hc_mult",
    "hc_sinkhorn_iters", "rope_theta", "compress_rope_theta", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "quantization_config",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_absent_field_is_named(name):
    data = {key: value for key, value in FLASH.items() if key != name}
    with pytest.raises(ValueError, match=rf"^config\.json: {name} is missing$"):
        ModelConfig.from_dict(data)


QUANT = FLASH["quantization_config"]
YARN = FLASH["rope_scaling"]
WRONG = [
    ({"vocab_size": "129280"}, "vocab_size is '129280', expected an integer"),
    ({"hidden_size": True}, "hidden_size is True, expected an integer"),
    ({"hidden_size": 4100}, "hidden_size is 4100, expected a multiple of 32"),
    ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100, expected a multiple of 32"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected at least 1"),
    ({"num_hidden_layers": 60},
     "compress_ratios is 44 entries, expected at least num_hidden_layers (60)"),
    ({"o_groups": 7}, "o_groups is 7, expected a divisor of num_attention_heads (64)"),
    ({"qk_rope_head_dim": 63},
     "qk_rope_head_dim is 63, expected an even number below head_dim (512)"),
    ({"qk_rope_head_dim": 512},
     "qk_rope_head_dim is 512, expected an even number below head_dim (512)"),
    ({"index_head_dim": 96}, "index_head_dim is 96, expected a power of two"),
    ({"index_head_dim": 32}, "index_head_dim is 32, expected at least qk_rope_head_dim (64)"),
    ({"sliding_window": 256}, "sliding_window is 256, expected 128"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2, expected 1"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected sqrtsoftplus"),
    ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8', expected 'fp4'"),
    ({"num_experts_per_tok": 300},
     "num_experts_per_tok is 300, expected at most n_routed_experts (256)"),
    ({"num_hash_layers": 44}, "num_hash_layers is 44, expected at most num_hidden_layers (43)"),
    ({"num_hash_layers": -1}, "num_hash_layers is -1, expected at least 0"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True, expected false"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False, expected true"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8, expected 1"),
    ({"model_type": "llama"}, "model_type is 'llama', expected \"deepseek_v4\""),
    ({"eos_token_id": []}, "eos_token_id is [], expected integers"),
    ({"eos_token_id": [1, 129280]},
     "eos_token_id is [1, 129280], expected ids below vocab_size (129280)"),
    ({"bos_token_id": -1}, "bos_token_id is -1, expected an id below vocab_size (129280)"),
    ({"swiglu_limit": -1.0}, "swiglu_limit is -1.0, expected at least 0"),
    ({"rope_theta": float("nan")}, "rope_theta is nan, expected a number below 2^40"),
    ({"swiglu_limit": 10**400}, f"swiglu_limit is {10**400}, expected a number below 2^40"),
    ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected an integer below 2^40"),
    ({"n_routed_experts": 10**6}, "n_routed_experts is 1000000, expected at most 4096"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0, expected a number above 0"),
    ({"rope_scaling": {**YARN, "type": "linear"}},
     "rope_scaling.type is 'linear', expected 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}},
     "rope_scaling.original_max_position_embeddings is missing"),
    ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor is 0.5, expected at least 1"),
    ({"quantization_config": {**QUANT, "fmt": "e5m2"}},
     "quantization_config.fmt is 'e5m2', expected 'e4m3'"),
    ({"quantization_config": {**QUANT, "weight_block_size": [64, 64]}},
     "quantization_config.weight_block_size is [64, 64], expected [128, 128]"),
    ({"quantization_config": {}}, "quantization_config.quant_method is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), WRONG, ids=[next(iter(w[0])) for w in WRONG])
def test_inconsistent_config_is_one_sentence(change, sentence):
    with pytest.raises(ValueError) as refusal:
        ModelConfig.from_dict({**FLASH, **change}, source="some/config.json")
    assert str(refusal.value) == f"some/config.json: {sentence}"


def test_unknown_ratio():
    ratios = [0, 0] + [4, 64] * 20 + [4, 0]
    with pytest.raises(
        ValueError, match=r"compress_ratios is .*expected 0, 4 or 128 for each layer"
    ):
        ModelConfig.from_dict({**FLASH, "compress_ratios": ratios})


def test_direct_construction_is_checked_too():
    with pytest.raises(ValueError, match="o_groups is 3"):
        dataclasses.replace(builtin("flash"), o_groups=3)
    with pytest.raises(ValueError, match="expected one of flash, pro"):
        builtin("nano")


def test_from_dir(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="not a directory, expected a checkpoint"):
        ModelConfig.from_dir(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds a list, expected a JSON object"):
        ModelConfig.from_dir(tmp_path)
    file.write_text(json.dumps({**FLASH, "o_groups": 7}))
    with pytest.raises(ValueError, match=rf"^{file}: o_groups is 7"):
        ModelConfig.from_dir(tmp_path)
    file.write_text(json.dumps(FLASH))
    assert ModelConfig.from_dir(str(tmp_path)) == builtin("flash")
