"""Row selection against section 8 in fp64, with the project's tie rule.

Operands lie on the FP4 grid with few octaves where picks must be equal, so that every sum is exact
and ties are real ties in any precision.

Mutants that these tests catch: visibility one row early or late, no relu, NaN lost in it, a head
left out, the weights' sign dropped, nibbles swapped, block scales of the next row or of the first
block, a cast or a fold that loses bits, lost rows not computed again by either kernel, NaN kept
after fp32, a counter left standing, neighbours of two sequences over the rows of one, a query given
its neighbour's rows, the rows of the last block left out, the second chunk scored over the first,
tokens past the batch.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import scratch_bytes
from ftkernels.attention import indexer
from ftkernels.attention.indexer import IndexConfig, index_select, index_select_reference
from ftkernels.attention.pools import empty_pool, write_index_rows
from ftkernels.config import pin
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import count_launches, randn
from tests.support.attention_cases import paged

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SMALL_CHUNKS = IndexConfig(block_r=64, block_c=64, num_queries=2, num_warps=4, num_stages=3)


def on_grid(*size, seed, octaves=(0, 0)):
    """E2M1 codes under a random power of two for each 32 channels."""
    generator = torch.Generator().manual_seed(seed)
    codes = CODES[torch.randint(0, 8, size, generator=generator)]
    sign = torch.randint(0, 2, size, generator=generator) * 2.0 - 1.0
    groups = (*size[:-1], size[-1] // 32, 1)
    scale = 2.0 ** torch.randint(octaves[0], octaves[1] + 1, groups, generator=generator)
    return ((codes * sign).unflatten(-1, (-1, 32)) * scale).flatten(-2)


def formula(q, weights, keys, position, topk, ratio=4):
    visible = (position + 1) // ratio
    dots = torch.relu(q.double() @ keys[:visible].double().T)
    score = (weights.double()[:, None] * dots).sum(0)
    score = score.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    score = score.tolist()
    best = sorted(range(visible), key=lambda j: (-score[j], j))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


def batch(
    lengths, news, heads, *, dim=32, seed=0, per_page=32, ratio=4, octaves=(0, 0), fp4=False,
    dtype=torch.float32, device="cpu",
):  # fmt: skip
    """Arguments of a ragged batch, unused rows NaN, and the rows of each sequence."""
    counts = [n // ratio for n in lengths]
    index = paged(counts, per_page, dim, dtype=dtype, seed=seed)
    rows = [on_grid(n, dim, seed=seed + 10 + s, octaves=octaves) for s, n in enumerate(counts)]
    pool, index_format = index.pool, "bf16"
    if fp4:
        pool = empty_pool(len(pool), per_page, dim, kv_format="fp4")
        pool.fill_(255)  # scales of what nobody wrote are NaN
        index_format = "fp4"
    for s, mine in enumerate(rows):
        numbers = torch.arange(len(mine))
        pages = index.table[s].long()[numbers // per_page]
        write_index_rows(pool, pages, numbers % per_page, mine, index_format)
    total = sum(news)
    q = on_grid(total, heads, dim, seed=seed + 1, octaves=octaves).to(dtype)
    generator = torch.Generator().manual_seed(seed + 2)
    weights = torch.randint(-4, 5, (total, heads), generator=generator) / 4
    bounds = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    args = (q, weights, pool, index.table, bounds, lens)
    return tuple(x.to(device) for x in args), rows, {"index_format": index_format}


def expected(args, rows, lengths, news, topk, ratio=4):
    q, weights = args[0].cpu(), args[1].cpu()
    t, picks = 0, []
    for mine, length, new in zip(rows, lengths, news, strict=True):
        for position in range(length - new, length):
            picks.append(formula(q[t], weights[t], mine, position, topk, ratio))
            t += 1
    return picks


LENGTHS, NEWS = [1, 3, 4, 300, 500, 27], [1, 3, 2, 3, 2, 27]


@pytest.mark.parametrize("topk", [1, 16])
@pytest.mark.parametrize("per_page", [32, 7, 128])
@pytest.mark.parametrize("num_queries", [1, 2])
def test_matches_formula(topk, per_page, num_queries, device, run, monkeypatch):
    """Blocks that take two neighbours or one, over pages of any size."""
    monkeypatch.setattr(indexer, "_FEW_QUERIES", 0)
    args, rows, kwargs = batch(LENGTHS, NEWS, 4, per_page=per_page, device=device)
    with pin("index_select", IndexConfig(64, 64, num_queries, 4, 3)):
        got = run(index_select, *args, topk=topk, **kwargs)
    assert got.tolist() == expected(args, rows, LENGTHS, NEWS, topk)


@pytest.mark.parametrize("heads", [1, 9, 128])
@pytest.mark.parametrize("fp4", [False, True])
def test_heads_and_formats(heads, fp4, device, run):
    lengths, news = [300, 41], [3, 1]
    args, rows, kwargs = batch(
        lengths, news, heads, dim=128, fp4=fp4, dtype=torch.bfloat16, octaves=(-1, 1), device=device
    )
    with count_launches() as launches:
        got = run(index_select, *args, topk=9, **kwargs)
    assert len(launches) <= 1
    assert got.tolist() == expected(args, rows, lengths, news, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_dtypes(dtype, dim, device, run):
    args, rows, _ = batch([250], [2], 3, dim=dim, dtype=dtype, device=device)
    assert run(index_select, *args, topk=8).tolist() == expected(args, rows, [250], [2], 8)
    strided = args[0].new_full((2, 4, 2 * dim), 7.0)
    strided[:, 1:, :dim] = args[0]
    pool = args[2].new_full((2 * len(args[2]), 33, dim + 8), 7.0)
    pool[::2, 1:, :dim] = args[2]
    given = (strided[:, 1:, :dim], args[1], pool[::2, 1:, :dim], *args[3:])
    out = torch.zeros(2, 11, dtype=torch.int32, device=device)
    got = run(index_select, *given, topk=8, out=out[:, :8])
    assert got.tolist() == expected(args, rows, [250], [2], 8)
    assert not out[:, 8:].any()


@pytest.mark.parametrize("fp4", [False, True])
def test_scales_that_eight_bits_cannot_hold(fp4, device, run):
    """Blocks many octaves apart, in rows and in queries: decided by what a cast would lose."""
    args, rows, kwargs = batch([300], [2], 2, dim=128, fp4=fp4, dtype=torch.bfloat16, device=device)
    q, weights, pool, table, bounds, lens = args
    numbers = torch.arange(75)
    pages = table[0].cpu().long()[numbers // 32].to(device)
    mine = rows[0]
    mine[:, :32] = 2.0 ** (numbers % 3)[:, None]
    mine[:, 32:64] *= 2.0**-20  # all that counts, far below the rest of its row
    mine[:, 64:] = 1.0
    mine[5] = 0.0
    mine[7] *= 2.0**-90
    write_index_rows(pool, pages, numbers % 32, mine.to(device), kwargs["index_format"])
    q[..., :32] = 0.0
    q[..., 64:] = 0.0
    got = run(index_select, *args, topk=20, **kwargs)
    assert got.tolist() == expected(args, [mine], [300], [2], 20)
    # a query whose small block alone meets the rows
    mine[:, :32] = CODES[numbers % 8][:, None]
    mine[:, 32:] = 0.0
    write_index_rows(pool, pages, numbers % 32, mine.to(device), kwargs["index_format"])
    q[...] = 1.0
    q[..., :32] = 2.0**-19
    given = (q, weights.abs() + 0.25, pool, table, bounds, lens)
    got = run(index_select, *given, topk=12, **kwargs)
    assert got.tolist() == expected(given, [mine], [300], [2], 12)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = data.draw(st.lists(st.integers(0, 420), min_size=1, max_size=4))
    news = [min(n, data.draw(st.integers(0, 3))) for n in lengths]
    topk, heads = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 5))
    ratio = data.draw(st.sampled_from([1, 2, 4]))
    args, rows, kwargs = batch(
        lengths, news, heads, per_page=data.draw(st.sampled_from([1, 5, 16, 64])), ratio=ratio,
        seed=data.draw(st.integers(0, 99)), octaves=data.draw(st.sampled_from([(0, 0), (-3, 3)])),
        device=device,
    )  # fmt: skip
    got = index_select(*args, topk=topk, compress_ratio=ratio, **kwargs)
    wanted = expected(args, rows, lengths, news, topk, ratio)
    assert got.tolist() == wanted


@pytest.mark.parametrize("heads", [2, 5])
def test_exact_scores_off_the_grid(heads, device, run):
    args, rows, _ = batch([301], [3], heads, device=device)
    q, weights, pool, *rest = args
    q = randn(*q.shape, seed=5, device=device)
    pool = torch.where(pool.isnan(), pool, pool * 0.7310586 + 0.0137)
    mine = [r * 0.7310586 + 0.0137 for r in rows]
    given = (q, weights, pool, *rest)
    for scores in ("exact", "fp8"):  # in fp8 what is off the grid is computed in fp32
        got = run(index_select, *given, topk=17, scores=scores)
        assert got.tolist() == expected(given, mine, [301], [3], 17)


@pytest.mark.parametrize("length", [7, 256, 257, 2051, 2052, 4100, 5000])
def test_one_token_of_any_context(length, device, run):
    args, rows, kwargs = batch([length], [1], 2, device=device)
    got = run(index_select, *args, topk=64, **kwargs)
    assert got.tolist() == expected(args, rows, [length], [1], 64)


def test_k03_a_row_of_an_earlier_chunk_is_found(device, run):
    """Three chunks; the best row lies in the first and must be picked from the last one."""
    length, topk = 600, 4
    args, _, _ = batch([length], [200], 2, device=device)
    q, weights, pool, table, _, _ = args
    weights = weights.abs() + 1
    page, row = table[0, 10 // 32], 10 % 32
    pool[page, row] = q[-1, 0].sign() * 2.0**7
    for begin in (197, 199):
        bounds = torch.tensor([0, 200 - begin], dtype=torch.int32, device=device)
        lens = torch.tensor([length], dtype=torch.int32, device=device)
        got = run(index_select, q[begin:], weights[begin:], pool, table, bounds, lens, topk=topk)
        assert 10 in got[-1].tolist()


@pytest.mark.parametrize("few", [True, False])
def test_k03_rows_of_every_chunk_compete(few, device, run, monkeypatch):
    """Needles in several of many chunks, more rows than are kept in each."""
    monkeypatch.setattr(indexer, "_FEW_QUERIES", 128 if few else 0)
    args, rows, _ = batch([900], [3], 2, ratio=1, device=device)
    with pin("index_select", SMALL_CHUNKS):
        got = run(index_select, *args, topk=30, compress_ratio=1)
    assert got.tolist() == expected(args, rows, [900], [3], 30, 1)
    assert len({row // 64 for row in got[-1].tolist()}) > 8


@pytest.mark.parametrize("tokens", [2, 3])
@pytest.mark.parametrize("few", [True, False])
def test_k04_scratch_is_read_where_it_was_written(tokens, few, device, run, monkeypatch):
    """Poisoned scratch, at as many queries as are shared among blocks and at one more."""
    monkeypatch.setattr(indexer, "_FEW_QUERIES", 2 if few else 0)
    args, rows, _ = batch([517], [tokens], 2, device=device)
    num_rows = args[3].shape[1] * 32
    num_bytes = scratch_bytes("index_select", T=tokens, rows=num_rows, topk=20)
    scratch = torch.full((num_bytes + 3,), 255, dtype=torch.uint8, device=device)
    scratch[:COUNTER_BYTES] = 0
    scratch[num_bytes:] = 77
    for _ in range(2):
        got = run(index_select, *args, topk=20, scratch=scratch)
        assert got.tolist() == expected(args, rows, [517], [tokens], 20)
        assert not scratch[:COUNTER_BYTES].any()
    assert (scratch[num_bytes:] == 77).all()
    with pytest.raises(ValueError, match=r"index_select: scratch is \d+ bytes, expected at least"):
        index_select(*args, topk=20, scratch=scratch[: num_bytes - 1])


def test_scratch_stays_below_its_limit():
    for num_tokens in (1, 50, 64, 128, 129, 3456, 8192):
        for rows in (0, 32, 1024, 32768, 262144):
            for topk in (1, 512, 1024):
                need = scratch_bytes("index_select", T=num_tokens, rows=rows, topk=topk)
                assert COUNTER_BYTES <= need <= 64 << 20
    tokens = [scratch_bytes("index_select", T=t, rows=262144, topk=512) for t in (3456, 8192)]
    assert tokens[0] == tokens[1]


def test_scratch_serves_every_smaller_call():
    counts, tables = (1, 2, 3, 50, 62, 63, 64, 128, 129, 3456), (32, 513, 8192, 131072, 262144)
    for num_tokens, rows in itertools.product(counts, tables):
        given = scratch_bytes("index_select", T=num_tokens, rows=rows, topk=512)
        for fewer, shorter in itertools.product(counts, tables):
            if fewer <= num_tokens and shorter <= rows:
                assert scratch_bytes("index_select", T=fewer, rows=shorter, topk=512) <= given


def test_decode_equals_prefill_bit_for_bit(device, run, monkeypatch):
    """One by one or together, over any number of blocks, whole or cut: the same picks.

    Random values off the grid, so that another order of a sum would show.
    """
    args, _, _ = batch([467, 260], [6, 2], 3, device=device)
    q, weights, pool, table, bounds, lens = args
    q = randn(*q.shape, seed=4, device=device)
    weights = randn(*weights.shape, seed=5, device=device)
    whole = run(index_select, q, weights, pool, table, bounds, lens, topk=50)
    monkeypatch.setattr(indexer, "_BLOCKS", 1)
    assert torch.equal(run(index_select, q, weights, pool, table, bounds, lens, topk=50), whole)
    monkeypatch.setattr(indexer, "_FEW_QUERIES", 0)
    assert torch.equal(run(index_select, q, weights, pool, table, bounds, lens, topk=50), whole)
    monkeypatch.undo()
    for t in range(6):
        one = torch.tensor([0, 1], dtype=torch.int32, device=device)
        at = torch.tensor([462 + t], dtype=torch.int32, device=device)
        got = run(index_select, q[t : t + 1], weights[t : t + 1], pool, table[:1], one, at, topk=50)
        assert torch.equal(got[0], whole[t])
    cut = torch.tensor([0, 3], dtype=torch.int32, device=device)
    for begin, length in ((0, 464), (3, 467)):
        at = torch.tensor([length], dtype=torch.int32, device=device)
        part = slice(begin, begin + 3)
        got = run(index_select, q[part], weights[part], pool, table[:1], cut, at, topk=50)
        assert torch.equal(got, whole[part])


def test_ties_keep_lower_rows(device, run):
    (q, weights, pool, table, bounds, lens), _, _ = batch([400], [1], 2, device=device)
    args = (q.abs(), weights.abs(), pool, table, bounds, lens)
    pool.fill_(1.0)
    assert run(index_select, *args, topk=5)[0].tolist() == [0, 1, 2, 3, 4]
    # no score but zeros of either sign
    got = run(index_select, -q.abs(), weights, pool, table, bounds, lens, topk=5)
    assert got[0].tolist() == [0, 1, 2, 3, 4]
    pool[table[0, 1].long(), 3] = 2.0
    assert run(index_select, *args, topk=5)[0].tolist() == [0, 1, 2, 3, 35]


@pytest.mark.parametrize("scores", ["fp8", "exact"])
def test_nan_and_infinite_scores(scores, device, run):
    """A NaN score is the worst, as -inf is; its row does not touch the others."""
    args, rows, _ = batch([300], [1], 2, device=device)
    q, weights, pool, table, bounds, lens = args
    weights = torch.tensor([[1.0, -0.5]], device=device)
    given, mine = (q, weights, pool, table, bounds, lens), rows[0]
    for row, value in ((3, float("nan")), (40, float("inf")), (41, float("-inf")), (70, 2e38)):
        pool[table[0, row // 32].long(), row % 32] = value
        mine[row] = value
    for topk in (5, 73, 74):
        got = run(index_select, *given, topk=topk, scores=scores)
        assert got.tolist() == index_select_reference(*given, topk=topk).tolist()
    got = run(index_select, *given, topk=20, scores=scores)[0].tolist()
    finite = [row for row in range(75) if row not in (3, 40, 41, 70)]
    alone = formula(q[0].cpu(), weights[0].cpu(), mine[finite], 4 * len(finite) - 1, 20)
    kept = [finite[row] for row in alone]
    assert set(got) - {40, 41, 70} <= set(kept)


def test_padding_rows_and_out(device, run):
    (q, weights, pool, table, bounds, lens), _, _ = batch([40, 0], [4, 2], 2, device=device)
    q, weights = torch.cat((q, q)), torch.cat((weights, weights))
    out = torch.zeros(12, 12, dtype=torch.int32, device=device)
    got = run(index_select, q, weights, pool, table, bounds, lens, topk=12, out=out)
    assert got is out
    assert (got[:4, 0] == 0).all()
    assert (got[4:] == -1).all()


def test_nothing_to_select(device, run):
    (q, weights, pool, table, bounds, lens), _, _ = batch([40], [4], 2, device=device)
    empty = bounds.new_zeros(2)
    got = run(index_select, q[:0], weights[:0], pool, table, empty, lens, topk=3, launched=False)
    assert got.shape == (0, 3)
    none = (table[:0], bounds[:1], lens[:0])
    got = run(index_select, q, weights, pool, *none, topk=3, launched=False)
    assert (got == -1).all()
    # a table without pages: nobody sees a row
    got = run(index_select, q, weights, pool, table[:, :0], bounds, lens // 40 * 3, topk=3)
    assert (got == -1).all()


def test_unsorted_or_late_picks_would_fail():
    """The formula itself tells visibility one token late and the higher row on ties apart."""
    args, rows, _ = batch([300], [20], 4)
    on_time = expected(args, rows, [300], [20], 16)
    late = [formula(args[0][t], args[1][t], rows[0], 279 + t, 16) for t in range(20)]
    assert on_time != late

    def higher(t):
        visible = (281 + t) // 4
        dots = torch.relu(args[0][t] @ rows[0][:visible].T)
        score = (args[1][t][:, None] * dots).sum(0).tolist()
        return sorted(sorted(range(visible), key=lambda j: (-score[j], -j))[:16])

    assert on_time != [higher(t) for t in range(20)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"topk": 0}, "topk is 0, expected >= 1"),
        ({"topk": 3.0}, "topk is 3.0, expected an integer >= 1"),
        ({"compress_ratio": 0}, "compress_ratio is 0, expected >= 1"),
        ({"compress_ratio": 2.5}, "compress_ratio is 2.5, expected an integer >= 1"),
        ({"scores": "bf16"}, "scores is 'bf16', expected 'fp8' or 'exact'"),
        ({"index_format": "fp4"}, "index_format is 'fp4' with Di 32, expected 128"),
    ],
)
def test_refusals(change, text):
    args, _, _ = batch([40], [4], 2)
    with pytest.raises((ValueError, TypeError), match=text):
        index_select(*args, **{"topk": 4, **change})
