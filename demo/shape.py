"""The shape of the demo model, as the fields of its ``config.json``.

Head 512 with 64 rotated channels and index head 128 are the model's own, so that every pool format
applies; eight heads, eight groups and experts of 256 channels let eight ranks share it out.
"""

from __future__ import annotations

from typing import Final

from ftruntime.demo.presets import demo_config

VOCAB_SIZE: Final = 1024
RATIOS: Final = (0, 4, 128, 4)


def config(**changes: object) -> dict[str, object]:
    """The ``config.json``; `changes` replace fields, for small tests."""
    return {
        **demo_config("small"),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": len(RATIOS),
        "num_nextn_predict_layers": 0,
        "compress_ratios": list(RATIOS),
        "num_hash_layers": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 64,
        "num_experts_per_tok": 2,
        "swiglu_limit": 10.0,
        **changes,
    }
