from __future__ import annotations

import pytest
import torch

from ftkernels.quant.act_quant import quantize_fp8_reference
from ftkernels.quant.round_trip import quant_round_trip, quant_round_trip_reference
from ftkernels.quant.weight_quant import (
    dequantize_fp4_reference,
    dequantize_fp8_reference,
    quantize_fp4_reference,
)
from ftkernels.testing import assert_close, randn


@pytest.mark.parametrize(
    ("size", "group", "channels"),
    [((3, 80), 32, None), ((5, 80), 24, 64), ((2, 3, 72), 64, 56), ((7,), 3, 5), ((2, 16), 8, 0)],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_oracle(size, group, channels, fmt, dtype, device, run, oracle):
    x = randn(*size, dtype=dtype, device=device, scale=5.0)
    got = run(quant_round_trip, x, fmt=fmt, group=group, channels=channels).cpu()
    rows = x.cpu().reshape(-1, size[-1])
    cut = size[-1] if channels is None else channels
    expected = rows.double()
    expected[:, :cut] = oracle.round_trip(rows[:, :cut], fmt, group)
    assert_close(got.reshape(-1, size[-1]), expected.to(dtype), max_ulp=0)


def test_kv_row_is_lossless_under_packing(device, run):
    """448 of 512 channels in blocks of 64, as KV rows; code times scale is exact in bf16."""
    x = randn(3, 512, dtype=torch.bfloat16, device=device, scale=2.0)
    got = run(quant_round_trip, x, fmt="fp8", group=64, channels=448)
    codes = quantize_fp8_reference(x[:, :448], group=64)
    assert torch.equal(got[:, :448], dequantize_fp8_reference(*codes, group=64))
    assert torch.equal(got[:, 448:], x[:, 448:])


def test_index_row_is_lossless_under_packing(device, run):
    x = randn(3, 128, dtype=torch.bfloat16, device=device)
    got = run(quant_round_trip, x, fmt="fp4", group=32)
    assert torch.equal(got, dequantize_fp4_reference(*quantize_fp4_reference(x)))


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_second_trip_changes_nothing(fmt, device, run):
    x = randn(4, 96, device=device, scale=7.0)
    once = run(quant_round_trip, x, fmt=fmt, group=32)
    assert torch.equal(run(quant_round_trip, once, fmt=fmt, group=32), once)


def test_channels_past_the_cut_do_not_raise_the_scale(device, run):
    x = randn(2, 64, device=device)
    loud = x.clone()
    loud[:, 40:] *= 1e6
    a = run(quant_round_trip, x, fmt="fp8", group=64, channels=40)
    b = run(quant_round_trip, loud, fmt="fp8", group=64, channels=40)
    assert torch.equal(a[:, :40], b[:, :40])
    assert torch.equal(b[:, 40:], loud[:, 40:])


@pytest.mark.parametrize("channels", [None, 48, 0])
def test_in_place(channels, device, run):
    x = randn(5, 80, dtype=torch.bfloat16, device=device)
    expected = quant_round_trip_reference(x, fmt="fp8", group=32, channels=channels)
    got = run(
        quant_round_trip, x, fmt="fp8", group=32, channels=channels, out=x, launched=channels != 0
    )
    assert got is x
    assert torch.equal(got, expected)


def test_strided_leading_dimensions(device, run):
    wide = randn(4, 3, 5, 6, 40, device=device)
    for x in (wide[::2, :, 1:4, :, 4:36], wide.permute(2, 0, 3, 1, 4)[..., :32], wide[0, 0, 0, 0]):
        got = run(quant_round_trip, x, fmt="fp4", group=16)
        assert torch.equal(got, quant_round_trip_reference(x.contiguous(), fmt="fp4", group=16))
    target = torch.empty(3, 4, 40, device=device).transpose(0, 1)[..., :32]
    x = wide[:, 0, 0, :3, :32]
    assert run(quant_round_trip, x, fmt="fp8", group=32, out=target) is target
    assert torch.equal(target, quant_round_trip_reference(x, fmt="fp8", group=32))


def test_broadcast_rows(device, run):
    x = randn(1, 32, device=device).expand(4, 32)
    got = run(quant_round_trip, x, fmt="fp8", group=32)
    assert torch.equal(got, got[:1].expand(4, 32))
    assert torch.equal(got[:1], quant_round_trip_reference(x[:1], fmt="fp8", group=32))


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_extremes(fmt, device, run, oracle):
    x = torch.tensor(
        [[0.0, 0.0], [1e-30, -1e-38], [3e38, -1.0], [1e-4, 2.0], [-0.0, 1e-45]], device=device
    )
    got = run(quant_round_trip, x, fmt=fmt, group=2)
    # 4 * 2^126 is what FP4 makes of 3e38, and past fp32
    assert torch.equal(got.cpu(), oracle.round_trip(x.cpu(), fmt, 2).float())
    assert got[4, 0].signbit()


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_group_is_nan(fmt, value, device, run):
    x = randn(2, 64, device=device)
    x[0, 3] = value
    got = run(quant_round_trip, x, fmt=fmt, group=32)
    assert got[0, :32].isnan().all()
    assert got[0, 32:].isfinite().all()
    assert got[1].isfinite().all()


def test_row_does_not_depend_on_others(device, run):
    x = randn(9, 96, device=device)
    whole = run(quant_round_trip, x, fmt="fp8", group=32)
    assert torch.equal(whole[4:5], run(quant_round_trip, x[4:5], fmt="fp8", group=32))


@pytest.mark.parametrize("size", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty_launches_nothing(size, device, run):
    x = torch.empty(size, device=device)
    assert run(quant_round_trip, x, fmt="fp8", group=4, launched=False).shape == size


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("x", "kwargs", "kind", "text"),
    [
        (None, {}, TypeError, "quant_round_trip: x is NoneType, expected a tensor"),
        (X.long(), {}, TypeError, "x is int64"),
        (torch.tensor(1.0), {}, ValueError, r"x is \(\), expected \[..., D\]"),
        (torch.zeros(8, 2).t(), {}, ValueError, "contiguous last dimension"),
        (X, {"fmt": "int8"}, ValueError, "fmt is 'int8', expected 'fp8' or 'fp4'"),
        (X, {"group": 0}, ValueError, "group is 0, expected >= 1"),
        (X, {"channels": 9}, ValueError, "channels is 9, expected 0 to D = 8"),
        (X, {"channels": -1}, ValueError, "channels is -1"),
        (X, {"out": X[:1]}, ValueError, r"out is \(1, 8\)"),
        (X, {"out": X.half()}, TypeError, "out is float16, expected float32"),
        (
            X.view(-1)[:8].view(2, 4),
            {"out": X.view(-1)[2:10].view(2, 4)},
            ValueError,
            "out is overlapping",
        ),
    ],
)
def test_refusals(x, kwargs, kind, text):
    for op in (quant_round_trip, quant_round_trip_reference):
        with pytest.raises(kind, match=text):
            op(x, **{"fmt": "fp8", "group": 4, **kwargs})


@pytest.mark.gpu
def test_flash_shapes(run):
    x = randn(3456, 512, dtype=torch.bfloat16, device="cuda", scale=3.0)
    got = run(quant_round_trip, x, fmt="fp8", group=64, channels=448)
    assert torch.equal(got, quant_round_trip_reference(x, fmt="fp8", group=64, channels=448))
