"""Product and choice in one launch: bit for bit what `linear` and the two routers give.

Mutants run, each noticed: a split dropped or of the wrong stride, the first row of a run ignored,
only a tile's first rows chosen for, the higher id on ties, NaN as the smallest, negative scores in
the order of their bits, a taken expert left at minus infinity, bias in the weights, no scale, the
count off by one, table row of the position, ids of padded rows read, masks of experts or tokens one
wide, a counter that stays, steps of K by the number of rows.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend, scratch_bytes
from ftkernels.linear.linear import linear
from ftkernels.moe import gate
from ftkernels.moe.gate import (
    SPECS,
    gate_hash,
    gate_hash_reference,
    gate_topk,
    gate_topk_reference,
)  # fmt: skip
from ftkernels.moe.hash_router import route_hash
from ftkernels.moe.router import route_topk
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import aot, assert_close, count_launches, randn
from ftkernels.testing.sass import mma_kind

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_path = pytest.mark.parametrize("path", ["gemv", "gemm"])


def operands(t, e, c, dtypes=(BF16, BF16), device="cpu", seed=0):
    x = randn(t, c, dtype=dtypes[0], device=device, seed=seed)
    weight = randn(e, c, dtype=dtypes[1], device=device, scale=3 * c**-0.5, seed=seed + 1)
    return x, weight


def table_of(t, e, topk, device="cpu", vocab=40, seed=3):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(e, (vocab, topk), generator=generator, dtype=torch.int32)
    return torch.randint(vocab, (t,), generator=generator).to(device), table.to(device)


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def formula(x, weight, bias, topk, scale):
    """Section 9 of the model's specification in fp64."""
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T, threshold=50).sqrt()
    ids = (scores + bias.double()).sort(dim=-1, descending=True, stable=True)[1][:, :topk]
    chosen = scores.gather(1, ids)
    return (chosen / chosen.sum(1, keepdim=True) * scale).float(), ids.int()


@each_path
@pytest.mark.parametrize(("t", "e", "c"), [(1, 16, 64), (5, 19, 100), (33, 40, 72)], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, BF16)], ids=str)
def test_topk_matches_formula(t, e, c, dtypes, path, device, run):
    x, weight = operands(t, e, c, dtypes, device)
    bias = randn(e, device=device, seed=2) - 5.0
    weights, ids = run(gate_topk, x, weight, bias, topk=4, route_scale=2.5, path=path)
    expected = formula(x.cpu(), weight.cpu(), bias.cpu(), 4, 2.5)
    assert_close(ids.cpu(), expected[1])
    assert_close(weights.cpu(), expected[0], rtol=1e-5)


@each_path
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize(("t", "e", "c", "topk"), [(1, 16, 1024, 6), (9, 70, 300, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_topk_is_the_router_of_the_product(t, e, c, topk, score, biased, path, device, run):
    x, weight = operands(t, e, c, device=device)
    bias = randn(e, device=device, seed=2) if biased else None
    routes = run(
        gate_topk, x, weight, bias, topk=topk, route_scale=1.5, score=score, path=path
    )
    logits = linear(x, weight, out_dtype=FP32, path=path)
    expected = route_topk(logits, bias, topk=topk, route_scale=1.5, score=score)
    if score == "softmax":
        assert torch.equal(routes[1], expected[1])
        assert_close(routes[0], expected[0], rtol=1e-6)
    else:
        same(routes, expected)


@each_path
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid"])
@pytest.mark.parametrize(("t", "e", "c", "topk"), [(1, 16, 1024, 6), (9, 70, 300, 1)], ids=str)
def test_hash_is_the_router_of_the_product(t, e, c, topk, score, path, device, run):
    x, weight = operands(t, e, c, device=device)
    ids, table = table_of(t, e, topk, device)
    routes = run(gate_hash, x, weight, ids, table, route_scale=1.5, score=score, path=path)
    logits = linear(x, weight, out_dtype=FP32, path=path)
    same(routes, route_hash(logits, ids, table, route_scale=1.5, score=score))
    assert torch.equal(routes[1], table[ids])


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 9), e=st.integers(2, 24), c=st.integers(1, 150), seed=st.integers(0, 9),
    path=st.sampled_from(["gemv", "gemm"]), wide=st.booleans(), columns=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_a_row_does_not_depend_on_the_others(t, e, c, seed, path, wide, columns, data):
    x, weight = operands(t, e, c, (FP32, FP32) if wide else (BF16, BF16), seed=seed)
    weight = weight.t().contiguous().t() if columns else weight
    topk = data.draw(st.integers(1, min(e, 6)))
    bias = randn(e, seed=seed + 2)
    whole = gate_topk(x, weight, bias, topk=topk, path=path)
    same(whole, route_topk(linear(x, weight, out_dtype=FP32, path=path), bias, topk=topk))
    start = data.draw(st.integers(0, t - 1))
    cut = slice(start, data.draw(st.integers(start + 1, t)))
    if backend.interpreted():  # a BLAS keeps to one order for whole vectors only
        part = gate_topk(x[cut].clone(), weight, bias, topk=topk, path=path)
        same(part, [r[cut] for r in whole])


@each_path
def test_ties_and_nan(path, device, run):
    """Equal rows of the weight: the lower id first; NaN counts as the largest score."""
    x, weight = operands(9, 24, 100, device=device)
    weight[5], weight[17], weight[20:] = weight[2], weight[2], weight[11]
    _, ids = run(gate_topk, x, weight, None, topk=24, path=path)
    place = ids.argsort(dim=1)
    for first, *others in ((2, 5, 17), (11, 20, 21, 22, 23)):
        for step, other in enumerate(others, 1):
            assert torch.equal(place[:, other], place[:, first] + step)
    weight[13, 7] = float("nan")
    weights, ids = run(gate_topk, x, weight, None, topk=3, path=path)
    assert (ids[:, 0] == 13).all()
    assert weights.isnan().all()
    zeros = torch.zeros(2, 24, device=device)
    bias = torch.full((24,), -math.inf, device=device)
    bias[4] = 0.0
    _, ids = run(gate_topk, zeros, torch.zeros(24, 24, device=device), bias, topk=24, path=path)
    assert ids.tolist() == [[4, *(e for e in range(24) if e != 4)]] * 2


@each_path
@pytest.mark.parametrize("used", [0, 2, 9])
def test_rows_past_num_tokens_are_skipped(used, path, device, run):
    x, weight = operands(9, 16, 64, device=device)
    ids, table = table_of(9, 16, 4, device)
    count = torch.tensor([used], dtype=torch.int32, device=device)
    whole = gate_topk(x, weight, None, topk=4, path=path), gate_hash(
        x, weight, ids, table, path=path
    )
    x[used:] = float("nan")
    ids[used:] = 1 << 40
    got = (
        run(gate_topk, x, weight, None, topk=4, num_tokens=count, path=path),
        run(gate_hash, x, weight, ids, table, num_tokens=count, path=path),
    )
    for mine, theirs in zip(got, whole, strict=True):
        same([r[:used] for r in mine], [r[:used] for r in theirs])
        assert (mine[0][used:] == 0).all()
        assert (mine[1][used:] == -1).all()


@each_path
def test_strided_rows_and_out(path, device, run):
    x, weight = operands(6, 40, 200, device=device)
    nan = torch.full((6, 300), float("nan"), dtype=BF16, device=device)
    nan[::2, 50:250] = x[:3]
    out = (
        torch.full((3, 8), 7.0, device=device)[:, :4],
        torch.full((3, 9), 7, dtype=torch.int32, device=device)[:, 5:],
    )
    result = run(gate_topk, nan[::2, 50:250], weight, None, topk=4, path=path, out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    same([r.contiguous() for r in out], gate_topk(x[:3], weight, None, topk=4, path=path))
    assert (out[0]._base[:, 4:] == 7).all()
    assert (out[1]._base[:, :5] == 7).all()


def test_many_rows_go_in_several_launches(device, lane, monkeypatch):
    monkeypatch.setattr(gate, "MAX_ROWS", 16)
    x, weight = operands(20, 8, 512, device=device)
    ids, table = table_of(20, 8, 2, device)
    with count_launches() as launches:
        routes = gate_hash(x, weight, ids, table, path="gemv")
    assert len(launches) == (0 if lane == "reference" else 2)
    logits = linear(x, weight, out_dtype=FP32, path="gemv")
    same(routes, route_hash(logits, ids, table))


@each_path
@pytest.mark.parametrize("op", [gate_topk, gate_hash])
def test_scratch_is_left_as_it_was_found(op, path, device, run):
    t, e, c = 11, 20, 1100
    x, weight = operands(t, e, c, device=device)
    more = (None,) if op is gate_topk else table_of(t, e, 3, device)
    kwargs = {"topk": 3} if op is gate_topk else {}
    size = scratch_bytes(op.__name__, T=t, E=e, C=c)
    scratch = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    scratch[:COUNTER_BYTES] = 0
    first = run(op, x, weight, *more, path=path, scratch=scratch, **kwargs)
    assert not scratch[:COUNTER_BYTES].any()
    scratch[COUNTER_BYTES:] = 0xFF
    again = run(op, x, weight, *more, path=path, scratch=scratch, **kwargs)
    same(first, again)
    same(first, op(x, weight, *more, path=path, **kwargs))
    text = rf"{op.__name__}: scratch is {size - 16} bytes, expected at least {size}"
    with pytest.raises(ValueError, match=text):
        op(x, weight, *more, scratch=scratch[:-16], **kwargs)
    out = scratch[-t * 12 :].view(FP32).view(t, 3), torch.empty(t, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="scratch is overlapping topk_weights"):
        op(x, weight, *more, scratch=scratch, out=out, **kwargs)


def test_empty(device, run):
    x, weight = operands(3, 5, 8, device=device)
    ids, table = table_of(3, 5, 2, device)
    for path in (None, "gemv", "gemm"):
        none = run(gate_topk, x[:0], weight, None, topk=2, path=path, launched=False)
        assert none[0].shape == none[1].shape == (0, 2)
        run(gate_hash, x[:0], weight, ids[:0], table, path=path, launched=False)
        none = run(gate_hash, x, weight, ids, table[:, :0], path=path, launched=False)
        assert none[1].shape == (3, 0)
        _, first = run(gate_topk, x[:, :0], weight[:, :0], None, topk=2, path=path)
        assert first.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"x": [1]}, TypeError, "x is list, expected a tensor"),
        ({"x": torch.zeros(8)}, ValueError, r"x is \(8,\), expected \[T, K\]"),
        ({"weight": torch.zeros(6, 8).half()}, TypeError, "weight is float16"),
        ({"weight": torch.zeros(6, 9)}, ValueError, r"weight is \(6, 9\)"),
        ({"path": "split"}, ValueError, "path is 'split'"),
        ({"score": "tanh"}, ValueError, "score is 'tanh', expected one of"),
        ({"num_tokens": torch.zeros(1)}, TypeError, "num_tokens is float32"),
        ({"topk": 0}, ValueError, "topk is 0, expected 1 to 6"),
        ({"topk": 7}, ValueError, "topk is 7, expected 1 to 6"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias is \(5,\), expected \[E\]"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, r"token_ids is \(3,\)"),
        ({"token_ids": torch.zeros(2)}, TypeError, "token_ids is float32"),
        ({"tid2eid": torch.zeros(9, 3)}, TypeError, "tid2eid is float32"),
        ({"out": (torch.zeros(2, 3), torch.zeros(2, 3))}, TypeError, "topk_ids is float32"),
        ({"out": (torch.zeros(2, 4), torch.zeros(2, 4))}, ValueError, r"topk_weights is \(2, 4\)"),
        ({"x": torch.empty((1 << 20) + 1, 8, device="meta")}, ValueError, "at most 1048576 rows"),
    ],
)
def test_refusals(change, kind, text):
    base = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}
    topk = {**base, "bias": None, "topk": 3}
    hashed = {
        **base, "token_ids": torch.zeros(2, dtype=torch.int64),
        "tid2eid": torch.zeros(9, 3, dtype=torch.int32),
    }  # fmt: skip
    if isinstance(change.get("x"), torch.Tensor):
        topk["weight"] = hashed["weight"] = base["weight"].to(change["x"].device)
    tried = 0
    for ops, arguments in (
        ((gate_topk, gate_topk_reference), topk), ((gate_hash, gate_hash_reference), hashed)
    ):  # fmt: skip
        if not set(change) <= {*arguments, "path", "score", "num_tokens", "out"}:
            continue
        for op in ops:
            with pytest.raises(kind, match=f"{ops[0].__name__}: {text}|{text}"):
                op(**{**arguments, **change})
            tried += 1
    assert tried


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles need another process")
@pytest.mark.parametrize(
    ("spec", "case"),
    [pytest.param(s, c, id=f"{s.name}-{c['name']}") for s in SPECS for c in s.cases],
)
def test_one_launch_and_nothing_else(spec, case):
    args, kwargs = spec.inputs(case, device="meta")
    size = (case["T"], case["topk"])
    kwargs["out"] = (
        torch.empty(size, device="meta"), torch.empty(size, dtype=torch.int32, device="meta")
    )  # fmt: skip
    num_bytes = scratch_bytes(spec.name, T=case["T"], E=case["E"], C=case["C"])
    kwargs["scratch"] = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    with aot.capture_launches(arch=89) as got:
        spec.op(*args, **kwargs)
    assert len(got.launches) == 1
    assert got.torch_ops == []
    assert mma_kind(got[0].sass) == (None if case.get("fp32") else "HMMA.16816.F32.BF16")
    assert got[0].spill_bytes == 0
