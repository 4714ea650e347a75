"""Merging of split results against softmax over all keys at once, in fp64."""

from __future__ import annotations

import pytest
import torch

from ftkernels.attention.merge import merge_splits
from ftkernels.testing import assert_close, randn
from tests.support.attention_cases import attend

DIM = 64


def test_merge_joins_disjoint_keys():
    heads, scale, sink = 3, 0.2, randn(3, seed=9)
    q, keys = randn(2, heads, DIM, seed=1), randn(50, DIM, seed=2)
    parts = [keys[:20], keys[20:21], keys[:0], keys[21:]]
    partial = torch.full((4, 2, heads, DIM), float("nan"))
    lse = torch.full((4, 2, heads), float("-inf"))
    expected = torch.zeros(2, heads, DIM, dtype=torch.float64)
    total = torch.zeros(2, heads, dtype=torch.float64)
    for t in range(2):
        expected[t], total[t] = attend(q[t], keys, scale, sink)
        for i, part in enumerate(parts):
            if len(part):
                partial[i, t], lse[i, t] = (x.float() for x in attend(q[t], part, scale, None))
    out, joint = merge_splits(partial, lse, sink=sink, out_dtype=torch.float32, return_lse=True)
    assert_close(out.double(), expected, row_tol=1e-5)
    assert_close(joint.double(), total, rtol=1e-5)


@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_of_nothing_is_zero(with_sink):
    sink = torch.zeros(3) if with_sink else None
    partial, lse = torch.full((2, 1, 3, 8), float("nan")), torch.full((2, 1, 3), float("-inf"))
    out, joint = merge_splits(partial, lse, sink=sink, return_lse=True)
    assert not out.any()
    assert joint.isneginf().all()
