"""Where attention looks before anything is learnt.

Mutants run, each noticed: heads that all look one token back, the direction that embeddings share
left out, queries that ask for nothing, or for the token they are.
"""

from __future__ import annotations

import pytest
import torch

from demo import attention, shape
from demo.attention import BLOCK, Selection
from demo.model import cast, forward, init_weights
from ftruntime.model.config import ModelConfig

TOKENS, PERIOD = 512, 60


@pytest.fixture(scope="module")
def probs():
    """Attention of each layer `[block, query, head, key]` over a sequence that repeats itself."""
    config = ModelConfig.from_dict(shape.config())
    weights = init_weights(config, torch.ones(config.vocab_size), seed=3)
    generator = torch.Generator().manual_seed(1)
    part = torch.randperm(config.vocab_size, generator=generator)[:PERIOD]
    ids = part.repeat(-(-TOKENS // PERIOD))[None, :TOKENS]
    seen, inner = [], attention._sink_attention

    def watched(*args):
        out = inner(*args)
        seen.append(out[1].view(TOKENS // BLOCK, BLOCK, config.num_attention_heads, -1))
        return out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention, "_sink_attention", watched)
        forward(config, cast(weights, config, torch.float32, False), ids,
                selection=Selection(sparse=False))  # fmt: skip
    return seen


def at_distance(probs, head, distance):
    """Mean share that queries of the third block give the token so far before them."""
    query = torch.arange(BLOCK)
    return probs[2, query, head, query + BLOCK - distance].mean().item()


@pytest.mark.parametrize("head", range(8))
def test_heads_of_the_first_layer_look_back_each_by_its_own_distance(probs, head):
    shares = [at_distance(probs[0], head, distance) for distance in range(12)]
    assert max(range(12), key=shares.__getitem__) == head + 1
    assert shares[head + 1] > 0.35


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_later_layers_find_what_came_next(probs, layer):
    """Behind the same token a period ago, rather than at it or anywhere else."""
    for head in range(8):
        shares = [at_distance(probs[layer], head, distance) for distance in range(30, 90)]
        found = shares.pop(PERIOD - 1 - 30)
        assert found > 1.1 * max(shares)
        assert found > 1.5 * sum(shares) / len(shares)
