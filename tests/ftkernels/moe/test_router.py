"""Mutants that these tests catch: bias in the weights, no normalization, no square root, no scale,
higher id on ties, ascending order, weights from row 0's sum, `num_tokens` off by one.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels.moe.router import route_topk, route_topk_reference
from ftkernels.testing import assert_close, randn


def score_of(x: float, row: list[float], score: str) -> float:
    if score == "sigmoid":
        return 1 / (1 + math.exp(-x))
    if score == "softmax":
        return math.exp(x - max(row)) / sum(math.exp(v - max(row)) for v in row)
    return math.sqrt(math.log1p(math.exp(x)) if x < 20 else x)


def formula(logits, bias, topk, route_scale, score):
    """Section 9 of the model's specification in fp64: choose by biased score, weigh by score."""
    weights, ids = [], []
    for row in logits.double().tolist():
        scores = [score_of(x, row, score) for x in row]
        biased = [
            s + (0.0 if bias is None else b) for s, b in zip(scores, bias or scores, strict=True)
        ]
        order = sorted(range(len(row)), key=lambda e: (-biased[e], e))[:topk]
        total = sum(scores[e] for e in order)
        weights.append([scores[e] / total * route_scale for e in order])
        ids.append(order)
    return torch.tensor(weights, dtype=torch.float32), torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"), [(1, 16, 4), (3, 13, 3), (7, 256, 6), (2, 384, 1)]
)
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [False, True])
def test_matches_formula(num_tokens, num_experts, topk, score, biased, device, run):
    logits = randn(num_tokens, num_experts, device=device, scale=3.0, seed=1)
    bias = randn(num_experts, device=device, seed=2) if biased else None
    weights, ids = run(route_topk, logits, bias, topk=topk, route_scale=1.5, score=score)
    expected = formula(logits, None if bias is None else bias.tolist(), topk, 1.5, score)
    assert_close(ids.cpu(), expected[1])
    assert_close(weights.cpu(), expected[0], rtol=2e-6)
    assert_close(weights.sum(1).cpu(), torch.full((num_tokens,), 1.5), rtol=1e-6)


@pytest.mark.gpu
def test_model_shape(device, run):
    logits, bias = randn(3456, 256, device=device), randn(256, device=device, seed=1)
    weights, ids = run(route_topk, logits, bias, topk=6, route_scale=1.5)
    expected = route_topk_reference(logits, bias, topk=6, route_scale=1.5)
    assert_close(ids, expected[1])
    assert_close(weights, expected[0], rtol=4e-6)


def test_ties_take_the_lower_id(device, run):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5], device=device)
    _, ids = run(route_topk, logits, None, topk=4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    _, ids = run(route_topk, torch.ones(1, 256, device=device), None, topk=6)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    bias = torch.tensor([0.0, -10.0, -10.0, 1.0, 0.0], device=device)
    _, ids = run(route_topk, logits, bias, topk=3)
    assert ids.tolist() == [[3, 4, 0], [3, 0, 4]]


def test_extreme_logits(device, run):
    logits = torch.tensor([[-200.0, -40.0, -18.0, 30.0, 1e30, -16.0]], device=device)
    weights, ids = run(route_topk, logits[:, [0, 1, 2, 3, 5]], None, topk=5)
    assert ids.tolist() == [[3, 4, 2, 1, 0]]
    root = [math.sqrt(30.0), *(math.exp(x / 2) for x in (-16.0, -18.0, -40.0, -200.0))]
    expected = torch.tensor([[r / sum(root) for r in root]], dtype=torch.float32)
    assert_close(weights.cpu(), expected, rtol=1e-6)
    weights, ids = run(route_topk, logits, None, topk=2)
    assert ids.tolist() == [[4, 3]]
    assert weights[0, 0].item() == pytest.approx(1.0)


def test_bias_of_minus_infinity_comes_last_without_duplicates(device, run):
    bias = torch.tensor([-math.inf, -math.inf, 0.0, -math.inf], device=device)
    _, ids = run(route_topk, torch.zeros(1, 4, device=device), bias, topk=4)
    assert ids.tolist() == [[2, 0, 1, 3]]


@pytest.mark.parametrize("used", [0, 2, 5])
def test_rows_past_num_tokens_are_skipped(used, device, run):
    logits = randn(5, 16, device=device)
    count = torch.tensor([used], dtype=torch.int32, device=device)
    weights, ids = run(route_topk, logits, None, topk=4, num_tokens=count)
    expected = route_topk_reference(logits, None, topk=4)
    assert_close(weights[:used], expected[0][:used], rtol=2e-6)
    assert_close(ids[:used], expected[1][:used])
    assert (ids[used:] == -1).all()
    assert (weights[used:] == 0).all()


def test_a_row_does_not_depend_on_the_others(device, run):
    logits, bias = randn(9, 20, device=device, scale=3.0), randn(20, device=device, seed=1)
    whole = route_topk(logits, bias, topk=5, route_scale=2.5)
    for n in range(1, 9):
        part = run(route_topk, logits[:n], bias, topk=5, route_scale=2.5)
        assert torch.equal(part[0], whole[0][:n])
        assert torch.equal(part[1], whole[1][:n])


def test_strided_rows_and_out(device, run):
    wide = randn(6, 40, device=device)
    out = (
        torch.empty(3, 8, device=device)[:, :4],
        torch.empty(3, 9, dtype=torch.int32, device=device)[:, 5:],
    )
    result = run(route_topk, wide[::2, 20:], None, topk=4, out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    expected = route_topk_reference(wide[::2, 20:].contiguous(), None, topk=4)
    assert_close(out[0], expected[0], rtol=2e-6)
    assert_close(out[1], expected[1])


def test_empty_launches_nothing(device, run):
    weights, ids = run(route_topk, torch.empty(0, 8, device=device), None, topk=2, launched=False)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"topk": 0}, ValueError, "route_topk: topk is 0, expected 1 to 4"),
        ({"topk": 5}, ValueError, "route_topk: topk is 5, expected 1 to 4"),
        ({"topk": 2, "score": "tanh"}, ValueError, "score is 'tanh', expected one of"),
        ({"topk": 2, "bias": torch.zeros(3)}, ValueError, r"bias is \(3,\), expected \[E\]"),
        ({"topk": 2, "bias": torch.zeros(4).double()}, TypeError, "bias is float64"),
        ({"topk": 2, "num_tokens": torch.zeros(1)}, TypeError, "num_tokens is float32"),
        ({"topk": 2, "out": (torch.empty(2, 2), torch.empty(2, 2))}, TypeError, "topk_ids is"),
        ({"topk": 2, "logits": torch.zeros(2, 4).half()}, TypeError, "router_logits is float16"),
        ({"topk": 2, "logits": torch.zeros(4, 4).t()[:, ::2]}, ValueError, "contiguous last"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = dict(kwargs)
    logits, bias = kwargs.pop("logits", torch.zeros(2, 4)), kwargs.pop("bias", None)
    for op in (route_topk, route_topk_reference):
        with pytest.raises(kind, match=text):
            op(logits, bias, **kwargs)
