"""The shares of all ranks put together are the checkpoint, bit for bit.

Mutants run, each noticed: rank 0's share for all; columns cut for rows; scales of the wrong blocks;
a tensor that is replicated cut, or one that is not left whole. Of progress: scales, or a matrix
read whole, counted by their shares; a share counted whole.
"""

from __future__ import annotations

import pytest
import torch

from ftruntime.checkpoint.loader import load_weights
from ftruntime.checkpoint.names import sharded_dim
from ftruntime.demo.make import make_demo
from ftruntime.demo.presets import VOCAB_SIZE, demo_config
from ftruntime.demo.vocabulary import build_tokenizer, readable_ids
from ftruntime.demo.weights import DemoWeights
from ftruntime.demo.write import write_checkpoint
from ftruntime.model.config import ModelConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("shares") / "tiny"
    make_demo(path, preset="tiny", seed=3)
    return path, ModelConfig.from_dir(path)


def whole_scale(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale for each element."""
    by_row = scale.repeat_interleave(128, 0)[: shape[0]]
    return by_row.repeat_interleave(128, 1)[:, : shape[1]]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """96 intermediate channels a rank of two: no number of blocks of scales."""
    path = tmp_path_factory.mktemp("shares") / "uneven"
    fields = {**demo_config("tiny"), "moe_intermediate_size": 192}
    tokenizer = build_tokenizer(VOCAB_SIZE)
    weights = DemoWeights(ModelConfig.from_dict(fields), 3, frozenset(readable_ids(tokenizer)))
    write_checkpoint(path, config=fields, tokenizer=tokenizer, tensors=weights.tensors())
    return path, ModelConfig.from_dir(path)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dequantize", [None, torch.float32], ids=["codes", "fp32"])
def test_shares_make_the_whole(ranks, dequantize, checkpoint):
    shares_make_the_whole(*checkpoint, ranks, dequantize)


def test_shares_across_blocks_of_scales_make_the_whole(uneven):
    shares_make_the_whole(*uneven, 2, torch.float32)


def shares_make_the_whole(path, config, ranks, dequantize):
    whole = load_weights(path, config, dequantize=dequantize)
    shares = [
        load_weights(path, config, dequantize=dequantize, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for name, tensor in whole.tensors.items():
        parts = [share.tensors[name] for share in shares]
        dim = sharded_dim(name)
        if dim is None:
            assert all(torch.equal(part, tensor) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts, dim), tensor), name
    for name, linear in whole.linears.items():
        dim = sharded_dim(f"{name}.weight")
        linears = [share.linears[name] for share in shares]
        if dim is None:
            assert all(torch.equal(own.weight, linear.weight) for own in linears), name
            continue
        assert torch.equal(torch.cat([own.weight for own in linears], dim), linear.weight), name
        if linear.scale is None:
            continue
        scales = [whole_scale(own.scale, own.weight.shape) for own in linears]
        expected = whole_scale(linear.scale, linear.weight.shape)
        assert torch.equal(torch.cat(scales, dim), expected), name


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("dequantize", [None, torch.float32], ids=["codes", "fp32"])
def test_progress_of_a_share_ends_at_one(ranks, dequantize, checkpoint):
    progress_ends_at_one(*checkpoint, ranks, dequantize)


def test_progress_ends_at_one_where_matrices_are_read_whole(uneven):
    progress_ends_at_one(*uneven, 2, torch.float32)


def progress_ends_at_one(path, config, ranks, dequantize):
    calls = []
    load_weights(
        path, config, dequantize=dequantize, rank=ranks - 1, ranks=ranks,
        progress=lambda text, share: calls.append(share),
    )  # fmt: skip
    assert calls == sorted(calls)
    assert calls[-1] == 1.0


def test_what_is_shared_out():
    """Heads, output groups, intermediate channels and the vocabulary; nothing else."""
    names = {
        "embed.weight": 0, "head.weight": 0, "layers.1.attn.wq_b.weight": 0,
        "layers.1.attn.wo_a.weight": 0, "layers.1.attn.wo_b.weight": 1,
        "layers.1.attn.attn_sink": 0, "layers.1.ffn.shared_experts.w1.weight": 0,
        "layers.1.ffn.shared_experts.w2.weight": 1, "layers.1.ffn.shared_experts.w3.weight": 0,
        "layers.1.attn.wq_a.weight": None, "layers.1.attn.wkv.weight": None,
        "layers.1.attn.indexer.wq_b.weight": None, "layers.1.ffn.gate.weight": None,
        "layers.1.attn.compressor.wkv.weight": None, "norm.weight": None, "hc_head_fn": None,
    }  # fmt: skip
    assert {name: sharded_dim(name) for name in names} == names
