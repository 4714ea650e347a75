"""Linear layers against fp64 products of the operands they promise to multiply."""

from __future__ import annotations

import pytest
import torch

from ftkernels.linear.fp8_linear import fp8_linear, fp8_linear_reference
from ftkernels.linear.grouped_linear import grouped_linear
from ftkernels.linear.linear import linear
from ftkernels.testing import assert_close, randn


def quantized(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """Section 11: the values a row has after FP8 activation quantization, in fp64."""
    parts = []
    for part in x.double().split(group, dim=-1):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(amax / 448))
        parts.append(
            (part / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale
        )
    return torch.cat(parts, dim=-1)


def fp8_weight(n: int, k: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the fp64 matrix they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-n // 128), -(-k // 128))
    scale = torch.randint(115, 130, blocks, generator=generator, dtype=torch.uint8)
    factor = 2.0 ** (scale.double() - 127)
    factor = factor.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return codes, scale, codes.double() * factor


@pytest.mark.parametrize(("t", "n", "k"), [(1, 7, 100), (5, 130, 256), (64, 300, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_is_fp32(t, n, k, dtype, device):
    x, w = randn(t, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device, seed=1)
    out = linear(x, w, out_dtype=torch.float32)
    expected = x.cpu().double() @ w.cpu().double().T
    assert_close(out.cpu().double(), expected, row_tol=1e-6)
    assert linear(x, w).dtype == dtype


@pytest.mark.parametrize(("t", "n", "k"), [(1, 130, 100), (5, 256, 256), (33, 100, 384)], ids=str)
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_fp8_linear_multiplies_the_quantized_operands(t, n, k, activation):
    codes, scale, matrix = fp8_weight(n, k)
    x = randn(t, k, scale=3.0)
    rows = quantized(x) if activation == "fp8" else x.double()
    out = fp8_linear(x, codes, scale, activation=activation, out_dtype=torch.float32)
    assert_close(out.double(), rows @ matrix.T, row_tol=1e-6)
    dense = fp8_linear(x, matrix.float(), None, activation=activation, out_dtype=torch.float32)
    assert torch.equal(dense, out), "a dequantized weight gives the same bits"


def test_fp8_linear_takes_quantized_rows_and_a_norm():
    codes, scale, matrix = fp8_weight(64, 256)
    x, norm = randn(6, 256), randn(256, seed=2)
    amax = x.view(6, 2, 128).abs().amax(-1).clamp_min(1e-4).double()
    exponent = torch.ceil(torch.log2(amax / 448))
    x_fp8 = (x.double() / (2.0**exponent).repeat_interleave(128, 1)).float().to(torch.float8_e4m3fn)
    x_scale = (exponent + 127).to(torch.uint8)
    out = fp8_linear((x_fp8, x_scale), codes, scale, out_dtype=torch.float32)
    assert torch.equal(out, fp8_linear(x, codes, scale, out_dtype=torch.float32))
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
    expected = (normed * norm.double()) @ matrix.T
    out = fp8_linear(x, codes, scale, activation="bf16", norm_weight=norm, out_dtype=torch.float32)
    assert_close(out.double(), expected, row_tol=1e-6)


@pytest.mark.parametrize(("groups", "rank", "k"), [(3, 50, 130), (2, 128, 128), (8, 4, 64)])
def test_grouped_linear(groups, rank, k):
    codes, scale, matrix = fp8_weight(groups * rank, k)
    x = randn(5, groups, k, scale=3.0)
    out = grouped_linear(x, codes.view(groups, rank, k), weight_scale=scale)
    expected = torch.einsum("tgk,grk->tgr", x.double(), matrix.view(groups, rank, k))
    assert_close(out.double(), expected, row_tol=1e-6)
    dense = grouped_linear(x, matrix.float().view(groups, rank, k))
    assert torch.equal(dense, out)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 17, 40])
def test_rows_do_not_depend_on_each_other(rows):
    x, w = randn(64, 256), randn(96, 256, seed=1)
    grouped, groups = randn(64, 4, 64, seed=2), randn(4, 24, 64, seed=3)
    whole = (
        linear(x, w),
        fp8_linear(x, w, None, out_dtype=torch.float32),
        grouped_linear(grouped, groups),
    )
    for start in (0, 13):
        cut = slice(start, start + rows)
        assert torch.equal(linear(x[cut], w), whole[0][cut])
        assert torch.equal(fp8_linear(x[cut], w, None, out_dtype=torch.float32), whole[1][cut])
        assert torch.equal(grouped_linear(grouped[cut], groups), whole[2][cut])


def test_out_strided_and_empty():
    x, w = randn(6, 128)[::2], randn(10, 128, seed=1)
    out = torch.empty(3, 20)[:, :10]
    assert linear(x, w, out=out) is out
    assert_close(out.double(), x.double() @ w.double().T, row_tol=1e-6)
    assert linear(x[:0], w).shape == (0, 10)
    assert fp8_linear(x[:0], w, None).shape == (0, 10)
    assert grouped_linear(torch.zeros(0, 2, 8), torch.zeros(2, 3, 8)).shape == (0, 2, 3)


def test_scale_index_mutant_fails():
    codes, scale, matrix = fp8_weight(256, 256)
    x = randn(4, 256)
    out = fp8_linear_reference(
        x, codes, scale.T.contiguous(), activation="bf16", out_dtype=torch.float32
    )
    with pytest.raises(AssertionError, match="differ by more"):
        assert_close(out.double(), x.double() @ matrix.T, row_tol=1e-6)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"activation": "int8"}, ValueError, "activation is 'int8', expected 'fp8' or 'bf16'"),
        ({"weight_scale": None}, ValueError, "weight_scale is None, expected the scales"),
        (
            {"weight_scale": torch.zeros(2, 1, dtype=torch.uint8)},
            ValueError,
            r"weight_scale is \(2, 1\)",
        ),
        (
            {"x": torch.zeros(2, 64)},
            ValueError,
            r"weight is \(64, 128\), expected \[N, K\] = \[\?, 64\]",
        ),
        ({"x": [1]}, TypeError, "x is list, expected a tensor"),
    ],
)
def test_refusals(change, kind, text):
    codes, scale, _ = fp8_weight(64, 128)
    kwargs = {"x": torch.zeros(2, 128), "weight": codes, "weight_scale": scale, **change}
    with pytest.raises(kind, match=text):
        fp8_linear(**kwargs)
