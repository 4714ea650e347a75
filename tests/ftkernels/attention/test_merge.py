"""Merging of split results against softmax over all keys at once, in fp64.

Mutants tried: no sink, the sink once a split, lse with the sink, empty splits read, a plain mean,
the largest lse not taken out or infinite, 0 / 0, another head's lse, last split dropped, split
offsets in 32 bits, sums that depend on how many splits are under way.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend, config
from ftkernels.attention.merge import MergeConfig, merge_splits
from ftkernels.testing import aot, assert_close, randn
from tests.support.attention_cases import attend
from tests.support.far import FAR, far_tensor

DIM = 64


def joined(partial, lse, sink):
    """The formula in fp64, one token and head after another."""
    num, tokens, heads, width = partial.shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64)
    total = torch.full((tokens, heads), float("-inf"), dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            live = [i for i in range(num) if lse[i, t, h] > float("-inf")]
            logits = [lse[i, t, h].double() for i in live]
            if logits:
                total[t, h] = torch.logsumexp(torch.stack(logits), 0)
            if sink is not None:
                logits.append(sink[h].double())
            if live:
                weights = torch.softmax(torch.stack(logits), 0)[: len(live)]
                out[t, h] = weights @ partial[live, t, h].double()
    return out, total


def test_disjoint_keys(device, run):
    heads, scale, sink = 3, 0.2, randn(3, seed=9)
    q, keys = randn(2, heads, DIM, seed=1), randn(50, DIM, seed=2)
    parts = [keys[:20], keys[20:21], keys[:0], keys[21:]]
    partial = torch.full((4, 2, heads, DIM), float("nan"))
    lse = torch.full((4, 2, heads), float("-inf"))
    expected = torch.zeros(2, heads, DIM, dtype=torch.float64)
    total = torch.zeros(2, heads, dtype=torch.float64)
    for t in range(2):
        expected[t], total[t] = attend(q[t], keys, scale, sink)
        for i, part in enumerate(parts):
            if len(part):
                partial[i, t], lse[i, t] = (x.float() for x in attend(q[t], part, scale, None))
    out, joint = run(
        merge_splits, partial.to(device), lse.to(device), sink=sink.to(device),
        out_dtype=torch.float32, return_lse=True,
    )  # fmt: skip
    assert_close(out.cpu().double(), expected, row_tol=1e-5)
    assert_close(joint.cpu().double(), total, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_splits(data, device):
    num, tokens = data.draw(st.integers(0, 19)), data.draw(st.integers(1, 2))
    heads, width = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 7, 64, 100, 130]))
    seed, spread = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.0, 30.0, 1e4]))
    dtype, tolerance = data.draw(
        st.sampled_from([(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 5e-3)])
    )
    wide = randn(num, tokens + 1, heads, width + 3, seed=seed)
    partial = wide[:, 1:, :, 3:]
    lse = randn(tokens, num, heads + 2, seed=seed + 1, scale=spread).transpose(0, 1)[:, :, 1:-1]
    sink = randn(heads, seed=seed + 2, scale=spread) if data.draw(st.booleans()) else None
    empty = torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    lse[empty], partial[empty] = float("-inf"), float("nan")
    expected, total = joined(partial, lse, sink)
    out, joint = merge_splits(
        partial.to(device), lse.to(device), sink=None if sink is None else sink.to(device),
        out_dtype=dtype, return_lse=True,
    )  # fmt: skip
    assert_close(out.cpu().double(), expected.to(dtype).double(), row_tol=tolerance)
    assert_close(joint.cpu().double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num", [0, 2])
@pytest.mark.parametrize("with_sink", [False, True])
def test_nothing_is_zero(num, with_sink, device, run):
    sink = torch.zeros(3, device=device) if with_sink else None
    partial = torch.full((num, 1, 3, 8), float("nan"), device=device)
    lse = torch.full((num, 1, 3), float("-inf"), device=device)
    out, joint = run(merge_splits, partial, lse, sink=sink, return_lse=True)
    assert not out.any()
    assert joint.isneginf().all()


def test_underflowing_split_is_not_read(device, run):
    partial = torch.full((2, 1, 1, 8), float("nan"), device=device)
    partial[0] = 3.0
    lse = torch.tensor([5.0, -300.0], device=device).view(2, 1, 1)
    assert (run(merge_splits, partial, lse) == 3.0).all()


def test_sums_in_order_of_splits(device):
    """Whatever is under way at a time, and whoever else is in the batch, the bits are the same."""
    partial, lse = randn(13, 3, 2, 100, device=device), randn(13, 3, 2, device=device, seed=1)
    whole = merge_splits(partial, lse, out_dtype=torch.float32)
    for t in range(3):
        alone = merge_splits(partial[:, t : t + 1], lse[:, t : t + 1], out_dtype=torch.float32)
        assert torch.equal(alone[0], whole[t])
    for block_n, block_d in ((1, 128), (4, 32), (16, 64)):
        with config.pin("merge_splits", MergeConfig(block_n, block_d, 1)):
            assert torch.equal(merge_splits(partial, lse, out_dtype=torch.float32), whole)


def test_partials_beyond_two_to_the_31_elements(device, tmp_path):
    partial = far_tensor((2, 1, 2, 64), torch.float32, tmp_path, device)
    partial.copy_(randn(2, 1, 2, 64))
    lse = torch.zeros(2, 1, 2, device=device)
    out = merge_splits(partial, lse, out_dtype=torch.float32)
    assert_close(out.cpu(), partial.cpu().mean(0), row_tol=1e-6)


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles")
def test_compiles_with_wide_strides():
    size = (16, 2, 8, 512)
    partial = torch.empty_strided(size, (FAR, 4096, 512, 1), dtype=torch.float32, device="meta")
    lse = torch.empty_strided(size[:3], (FAR, 8, 1), dtype=torch.float32, device="meta")
    with aot.capture_launches() as got:
        merge_splits(partial, lse, return_lse=True)
    assert len(got.launches) == 1
    assert got[0].check().ld128


def test_outputs_and_empty_batch(device, run):
    partial, lse = randn(2, 3, 2, 8, device=device), randn(2, 3, 2, device=device)
    out = torch.empty(3, 4, 8, dtype=torch.float16, device=device)[:, ::2]
    total = torch.empty(3, 2, device=device)
    got = run(
        merge_splits, partial, lse, out_dtype=torch.float16, return_lse=True, out=(out, total)
    )
    assert got[0] is out
    assert got[1] is total
    expected, joint = joined(partial.cpu(), lse.cpu(), None)
    assert_close(out.cpu().double(), expected, row_tol=2e-3)
    assert_close(total.cpu().double(), joint, atol=1e-5)
    none = run(merge_splits, partial[:, :0], lse[:, :0], launched=False)
    assert none.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lse": torch.zeros(2, 3, 3)}, r"lse is \(2, 3, 3\), expected \[n, T, H\] = \[2, 3, 2\]"),
        ({"sink": torch.zeros(3)}, r"sink is \(3,\), expected \[H\] = \[2\]"),
        ({"out": torch.zeros(3, 2, 9)}, r"out is \(3, 2, 9\)"),
    ],
)
def test_refusals(change, text):
    call = {"partial": torch.zeros(2, 3, 2, 8), "lse": torch.zeros(2, 3, 2)} | change
    with pytest.raises(ValueError, match=text):
        merge_splits(**call, out_dtype=torch.float32)
