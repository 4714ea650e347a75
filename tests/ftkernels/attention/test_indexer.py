"""Row selection against section 8 in fp64, with the project's tie rule."""

from __future__ import annotations

import pytest
import torch

from ftkernels.attention.indexer import index_select
from ftkernels.testing import randn
from tests.support.attention_cases import paged

DIM = 32


def formula(q, weights, keys, position, topk, ratio=4):
    visible = (position + 1) // ratio
    dots = torch.relu(q.double() @ keys[:visible].double().T)
    score = (weights.double()[:, None] * dots).sum(0).tolist()
    best = sorted(range(visible), key=lambda j: (-score[j], j))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


def batch(lengths, news, heads, *, seed=0, per_page=32):
    index = paged([n // 4 for n in lengths], per_page, DIM, dtype=torch.float32, seed=seed)
    total = sum(news)
    # small integers: sums are exact, so ties are real ties in every precision
    q = torch.randint(-2, 3, (total, heads, DIM), generator=torch.Generator().manual_seed(seed + 1))
    index.pool.copy_(torch.where(index.pool.isnan(), index.pool, index.pool.round()))
    rows = [r.round() for r in index.rows]
    weights = randn(total, heads, seed=seed + 2).sign()
    bounds = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return (q.float(), weights, index.pool, index.table, bounds, lens), rows


@pytest.mark.parametrize("topk", [1, 16, 64])
@pytest.mark.parametrize("per_page", [32, 7])
def test_matches_formula(topk, per_page):
    lengths, news = [1, 3, 4, 300, 700, 129], [1, 3, 2, 120, 5, 129]
    args, rows = batch(lengths, news, 4, per_page=per_page)
    got = index_select(*args, topk=topk).tolist()
    t = 0
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        for position in range(length - new, length):
            expected = formula(args[0][t], args[1][t], rows[s], position, topk)
            assert got[t] == expected, (s, position)
            t += 1


def test_k03_a_row_of_an_earlier_chunk_is_found():
    """Three chunks; the best row lies in the first and must be picked from the last one."""
    length, topk = 600, 4
    (q, weights, pool, table, _, _), _ = batch([length], [length], 2)
    weights = weights.abs()
    page, row = table[0, 10 // 32], 10 % 32
    pool[page, row] = q[-1, 0] * 100
    for begin in (400, 599):
        bounds = torch.tensor([0, length - begin], dtype=torch.int32)
        lens = torch.tensor([length], dtype=torch.int32)
        got = index_select(q[begin:], weights[begin:], pool, table, bounds, lens, topk=topk)
        assert 10 in got[-1].tolist()


def test_ties_keep_lower_rows():
    (q, weights, pool, table, bounds, lens), _ = batch([400], [1], 2)
    pool.fill_(1.0)
    got = index_select(q.abs(), weights.abs(), pool, table, bounds, lens, topk=5)
    assert got[0].tolist() == [0, 1, 2, 3, 4]


def test_padding_rows_and_out():
    (q, weights, pool, table, bounds, lens), _ = batch([40], [4], 2)
    q, weights = torch.cat((q, q)), torch.cat((weights, weights))
    out = torch.zeros(8, 6, dtype=torch.int32)
    got = index_select(q, weights, pool, table, bounds, lens, topk=6, out=out)
    assert got is out
    assert (got[4:] == -1).all()


def test_unsorted_or_late_picks_would_fail():
    """Mutants: visibility one token late, and the higher row on ties."""
    args, rows = batch([300], [120], 4)
    got = index_select(*args, topk=16).tolist()
    late = [formula(args[0][t], args[1][t], rows[0], 179 + t, 16) for t in range(120)]
    assert got != late

    def higher(t):
        visible = (181 + t) // 4
        dots = torch.relu(args[0][t] @ rows[0][:visible].T)
        score = (args[1][t][:, None] * dots).sum(0).tolist()
        return sorted(sorted(range(visible), key=lambda j: (-score[j], -j))[:16])

    assert [row for row in got] != [higher(t) for t in range(120)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"topk": 0}, "topk is 0, expected >= 1"),
        ({"scores": "bf16"}, "scores is 'bf16', expected 'fp8' or 'exact'"),
        ({"index_format": "fp4"}, "index_format is 'fp4' with Di 32, expected 128"),
    ],
)
def test_refusals(change, text):
    args, _ = batch([40], [4], 2)
    with pytest.raises(ValueError, match=text):
        index_select(*args, **{"topk": 4, **change})
