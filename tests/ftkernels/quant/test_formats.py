from __future__ import annotations

import math

import pytest
import torch

from ftkernels.quant import formats

TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


def test_e2m1_decodes_every_code():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = formats.e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert got.tolist() == expected + [-v for v in expected]
    assert math.copysign(1, got[8].item()) == -1


def test_nibbles_of_every_byte():
    byte = torch.arange(256, dtype=torch.uint8)
    codes = formats.unpack_nibbles(byte)
    assert codes[0::2].tolist() == [b % 16 for b in range(256)]
    assert codes[1::2].tolist() == [b // 16 for b in range(256)]
    assert torch.equal(formats.pack_nibbles(codes), byte)


def test_ue8m0_decodes_every_code():
    got = formats.ue8m0_decode(torch.arange(256, dtype=torch.uint8))
    assert [math.log2(v) for v in got[:255].tolist()] == list(range(-127, 128))
    assert math.isnan(got[255].item())


@pytest.mark.parametrize(("x", "value"), TIES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_ties_go_to_the_even_code(x, value, sign):
    at = torch.tensor([x, x], dtype=torch.float32) * sign
    assert formats.e2m1_round(at).tolist() == [value * sign] * 2
    assert formats.e2m1_decode(formats.e2m1_encode(at)).tolist() == [value * sign] * 2
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    below = torch.nextafter(torch.tensor(x), torch.tensor(0.0)) * sign
    above = torch.nextafter(torch.tensor(x), torch.tensor(9.0)) * sign
    assert formats.e2m1_round(below).item() == sign * max(v for v in grid if v < x)
    assert formats.e2m1_round(above).item() == sign * min(v for v in grid if v > x)


def test_e2m1_saturates_and_keeps_sign_and_nan():
    x = torch.tensor([7.0, 1e30, float("inf"), -1e30, -0.0, -0.1, float("nan")])
    got = formats.e2m1_round(x)
    assert got[:4].tolist() == [6.0, 6.0, 6.0, -6.0]
    assert got[4:6].signbit().all()
    assert got[6].isnan()
    assert formats.e2m1_encode(x).tolist() == [7, 7, 7, 15, 8, 8, 0]


def test_e4m3_rounds_as_the_oracle(oracle):
    grid = torch.tensor(oracle.grids["fp8"], dtype=torch.float64)
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    x = torch.cat(
        (
            grid.float(),
            middle,
            middle.nextafter(torch.zeros(1)),
            middle.nextafter(torch.ones(1) * 999),
        )
    )
    x = torch.cat((x, -x))
    got = formats.e4m3_round(x).double()
    assert got.tolist() == [oracle.nearest(v, "fp8") for v in x.tolist()]


def test_e4m3_saturates():
    x = torch.tensor([448.0, 464.0, 1e30, float("inf"), float("-inf")])
    assert formats.e4m3_round(x).float().tolist() == [448.0] * 4 + [-448.0]


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_scale_is_the_least_power_of_two(fmt, oracle):
    """Around every threshold of fp32: the power itself, its neighbours, and the floor."""
    largest = oracle.grids[fmt][-1]
    at = torch.tensor([largest * 2.0**e for e in range(-120, 119)], dtype=torch.float64).float()
    big = torch.tensor(3e38)
    amax = torch.cat(
        (at, at.nextafter(big), at.nextafter(-big), torch.tensor([0.0, 1e-30, 1e-4, 3.4e38]))
    )
    got = formats.ue8m0_encode(formats.group_scale(amax[:, None], formats.FORMATS[fmt]))
    assert got.flatten().tolist() == [oracle.exponent(v, fmt) + 127 for v in amax.tolist()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scale_of_a_spoilt_group_is_255(value):
    x = torch.tensor([[1.0, value, 2.0], [1.0, 2.0, 3.0]])
    codes = formats.ue8m0_encode(formats.group_scale(x, formats.FP8))
    assert codes.flatten().tolist()[0] == 255
    assert codes.flatten().tolist()[1] < 255


def test_groups_fill_up_with_zeros():
    x = torch.arange(1, 6, dtype=torch.bfloat16)[None]
    assert formats.into_groups(x, 3).tolist() == [[[1, 2, 3], [4, 5, 0]]]
