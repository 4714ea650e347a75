"""``mla_prefill`` against the specification's formula in fp64, over ragged paged batches.

Mutants run, each noticed: no decay of the sum or of the mixed rows, a window one row wider or one
shorter, a compressed row seen one token early, the first pick dropped, the sink's logit in the
wrong base, the log-sum in base 2, rotation forward or one pair off, a packed row's scale left out
of the values, on the rotated part, or of the next row, offsets of 31 bits, picks of another token,
tiles that begin with the chunk, padded rows left unwritten, a sequence of length 0 taken for one of
its tokens, the first heads' block for all.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.attention import prefill
from ftkernels.attention.prefill import mla_prefill_reference
from ftkernels.testing import assert_close, count_launches, randn
from tests.support.attention_cases import WINDOW, Attention, attend, carried

mla_prefill = carried(prefill.mla_prefill)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
LAYERS = [(0, 0), (128, 0), (4, 0), (4, 24)]
each_layer = pytest.mark.parametrize(("ratio", "picks"), LAYERS, ids=["swa", "hca", "all", "csa"])
each_form = pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *itertools.product([1, 8, 16], [torch.float32, torch.bfloat16]),
        (8, torch.float16), (16, torch.float16),
    ],
    ids=str,
)  # fmt: skip


@each_layer
@each_form
def test_matches_formula(heads, dtype, ratio, picks, run):
    lengths, news = [1, 300, 129, 40, 128], [1, 3, 2, 5, 4]
    case = Attention(lengths, news, heads, ratio, picks, dtype=dtype)
    got, lse = run(mla_prefill, *case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=TOLERANCE[dtype])
    assert_close(lse.double(), case.lse, rtol=1e-5, atol=1e-5)
    assert not got[-2:].any(), "rows of no sequence are zero"
    assert lse[-2:].isneginf().all()


@each_layer
@pytest.mark.parametrize("heads", [64, 128])
def test_matches_formula_with_many_heads(ratio, picks, heads, run):
    case = Attention([300, 5], [2, 1], heads, ratio, picks, dtype=torch.bfloat16)
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=5e-3)


@pytest.mark.parametrize(("ratio", "picks"), [(128, 0), (4, 40)])
@pytest.mark.parametrize("heads", [8, 33])
def test_packed_rows_match_formula(heads, ratio, picks, run):
    case = Attention(
        [300, 4], [3, 1], heads, ratio, picks, dim=512, rope=64, dtype=torch.bfloat16,
        kv_format="fp8",
    )  # fmt: skip
    got, lse = run(mla_prefill, *case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=5e-3)
    assert_close(lse.double(), case.lse, rtol=1e-5, atol=2e-5)


def test_heads_of_512_match_formula(run):
    case = Attention([260], [3], 8, 4, 40, dim=512, rope=64, dtype=torch.bfloat16)
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=5e-3)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_batches(data):
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    news = [data.draw(st.integers(1, min(n, 6))) for n in lengths]
    ratio, picks = data.draw(st.sampled_from([(0, 0), (128, 0), (4, 0), (4, 8), (5, 3)]))
    dtype, dim = data.draw(
        st.sampled_from(
            [(torch.float32, 48), (torch.float32, 64), (torch.float32, 128), (torch.bfloat16, 512)]
        )
    )
    case = Attention(
        lengths, news, data.draw(st.sampled_from([1, 3, 8, 17])), ratio, picks, dtype=dtype,
        seed=data.draw(st.integers(0, 99)), per_page=data.draw(st.sampled_from([0, 5])),
        page=data.draw(st.sampled_from([128, 64, 7])),
        window=data.draw(st.sampled_from([128, 1, 50])),
        dim=dim,
    )  # fmt: skip
    got, _ = mla_prefill(*case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=TOLERANCE[dtype])


@pytest.mark.parametrize("length", [2500, 5000])
@each_layer
def test_long_contexts(length, ratio, picks, run):
    case = Attention([length], [2], 8, ratio, picks, dtype=torch.bfloat16)
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=5e-3)


def test_mixed_dtypes(run):
    """Queries in bf16 on fp32 pools, as exact numerics of an engine may have them."""
    case = Attention([140], [3], 4, 4, 8)
    q = case.args[0].to(torch.bfloat16)
    case.args = (q, *case.args[1:])
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    want, _ = mla_prefill_reference(*case.args, **case.kwargs)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), want.double(), row_tol=8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ratio", "picks"), [(0, 0), (16, 0), (4, 8)])
def test_bits_do_not_depend_on_the_cut(dtype, ratio, picks):
    length = 70
    case = Attention([length], [length], 4, ratio, picks, dtype=dtype, window=33, page=32)
    q, pool, table, _, _ = case.args
    whole, _ = mla_prefill(*case.args, **case.kwargs)
    chosen = case.kwargs.pop("index_topk", None)
    begin = 0
    for end in (1, 17, 32, 51, 70):
        bounds = torch.tensor([0, end - begin], dtype=torch.int32)
        lens = torch.tensor([end], dtype=torch.int32)
        extra = {} if chosen is None else {"index_topk": chosen[begin:end]}
        part, _ = mla_prefill(q[begin:end], pool, table, bounds, lens, **case.kwargs, **extra)
        assert torch.equal(part, whole[begin:end]), (begin, end)
        begin = end


@each_layer
def test_bits_do_not_depend_on_batch_mates(ratio, picks):
    case = Attention([131, 60, 258], [5, 3, 2], 3, ratio, picks, dtype=torch.bfloat16)
    q, pool, table, bounds, lens = case.args
    together, _ = mla_prefill(*case.args, **case.kwargs)
    for s in range(3):
        tokens = slice(int(bounds[s]), int(bounds[s + 1]))
        kwargs = dict(case.kwargs)
        if ratio:
            kwargs["block_table"] = kwargs["block_table"][s : s + 1]
        if picks:
            kwargs["index_topk"] = kwargs["index_topk"][tokens]
        new = torch.tensor([0, case.news[s]], dtype=torch.int32)
        alone, _ = mla_prefill(q[tokens], pool, table[s : s + 1], new, lens[s : s + 1], **kwargs)
        assert torch.equal(alone, together[tokens])


@pytest.mark.parametrize("heads", [2, 16])
def test_freed_window_pages_are_not_read(heads, run):
    case = Attention([700], [10], heads, 128)
    q, pool, table, bounds, lens = case.args
    table = table.clone()
    table[0, :4] = -1  # positions below 512; the oldest visible one is 563
    got, _ = run(mla_prefill, q, pool, table, bounds, lens, **case.kwargs)
    assert_close(got.double(), case.out, row_tol=1e-5)


def test_sequences_of_no_length_and_no_tokens(run):
    """A padded sequence may own tokens or not; both kinds stand between live ones."""
    case = Attention([130, 40], [3, 2], 2, 4, 8)
    q, pool, table, _, _ = case.args
    order = [0, 1, 2, 7, 7, 3, 4]
    kwargs = dict(case.kwargs)
    for name in ("index_topk",):
        kwargs[name] = kwargs[name][[0, 1, 2, 5, 5, 3, 4]]
    kwargs["block_table"] = kwargs["block_table"][[0, 0, 0, 1]]
    padded = q[[0, 1, 2, 5, 5, 3, 4]]
    bounds = torch.tensor([0, 3, 5, 5, 7], dtype=torch.int32)
    lens = torch.tensor([130, 0, 9, 40], dtype=torch.int32)
    got, lse = run(mla_prefill, padded, pool, table[[0, 0, 0, 1]], bounds, lens, **kwargs)
    live = [i for i, t in enumerate(order) if t != 7]
    assert_close(got[live].double(), case.out[:5], row_tol=1e-5)
    assert not got[3:5].any()
    assert lse[3:5].isneginf().all()


def test_strided_tensors(run):
    """Queries and result as slices of wider tensors, pages as slices of a larger allocation."""
    case = Attention([200], [4], 3, 4, 8, dtype=torch.bfloat16)
    q, pool, table, bounds, lens = case.args
    wide_q = torch.zeros(q.shape[0], 5, 96, dtype=q.dtype)
    wide_q[:, 1:4, 16:80] = q
    wide_pool = torch.full((pool.shape[0], 140, 80), float("nan"), dtype=pool.dtype)
    wide_pool[:, 3:131, 8:72] = pool
    out = torch.full((q.shape[0], 6, 64), 7.0, dtype=q.dtype)
    lse = torch.full((q.shape[0], 9), 7.0)
    mine = (out[:, 2:5], lse[:, 4:7])
    got = run(
        mla_prefill, wide_q[:, 1:4, 16:80], wide_pool[:, 3:131, 8:72], table, bounds, lens,
        **case.kwargs, out=mine,
    )  # fmt: skip
    assert got[0] is mine[0]
    assert_close(mine[0].double(), case.out, row_tol=5e-3)
    assert_close(mine[1].double(), case.lse, rtol=1e-5, atol=1e-5)
    assert (out[:, :2] == 7).all()
    assert (out[:, 5:] == 7).all()
    assert (lse[:, :4] == 7).all()


def far_pool(rows: torch.Tensor, page: int, near: int) -> tuple[torch.Tensor, int]:
    """A pool of more than 2^31 elements whose last page holds ``rows``; memory is not touched."""
    dim = rows.shape[1]
    pages = (1 << 31) // (page * dim) + near + 1
    memory = np.empty(pages * page * dim, dtype=np.int16)
    pool = torch.from_numpy(memory).view(torch.bfloat16).view(pages, page, dim)
    pool[-1, : len(rows)] = rows
    return pool, pages - 1


def test_pools_beyond_31_bits(run):
    rows = randn(8, 64, dtype=torch.bfloat16, seed=1)
    pool, last = far_pool(rows, 128, 3)
    q = randn(1, 2, 64, dtype=torch.bfloat16, seed=2)
    table = torch.tensor([[last]], dtype=torch.int32)
    bounds, lens = torch.tensor([0, 1]).int(), torch.tensor([8]).int()
    extra = {"cmp_kv": pool, "block_table": table, "compress_ratio": 2}
    got = run(mla_prefill, q, pool, table, bounds, lens, softmax_scale=0.1, **extra)
    want, _ = attend(q[0], torch.cat((rows, rows[:4])), 0.1, None)
    assert_close(got[0].double(), want, row_tol=5e-3)


def test_more_compressed_than_31_bits_of_channels_apart(run):
    """The picks lie in the far page, the window in a near one."""
    rows = randn(6, 64, dtype=torch.bfloat16, seed=1)
    pool, last = far_pool(rows, 32, 1)
    near = randn(1, 128, 64, dtype=torch.bfloat16, seed=3)
    q = randn(1, 2, 64, dtype=torch.bfloat16, seed=2)
    got = run(
        mla_prefill, q, near, torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(),
        torch.tensor([24]).int(), softmax_scale=0.1, cmp_kv=pool,
        block_table=torch.tensor([[last]]).int(), compress_ratio=4,
        index_topk=torch.tensor([[5, -1, 2]]).int(),
    )  # fmt: skip
    want, _ = attend(q[0], torch.cat((near[0, :24], rows[[5, 2]])), 0.1, None)
    assert_close(got[0].double(), want, row_tol=5e-3)


def test_one_strong_row_is_found(run):
    """A needle in the oldest place of the window."""
    case = Attention([300], [2], 8, 4, 24)
    q, pool, table, _, _ = case.args
    strong = q[0].mean(0) * 4
    page, row = divmod(298 - WINDOW + 1, 128)
    pool[table[0, page], row] = strong
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    want, _ = mla_prefill_reference(*case.args, **case.kwargs)
    assert (got[0] - case.out[0]).abs().max() > 0.1, "the first query still sees the row"
    assert_close(got, want, row_tol=1e-5)
    assert_close(got[1].double(), case.out[1], row_tol=1e-5)


def test_the_sink_takes_its_share(run):
    case = Attention([120], [1], 8)
    without, lse = run(mla_prefill, *case.args, **{**case.kwargs, "sink": None})
    share = 1 - (case.out[0].norm(dim=1) / without[0].double().norm(dim=1))
    expected = torch.sigmoid(case.kwargs["sink"].double() - lse[0].double())
    assert_close(share, expected, atol=1e-5)
    assert share.min() > 1e-3
    assert share.max() > 0.1


def test_extreme_scores_stay_finite(run):
    case = Attention([300], [4], 2, 128)
    args = (case.args[0] * 1e4, *case.args[1:])
    case.kwargs["sink"] = torch.tensor([500.0, -500.0])
    got, _ = run(mla_prefill, *args, **case.kwargs)
    want, _ = mla_prefill_reference(*args, **case.kwargs)
    assert got.isfinite().all()
    assert_close(got, want, row_tol=1e-5)


def test_a_sink_of_minus_infinity_is_none(run):
    case = Attention([9], [2], 3)
    case.kwargs["sink"] = torch.full((3,), float("-inf"))
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    want, _ = run(mla_prefill, *case.args, **{**case.kwargs, "sink": None})
    assert_close(got, want, row_tol=1e-6)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 127, 128, 129, 255, 256])
def test_lengths_about_compression_edges(length, run):
    """K02: prompts on either side of each compression boundary."""
    for ratio in (4, 128):
        case = Attention([length], [min(length, 3)], 2, ratio)
        got, _ = run(mla_prefill, *case.args, **case.kwargs)
        assert_close(got.double(), case.out, row_tol=1e-5)


@pytest.mark.parametrize("change", ["no sink", "window", "late row", "no rotation", "scale"])
def test_wrong_formulas_are_far(change, run):
    case = Attention([300], [5], 4, 128)
    if change == "no sink":
        case.kwargs["sink"] = None
    elif change == "window":
        case.kwargs["window"] = WINDOW - 1
    elif change == "late row":
        case.kwargs["compress_ratio"] = 151
    elif change == "no rotation":
        case.kwargs["cos"] = case.kwargs["sin"] = None
    else:
        case.kwargs["softmax_scale"] *= 1.01
    got, _ = run(mla_prefill, *case.args, **case.kwargs)
    with pytest.raises(AssertionError, match="differ by more"):
        assert_close(got.double(), case.out, row_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("window", 0, "window is 0, expected >= 1"),
        ("window", 128.0, "window is 128.0, expected an integer >= 1"),
        ("window", "4", "window is '4', expected an integer >= 1"),
        ("compress_ratio", 4.0, "compress_ratio is 4.0, expected an integer >= 0"),
        ("out", [torch.empty(7, 2, 64)], "out is not a pair"),
        ("kv_format", "fp4", "kv_format is 'fp4', expected 'bf16' or 'fp8'"),
        ("sink", torch.zeros(3), r"sink is \(3,\), expected \[H\] = \[2\]"),
        ("compress_ratio", 4, "partly given"),
        ("sin", None, "cos and sin are partly given"),
        ("index_topk", torch.zeros(7, 4, dtype=torch.int32), "index_topk is given without cmp_kv"),
        ("softmax_scale", math.nan, "softmax_scale is nan, expected a finite number"),
    ],
)
def test_refusals(name, value, text):
    case = Attention([5], [5], 2)
    with pytest.raises((ValueError, TypeError), match=text):
        prefill.mla_prefill(*case.args, **{**case.kwargs, name: value})


def test_heads_too_wide_are_refused():
    case = Attention([5], [5], 2, dim=520)
    with pytest.raises(ValueError, match=r"q is \(7, 2, 520\), expected .* with D up to 512"):
        prefill.mla_prefill(*case.args, **case.kwargs)


def test_odd_heads_are_not_rotated():
    case = Attention([5], [5], 2, dim=33)
    with pytest.raises(ValueError, match=r"q is \(7, 2, 33\), expected an even D to rotate back"):
        prefill.mla_prefill(*case.args, **case.kwargs)


@pytest.mark.parametrize("picks", [0, 3])
def test_no_compressed_row_at_all(picks, run):
    """Prompts too short for a row have no page of rows, and a table of no width."""
    case = Attention([3, 2], [3, 2], 2)
    more = {"cmp_kv": torch.zeros(0, 32, 64), "compress_ratio": 4}
    more["block_table"] = torch.zeros(2, 0, dtype=torch.int32)
    if picks:
        more["index_topk"] = torch.full((7, picks), -1, dtype=torch.int32)
    got, _ = run(mla_prefill, *case.args, **case.kwargs, **more)
    assert_close(got.double(), case.out, row_tol=1e-5)


def test_a_nan_shows_in_the_result_and_in_its_logsum(run):
    case = Attention([40], [2], 2)
    case.args[0][0, 1, 5] = float("nan")
    got, lse = run(mla_prefill, *case.args, **case.kwargs)
    assert got[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert got[0, 0].isfinite().all()
    assert lse[0, 0].isfinite()


def test_result_over_an_input_is_refused():
    case = Attention([5], [5], 2)
    out = (case.args[0], torch.empty(7, 2))
    with pytest.raises(ValueError, match="out is overlapping an input"):
        prefill.mla_prefill(*case.args, **case.kwargs, out=out)


def test_empty_batches():
    case = Attention([5], [5], 2)
    q, pool, table, _, _ = case.args
    none = torch.zeros(1, dtype=torch.int32)
    with count_launches() as launches:
        got, lse = mla_prefill(q[:0], pool, table[:0], none, none[:0], **case.kwargs)
    assert got.shape == (0, 2, 64)
    assert lse.shape == (0, 2)
    assert not launches


def test_no_sequence_but_rows(run):
    case = Attention([5], [5], 2)
    q, pool, table, _, _ = case.args
    none = torch.zeros(1, dtype=torch.int32)
    got, lse = run(mla_prefill, q, pool, table[:0], none, none[:0], **case.kwargs)
    assert not got.any()
    assert lse.isneginf().all()
