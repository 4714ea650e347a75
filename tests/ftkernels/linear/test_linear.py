"""fp32 products against fp64: within 1e-6 of ``sum |a||b|``, whatever the operands' types.

Mutants run, each noticed: operands rounded to TF32 or to bf16, a split or a mask of K dropped,
slices that overlap, splits or steps of K by the number of rows, sums kept in bf16, a rounding
twice, a counter that stays or is one off, the stride of a column or of the result ignored, columns
past the weight stored, the pinned path ignored, a run of 256 rows one short.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend, scratch_bytes
from ftkernels.linear import products
from ftkernels.linear.linear import SPEC, linear, linear_reference
from ftkernels.linear.products import Pieces
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import aot, count_launches, nan_poison, randn
from ftkernels.testing.sass import mma_kind, opcodes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP32, BF16), (FP16, BF16), (FP16, FP32)]
each_path = pytest.mark.parametrize("path", ["gemv", "gemm"])
offline = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


def operands(t, n, k, dtypes=(BF16, BF16), device="cpu", seed=0):
    x = randn(t, k, dtype=dtypes[0], device=device, seed=seed)
    return x, randn(n, k, dtype=dtypes[1], device=device, seed=seed + 1)


def assert_product(out, x, weight, tol=1e-6):
    a, b = x.cpu().double(), weight.cpu().double()
    error = (out.cpu().double() - a @ b.T).abs()
    bound = tol * (a.abs() @ b.abs().T)
    assert (error <= bound).all(), f"error {(error / bound.clamp_min(1e-300)).max() * tol:.3g}"


@each_path
@pytest.mark.parametrize(
    ("t", "n", "k"), [(1, 7, 100), (3, 7, 100), (65, 33, 100), (2, 40, 1), (5, 70, 520)], ids=str
)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_is_the_fp32_product(t, n, k, dtypes, path, device, run):
    x, weight = operands(t, n, k, dtypes, device)
    out = run(linear, x, weight, out_dtype=FP32, path=path)
    assert_product(out, x, weight)
    columns = weight.t().contiguous().t()
    assert torch.equal(run(linear, x, columns, out_dtype=FP32, path=path), out) or (
        not backend.interpreted() and device == "cpu"  # a BLAS has an order for each layout
    )


@pytest.mark.parametrize(("t", "n", "k"), [(2, 64, 2048), (9, 33, 1536)], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32)], ids=str)
def test_split_sums(t, n, k, dtypes, device, run):
    assert Pieces.of(n, k).splits > 1
    x, weight = operands(t, n, k, dtypes, device)
    assert_product(run(linear, x, weight, out_dtype=FP32, path="gemv"), x, weight)


def test_rows_that_fill_a_card_are_not_split(device, run):
    x, weight = operands(3, 16400, 64, device=device)
    assert Pieces.of(16400, 64) == Pieces(1, 1, 64)
    x = x[:1] if backend.interpreted() else x
    assert_product(run(linear, x, weight[-200:], out_dtype=FP32), x, weight[-200:])
    assert Pieces.of(129280, 4096).splits == 1


def test_tall_weight(device, run, monkeypatch):
    """As the head does it: whole rows of a tall weight, few tokens."""
    monkeypatch.setattr(products, "_TALL", 100)
    for dtypes in PAIRS[:3]:
        x, weight = operands(9, 150, 200, dtypes, device)
        assert_product(run(linear, x, weight, out_dtype=FP32, path="gemv"), x, weight)


@each_path
def test_products_of_bf16_values_are_exact(path, device, run):
    x, weight = operands(9, 20, 1, device=device)
    exact = (x.double() @ weight.double().T).float()
    assert torch.equal(run(linear, x, weight, out_dtype=FP32, path=path), exact)
    # a sum whose large terms cancel leaves the small ones
    x = torch.tensor([[2.0**30, 2.0**-9, -(2.0**30)]], dtype=BF16, device=device)
    ones = torch.ones(17, 3, dtype=BF16, device=device)
    small = run(linear, x[:, 1:2], ones[:, :1], out_dtype=FP32, path=path)
    assert (small == 2.0**-9).all()


@each_path
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32)], ids=str)
def test_extreme_values(dtypes, path, device, run):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [[3e38, 1.0, 0.0], [1e-38, 1e-38, 0.0], [inf, 0.0, 1.0], [nan, 0.0, 0.0], [0.0, -1.0, 2.0]],
        dtype=dtypes[0], device=device,
    )  # fmt: skip
    weight = torch.tensor(
        [[1.0, 1.0, 1.0], [1e-30, -2.0, 3.0], [-1.0, 0.5, 0.0]], dtype=dtypes[1], device=device
    )
    out = run(linear, x, weight, out_dtype=FP32, path=path).cpu().double()
    expected = x.cpu().double() @ weight.cpu().double().T
    assert torch.equal(out.isnan(), expected.isnan())
    kept = ~expected.isnan()
    torch.testing.assert_close(out[kept], expected[kept], rtol=1e-6, atol=1e-43)


@each_path
def test_reads_and_writes_nothing_else(path, device, run):
    """Slices of poisoned memory in, a slice of a marked buffer out."""
    nan = float("nan")
    x = torch.full((9, 90), nan, dtype=BF16, device=device)
    weight = torch.full((40, 130), nan, dtype=BF16, device=device)
    x[1:8:2, 5:77] = randn(4, 72, device=device).to(BF16)
    weight[3:37, 11:83] = randn(34, 72, device=device, seed=1).to(BF16)
    buffer = torch.full((9, 60), 7.0, device=device)
    rows, matrix, out = x[1:8:2, 5:77], weight[3:37, 11:83], buffer[1:9:2, 6:40]
    assert run(linear, rows, matrix, out=out, out_dtype=FP32, path=path) is out
    assert_product(out, rows, matrix)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


@each_path
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_one_rounding_to_the_result(dtype, path, device, run):
    x, weight = operands(5, 30, 70, device=device)
    wide = run(linear, x, weight, out_dtype=FP32, path=path)
    out = run(linear, x, weight, out_dtype=dtype, path=path)
    assert torch.equal(out, wide.to(dtype))
    assert run(linear, x, weight, path=path).dtype == BF16


@each_path
@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 300), pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 9), data=st.data(),
)  # fmt: skip
def test_a_row_does_not_depend_on_the_others(path, t, n, k, pair, seed, data):
    x, weight = operands(t, n, k, pair, seed=seed)
    whole = linear(x, weight, out_dtype=FP32, path=path)
    assert_product(whole, x, weight)
    start = data.draw(st.integers(0, t - 1))
    cut = slice(start, data.draw(st.integers(start + 1, t)))
    with nan_poison():
        part = linear(x[cut].clone(), weight, out_dtype=FP32, path=path)
    if backend.interpreted():  # a BLAS keeps to one order for whole vectors only
        assert torch.equal(part, whole[cut])


@each_path
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bits_of_a_row_in_every_tile(dtype, path, device, run):
    """Any number of rows: a block of 8 to 128 of them gives the same bits."""
    x, weight = operands(150, 24, 512, (dtype, dtype), device)
    whole = run(linear, x, weight, out_dtype=FP32, path=path)
    for start, stop in ((0, 1), (149, 150), (7, 16), (60, 77), (3, 36), (11, 76)):
        part = run(linear, x[start:stop], weight, out_dtype=FP32, path=path)
        assert torch.equal(part, whole[start:stop]), (start, stop)


def test_without_a_path_few_rows_are_split(device, run):
    x, weight = operands(65, 20, 512, device=device)
    for rows, path in ((1, "gemv"), (64, "gemv"), (65, "gemm")):
        pinned = linear(x[:rows], weight, out_dtype=FP32, path=path)
        if backend.interpreted() or device != "cpu":
            assert torch.equal(run(linear, x[:rows], weight, out_dtype=FP32), pinned)


def test_many_rows_go_in_several_launches(device, lane):
    x, weight = operands(300, 16, 512, device=device)
    with count_launches() as launches:
        out = linear(x, weight, out_dtype=FP32, path="gemv")
    assert_product(out, x, weight)
    assert len(launches) == (0 if lane == "reference" else 2)
    assert torch.equal(out[255:], linear(x[255:], weight, out_dtype=FP32, path="gemv"))


def test_scratch_is_left_as_it_was_found(device, run):
    x, weight = operands(11, 40, 2048, device=device)
    assert Pieces.of(40, 2048).splits > 1
    size = scratch_bytes("linear", T=11, N=40, K=2048)
    scratch = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    scratch[:COUNTER_BYTES] = 0
    first = run(linear, x, weight, out_dtype=FP32, path="gemv", scratch=scratch)
    assert not scratch[:COUNTER_BYTES].any()
    scratch[COUNTER_BYTES:] = 0xFF
    again = run(linear, x, weight, out_dtype=FP32, path="gemv", scratch=scratch)
    assert torch.equal(first, again)
    assert_product(first, x, weight)
    with pytest.raises(ValueError, match=rf"linear: scratch is {size - 16} bytes, expected at"):
        linear(x, weight, path="gemv", scratch=scratch[:-16])
    out = scratch[COUNTER_BYTES:][: 11 * 40 * 4].view(FP32).view(11, 40)
    with pytest.raises(ValueError, match="scratch is overlapping out"):
        linear(x, weight, out_dtype=FP32, out=out, path="gemv", scratch=scratch)


def test_empty(device, run):
    x, weight = operands(3, 5, 8, device=device)
    for path in (None, "gemv", "gemm"):
        none = run(linear, x[:0], weight, path=path, launched=False)
        assert none.shape == (0, 5)
        assert run(linear, x, weight[:0], path=path, launched=False).shape == (3, 0)
        assert (run(linear, x[:, :0], weight[:, :0], path=path) == 0).all()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"x": [1]}, TypeError, "x is list, expected a tensor"),
        ({"x": torch.zeros(2, 8).double()}, TypeError, "x is float64"),
        ({"x": torch.zeros(8)}, ValueError, r"x is \(8,\), expected \[T, K\]"),
        ({"x": torch.zeros(8, 2).t()}, ValueError, "contiguous last dimension"),
        ({"weight": torch.zeros(4, 8).half()}, TypeError, "weight is float16"),
        ({"weight": torch.zeros(4, 9)}, ValueError, r"weight is \(4, 9\), expected \[N, K\]"),
        ({"weight": torch.zeros(8, 16)[::2, ::2]}, ValueError, "contiguous last dimension"),
        ({"weight": torch.zeros(4, 8, device="meta")}, ValueError, "weight is on meta"),
        ({"path": "split"}, ValueError, "path is 'split', expected None, 'gemm' or 'gemv'"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
        ({"out": torch.zeros(2, 5)}, ValueError, r"out is \(2, 5\)"),
        ({"out": torch.zeros(2, 4).half()}, TypeError, "out is float16"),
    ],
)
def test_refusals(change, kind, text):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), **change}
    for op in (linear, linear_reference):
        with pytest.raises(kind, match=f"linear: .*{text}|{text}"):
            op(**arguments)


def captured(case):
    args, kwargs = SPEC.inputs(case, device="meta")
    kwargs["out"] = torch.empty(case["T"], case["N"], device="meta")
    size = scratch_bytes("linear", T=case["T"], N=case["N"], K=case["K"])
    kwargs["scratch"] = torch.empty(size, dtype=torch.uint8, device="meta")
    with aot.capture_launches(arch=89) as got:
        linear(*args, **kwargs)
    return got


@offline
@pytest.mark.parametrize(
    "case", [c for c in SPEC.cases if "small" not in c["name"]], ids=lambda c: c["name"]
)
def test_one_launch_with_wide_asynchronous_copies(case):
    got = captured(case)
    assert len(got.launches) == 1
    assert got.torch_ops == []
    (report,) = got
    codes = opcodes(report.sass)
    assert mma_kind(report.sass) == (None if case.get("fp32") else "HMMA.16816.F32.BF16")
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in codes)
    assert not any(re.match(r"LDG\.E\.[SU](8|16)\b", op) for op in codes)
    assert report.spill_bytes == 0
