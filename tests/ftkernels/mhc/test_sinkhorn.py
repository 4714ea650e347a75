"""The host side of the mixes: a row has the same bits in Python floats and in tensors.

Mutants that these tests catch: a sum taken from the right, division in one path and the reciprocal
in the other, torch's own exp in the tensor path, one row step too many, rows and columns swapped.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels.mhc import sinkhorn
from ftkernels.testing import randn


def formula(logits, eps, iters):
    """Section 4.2 of the model's specification, one row."""
    c = logits.double().softmax(-1) + eps
    c = c / (c.sum(0) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(1, keepdim=True) + eps)
        c = c / (c.sum(0) + eps)
    return c


@pytest.mark.parametrize("hc", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_floats_and_tensors_agree_bit_for_bit(hc, iters, scale):
    logits = randn(200, hc, hc, scale=scale, seed=hc).double()
    rows = sinkhorn.sinkhorn_rows(logits, 1e-6, iters)
    for row, matrix in zip(logits, rows, strict=True):
        values = sinkhorn.sinkhorn(row.flatten().tolist(), hc, 1e-6, iters)
        assert values == matrix.flatten().tolist()
        expected = formula(row, 1e-6, iters)
        assert torch.allclose(matrix, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("scale", [1.0, 400.0])
def test_sigmoids_agree_bit_for_bit(scale):
    mix, base = randn(100, 6, scale=scale).double(), randn(6, seed=1).double()
    rms, factor = randn(100, seed=2).abs().double(), torch.tensor(1.3, dtype=torch.float64)
    rows = sinkhorn.sigmoid_rows(mix, rms, factor, base, 2.0, 1e-6)
    for i in range(100):
        row = sinkhorn.sigmoids(mix[i].tolist(), rms[i].item(), 1.3, base.tolist(), 2.0, 1e-6)
        assert row == rows[i].tolist()
        z = [
            m * rms[i].item() * 1.3 + b for m, b in zip(mix[i].tolist(), base.tolist(), strict=True)
        ]
        expected = [2 / (1 + math.exp(-v)) + 1e-6 if v > -700 else 1e-6 for v in z]
        assert row == pytest.approx(expected, rel=1e-12)


def test_both_paths_survive_infinities_and_nan():
    for value in (math.inf, -math.inf, math.nan):
        logits = [value, *[0.5] * 15]
        few = sinkhorn.sinkhorn(logits, 4, 1e-6, 20)
        rows = sinkhorn.sinkhorn_rows(torch.tensor(logits).double().view(1, 4, 4), 1e-6, 20)
        assert torch.equal(torch.tensor(few).double().isnan(), rows.flatten().isnan())


def test_narrow_products_do_not_depend_on_the_number_of_rows():
    for num_rows in (1, 2, 3, 5):
        streams, fn = randn(9, 2, 48), randn(num_rows, 96, seed=1)
        whole = sinkhorn.project_reference(streams, fn)
        for n in range(1, 9):
            part = sinkhorn.project_reference(streams[:n], fn)
            assert all(torch.equal(a, b[:n]) for a, b in zip(part, whole, strict=True))
