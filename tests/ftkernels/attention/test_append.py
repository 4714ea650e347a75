"""``append_kv`` leaves in both pools and the state what ``store_kv`` and ``compress_kv`` leave, bit
for bit; those have tests of their own against fp64.

Mutants run, each noticed: the store's token number not counted from its first block, one program of
the compressor fewer, the window's slots for both pools, window rows without their norm, rows that
are not round-tripped, the compressor's blocks left out, snapshots left out.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.attention.append import append_kv, append_kv_reference
from ftkernels.attention.compressor import compress_kv, compressor_state_shape
from ftkernels.attention.kv_store import store_kv
from ftkernels.attention.pools import empty_pool
from ftkernels.testing import randn


def inputs(news, lengths, ratio, device, *, dim=64, width=64, rope=16, kv_format="bf16", seed=0):
    """Tokens of sequences with one padded token and one padded sequence more."""
    total, sequences = sum(news) + 1, len(news) + 1
    wide = width * (2 if ratio == 4 else 1)
    kv, gate = (randn(total, wide, device=device, seed=seed + i) for i in range(2))
    pages = max(1, -(-max(lengths) // 128))
    made = {"kv_format": kv_format, "device": device, "dtype": torch.bfloat16}
    if kv_format == "fp8":
        del made["dtype"]
    window = empty_pool(sequences * pages, 128, dim, **made).zero_()
    pool = empty_pool(sequences * pages, 128 // ratio, width, **made).zero_()
    positions = [p for new, length in zip(news, lengths, strict=True)
                 for p in range(length - new, length)]  # fmt: skip
    slots = [
        128 * pages * s + p
        for s, (new, length) in enumerate(zip(news, lengths, strict=True))
        for p in range(length - new, length)
    ]
    angles = randn(max(lengths), rope // 2, device=device, seed=seed + 2)
    bounds = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist(), sum(news)])
    args = (
        randn(total, dim, dtype=torch.bfloat16, device=device, seed=seed + 3, scale=3.0), window,
        torch.tensor([*slots, -1], device=device), kv, gate,
        randn(ratio, wide, device=device, seed=seed + 4),
        randn(width, device=device, seed=seed + 5),
        randn(sequences, *compressor_state_shape(ratio, width), device=device, seed=seed + 6).abs(),
        torch.arange(sequences, dtype=torch.int32, device=device).flip(0),
        pool,
        torch.arange(sequences * pages, dtype=torch.int32, device=device).view(sequences, pages),
        bounds.to(device, torch.int32), torch.tensor([*lengths, 0], device=device).int(),
    )  # fmt: skip
    kwargs = {
        "compress_ratio": ratio, "row_norm_weight": randn(dim, device=device, seed=seed + 7),
        "positions": torch.tensor([*positions, 0], device=device), "cos": angles.cos(),
        "sin": angles.sin(), "kv_format": kv_format, "eps": 1e-3,
    }  # fmt: skip
    return args, kwargs


def one_by_one(args, kwargs):
    """Pools and state after the two ops."""
    row, window, slots, kv, gate, ape, weight, state, index, pool, table, bounds, lens = args
    window, state, pool = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for x in (window, state, pool)
    )
    common = {name: kwargs[name] for name in ("cos", "sin", "eps", "kv_format")}
    round_trip = kwargs.get("round_trip", True)
    store_kv(
        row, window, slots, rope_dim=2 * kwargs["cos"].shape[1], round_trip=round_trip,
        norm_weight=kwargs["row_norm_weight"], positions=kwargs["positions"], **common,
    )  # fmt: skip
    compress_kv(
        kv, gate, ape, weight, state, index, pool, table, bounds, lens,
        compress_ratio=kwargs["compress_ratio"], store="kv" if round_trip else "raw", **common,
    )  # fmt: skip
    return window, state, pool


def same_bits(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("round_trip", [True, False])
@pytest.mark.parametrize(
    ("news", "lengths"), [([1, 1, 1], [4, 128, 131]), ([1], [1]), ([6, 1, 3], [130, 8, 3])]
)
def test_leaves_what_the_two_ops_leave(ratio, round_trip, news, lengths, device, run):
    args, kwargs = inputs(news, lengths, ratio, device)
    kwargs["round_trip"] = round_trip
    expected = one_by_one(args, kwargs)
    changed = [not torch.equal(a, b) for a, b in zip((args[1], args[7]), expected, strict=False)]
    assert changed == [True, True]
    assert run(append_kv, *args, **kwargs) is None
    same_bits((args[1], args[7], args[9]), expected)


@pytest.mark.parametrize(
    ("news", "lengths"), [([1, 1, 1], [4, 128, 131]), ([6, 1, 3], [130, 256, 128]), ([30], [270])]
)
def test_keeps_the_snapshots_that_compress_kv_keeps(news, lengths, device, run):
    args, kwargs = inputs(news, lengths, 4, device)
    pages = args[10].shape[1]
    table = torch.arange((len(news) + 1) * pages, dtype=torch.int32, device=device).flip(0)
    table = table.view(-1, pages)
    kept = torch.full((table.numel(), 2, 4, 64), -1.0, device=device)
    common = {name: kwargs[name] for name in ("compress_ratio", "cos", "sin", "eps", "kv_format")}
    expected = kept.clone()
    compress_kv(*(x.clone() for x in args[3:]), **common, carry_snapshots=expected,
                snapshot_table=table)  # fmt: skip
    assert (expected != -1).any(), "a page is filled"
    pools = one_by_one(args, kwargs)
    run(append_kv, *args, **kwargs, carry_snapshots=kept, snapshot_table=table)
    same_bits((args[1], args[7], args[9], kept), (*pools, expected))


@pytest.mark.parametrize("ratio", [4, 128])
def test_packed_pools(ratio, device, run):
    args, kwargs = inputs([1, 2], [128, 5], ratio, device, dim=512, width=512, rope=64,
                          kv_format="fp8")  # fmt: skip
    expected = one_by_one(args, kwargs)
    run(append_kv, *args, **kwargs)
    same_bits((args[1], args[7], args[9]), expected)


@pytest.mark.parametrize("ratio", [4, 128])
def test_without_a_padded_row(ratio, device, run):
    """No program is to spare."""
    args, kwargs = inputs([1, 1, 1], [4, 128, 256], ratio, device)
    places = (0, 2, 3, 4, 8, 10, 11, 12)
    args = tuple(x[:-1] if place in places else x for place, x in enumerate(args))
    kwargs["positions"] = kwargs["positions"][:-1]
    expected = one_by_one(args, kwargs)
    run(append_kv, *args, **kwargs)
    same_bits((args[1], args[7], args[9]), expected)


def test_skipped_tokens_and_sequences_are_not_read(device, run):
    args, kwargs = inputs([1, 1], [128, 4], 4, device)
    args[2][0] = -1
    args[8][1] = -1
    args[0][0], args[0][-1] = float("nan"), float("nan")
    args[3][1], args[3][-1] = float("nan"), float("nan")
    expected = one_by_one(args, kwargs)
    run(append_kv, *args, **kwargs)
    same_bits((args[1], args[7], args[9]), expected)
    assert args[1].isfinite().all()
    assert args[9].isfinite().all()


def test_strided_tensors(device, run):
    args, kwargs = inputs([2, 1], [129, 4], 4, device)
    row, window, slots, kv, gate, *rest = args
    together = torch.cat((kv, gate), 1)
    row = torch.cat((row, row), 1)[:, 64:]
    args = (row, window, slots, together[:, :128], together[:, 128:], *rest)
    expected = one_by_one(args, kwargs)
    run(append_kv, *args, **kwargs)
    same_bits((args[1], args[7], args[9]), expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_batches(data):
    ratio = data.draw(st.sampled_from([4, 128]))
    news = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    lengths = [new + data.draw(st.integers(0, 260)) for new in news]
    args, kwargs = inputs(news, lengths, ratio, "cpu", seed=data.draw(st.integers(0, 99)))
    expected = one_by_one(args, kwargs)
    append_kv(*args, **kwargs)
    same_bits((args[1], args[7], args[9]), expected)


def test_empty_launches_nothing(device, run):
    args, kwargs = inputs([1], [4], 4, device)
    row, window, slots, kv, gate, *rest = args
    kwargs["positions"] = kwargs["positions"][:0]
    run(append_kv, row[:0], window, slots[:0], kv[:0], gate[:0], *rest, launched=False, **kwargs)
    assert not window.any()


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (0, torch.zeros(3, 64), ValueError, r"append_kv: row is \(3, 64\), expected \[T, D\]"),
        (0, torch.zeros(2, 64).double(), TypeError, "append_kv: row is float64"),
        (1, torch.zeros(2, 128, 60), ValueError, "append_kv: window_kv is"),
        (3, torch.zeros(2, 128).half(), TypeError, "append_kv: kv is float16"),
        (7, torch.zeros(2, 3, 64), ValueError, "append_kv: state is"),
        (9, torch.zeros(2, 32, 60), ValueError, "append_kv: cmp_kv is"),
        ("carry_snapshots", torch.zeros(2, 2, 4, 64), TypeError,
         "append_kv: snapshot_table is None, expected a tensor"),
        ("compress_ratio", 8, ValueError, "append_kv: compress_ratio is 8, expected 4 or 128"),
        ("row_norm_weight", torch.zeros(3), ValueError, "append_kv: row_norm_weight is"),
        ("positions", None, TypeError, "append_kv: positions is NoneType, expected a tensor"),
        ("eps", -1.0, ValueError, "append_kv: eps is -1.0, expected >= 0"),
        ("kv_format", "fp4", ValueError, "append_kv: "),
    ],
)  # fmt: skip
def test_refusals(place, value, kind, text):
    args, kwargs = inputs([1], [4], 4, "cpu")
    args = list(args)
    if isinstance(place, int):
        args[place] = value
        if place == 0 and value.shape[0] == 3:
            args[2], kwargs["positions"] = torch.zeros(3).long(), torch.zeros(3).long()
    else:
        kwargs[place] = value
    for op in (append_kv, append_kv_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


def test_refuses_memory_that_is_shared():
    args, kwargs = inputs([1], [4], 128, "cpu")
    args = list(args)
    args[9] = args[1].view(-1)[: args[9].numel()].view(args[9].shape)
    with pytest.raises(ValueError, match="append_kv: window_kv is overlapping cmp_kv in memory"):
        append_kv(*args, **kwargs)
