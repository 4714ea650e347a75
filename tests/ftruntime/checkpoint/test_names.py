"""Expected names against the published index: totals and per-dtype counts of Flash and Pro."""

from __future__ import annotations

from collections import Counter

import pytest

from ftruntime.checkpoint.names import (
    TensorSpec,
    block_tensors,
    expected_tensors,
    fp8_tensors,
)
from ftruntime.model.config import builtin

# dtypes in the order BF16, F32, F8_E4M3, F8_E8M0, I8, I64 (spec section 15)
DTYPES = ("BF16", "F32", "F8_E4M3", "F8_E8M0", "I8", "I64")
PUBLISHED = {
    "flash": (69187, 159609485896, (433, 417, 375, 34167, 33792, 3)),
    "pro": (145116, 864704792696, (619, 590, 528, 71952, 71424, 3)),
}


def _with_draft_layer(model):
    config = builtin(model)
    tensors = expected_tensors(config)
    hidden, streams = config.hidden_size, config.hc_mult
    tensors.update(block_tensors(config, "mtp.0", ratio=0, hash_routed=False))
    for name in ("e_proj", "h_proj"):
        tensors.update(fp8_tensors(f"mtp.0.{name}", hidden, hidden))
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = TensorSpec("BF16", (hidden,))
    tensors["mtp.0.hc_head_fn"] = TensorSpec("F32", (streams, streams * hidden))
    tensors["mtp.0.hc_head_base"] = TensorSpec("F32", (streams,))
    tensors["mtp.0.hc_head_scale"] = TensorSpec("F32", (1,))
    return tensors


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_totals_equal_the_published_index(model):
    tensors = _with_draft_layer(model)
    count, total, per_dtype = PUBLISHED[model]
    assert len(tensors) == count
    assert sum(spec.num_bytes for spec in tensors.values()) == total
    found = Counter(spec.dtype for spec in tensors.values())
    assert tuple(found[dtype] for dtype in DTYPES) == per_dtype


def test_flash_shapes_of_the_table():
    tensors = expected_tensors(builtin("flash"))
    expected = {
        "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1024)),
        "layers.0.attn.wkv.scale": ("F8_E8M0", (4, 32)),
        "layers.0.ffn.gate.tid2eid": ("I64", (129280, 6)),
        "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
        "layers.3.attn.compressor.ape": ("F32", (128, 512)),
        "layers.3.attn.compressor.wkv.weight": ("BF16", (512, 4096)),
        "layers.2.attn.indexer.compressor.ape": ("F32", (4, 256)),
        "layers.2.attn.indexer.wq_b.weight": ("F8_E4M3", (8192, 1024)),
        "layers.3.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
        "layers.3.ffn.experts.255.w1.scale": ("F8_E8M0", (2048, 128)),
        "layers.3.ffn.experts.0.w2.weight": ("I8", (4096, 1024)),
        "layers.42.ffn.gate.bias": ("F32", (256,)),
        "layers.0.hc_attn_fn": ("F32", (24, 16384)),
        "hc_head_fn": ("F32", (4, 16384)),
    }
    assert {name: (tensors[name].dtype, tensors[name].shape) for name in expected} == expected
    for absent in (
        "layers.0.attn.compressor.ape",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "mtp.0.norm.weight",
    ):
        assert absent not in tensors
