"""``linear`` against fp64 products."""

from __future__ import annotations

import pytest
import torch

from ftkernels.linear.linear import linear
from ftkernels.testing import assert_close, randn


@pytest.mark.parametrize(("t", "n", "k"), [(1, 7, 100), (5, 130, 256), (64, 300, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_is_fp32(t, n, k, dtype, device):
    x, w = randn(t, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device, seed=1)
    out = linear(x, w, out_dtype=torch.float32)
    expected = x.cpu().double() @ w.cpu().double().T
    assert_close(out.cpu().double(), expected, row_tol=1e-6)
    assert linear(x, w).dtype == dtype


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 17, 40])
def test_rows_do_not_depend_on_each_other(rows):
    x, w = randn(64, 256), randn(96, 256, seed=1)
    whole = linear(x, w)
    for start in (0, 13):
        cut = slice(start, start + rows)
        assert torch.equal(linear(x[cut], w), whole[cut])


def test_out_strided_and_empty():
    x, w = randn(6, 128)[::2], randn(10, 128, seed=1)
    out = torch.empty(3, 20)[:, :10]
    assert linear(x, w, out=out) is out
    assert_close(out.double(), x.double() @ w.double().T, row_tol=1e-6)
    assert linear(x[:0], w).shape == (0, 10)
