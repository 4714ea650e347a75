"""``mla_decode`` against the specification's formula in fp64, over paged sequences.

Mutants run, each noticed: rotation by the next position, the last tile of a run dropped, runs
joined without decay, counters left, runs of a length the launch decides, a table's width that cuts
the runs, a compressed row seen one token late, one sequence's states for all, the first heads'
block for all; of raw queries: no norm, eps left out, the next position, rotated before the norm,
another head's row, not rounded between the steps.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import apply_rope, rms_norm, scratch_bytes
from ftkernels.attention import decode
from ftkernels.attention.decode import mla_decode_reference
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import assert_close, count_launches, randn
from tests.ftkernels.attention.test_prefill import (
    TOLERANCE,
    each_form,
    each_layer,
    far_pool,
    mla_prefill,
)
from tests.support.attention_cases import Attention, attend, carried

mla_decode = carried(decode.mla_decode)

LENGTHS = [1, 300, 129, 128, 4, 3]


def ones(lengths, heads, ratio=0, picks=0, **kwargs):
    return Attention(lengths, [1] * len(lengths), heads, ratio, picks, **kwargs)


@each_layer
@each_form
def test_matches_formula(heads, dtype, ratio, picks, run):
    case = ones(LENGTHS, heads, ratio, picks, dtype=dtype)
    args, kwargs = case.decode()
    got, lse = run(mla_decode, *args, **kwargs)
    assert_close(got.double(), case.out[:6], row_tol=TOLERANCE[dtype])
    assert_close(lse.double(), case.lse[:6], rtol=1e-5, atol=1e-5)


@each_layer
@pytest.mark.parametrize("heads", [2, 20])
def test_bits_are_those_of_a_sequence_alone(ratio, picks, heads, run):
    case = ones([300, 5, 129], heads, ratio, picks, dtype=torch.bfloat16)
    args, kwargs = case.decode()
    got, lse = run(mla_decode, *args, **kwargs)
    q, pool, table, lens = args
    for s in range(3):
        one = dict(kwargs)
        for name in ("block_table", "index_topk"):
            if name in one:
                one[name] = one[name][s : s + 1]
        if ratio:
            # a batch of longer sequences has a wider table
            one["block_table"] = torch.nn.functional.pad(one["block_table"], (0, 7), value=-1)
        alone, mine = mla_decode(q[s : s + 1], pool, table[s : s + 1], lens[s : s + 1], **one)
        assert torch.equal(alone[0], got[s])
        assert torch.equal(mine[0], lse[s])


@pytest.mark.parametrize(("ratio", "picks"), [(128, 0), (4, 40)])
@pytest.mark.parametrize("heads", [8, 17])
def test_packed_rows_match_formula(heads, ratio, picks, run):
    case = ones(
        [300, 4], heads, ratio, picks, dim=512, rope=64, dtype=torch.bfloat16, kv_format="fp8"
    )
    args, kwargs = case.decode()
    got, lse = run(mla_decode, *args, **kwargs)
    assert_close(got.double(), case.out[:2], row_tol=5e-3)
    assert_close(lse.double(), case.lse[:2], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 9, 100])
@pytest.mark.parametrize(("ratio", "picks"), [(4, 0), (4, 24)])
def test_any_number_of_splits(num_splits, ratio, picks, run):
    case = ones([300, 1, 77], 3, ratio, picks)
    args, kwargs = case.decode()
    got, lse = run(mla_decode, *args, **kwargs, num_splits=num_splits)
    assert_close(got.double(), case.out[:3], row_tol=1e-5)
    assert_close(lse.double(), case.lse[:3], rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_batches(data):
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=4))
    ratio, picks = data.draw(st.sampled_from([(0, 0), (128, 0), (4, 0), (4, 8), (5, 3)]))
    dtype, dim = data.draw(
        st.sampled_from(
            [(torch.float32, 48), (torch.float32, 64), (torch.float32, 128), (torch.bfloat16, 512)]
        )
    )
    case = ones(
        lengths, data.draw(st.sampled_from([1, 3, 8, 17])), ratio, picks, dtype=dtype,
        seed=data.draw(st.integers(0, 99)), per_page=data.draw(st.sampled_from([0, 5])),
        page=data.draw(st.sampled_from([128, 64, 7])),
        window=data.draw(st.sampled_from([128, 1, 50])),
        dim=dim,
    )  # fmt: skip
    args, kwargs = case.decode()
    splits = data.draw(st.sampled_from([None, 1, 4]))
    got, _ = mla_decode(*args, **kwargs, num_splits=splits)
    assert_close(got.double(), case.out[: len(lengths)], row_tol=TOLERANCE[dtype])


@pytest.mark.parametrize("length", [2500, 5000])
@each_layer
def test_long_contexts(length, ratio, picks, run):
    case = ones([length], 8, ratio, picks, dtype=torch.bfloat16)
    args, kwargs = case.decode()
    got, _ = run(mla_decode, *args, **kwargs)
    assert_close(got.double(), case.out[:1], row_tol=5e-3)


@each_layer
def test_equals_prefill(ratio, picks, run):
    """Within fp32 rounding: the two walk over the rows in other tiles."""
    case = ones([260, 131, 6], 4, ratio, picks)
    args, kwargs = case.decode()
    got, _ = run(mla_decode, *args, **kwargs)
    other, _ = mla_prefill(*case.args, **case.kwargs)
    assert_close(got, other[:3], row_tol=2e-6)


def test_padded_rows_are_zero(run):
    case = ones([5, 9], 2)
    (q, pool, table, lens), kwargs = case.decode()
    lens = lens.clone()
    lens[1] = 0
    got, lse = run(mla_decode, q, pool, table, lens, **kwargs)
    assert_close(got[0].double(), case.out[0], row_tol=1e-5)
    assert not got[1].any()
    assert lse[1].isneginf().all()


@pytest.mark.parametrize("num_splits", [1, None])
def test_picks_of_nothing(num_splits, run):
    """A sequence whose picks are all -1 has its window only, and a splits' share may be empty."""
    case = ones([300], 3, 4, 40)
    (q, pool, table, lens), kwargs = case.decode()
    kwargs["index_topk"] = torch.full((1, 40), -1, dtype=torch.int32)
    got, lse = run(mla_decode, q, pool, table, lens, **kwargs, num_splits=num_splits)
    want, want_lse = mla_decode_reference(q, pool, table, lens, **kwargs)
    assert_close(got, want, row_tol=1e-5)
    assert_close(lse, want_lse, rtol=1e-6)


def test_freed_window_pages_are_not_read(run):
    case = ones([700], 3, 128)
    (q, pool, table, lens), kwargs = case.decode()
    table = table.clone()
    table[0, :4] = -1
    got, _ = run(mla_decode, q, pool, table, lens, **kwargs)
    assert_close(got.double(), case.out[:1], row_tol=1e-5)


def test_pools_beyond_31_bits(run):
    rows = randn(8, 64, dtype=torch.bfloat16, seed=1)
    pool, last = far_pool(rows, 128, 3)
    q = randn(1, 2, 64, dtype=torch.bfloat16, seed=2)
    table = torch.tensor([[last]], dtype=torch.int32)
    extra = {"cmp_kv": pool, "block_table": table, "compress_ratio": 2}
    got = run(mla_decode, q, pool, table, torch.tensor([8]).int(), softmax_scale=0.1, **extra)
    want, _ = attend(q[0], torch.cat((rows, rows[:4])), 0.1, None)
    assert_close(got[0].double(), want, row_tol=5e-3)


def test_scratch_of_the_caller(run, lane):
    """The counters end at zero, so that one scratch serves call after call; the rest may hold
    anything. Every sequence has runs of its own there: programs of all of them run at once."""
    case = ones([300, 129], 3, 4, 24)
    args, kwargs = case.decode()
    size = scratch_bytes("mla_decode", S=2, H=3, D=64, topk=24)
    scratch = torch.full((size,), 0x7F, dtype=torch.uint8)
    scratch[:COUNTER_BYTES] = 0
    for _ in range(2):
        got, _ = run(mla_decode, *args, **kwargs, scratch=scratch)
        assert_close(got.double(), case.out[:2], row_tol=1e-5)
        assert not scratch[:COUNTER_BYTES].any()
    if lane != "reference":
        splits = (size - COUNTER_BYTES) // (4 * 2 * 3 * (64 + 2))
        mixed = scratch[COUNTER_BYTES:][: 4 * 2 * splits * 3 * 64].view(2, splits, -1)
        assert not (mixed[:, 0] == 0x7F).all(1).any()


def test_scratch_of_other_layers():
    for sizes in ({}, {"rows": 1024}, {"num_splits": 5, "rows": 1024}):
        one = scratch_bytes("mla_decode", S=1, H=8, D=512, **sizes)
        four = scratch_bytes("mla_decode", S=4, H=8, D=512, **sizes)
        assert COUNTER_BYTES < one < four
        assert four - COUNTER_BYTES == 4 * (one - COUNTER_BYTES)


def test_strided_tensors(run):
    case = ones([200, 30], 3, 4, 8, dtype=torch.bfloat16)
    (q, pool, table, lens), kwargs = case.decode()
    wide = torch.zeros(2, 5, 96, dtype=q.dtype)
    wide[:, 1:4, 16:80] = q
    out, lse = torch.full((2, 6, 64), 7.0, dtype=q.dtype), torch.full((2, 9), 7.0)
    mine = (out[:, 2:5], lse[:, 4:7])
    run(mla_decode, wide[:, 1:4, 16:80], pool, table, lens, **kwargs, out=mine)
    assert_close(mine[0].double(), case.out[:2], row_tol=5e-3)
    assert_close(mine[1].double(), case.lse[:2], rtol=1e-5, atol=1e-5)
    assert (out[:, :2] == 7).all()
    assert (out[:, 5:] == 7).all()


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 127, 128, 129, 255, 256])
def test_lengths_about_compression_edges(length, run):
    """K02: contexts on either side of each compression boundary."""
    for ratio in (4, 128):
        case = ones([length], 2, ratio)
        args, kwargs = case.decode()
        got, _ = run(mla_decode, *args, **kwargs)
        assert_close(got.double(), case.out[:1], row_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_splits", 0, "num_splits is 0, expected >= 1"),
        ("num_splits", 2.0, "num_splits is 2.0, expected an integer >= 1"),
        ("num_splits", True, "num_splits is True, expected an integer >= 1"),
        ("index_topk", torch.zeros(1, 4, dtype=torch.int32), "index_topk is given without cmp_kv"),
        ("out", torch.empty(1, 2, 64), "out is not a pair, expected"),
    ],
)
def test_refusals(name, value, text):
    args, kwargs = ones([5], 2).decode()
    with pytest.raises((ValueError, TypeError), match=text):
        decode.mla_decode(*args, **{**kwargs, name: value})


def test_scratch_too_small():
    args, kwargs = ones([5], 2).decode()
    size = scratch_bytes("mla_decode", S=1, H=2, D=64)
    with pytest.raises(ValueError, match=f"scratch is {size - 1} bytes, expected at least {size}"):
        decode.mla_decode(*args, **kwargs, scratch=torch.zeros(size - 1, dtype=torch.uint8))


def test_scratch_over_other_memory():
    (q, *args), kwargs = ones([5], 2).decode()
    scratch = torch.zeros(1 << 20, dtype=torch.uint8)
    q = scratch[1024 : 1024 + 4 * q.numel()].view(torch.float32).view(q.shape)
    with pytest.raises(ValueError, match="scratch is overlapping q in memory"):
        decode.mla_decode(q, *args, **kwargs, scratch=scratch)


def test_packed_pages_of_one_row(run):
    """Of a page with a single row the row stride says nothing, and may be odd."""
    case = ones([260], 8, 128, dim=512, rope=64, dtype=torch.bfloat16, kv_format="fp8")
    args, kwargs = case.decode()
    pool = kwargs["cmp_kv"]
    kwargs["cmp_kv"] = pool.as_strided(pool.shape, (pool.stride(0), 1, 1))
    got, _ = run(mla_decode, *args, **kwargs)
    assert_close(got.double(), case.out[:1], row_tol=5e-3)


def test_too_many_sequences():
    (q, pool, table, lens), kwargs = ones([5], 64).decode()
    many = [x.repeat(2049, *[1] * (x.ndim - 1)) for x in (q, table, lens)]
    with pytest.raises(ValueError, match=r"q is \(2049, 64, 64\), expected at most 2048 sequences"):
        decode.mla_decode(many[0], pool, *many[1:], **kwargs)


def test_empty_batch():
    (q, pool, table, lens), kwargs = ones([5], 2).decode()
    with count_launches() as launches:
        got, lse = mla_decode(q[:0], pool, table[:0], lens[:0], **kwargs)
    assert got.shape == (0, 2, 64)
    assert lse.shape == (0, 2)
    assert not launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "ratio", "picks"), [(3, 0, 0), (8, 4, 24), (17, 128, 0)])
def test_raw_queries_are_normed_and_rotated(dtype, heads, ratio, picks, run):
    """As the two ops do it; the norm's sum may run in another order."""
    case = ones([300, 1, 129, 4], heads, ratio, picks, dtype=dtype)
    (q, *rest), kwargs = case.decode()
    raw, before = torch.full_like(q, float("nan")), q.shape[0]
    raw.copy_(randn(*q.shape, dtype=dtype, seed=9, scale=5.0))
    kept = raw.clone()
    positions = (rest[2] - 1).clamp(min=0)
    wide = raw.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 0.25).sqrt()).to(dtype)
    cos, sin = kwargs["cos"], kwargs["sin"]
    turned = normed.double()
    angle = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    tail = turned[..., -2 * cos.shape[1] :].unflatten(-1, (-1, 2)).contiguous()
    turned[..., -2 * cos.shape[1] :] = torch.view_as_real(
        torch.view_as_complex(tail) * angle
    ).flatten(-2)
    expected, lse = mla_decode_reference(turned.to(dtype), *rest, **kwargs)
    got, mine = run(mla_decode, raw, *rest, **kwargs, q_norm_eps=0.25)
    assert torch.equal(raw, kept)
    assert len(got) == before
    # a rounding of q that falls the other way moves a result by one of its own
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(got, expected, row_tol=tolerance)
    assert_close(mine, lse, rtol=2e-3 if dtype == torch.bfloat16 else 1e-5, atol=2e-3)
    one, _ = run(mla_decode, raw, *rest, **kwargs, q_norm_eps=0.25, num_splits=1)
    assert_close(one, expected, row_tol=tolerance)


@pytest.mark.parametrize("heads", [2, 20])
def test_raw_queries_give_the_bits_of_the_three_ops(heads, run):
    case = ones([140, 1, 7], heads, 0, 0, dtype=torch.bfloat16, dim=128, rope=32)
    (q, *rest), kwargs = case.decode()
    positions = (rest[2] - 1).clamp(min=0)
    x = rms_norm(q, None, eps=1e-6)
    x = apply_rope(x, positions, kwargs["cos"], kwargs["sin"])
    expected, lse = mla_decode(x, *rest, **kwargs)
    got, mine = run(mla_decode, q, *rest, **kwargs, q_norm_eps=1e-6)
    assert torch.equal(got, expected)
    assert torch.equal(mine, lse)


def test_raw_queries_are_refused_without_tables():
    case = ones([5], 2)
    (q, *rest), kwargs = case.decode()
    with pytest.raises(ValueError, match=r"mla_decode: q_norm_eps is -1\.0, expected >= 0"):
        mla_decode(q, *rest, **kwargs, q_norm_eps=-1.0)
    with pytest.raises(ValueError, match="mla_decode: q_norm_eps is given without cos and sin"):
        mla_decode(q, *rest, **{**kwargs, "cos": None, "sin": None}, q_norm_eps=1e-6)
