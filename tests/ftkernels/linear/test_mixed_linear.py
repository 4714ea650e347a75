"""Two products in one launch: each bit for bit that of its own op, and near the fp64 product.

Mutants run, each noticed: counters or sums of both in one place, tiles of either in another order,
blocks not told apart or one short, the first 64 rows for all, rows always quantized, their scales
left out, the other matrix by quantized rows, the path unpinned, a counter for several tiles of
either, scratch without room for both.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend, scratch_bytes
from ftkernels.linear.fp8_linear import fp8_linear
from ftkernels.linear.linear import linear
from ftkernels.linear.mixed_linear import SPEC, mixed_linear, mixed_linear_reference
from ftkernels.quant.act_quant import quantize_fp8
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import aot, count_launches, randn
from ftkernels.testing.sass import opcodes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_path = pytest.mark.parametrize("path", ["gemv", "gemm"])


def operands(t, n, n2, k, dtype=BF16, device="cpu", seed=0):
    x = randn(t, k, dtype=dtype, device=device, scale=2.0, seed=seed)
    weight = randn(n, k, device=device, seed=seed + 1).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(seed)
    blocks = (-(-n // 128), -(-k // 128))
    scale = torch.randint(117, 130, blocks, generator=generator, dtype=torch.uint8).to(device)
    dense = randn(n2, k, dtype=BF16 if dtype == FP16 else dtype, device=device, seed=seed + 2)
    return x, weight, scale, dense


def apart(x, weight, scale, dense, path, x_fp8=None, x_scale=None, **kwargs):
    rows = x if x_fp8 is None else (x_fp8, x_scale)
    dtype = kwargs.pop("out_dtype", BF16)
    first = fp8_linear(rows, weight, scale, path=path, out_dtype=dtype, **kwargs)
    return first, linear(x, dense, out_dtype=FP32, path=path)


def same(mine, theirs):
    assert len(mine) == len(theirs) == 2
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@each_path
@pytest.mark.parametrize(
    ("t", "n", "n2", "k"), [(1, 130, 40, 200), (9, 33, 70, 600), (20, 200, 17, 1024)], ids=str
)
@pytest.mark.parametrize("form", ["quantized", "dense", "bf16", "fp16", "fp32"])
def test_each_product_is_its_own_ops(t, n, n2, k, form, path, device, run):
    dtype = {"fp16": FP16, "fp32": FP32}.get(form, BF16)
    x, weight, scale, dense = operands(t, n, n2, k, dtype, device)
    kwargs = {"out_dtype": FP32}
    if form == "quantized":
        kwargs["x_fp8"], kwargs["x_scale"] = quantize_fp8(x)
    elif form != "dense":
        kwargs["activation"] = "bf16"
    got = run(mixed_linear, x, weight, scale, dense, path=path, **kwargs)
    same(got, apart(x, weight, scale, dense, path, **kwargs))
    factor = (2.0 ** (scale.cpu().double() - 127)).repeat_interleave(128, 0)
    matrix = weight.cpu().double() * factor.repeat_interleave(128, 1)[:n, :k]
    rows = x.cpu().double()
    exact = rows @ dense.cpu().double().T
    bound = 1e-6 * (rows.abs() @ dense.cpu().double().abs().T)
    assert ((got[1].cpu().double() - exact).abs() <= bound).all()
    if form in ("bf16", "fp16", "fp32"):
        bound = 1e-6 * (rows.abs() @ matrix.abs().T)
        assert ((got[0].cpu().double() - rows @ matrix.T).abs() <= bound).all()
    if form == "dense":
        x_fp8, x_scale = quantize_fp8(x)
        same(got, mixed_linear(
            x, weight, scale, dense, path=path, x_fp8=x_fp8, x_scale=x_scale, out_dtype=FP32
        ))  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 20), n=st.integers(1, 150), n2=st.integers(1, 40), k=st.integers(1, 700),
    path=st.sampled_from(["gemv", "gemm"]), seed=st.integers(0, 9), data=st.data(),
)  # fmt: skip
def test_any_size_and_any_batch(t, n, n2, k, path, seed, data):
    x, weight, scale, dense = operands(t, n, n2, k, seed=seed)
    if data.draw(st.booleans()):
        dense = dense.t().contiguous().t()
    whole = mixed_linear(x, weight, scale, dense, path=path)
    same(whole, apart(x, weight, scale, dense, path))
    start = data.draw(st.integers(0, t - 1))
    cut = slice(start, data.draw(st.integers(start + 1, t)))
    if backend.interpreted():  # a BLAS keeps to one order for whole vectors only
        same(mixed_linear(x[cut].clone(), weight, scale, dense, path=path), [r[cut] for r in whole])


def test_many_rows_go_in_several_launches(device, lane):
    x, weight, scale, dense = operands(70, 40, 20, 600, device=device)
    with count_launches() as launches:
        got = mixed_linear(x, weight, scale, dense, path="gemv")
    assert len(launches) == (0 if lane == "reference" else 2)
    same(got, apart(x, weight, scale, dense, "gemv"))


@each_path
def test_strided_rows_and_out(path, device, run):
    x, weight, scale, dense = operands(3, 50, 20, 300, device=device)
    wide = torch.full((6, 400), float("nan"), dtype=BF16, device=device)
    wide[::2, 20:320] = x
    out = (
        torch.full((3, 80), 7.0, dtype=BF16, device=device)[:, 8:58],
        torch.full((6, 30), 7.0, device=device)[::2, :20],
    )
    got = run(mixed_linear, wide[::2, 20:320], weight, scale, dense, path=path, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    same([r.contiguous() for r in out], mixed_linear(x, weight, scale, dense, path=path))
    for r in out:
        base = r._base
        r.fill_(7.0)
        assert (base == 7.0).all()


@each_path
def test_scratch_is_left_as_it_was_found(path, device, run):
    t, n, n2, k = 11, 150, 40, 1500
    x, weight, scale, dense = operands(t, n, n2, k, device=device)
    size = scratch_bytes("mixed_linear", T=t, N=n, N2=n2, K=k)
    scratch = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    scratch[:COUNTER_BYTES] = 0
    expected = apart(x, weight, scale, dense, path)
    for _ in range(2):
        same(run(mixed_linear, x, weight, scale, dense, path=path, scratch=scratch), expected)
        assert not scratch[:COUNTER_BYTES].any()
        scratch[COUNTER_BYTES:] = 0xFF
    with pytest.raises(ValueError, match="mixed_linear: scratch is 65536 bytes, expected at least"):
        mixed_linear(x, weight, scale, dense, path=path, scratch=scratch[:COUNTER_BYTES])


def test_the_two_products_share_no_scratch(monkeypatch):
    """Blocks of both kinds run at the same time: counters and sums of their own, within bounds."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **_: calls.append(args)

    module = sys.modules[mixed_linear.__module__]
    monkeypatch.setattr(module, "_mixed_gemv_kernel", Kernel())
    monkeypatch.setattr(module.backend, "use_reference", lambda x: False)
    for t, n, n2, k in ((1, 130, 40, 600), (64, 1536, 1024, 4096), (7, 33, 17, 1030)):
        x, weight, scale, dense = operands(t, n, n2, k)
        size = scratch_bytes("mixed_linear", T=t, N=n, N2=n2, K=k)
        scratch = torch.zeros(size, dtype=torch.uint8)
        base = scratch.data_ptr()
        calls.clear()
        mixed_linear(x, weight, scale, dense, scratch=scratch)
        inside = [
            (a.data_ptr() - base, a) for a in calls[0] if isinstance(a, torch.Tensor)
            and base <= a.data_ptr() < base + size
        ]  # fmt: skip
        (own, _), (sums, dense_sums), (_, fp8_counters), (fp8_sums, a) = inside
        fp8_tiles = calls[0][15] * calls[0][16]
        assert fp8_counters.data_ptr() == base
        assert own >= 4 * fp8_tiles >= 4 * (n // 512)
        assert fp8_sums == COUNTER_BYTES
        assert fp8_sums + 4 * a.numel() <= sums
        assert sums + 4 * dense_sums.numel() <= size


@each_path
def test_a_dequantized_weight_runs_apart(path, device):
    x, weight, _, dense = operands(5, 50, 20, 300, FP32, device)
    got = mixed_linear(x, weight.float(), None, dense, activation="bf16", path=path)
    same(got, apart(x, weight.float(), None, dense, path, activation="bf16"))


def test_empty(device, run):
    x, weight, scale, dense = operands(3, 50, 20, 300, device=device)
    for path in (None, "gemv", "gemm"):
        none = run(mixed_linear, x[:0], weight, scale, dense, path=path, launched=False)
        assert [r.shape for r in none] == [(0, 50), (0, 20)]
        one = mixed_linear(x, weight, scale, dense[:0], path=path)
        assert torch.equal(one[0], mixed_linear(x, weight, scale, dense, path=path)[0])


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"x": [1]}, TypeError, "x is list, expected a tensor"),
        ({"weight": torch.zeros(4, 9).to(torch.float8_e4m3fn)}, ValueError, r"weight is \(4, 9\)"),
        ({"weight_scale": None}, ValueError, "weight_scale is None, expected the scales"),
        ({"dense": torch.zeros(4, 9)}, ValueError, r"dense is \(4, 9\), expected \[N2, K\]"),
        ({"dense": torch.zeros(4, 8).half()}, TypeError, "dense is float16"),
        ({"path": "split"}, ValueError, "path is 'split'"),
        ({"activation": "int8"}, ValueError, "activation is 'int8', expected 'fp8' or 'bf16'"),
        ({"x_scale": torch.zeros(2, 1)}, ValueError, "x_fp8 and x_scale are partly given"),
        (
            {"x_fp8": torch.zeros(2, 8), "x_scale": torch.zeros(2, 1, dtype=torch.uint8)},
            TypeError, "x_fp8 is float32",
        ),
        (
            {
                "x_fp8": torch.zeros(2, 8).to(torch.float8_e4m3fn), "activation": "bf16",
                "x_scale": torch.zeros(2, 1, dtype=torch.uint8),
            },
            ValueError, "x_fp8 is given with activation 'bf16'",
        ),
        ({"out": (torch.zeros(2, 4),)}, ValueError, "out is a tuple of 1, expected 2 tensors"),
        (
            {"out": (torch.zeros(2, 4).bfloat16(), torch.zeros(2, 5))},
            ValueError, r"out\[1\] is \(2, 5\)",
        ),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ],
)  # fmt: skip
def test_refusals(change, kind, text):
    base = {
        "x": torch.zeros(2, 8), "weight": torch.zeros(4, 8).to(torch.float8_e4m3fn),
        "weight_scale": torch.zeros(1, 1, dtype=torch.uint8), "dense": torch.zeros(6, 8),
    }  # fmt: skip
    for op in (mixed_linear, mixed_linear_reference):
        with pytest.raises(kind, match=f"mixed_linear: {text}"):
            op(**{**base, **change})


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles need another process")
@pytest.mark.parametrize(
    "case", [c for c in SPEC.cases if c["T"] <= 64], ids=lambda case: case["name"]
)
def test_one_launch_and_nothing_else(case):
    args, kwargs = SPEC.inputs(case, device="meta")
    kwargs["out"] = (
        torch.empty(case["T"], case["N"], dtype=BF16, device="meta"),
        torch.empty(case["T"], case["N2"], device="meta"),
    )
    size = scratch_bytes("mixed_linear", **{name: case[name] for name in ("T", "N", "N2", "K")})
    kwargs["scratch"] = torch.empty(size, dtype=torch.uint8, device="meta")
    with aot.capture_launches(arch=89) as got:
        mixed_linear(*args, **kwargs)
    assert len(got.launches) == 1
    assert got.torch_ops == []
    codes = opcodes(got[0].sass)
    assert any(op.startswith("HMMA.16816.F32.BF16") for op in codes) == (
        case.get("form") != "fp32"
    )
    assert any(op.startswith("QMMA.16832.F32.E4M3") for op in codes) == (
        case.get("form") in (None, "quantized")
    )
    assert got[0].spill_bytes == 0
