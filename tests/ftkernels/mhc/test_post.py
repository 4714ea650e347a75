"""Mutants that these tests catch: comb transposed, post left out, post of another stream, y added
after the rounding, streams overwritten before they are read.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels.mhc.post import hc_post, hc_post_reference
from ftkernels.testing import assert_close, randn


def inputs(num_tokens, hc, width, device, dtype=torch.float32):
    y = randn(num_tokens, width, dtype=dtype, device=device)
    streams = randn(num_tokens, hc, width, dtype=dtype, device=device, seed=1)
    post = randn(num_tokens, hc, device=device, seed=2)
    return y, streams, post, randn(num_tokens, hc, hc, device=device, seed=3)


def formula(y, streams, post, comb):
    """Section 4.3 in fp64: the sum runs over the first index of comb."""
    y, streams, post, comb = (t.double().cpu() for t in (y, streams, post, comb))
    out = torch.zeros_like(streams)
    for k in range(streams.shape[1]):
        out[:, k] = post[:, k, None] * y
        for j in range(streams.shape[1]):
            out[:, k] += comb[:, j, k, None] * streams[:, j]
    return out


@pytest.mark.parametrize(
    ("num_tokens", "hc", "width"), [(1, 4, 256), (3, 4, 100), (5, 2, 600), (2, 3, 33), (2, 1, 40)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_formula(num_tokens, hc, width, dtype, device, run):
    args = inputs(num_tokens, hc, width, device, dtype)
    out = run(hc_post, *args)
    expected = formula(*args)
    if dtype == torch.float32:
        assert_close(out.cpu(), expected.float(), row_tol=1e-6)
    else:
        assert_close(out.cpu(), expected.to(dtype), max_ulp=1)


def test_out_may_be_streams(device, run):
    y, streams, post, comb = inputs(3, 4, 700, device)
    expected = formula(y, streams, post, comb)
    assert run(hc_post, y, streams, post, comb, out=streams) is streams
    assert_close(streams.cpu(), expected.float(), row_tol=1e-6)


def test_a_row_does_not_depend_on_the_others(device, run, lane):
    rows = 9 if lane == "interpreter" else 600  # the reference takes another path for many elements
    args = inputs(rows, 4, 36, device)
    whole = hc_post(*args)
    for n in range(1, 9):
        assert torch.equal(run(hc_post, *(a[:n] for a in args)), whole[:n])


def test_strided_inputs_and_out(device, run):
    wide = inputs(6, 8, 96, device)
    y, streams, post, comb = wide
    y, streams = y[::2, 32:], streams[::2, ::2, 32:]
    post, comb = post[::2, 4:], comb[::2, 1:8:2, 2:6]
    out = torch.empty(3, 4, 80, device=device)[:, :, 8:72]
    assert run(hc_post, y, streams, post, comb, out=out) is out
    assert_close(out.cpu(), formula(y, streams, post, comb).float(), row_tol=1e-6)


def test_identity(device, run):
    y, streams, _, _ = inputs(2, 4, 64, device)
    eye = torch.eye(4, device=device).expand(2, 4, 4).contiguous()
    assert torch.equal(run(hc_post, y, streams, torch.zeros(2, 4, device=device), eye), streams)


def test_large_values_and_empty(device, run):
    y, streams, post, comb = inputs(1, 4, 32, device)
    out = run(hc_post, y * 1e30, streams * 1e30, post, comb)
    assert_close(out.cpu(), formula(y * 1e30, streams * 1e30, post, comb).float(), row_tol=1e-6)
    empty = [t[:0] for t in (y, streams, post, comb)]
    assert run(hc_post, *empty, launched=False).shape == (0, 4, 32)


@pytest.mark.gpu
def test_model_shape(device, run):
    args = inputs(3456, 4, 4096, device, torch.bfloat16)
    assert_close(run(hc_post, *args), hc_post_reference(*args), max_ulp=1)


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (0, torch.zeros(2, 9), ValueError, r"hc_post: y is \(2, 9\), expected \[T, C\]"),
        (0, torch.zeros(2, 8).double(), TypeError, "y is float64"),
        (1, torch.zeros(2, 8), ValueError, "streams is"),
        (2, torch.zeros(2, 3), ValueError, r"post is \(2, 3\), expected \[T, hc\]"),
        (2, torch.zeros(2, 4).bfloat16(), TypeError, "post is bfloat16, expected float32"),
        (3, torch.zeros(2, 4, 3), ValueError, "comb is"),
    ],
)
def test_refusals(place, value, kind, text):
    args = [torch.zeros(2, 8), torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(2, 4, 4)]
    args[place] = value
    for op in (hc_post, hc_post_reference):
        with pytest.raises(kind, match=text):
            op(*args)


def test_refuses_partial_overlap():
    memory = torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match="hc_post: out is overlapping an input"):
        hc_post(
            torch.zeros(2, 8), memory[:2], torch.zeros(2, 4), torch.zeros(2, 4, 4), out=memory[1:]
        )
