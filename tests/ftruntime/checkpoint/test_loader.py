"""Loaded values against the format's own formulas, and the refusals that need the values.

Mutants tried: w3 rows first; views of the file instead of copies; half the bytes counted in
progress.
"""

from __future__ import annotations

import json

import pytest
import torch

from ftruntime.checkpoint.loader import load_weights
from ftruntime.model.config import ModelConfig
from tests.support.hf_model import read_dequantized


def _load(directory, dequantize=None, **options):
    config = ModelConfig.from_dir(directory)
    return load_weights(directory, config, dequantize=dequantize, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantized_equals_the_formulas(demo, dtype):
    weights = _load(demo, dtype)
    expected = read_dequantized(demo)
    seen = set()
    for name, linear in weights.linears.items():
        assert linear.scale is None
        assert linear.weight.dtype == dtype
        # exact in bf16 too
        assert torch.equal(linear.weight.float(), expected[f"{name}.weight"])
        seen.add(f"{name}.weight")
    for layer, bank in enumerate(weights.experts):
        assert bank.w13_scale is None
        assert bank.w2_scale is None
        assert bank.w13.dtype == bank.w2.dtype == dtype
        for e in range(bank.w13.shape[0]):
            prefix = f"layers.{layer}.ffn.experts.{e}"
            names = [f"{prefix}.{w}.weight" for w in ("w1", "w3", "w2")]
            w1_w3 = torch.cat([expected[name] for name in names[:2]])
            assert torch.equal(bank.w13[e].float(), w1_w3)
            assert torch.equal(bank.w2[e].float(), expected[names[2]])
            seen.update(names)
    for name, value in weights.tensors.items():
        assert torch.equal(value.float(), expected[name].float())
        seen.add(name)
    assert seen == set(expected)


def test_dtypes_of_what_is_not_quantized(tiny):
    kept, widened = _load(tiny).tensors, _load(tiny, torch.float32).tensors
    assert kept["embed.weight"].dtype == torch.bfloat16
    assert kept["hc_head_fn"].dtype == torch.float32
    assert kept["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    assert widened["embed.weight"].dtype == torch.float32
    assert widened["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    assert _load(tiny, torch.bfloat16).tensors["embed.weight"].dtype == torch.bfloat16


def test_q01_scales_stay_codes_and_decode_to_powers_of_two(damaged, shard_of):
    name = "layers.0.ffn.experts.3.w3"
    _fill(shard_of(damaged, f"{name}.scale"), f"{name}.scale", 120)
    _fill(shard_of(damaged, f"{name}.weight"), f"{name}.weight", 0x2A)  # low 1010: -1, high 0010: 1
    raw = _load(damaged)
    inter = raw.experts[0].w13.shape[1] // 2
    codes = raw.experts[0].w13_scale[3, inter:]
    assert codes.dtype == torch.uint8
    assert bool((codes == 120).all())
    assert bool((raw.experts[0].w13[3, inter:] == 0x2A).all())
    for dtype in (torch.float32, torch.bfloat16):
        value = _load(damaged, dtype).experts[0].w13[3, inter:]
        assert bool((value[:, 0::2] == -(2.0**-7)).all())
        assert bool((value[:, 1::2] == 2.0**-7).all())


def test_raw_linears_are_the_stored_bytes(demo, shard_of):
    from safetensors import safe_open

    weights = _load(demo)
    name = "layers.2.attn.indexer.wq_b"
    linear = weights.linears[name]
    with safe_open(shard_of(demo, f"{name}.weight"), framework="pt") as file:
        stored, scale = file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.scale")
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(linear.weight.view(torch.uint8), stored.view(torch.uint8))
    assert linear.scale.dtype == torch.uint8
    assert torch.equal(linear.scale, scale.view(torch.uint8))


def test_loaded_tensors_do_not_follow_the_files(damaged, shard_of):
    weights = _load(damaged)
    before = weights.tensors["embed.weight"].clone()
    _fill(shard_of(damaged, "embed.weight"), "embed.weight", 0)
    assert torch.equal(weights.tensors["embed.weight"], before)


def test_unaligned_data_loads(damaged, shard_of, edit_header):
    shard = shard_of(damaged, "embed.weight")
    expected = _load(damaged).tensors["embed.weight"]
    # a header of odd length moves the data to an odd address
    edit_header(shard, lambda header: header.update(__metadata__={"pad": ""}))
    length = int.from_bytes(shard.read_bytes()[:8], "little")
    edit_header(shard, lambda h: h.update(__metadata__={"pad": "x" * (1 + length % 2)}))
    assert int.from_bytes(shard.read_bytes()[:8], "little") % 2 == 1
    assert torch.equal(_load(damaged).tensors["embed.weight"], expected)


def test_progress_rises_to_one(tiny):
    calls = []
    _load(tiny, progress=lambda name, share: calls.append((name, share)))
    shares = [share for _, share in calls]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0
    assert not any(name.startswith("mtp.") for name, _ in calls)


def test_nan_scale_is_refused(damaged, shard_of):
    for name in ("layers.4.ffn.experts.9.w2.scale", "layers.1.attn.wo_b.scale"):
        shard = shard_of(damaged, name)
        before = shard.read_bytes()
        _fill(shard, name, 255)
        with pytest.raises(ValueError, match=f"{name} holds the scale code 255") as caught:
            _load(damaged)
        assert str(shard) in str(caught.value)
        shard.write_bytes(before)


def test_hash_table_outside_the_experts_is_refused(damaged, shard_of):
    name = "layers.1.ffn.gate.tid2eid"
    _fill(shard_of(damaged, name), name, 255)
    with pytest.raises(ValueError, match=f"{name} holds expert ids -1 to -1, expected 0 to 15"):
        _load(damaged)


def test_bad_dequantize(tiny):
    with pytest.raises(ValueError, match=r"dequantize is torch\.float16, expected None, torch"):
        _load(tiny, torch.float16)


def _fill(file, name, byte):
    """Set every byte of a stored tensor."""
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    base = 8 + length
    raw[base + start : base + end] = bytes([byte]) * (end - start)
    file.write_bytes(raw)
