"""Mutants that these tests catch: logits instead of log-probabilities, higher id on ties, rising
order, one maximum for all rows, temperature applied.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels.config import pin
from ftkernels.sampling.logprobs import LogprobsConfig, top_logprobs, top_logprobs_reference
from ftkernels.testing import assert_close, randn


def formula(logits, token_ids, num_top):
    chosen, ids, values = [], [], []
    for row, token in zip(logits.double().tolist(), token_ids.tolist(), strict=True):
        top = max(row)
        lse = top + math.log(math.fsum(math.exp(x - top) for x in row))
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
        chosen.append(row[token] - lse)
        ids.append(order)
        values.append([row[i] - lse for i in order])
    shape = (len(chosen), num_top)
    return (
        torch.tensor(chosen, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int32).view(shape),
        torch.tensor(values, dtype=torch.float32).view(shape),
    )


def check(got, expected):
    assert_close(got[1].cpu(), expected[1])
    assert_close(got[0].cpu(), expected[0], rtol=2e-6, atol=2e-6)
    assert_close(got[2].cpu(), expected[2], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "vocab", "num_top"), [(1, 1, 1), (3, 7, 7), (4, 300, 5), (2, 900, 0)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_formula(rows, vocab, num_top, dtype, device, run):
    logits = randn(rows, vocab, dtype=dtype, device=device, scale=4.0)
    token_ids = torch.arange(rows, device=device) * 5 % vocab
    got = run(top_logprobs, logits, token_ids, num_top=num_top)
    check(got, formula(logits, token_ids, num_top))


def test_several_blocks(device, run):
    logits = randn(2, 1000, device=device, scale=4.0)
    token_ids = torch.tensor([999, 0], dtype=torch.int32, device=device)
    with pin("top_logprobs", LogprobsConfig(block_v=256, num_warps=4)):
        check(run(top_logprobs, logits, token_ids, num_top=20), formula(logits, token_ids, 20))


def test_ties_take_the_lower_id(device, run):
    logits = torch.zeros(2, 40, device=device)
    logits[0, [30, 12]] = 2.0
    logits[1, 0] = -0.0
    token_ids = torch.tensor([3, 4], device=device)
    _, ids, _ = run(top_logprobs, logits, token_ids, num_top=4)
    assert ids.tolist() == [[12, 30, 0, 1], [0, 1, 2, 3]]


def test_extreme_logits(device, run):
    inf = math.inf
    logits = torch.tensor([[1e4, 0.0, -inf, -1e30], [-inf, -inf, 5.0, -inf]], device=device)
    token_ids = torch.tensor([2, -1], device=device)
    logprob, ids, top = run(top_logprobs, logits, token_ids, num_top=4)
    assert logprob.tolist() == [-inf, -inf]
    assert ids.tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]
    assert top.tolist()[1] == [0.0, -inf, -inf, -inf]
    assert top[0].tolist() == pytest.approx([0.0, -1e4, -1e30, -inf])


def test_rows_without_a_distribution_give_nan(device, run):
    logits = torch.tensor(
        [[-math.inf] * 3, [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]], device=device
    )
    token_ids = torch.tensor([1, 1, 1], device=device)
    logprob, ids, top = run(top_logprobs, logits, token_ids, num_top=2)
    assert logprob.isnan()[:2].all()
    assert top.isnan()[:2].all()
    assert ids.tolist() == [[0, 1], [2, 1], [0, 2]]


def test_exponentials_of_all_ids_sum_to_one(device, run):
    logits = randn(3, 60, device=device, scale=5.0)
    token_ids = torch.zeros(3, dtype=torch.int32, device=device)
    _, ids, top = run(top_logprobs, logits, token_ids, num_top=60)
    assert_close(top.exp().sum(1).cpu(), torch.ones(3), rtol=1e-5)
    assert (ids.sort(1)[0] == torch.arange(60, device=device)).all()


def test_a_row_does_not_depend_on_the_others(device, run):
    logits, token_ids = randn(9, 37, device=device), torch.arange(9, device=device)
    whole = top_logprobs(logits, token_ids, num_top=3)
    for n in range(1, 9):
        part = run(top_logprobs, logits[:n], token_ids[:n], num_top=3)
        assert all(torch.equal(a, b[:n]) for a, b in zip(part, whole, strict=True))


def test_strided_out_and_empty(device, run):
    logits = randn(6, 90, device=device)[::2, 10:70]
    token_ids = torch.tensor([1, 2, 3], device=device)
    out = (
        torch.empty(3, device=device),
        torch.empty(3, 9, dtype=torch.int32, device=device)[:, 2:6],
        torch.empty(3, 9, device=device)[:, 1:5],
    )
    got = run(top_logprobs, logits, token_ids, num_top=4, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    check(got, formula(logits, token_ids, 4))
    empty = run(top_logprobs, logits[:0], token_ids[:0], num_top=4, launched=False)
    assert [x.shape for x in empty] == [(0,), (0, 4), (0, 4)]


@pytest.mark.gpu
def test_model_shape(device, run):
    logits = randn(50, 129280, device=device, scale=3.0)
    token_ids = torch.arange(50, device=device)
    got = run(top_logprobs, logits, token_ids, num_top=20)
    check(got, [x.cpu() for x in top_logprobs_reference(logits, token_ids, num_top=20)])


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"num_top": -1}, ValueError, "top_logprobs: num_top is -1, expected 0 to 4"),
        ({"num_top": 5}, ValueError, "top_logprobs: num_top is 5, expected 0 to 4"),
        ({"logits": torch.zeros(2, 4).double()}, TypeError, "logits is float64"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"logits is \(2, 0\), expected V >= 1"),
        ({"token_ids": torch.zeros(3).long()}, ValueError, "token_ids is"),
        ({"token_ids": torch.zeros(2)}, TypeError, "token_ids is float32"),
        ({"out": (torch.zeros(2), torch.zeros(2, 1), None)}, TypeError, "top_ids is float32"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = {"num_top": 1, **kwargs}
    logits = kwargs.pop("logits", torch.zeros(2, 4))
    token_ids = kwargs.pop("token_ids", torch.zeros(2, dtype=torch.int32))
    for op in (top_logprobs, top_logprobs_reference):
        with pytest.raises(kind, match=text):
            op(logits, token_ids, **kwargs)
