"""Mutants that these tests catch: ids sorted by score, duplicates merged, no normalization, table
row of the position instead of the token id, ids of padded rows read.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels.moe.hash_router import route_hash, route_hash_reference
from ftkernels.testing import assert_close, randn


def formula(logits, token_ids, table, route_scale):
    weights, ids = [], []
    for row, token in zip(logits.double().tolist(), token_ids.tolist(), strict=True):
        experts = table[token].tolist()
        scores = [math.sqrt(math.log1p(math.exp(row[e]))) for e in experts]
        weights.append([s / math.fsum(scores) * route_scale for s in scores])
        ids.append(experts)
    return torch.tensor(weights, dtype=torch.float32), torch.tensor(ids, dtype=torch.int32)


def case(
    device, *, rows=5, num_experts=16, topk=4, token_dtype=torch.int32, table_dtype=torch.int64
):
    logits = randn(rows, num_experts, device=device, scale=3.0)
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(num_experts, (50, topk), generator=generator).to(table_dtype)
    token_ids = torch.randint(50, (rows,), generator=generator).to(token_dtype)
    return logits, token_ids.to(device), table.to(device)


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "topk"), [(1, 16, 4), (5, 13, 3), (3, 256, 6)])
def test_matches_formula(rows, num_experts, topk, token_dtype, table_dtype, device, run):
    logits, token_ids, table = case(
        device, rows=rows, num_experts=num_experts, topk=topk, token_dtype=token_dtype,
        table_dtype=table_dtype,
    )  # fmt: skip
    weights, ids = run(route_hash, logits, token_ids, table, route_scale=1.5)
    expected = formula(logits.cpu(), token_ids.cpu(), table.cpu(), 1.5)
    assert_close(ids.cpu(), expected[1])
    assert_close(weights.cpu(), expected[0], rtol=2e-6)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_other_scores(score, device, run):
    logits, token_ids, table = case(device)
    weights, _ = run(route_hash, logits, token_ids, table, score=score)
    scores = logits.double().sigmoid() if score == "sigmoid" else logits.double().softmax(-1)
    chosen = scores.gather(1, table[token_ids.long()])
    assert_close(weights, (chosen / chosen.sum(1, keepdim=True)).float(), rtol=2e-6)


def test_duplicates_keep_their_own_weight(device, run):
    table = torch.tensor([[2, 0, 2]], device=device)
    token_ids = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.zeros(1, 4, device=device)
    weights, ids = run(route_hash, logits, token_ids, table, route_scale=3.0)
    assert ids.tolist() == [[2, 0, 2]]
    assert weights[0].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_padded_rows_are_skipped_and_their_ids_unread(device, run):
    logits, token_ids, table = case(device)
    expected = route_hash_reference(logits, token_ids, table)
    token_ids[3:] = 1 << 30
    count = torch.tensor([3], dtype=torch.int32, device=device)
    weights, ids = run(route_hash, logits, token_ids, table, num_tokens=count)
    assert_close(weights[:3], expected[0][:3], rtol=2e-6)
    assert_close(ids[:3], expected[1][:3])
    assert (ids[3:] == -1).all()
    assert (weights[3:] == 0).all()


def test_a_row_does_not_depend_on_the_others(device, run):
    logits, token_ids, table = case(device, rows=9)
    whole = route_hash(logits, token_ids, table)
    for n in range(1, 9):
        part = run(route_hash, logits[:n], token_ids[:n], table)
        assert torch.equal(part[0], whole[0][:n])
        assert torch.equal(part[1], whole[1][:n])


def test_strided_and_empty(device, run):
    logits, token_ids, table = case(device, rows=6)
    wide = torch.cat((table, table), 1)
    weights, ids = run(route_hash, logits[::2], token_ids[::2], wide[:, :4])
    expected = route_hash_reference(logits[::2].contiguous(), token_ids[::2].contiguous(), table)
    assert_close(weights, expected[0], rtol=2e-6)
    assert_close(ids, expected[1])
    weights, ids = run(route_hash, logits[:0], token_ids[:0], table, launched=False)
    assert weights.shape == ids.shape == (0, 4)


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (0, torch.zeros(2, 4).bfloat16(), TypeError, "router_logits is bfloat16"),
        (1, torch.zeros(3, dtype=torch.int32), ValueError, r"token_ids is \(3,\), expected \[T\]"),
        (1, torch.zeros(2), TypeError, "token_ids is float32"),
        (2, torch.zeros(5, 2), TypeError, "tid2eid is float32"),
        (2, torch.zeros(5, dtype=torch.int32), ValueError, r"tid2eid is \(5,\)"),
        ("score", "relu", ValueError, "score is 'relu'"),
        ("num_tokens", torch.zeros(2, dtype=torch.int32), ValueError, "num_tokens is"),
    ],
)
def test_refusals(place, value, kind, text):
    args = [
        torch.zeros(2, 4),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(5, 2, dtype=torch.int32),
    ]
    kwargs = {place: value} if isinstance(place, str) else {}
    if not kwargs:
        args[place] = value
    for op in (route_hash, route_hash_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)
