from __future__ import annotations

import pytest
import torch

from ftkernels.quant.act_quant import quantize_fp8, quantize_fp8_reference
from ftkernels.testing import randn


def equal_to_oracle(got, expected) -> None:
    values, codes = expected
    assert got[0].dtype == torch.float8_e4m3fn
    assert torch.equal(got[1].cpu(), codes)
    assert torch.equal(got[0].cpu().double(), values)


@pytest.mark.parametrize(
    ("num_tokens", "width", "group"),
    [(1, 128, 128), (5, 300, 128), (3, 101, 24), (2, 1, 7)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_oracle(num_tokens, width, group, dtype, device, run, oracle):
    x = randn(num_tokens, width, dtype=dtype, device=device, scale=20.0)
    got = run(quantize_fp8, x, group=group)
    equal_to_oracle(got, oracle.quantize(x.cpu(), "fp8", group))


def test_rounds_every_midpoint_to_even(device, run, oracle):
    grid = torch.tensor(oracle.grids["fp8"], dtype=torch.float64)
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    zero, big = torch.zeros(1), torch.full((1,), 999.0)
    x = torch.cat((grid.float(), middle, middle.nextafter(zero), middle.nextafter(big)))
    x = torch.stack((x, -x)).to(device)
    got = run(quantize_fp8, x, group=x.shape[1])
    assert got[1].flatten().tolist() == [127, 127]
    equal_to_oracle(got, oracle.quantize(x.cpu(), "fp8", x.shape[1]))


def test_scale_thresholds(device, run, oracle):
    at = torch.tensor([448.0 * 2.0**e for e in range(-22, 110, 3)])
    big = torch.tensor(3e38)
    x = torch.cat((at, at.nextafter(big), at.nextafter(-big)))[:, None].to(device)
    equal_to_oracle(run(quantize_fp8, x, group=1), oracle.quantize(x.cpu(), "fp8", 1))


def test_extremes(device, run, oracle):
    x = torch.tensor(
        [[0.0, 0.0], [1e-30, -1e-38], [3e38, -1.0], [1e-4, 0.99e-4], [-0.0, 65504.0], [1e-45, 0.0]],
        device=device,
    )
    got = run(quantize_fp8, x, group=2)
    equal_to_oracle(got, oracle.quantize(x.cpu(), "fp8", 2))
    # the floor of the largest magnitude: 2^ceil(log2(1e-4 / 448)) = 2^-22
    assert got[1][0].item() == 127 - 22


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_spoilt_group_has_a_nan_scale_and_no_neighbour(value, device, run):
    x = randn(2, 64, device=device)
    x[0, 5] = value
    x_fp8, x_scale = run(quantize_fp8, x, group=32)
    alone = quantize_fp8_reference(x[:, 32:], group=32)
    assert x_scale[0, 0].item() == 255
    assert torch.equal(x_scale[:, 1:], alone[1])
    assert torch.equal(x_fp8[:, 32:].view(torch.uint8), alone[0].view(torch.uint8))
    assert x_fp8[0, 5].float().isnan()


def test_strided_rows_and_out(device, run, oracle):
    x = randn(6, 300, dtype=torch.bfloat16, device=device)[::2, 30:230]
    out = (
        torch.empty(3, 260, device=device).to(torch.float8_e4m3fn)[:, :200],
        torch.empty(3, 7, dtype=torch.uint8, device=device)[:, 1:5],
    )
    got = run(quantize_fp8, x, group=64, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    equal_to_oracle(got, oracle.quantize(x.cpu(), "fp8", 64))


def test_row_does_not_depend_on_others(device, run):
    x = randn(9, 256, device=device)
    whole, alone = run(quantize_fp8, x), run(quantize_fp8, x[4:5])
    assert torch.equal(whole[0][4:5].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(whole[1][4:5], alone[1])


@pytest.mark.parametrize("size", [(0, 128), (3, 0)])
def test_empty_launches_nothing(size, device, run):
    x_fp8, x_scale = run(quantize_fp8, torch.empty(size, device=device), launched=False)
    assert x_fp8.shape == size
    assert x_scale.shape == (size[0], -(-size[1] // 128))


X = torch.zeros(2, 4)
CODES = torch.zeros(2, 4).to(torch.float8_e4m3fn)
SCALE = torch.zeros(2, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("x", "kwargs", "kind", "text"),
    [
        ([1.0], {}, TypeError, "quantize_fp8: x is list, expected a tensor"),
        (X.double(), {}, TypeError, "x is float64, expected bfloat16, float16, float32"),
        (X[0], {}, ValueError, r"x is \(4,\), expected \[T, K\]"),
        (torch.zeros(4, 2).t(), {}, ValueError, "expected a contiguous last dimension"),
        (X, {"group": 0}, ValueError, "group is 0, expected >= 1"),
        (X, {"out": CODES}, TypeError, "out is Tensor, expected a pair of tensors"),
        (X, {"out": (X, SCALE)}, TypeError, r"out\[0\] is float32, expected float8_e4m3fn"),
        (X, {"out": (CODES, SCALE[:1])}, ValueError, r"out\[1\] is \(1, 1\)"),
        (X, {"out": (CODES, SCALE.int())}, TypeError, r"out\[1\] is int32, expected uint8"),
        (
            X,
            {"out": (CODES, CODES.view(torch.uint8)[:, :1])},
            ValueError,
            r"out\[1\] is overlapping",
        ),
        (
            X,
            {"out": (X.view(torch.float8_e4m3fn)[:, :4], SCALE)},
            ValueError,
            r"out\[0\] is overlapping",
        ),
    ],
)
def test_refusals(x, kwargs, kind, text):
    for op in (quantize_fp8, quantize_fp8_reference):
        with pytest.raises(kind, match=text):
            op(x, **kwargs)


@pytest.mark.gpu
def test_flash_shape(run):
    x = randn(3456, 4096, dtype=torch.bfloat16, device="cuda", scale=3.0)
    x_fp8, x_scale = run(quantize_fp8, x)
    expected = quantize_fp8_reference(x)
    assert torch.equal(x_fp8.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(x_scale, expected[1])
