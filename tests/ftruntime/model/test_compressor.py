"""Head weights of the indexer: a bf16 matrix under a power of two, so that nothing is rounded.

Mutants run, each noticed: the matrix widened to fp32, the factor itself.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ftkernels.testing import randn
from ftruntime.checkpoint.loader import Weights
from ftruntime.checkpoint.names import block_tensors
from ftruntime.model.compressor import Indexer
from ftruntime.model.config import builtin
from ftruntime.model.linear import stacked
from ftruntime.model.numerics import Numerics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_head_weights_are_scaled_exactly_in_their_own_type(dtype):
    config = dataclasses.replace(
        builtin("flash"), num_hidden_layers=1, compress_ratios=(4,), num_hash_layers=0
    )
    made = {
        name: torch.empty(spec.shape, dtype=dtype, device="meta")
        for name, spec in block_tensors(config, "layers.0", ratio=4, hash_routed=False)
        if ".attn." in name
    }
    prefix = "layers.0.attn.indexer"
    matrix = randn(64, 4096, dtype=dtype)
    made[f"{prefix}.weights_proj.weight"] = matrix
    indexer = Indexer.of(Weights(made, {}, []), prefix, config, Numerics.of("official"))
    mine = indexer.weights_proj
    assert mine.dtype == dtype
    assert stacked([torch.zeros(8, 4096, dtype=dtype), mine]).dtype == dtype
    ratio = (mine.double() / matrix.double()).unique()
    assert ratio.numel() == 1
    assert math.frexp(ratio.item())[0] == 0.5
    assert 0.7 < ratio.item() / (128 * 64) ** -0.5 < 1.5
