"""Prefill and decode against the specification's formula in fp64, over ragged paged batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.attention.decode import mla_decode
from ftkernels.attention.prefill import mla_prefill, mla_prefill_reference
from ftkernels.testing import assert_close, randn
from tests.support.attention_cases import WINDOW, attend, paged, unrotate

DIM, ROPE = 64, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def batch(lengths, news, heads, ratio, *, dtype=torch.float32, seed=0, picks=None, per_page=None):
    """Arguments of ``mla_prefill`` and, by token, what the formula gives."""
    window = paged(lengths, 128, DIM, dtype=dtype, seed=seed)
    scale, sink = DIM**-0.5, randn(heads, seed=seed + 1, scale=2.0)
    total = sum(news)
    q = randn(total + 2, heads, DIM, dtype=dtype, seed=seed + 2, scale=3.0)
    angles = randn(max(lengths) + 1, ROPE // 2, seed=seed + 3, scale=3.0)
    bounds = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    kwargs = {
        "softmax_scale": scale, "sink": sink, "return_lse": True,
        "cos": angles.cos(), "sin": angles.sin(),
    }  # fmt: skip
    compressed = None
    if ratio:
        counts = [n // ratio for n in lengths]
        compressed = paged(counts, per_page or 128 // ratio, DIM, dtype=dtype, seed=seed + 4)
        kwargs |= {"cmp_kv": compressed.pool, "block_table": compressed.table}
        kwargs["compress_ratio"] = ratio
    generator = torch.Generator().manual_seed(seed + 5)
    chosen = torch.full((total + 2, picks), -1, dtype=torch.int32) if picks else None
    out = torch.zeros(total + 2, heads, DIM, dtype=torch.float64)
    lse = torch.full((total + 2, heads), float("-inf"), dtype=torch.float64)
    t = 0
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        for p in range(length - new, length):
            keys = window.rows[s][max(0, p - WINDOW + 1) : p + 1]
            if compressed is not None:
                visible = (p + 1) // ratio
                extra = torch.arange(visible)
                if chosen is not None:
                    extra = torch.randperm(visible, generator=generator)[:picks]
                    places = torch.randperm(picks, generator=generator)[: len(extra)]
                    chosen[t, places] = extra.to(torch.int32)
                keys = torch.cat((keys, compressed.rows[s][extra]))
            mixed, lse[t] = attend(q[t], keys, scale, sink)
            out[t] = unrotate(mixed, angles[p])
            t += 1
    if chosen is not None:
        kwargs["index_topk"] = chosen
    return (q, window.pool, window.table, bounds, lens), kwargs, out, lse


@pytest.mark.parametrize("heads", [1, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ratio", "picks"), [(0, None), (128, None), (4, None), (4, 16)])
def test_prefill_matches_formula(heads, dtype, ratio, picks):
    lengths, news = [1, 300, 129, 700, 128], [1, 131, 2, 5, 128]
    args, kwargs, out, lse = batch(lengths, news, heads, ratio, dtype=dtype, picks=picks)
    got, got_lse = mla_prefill(*args, **kwargs)
    assert_close(got.double(), out, row_tol=TOLERANCE[dtype])
    assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert not got[-2:].any(), "rows of no sequence are zero"
    assert got_lse[-2:].isneginf().all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prefill_random_batches(data):
    lengths = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    news = [data.draw(st.integers(1, min(n, 150))) for n in lengths]
    ratio, picks = data.draw(st.sampled_from([(0, None), (128, None), (4, None), (4, 8)]))
    args, kwargs, out, _ = batch(
        lengths, news, data.draw(st.sampled_from([1, 3, 8])), ratio, picks=picks,
        seed=data.draw(st.integers(0, 99)), per_page=data.draw(st.sampled_from([None, 5])),
    )  # fmt: skip
    got, _ = mla_prefill(*args, **kwargs)
    assert_close(got.double(), out, row_tol=1e-5)


@pytest.mark.parametrize(("ratio", "picks"), [(0, None), (128, None), (4, None), (4, 16)])
@pytest.mark.parametrize("heads", [1, 8])
def test_decode_matches_formula(ratio, picks, heads):
    lengths = [1, 300, 129, 700, 128, 4, 3]
    args, kwargs, out, lse = batch(lengths, [1] * len(lengths), heads, ratio, picks=picks)
    q, pool, table, _, lens = args
    count = len(lengths)
    if picks:
        kwargs["index_topk"] = kwargs["index_topk"][:count]
    got, got_lse = mla_decode(q[:count], pool, table, lens, **kwargs)
    assert_close(got.double(), out[:count], row_tol=1e-5)
    assert_close(got_lse.double(), lse[:count], rtol=1e-5, atol=1e-5)
    for s in range(count):
        one = {k: v for k, v in kwargs.items() if k not in ("block_table", "index_topk")}
        for name in ("block_table", "index_topk"):
            if name in kwargs:
                one[name] = kwargs[name][s : s + 1]
        alone, _ = mla_decode(q[s : s + 1], pool, table[s : s + 1], lens[s : s + 1], **one)
        assert torch.equal(alone[0], got[s]), "bit for bit alone and batched"


def test_decode_padded_rows_are_zero():
    args, kwargs, _, _ = batch([5, 9], [1, 1], 2, 0)
    q, pool, table, _, lens = args
    lens = lens.clone()
    lens[1] = 0
    got, lse = mla_decode(q[:2], pool, table, lens, **kwargs)
    assert not got[1].any()
    assert lse[1].isneginf().all()


@pytest.mark.parametrize(("ratio", "picks"), [(0, None), (128, None), (4, 16)])
def test_prefill_is_bit_identical_under_any_cut(ratio, picks):
    length = 300
    args, kwargs, _, _ = batch([length], [length], 4, ratio, picks=picks)
    q, pool, table, _, _ = args
    whole, _ = mla_prefill(*args, **kwargs)
    chosen = kwargs.pop("index_topk", None)
    for cuts in ([37, 61, 130, 300], [1, 2, 3, 128, 129, 300]):
        begin = 0
        for end in cuts:
            bounds = torch.tensor([0, end - begin], dtype=torch.int32)
            lens = torch.tensor([end], dtype=torch.int32)
            extra = {} if chosen is None else {"index_topk": chosen[begin:end]}
            part, _ = mla_prefill(q[begin:end], pool, table, bounds, lens, **kwargs, **extra)
            assert torch.equal(part, whole[begin:end]), (begin, end)
            begin = end


def test_freed_window_pages_are_not_read():
    args, kwargs, out, _ = batch([700], [10], 4, 128)
    q, pool, table, bounds, lens = args
    table = table.clone()
    table[0, :4] = -1  # positions below 512; the oldest visible one is 563
    got, _ = mla_prefill(q, pool, table, bounds, lens, **kwargs)
    assert_close(got.double(), out, row_tol=1e-5)


@pytest.mark.parametrize("change", ["no sink", "window", "late row", "no rotation", "scale"])
def test_mutants_fail(change):
    args, kwargs, out, _ = batch([300], [150], 4, 128)
    if change == "no sink":
        kwargs["sink"] = None
    elif change == "window":
        kwargs["window"] = WINDOW - 1
    elif change == "late row":
        kwargs["compress_ratio"] = 129
    elif change == "no rotation":
        kwargs["cos"] = kwargs["sin"] = None
    else:
        kwargs["softmax_scale"] *= 1.01
    got, _ = mla_prefill_reference(*args, **kwargs)
    with pytest.raises(AssertionError, match="differ by more"):
        assert_close(got.double(), out, row_tol=1e-5)


def test_extreme_scores_stay_finite():
    args, kwargs, _, _ = batch([300], [40], 2, 128)
    q = args[0] * 1e4
    kwargs["sink"] = torch.tensor([500.0, -500.0])
    got, _ = mla_prefill(q, *args[1:], **kwargs)
    assert got.isfinite().all()
    assert got.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("window", 0, "window is 0, expected >= 1"),
        ("kv_format", "fp4", "kv_format is 'fp4', expected 'bf16' or 'fp8'"),
        ("sink", torch.zeros(3), r"sink is \(3,\), expected \[H\] = \[2\]"),
        ("compress_ratio", 4, "partly given"),
        ("sin", None, "cos and sin are partly given"),
        ("index_topk", torch.zeros(7, 4, dtype=torch.int32), "index_topk is given without cmp_kv"),
    ],
)
def test_refusals(name, value, text):
    args, kwargs, _, _ = batch([5], [5], 2, 0)
    with pytest.raises(ValueError, match=text):
        mla_prefill(*args, **{**kwargs, name: value})


def test_empty_batch():
    args, kwargs, _, _ = batch([5], [5], 2, 0)
    q, pool, table, _, _ = args
    none = torch.zeros(1, dtype=torch.int32)
    got, lse = mla_prefill(q[:0], pool, table[:0], none, none[:0], **kwargs)
    assert got.shape == (0, 2, DIM)
    assert lse.shape == (0, 2)
