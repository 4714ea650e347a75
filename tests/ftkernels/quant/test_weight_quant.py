from __future__ import annotations

import pytest
import torch

from ftkernels.quant.weight_quant import (
    dequantize_fp4,
    dequantize_fp4_reference,
    dequantize_fp8,
    dequantize_fp8_reference,
    quantize_fp4,
    quantize_fp4_reference,
)
from ftkernels.testing import assert_close, randn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def codes(*size: int, low: int = 0, high: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, size, dtype=torch.uint8, generator=generator)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """The specification's nibbles: sign bit 3, magnitude below, even column in the low nibble."""
    table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], dtype=torch.float64)
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    out[:, 0::2] = table[packed.int() % 16]
    out[:, 1::2] = table[packed.int() // 16]
    return out


def scales(code: torch.Tensor) -> torch.Tensor:
    value = torch.exp2(code.double() - 127)
    return value.masked_fill(code == 255, float("nan"))


@pytest.mark.parametrize(
    ("num_rows", "width", "group"), [(1, 32, 32), (3, 96, 32), (2, 60, 12)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_fp4_matches_oracle(num_rows, width, group, dtype, device, run, oracle):
    x = randn(num_rows, width, dtype=dtype, device=device, scale=3.0)
    packed, scale = run(quantize_fp4, x, group=group)
    values, code = oracle.quantize(x.cpu(), "fp4", group)
    assert torch.equal(scale.cpu(), code)
    assert torch.equal(fp4_values(packed.cpu()), values)


def test_quantize_fp4_ties(device, run):
    """Scale 1 is pinned by the 6; nearest, ties to the even code."""
    pairs = [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]
    x = torch.tensor([[6.0] + [p for p, _ in pairs]], device=device)
    packed, scale = run(quantize_fp4, torch.cat((x, -x)), group=8)
    assert scale.flatten().tolist() == [127, 127]
    expected = torch.tensor([6.0] + [v for _, v in pairs]).double()
    assert torch.equal(fp4_values(packed.cpu()), torch.stack((expected, -expected)))


def test_quantize_fp4_extremes(device, run, oracle):
    floor = 6.0 * 2.0**-126
    x = torch.tensor(
        [
            [0.0, 0.0],
            [floor, -floor / 2],
            [1e-45, 0.0],
            [3.4e38, -1e38],
            [6.0, -6.0000005],
            [2e-37, 1e-38],
        ],
        device=device,
    )
    packed, scale = run(quantize_fp4, x, group=2)
    values, code = oracle.quantize(x.cpu(), "fp4", 2)
    assert torch.equal(scale.cpu(), code)
    assert scale[0].item() == 1
    assert torch.equal(fp4_values(packed.cpu()), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_quantize_fp4_spoilt_group(value, device, run):
    x = randn(2, 64, device=device)
    x[1, 33] = value
    packed, scale = run(quantize_fp4, x)
    assert scale[1, 1].item() == 255
    assert (scale.flatten()[:3] < 255).all()
    back = dequantize_fp4_reference(packed, scale)
    assert back[1, 32:].isnan().all()
    assert back[0].isfinite().all()


def test_fp4_strided_rows_and_out(device, run, oracle):
    x = randn(4, 200, dtype=torch.bfloat16, device=device)[::2, 8:136]
    out = (
        torch.empty(2, 99, dtype=torch.uint8, device=device)[:, 3:67],
        torch.empty(2, 9, dtype=torch.uint8, device=device)[:, 2:6],
    )
    packed, scale = run(quantize_fp4, x, out=out)
    assert packed is out[0]
    assert scale is out[1]
    values, code = oracle.quantize(x.cpu(), "fp4", 32)
    assert torch.equal(scale.cpu(), code)
    assert torch.equal(fp4_values(packed.cpu()), values)
    target = torch.empty(2, 150, dtype=torch.float32, device=device)[:, 5:133]
    assert run(dequantize_fp4, packed, scale, dtype=torch.float32, out=target) is target
    assert torch.equal(target.cpu().double(), oracle.round_trip(x.cpu(), "fp4", 32))


def test_quantize_of_dequantized_codes_is_exact(device, run):
    """Every group that holds a 4 or a 6 is its own quantization."""
    packed = codes(8, 64).to(device)
    packed[:, ::16] = 0x76
    scale = codes(8, 4, low=30, high=220).to(device)
    again = run(quantize_fp4, run(dequantize_fp4, packed, scale))
    assert torch.equal(again[1], scale)
    assert torch.equal(again[0], packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_fp4_every_byte(dtype, device, run):
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128).to(device)
    scale = torch.tensor([[127, 120, 130, 0, 255, 126, 128, 140]], dtype=torch.uint8).repeat(2, 1)
    got = run(dequantize_fp4, packed, scale.to(device), dtype=dtype)
    expected = fp4_values(packed.cpu()) * scales(scale).repeat_interleave(32, dim=1)
    assert_close(got.cpu(), expected.to(dtype), max_ulp=0)


@pytest.mark.parametrize(("num_rows", "width", "group"), [(3, 60, 12), (2, 4096 + 64, 32)], ids=str)
def test_dequantize_fp4_sizes(num_rows, width, group, device, run):
    packed, scale = codes(num_rows, width // 2), codes(num_rows, width // group, low=100, high=140)
    got = run(dequantize_fp4, packed.to(device), scale.to(device), group=group)
    expected = fp4_values(packed) * scales(scale).repeat_interleave(group, dim=1)
    assert_close(got.cpu(), expected.bfloat16(), max_ulp=0)


def e4m3_values(byte: torch.Tensor) -> torch.Tensor:
    exponent, mantissa = (byte.int() >> 3) & 15, (byte.int() & 7).double()
    value = torch.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    )
    value = torch.where(byte > 127, -value, value)
    return value.masked_fill((byte & 127) == 127, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", [0, 100, 127, 135, 255])
def test_dequantize_fp8_every_byte(dtype, code, device, run):
    byte = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scale = torch.full((1, 2), code, dtype=torch.uint8)
    got = run(
        dequantize_fp8, byte.to(device).view(torch.float8_e4m3fn), scale.to(device), dtype=dtype
    )
    expected = e4m3_values(byte) * scales(scale).repeat_interleave(128, dim=1)
    assert_close(got.cpu(), expected.to(dtype), max_ulp=0)


@pytest.mark.parametrize(
    ("num_rows", "width", "group"),
    [(5, 300, 128), (130, 200, (128, 128)), (3, 33, (2, 16)), (1, 5000, 64), (4, 4, (1, 1))],
    ids=str,
)
def test_dequantize_fp8_scales(num_rows, width, group, device, run):
    group_n, group_k = (1, group) if isinstance(group, int) else group
    byte = codes(num_rows, width)
    scale = codes(-(-num_rows // group_n), -(-width // group_k), low=100, high=140)
    got = run(
        dequantize_fp8, byte.to(device).view(torch.float8_e4m3fn), scale.to(device), group=group
    )
    row, column = torch.arange(num_rows) // group_n, torch.arange(width) // group_k
    expected = e4m3_values(byte) * scales(scale)[row][:, column]
    assert_close(got.cpu(), expected.bfloat16(), max_ulp=0)


def test_dequantize_fp8_strided(device, run):
    byte = codes(6, 100).to(device)[::2, 10:74]
    scale = codes(3, 8, low=110, high=130).to(device)[:, ::1][:, 1:3]
    out = torch.empty(3, 70, device=device)[:, 3:67]
    got = run(
        dequantize_fp8,
        byte.view(torch.float8_e4m3fn),
        scale,
        group=32,
        dtype=torch.float32,
        out=out,
    )
    assert got is out
    expected = e4m3_values(byte.cpu()) * scales(scale.cpu()).repeat_interleave(32, dim=1)
    assert_close(got.cpu(), expected.float(), max_ulp=0)


def test_empty_launches_nothing(device, run):
    packed, scale = run(quantize_fp4, torch.empty(0, 64, device=device), launched=False)
    assert packed.shape == (0, 32)
    assert scale.shape == (0, 2)
    assert run(dequantize_fp4, packed, scale, launched=False).shape == (0, 64)
    empty = torch.empty(0, 64, device=device).to(torch.float8_e4m3fn)
    scale = torch.empty(0, 1, dtype=torch.uint8, device=device)
    assert run(dequantize_fp8, empty, scale, group=(128, 128), launched=False).shape == (0, 64)


X, PACKED, SCALE = (
    torch.zeros(2, 64),
    torch.zeros(2, 32, dtype=torch.uint8),
    torch.zeros(2, 2, dtype=torch.uint8),
)
FP8, ONE = torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("x", "kwargs", "kind", "text"),
    [
        (X.int(), {}, TypeError, "quantize_fp4: x is int32"),
        (X[0], {}, ValueError, r"x is \(64,\), expected \[N, K\]"),
        (X, {"group": 3}, ValueError, "group is 3, expected an even number >= 2"),
        (X, {"group": 0}, ValueError, "group is 0"),
        (X, {"group": 48}, ValueError, "with K a multiple of group 48"),
        (X, {"out": PACKED}, TypeError, "out is Tensor, expected a pair"),
        (X, {"out": (PACKED[:, :5], SCALE)}, ValueError, r"out\[0\] is \(2, 5\)"),
        (X, {"out": (PACKED, PACKED[:, :2])}, ValueError, r"out\[1\] is overlapping"),
    ],
)
def test_quantize_fp4_refusals(x, kwargs, kind, text):
    for op in (quantize_fp4, quantize_fp4_reference):
        with pytest.raises(kind, match=text):
            op(x, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        ((X, ONE), {}, TypeError, "dequantize_fp8: x_fp8 is float32, expected float8_e4m3fn"),
        ((FP8, ONE.int()), {}, TypeError, "scale is int32, expected uint8"),
        ((FP8, SCALE), {}, ValueError, r"scale is \(2, 2\), expected .* = \[2, 1\]"),
        ((FP8, ONE), {"group": (128, 128)}, ValueError, r"= \[1, 1\]"),
        ((FP8, ONE), {"group": 0}, ValueError, "group is 0, expected a number >= 1 or a pair"),
        ((FP8, ONE), {"group": (1, 2, 3)}, ValueError, r"group is \(1, 2, 3\)"),
        ((FP8, ONE), {"dtype": torch.int32}, TypeError, "dtype is torch.int32, expected bfloat16"),
        ((FP8, ONE), {"out": X}, TypeError, "out is float32, expected bfloat16"),
        ((FP8, ONE), {"out": X[:1].bfloat16()}, ValueError, r"out is \(1, 64\)"),
    ],
)
def test_dequantize_fp8_refusals(args, kwargs, kind, text):
    for op in (dequantize_fp8, dequantize_fp8_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        ((X, SCALE), {}, TypeError, "dequantize_fp4: packed is float32, expected uint8"),
        ((PACKED, ONE), {}, ValueError, r"scale is \(2, 1\), expected \[N, K/group\] = \[2, 2\]"),
        ((PACKED, SCALE), {"group": 5}, ValueError, "group is 5, expected an even number"),
        ((PACKED, SCALE), {"group": 48}, ValueError, "with K a multiple of 48"),
        ((PACKED, SCALE), {"dtype": torch.float64}, TypeError, "dtype is torch.float64"),
        (
            (PACKED, SCALE),
            {"out": torch.zeros(2, 64)},
            TypeError,
            "out is float32, expected bfloat16",
        ),
    ],
)
def test_dequantize_fp4_refusals(args, kwargs, kind, text):
    for op in (dequantize_fp4, dequantize_fp4_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.gpu
def test_flash_shapes(run):
    x = randn(4096, 4096, dtype=torch.bfloat16, device="cuda", scale=3.0)
    packed, scale = run(quantize_fp4, x)
    expected = quantize_fp4_reference(x)
    assert torch.equal(packed, expected[0])
    assert torch.equal(scale, expected[1])
    assert torch.equal(run(dequantize_fp4, packed, scale), dequantize_fp4_reference(packed, scale))
