"""Mutants that these tests catch: division for negative logits, offset before the factor, offset
scaled by the factor, other logits not copied, skipped entries written at row -1.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels.sampling.adjust import adjust_logits, adjust_logits_reference
from ftkernels.testing import assert_close, randn


def entries(rows, vocab, count, device, seed=0):
    """Distinct places, some of them skipped."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(rows * vocab, generator=generator)[:count]
    row_ids = (place // vocab).int()
    row_ids[::5] = -1
    repetition = 0.5 + 2 * torch.rand(count, generator=generator)
    offset = torch.randn(count, generator=generator)
    offset[::7] = -math.inf
    parts = (row_ids, (place % vocab).int(), repetition, offset)
    return tuple(part.to(device) for part in parts)


def formula(logits, row_ids, token_ids, repetition, offset):
    out = logits.double().cpu().clone()
    for row, token, factor, shift in zip(
        row_ids.tolist(), token_ids.tolist(), repetition.tolist(), offset.tolist(), strict=True
    ):
        if row >= 0:
            x = out[row, token].item()
            out[row, token] = (x / factor if x > 0 else x * factor) + shift
    return out


@pytest.mark.parametrize(("rows", "vocab", "count"), [(1, 7, 1), (3, 100, 60), (2, 500, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_matches_formula(rows, vocab, count, dtype, in_place, device, run):
    logits = randn(rows, vocab, dtype=dtype, device=device, scale=4.0)
    before, listed = logits.clone(), entries(rows, vocab, count, device)
    expected = formula(logits, *listed)
    out = run(adjust_logits, logits, *listed, out=logits if in_place else None)
    assert (out is logits) == in_place
    if dtype == torch.float32:
        assert_close(out.cpu(), expected.float(), rtol=1e-6, atol=1e-6)
    else:
        assert_close(out.cpu(), expected.to(dtype), max_ulp=1)
    assert in_place or torch.equal(logits, before)


def test_infinite_logits_and_bans(device, run):
    inf = math.inf
    logits = torch.tensor([[inf, -inf, 0.0, -0.0, 2.0, -2.0]], device=device)
    tokens = torch.arange(6, dtype=torch.int32, device=device)
    rows = torch.zeros(6, dtype=torch.int32, device=device)
    factor = torch.full((6,), 2.0, device=device)
    offset = torch.tensor([1.0, 1.0, 1.0, 1.0, -inf, -inf], device=device)
    out = run(adjust_logits, logits, rows, tokens, factor, offset)
    assert out.tolist() == [[inf, -inf, 1.0, 1.0, -inf, -inf]]


def test_neutral_entries_change_nothing(device, run):
    logits = randn(2, 30, device=device)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
    one, zero = torch.ones(2, device=device), torch.zeros(2, device=device)
    assert torch.equal(run(adjust_logits, logits, rows, rows, one, zero), logits)


def test_strided_rows_and_out(device, run):
    logits = randn(6, 90, device=device)[::2, 10:70]
    listed = entries(3, 60, 40, device)
    out = torch.empty(3, 99, device=device)[:, :60]
    assert run(adjust_logits, logits, *listed, out=out) is out
    assert_close(out.cpu(), formula(logits, *listed).float(), rtol=1e-6, atol=1e-6)


def test_nothing_listed_copies(device, run):
    logits, listed = randn(2, 8, device=device), entries(2, 8, 0, device)
    assert torch.equal(run(adjust_logits, logits, *listed, launched=False), logits)
    empty = run(adjust_logits, logits[:0], *listed, launched=False)
    assert empty.shape == (0, 8)


def test_a_row_does_not_depend_on_the_others(device, run):
    logits, listed = randn(4, 50, device=device), entries(4, 50, 80, device)
    whole = adjust_logits(logits, *listed)
    for row in range(4):
        mine = listed[0] == row
        part = [x[mine].contiguous() for x in listed]
        part[0] = torch.zeros_like(part[0])
        one = run(adjust_logits, logits[row : row + 1], *part)
        assert torch.equal(one[0], whole[row])


@pytest.mark.gpu
def test_model_shape(device, run):
    logits, listed = randn(50, 129280, device=device), entries(50, 129280, 20000, device)
    expected = adjust_logits_reference(logits, *listed)
    assert_close(run(adjust_logits, logits, *listed), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (0, torch.zeros(4), ValueError, r"adjust_logits: logits is \(4,\), expected \[S, V\]"),
        (0, torch.zeros(2, 4).double(), TypeError, "logits is float64"),
        (1, torch.zeros(3).long(), TypeError, "row_ids is int64, expected int32"),
        (2, torch.zeros(2, dtype=torch.int32), ValueError, r"token_ids is \(2,\), expected \[N\]"),
        (3, torch.zeros(3).half(), TypeError, "repetition is float16"),
        (4, torch.zeros(4), ValueError, "offset is"),
        (5, torch.zeros(2, 5), ValueError, "out is"),
    ],
)
def test_refusals(place, value, kind, text):
    int32 = torch.zeros(3, dtype=torch.int32)
    args = [torch.zeros(2, 4), int32, int32, torch.ones(3), torch.zeros(3), None]
    args[place] = value
    for op in (adjust_logits, adjust_logits_reference):
        with pytest.raises(kind, match=text):
            op(*args[:5], out=args[5])
