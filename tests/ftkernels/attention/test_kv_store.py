"""Stores and loads of both pool formats."""

from __future__ import annotations

import pytest
import torch

from ftkernels.attention.kv_store import load_kv, store_kv
from ftkernels.attention.pools import empty_pool
from ftkernels.testing import assert_close, randn
from tests.support.attention_cases import unrotate


def round_trip(x: torch.Tensor, group: int) -> torch.Tensor:
    """Section 11 in fp64: power-of-two scales, e4m3."""
    parts = []
    for part in x.double().split(group, dim=1):
        amax = part.abs().amax(1, keepdim=True).clamp_min(1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(amax / 448))
        codes = (part / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        parts.append(codes.double() * scale)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_rows_come_back_where_they_were_put(kv_format):
    kv = randn(9, 512, dtype=torch.bfloat16, scale=3.0)
    pool = empty_pool(4, 5, 512, kv_format=kv_format)
    slots = torch.tensor([0, 19, 7, -1, 12, 3, 4, 5, 18])
    store_kv(kv, pool, slots, kv_format=kv_format, round_trip=True)
    got = load_kv(pool, slots, kv_format=kv_format)
    expected = torch.cat((round_trip(kv[:, :448], 64), kv[:, 448:].double()), dim=1)
    expected[3] = 0
    assert_close(got.double(), expected)


@pytest.mark.parametrize("rows", [1, 32])
def test_packed_page_layout(rows):
    """Data rows of 576 bytes, then scale rows of 8: seven codes and a zero."""
    pool = empty_pool(3, rows, 512, kv_format="fp8")
    assert pool.stride(0) % 16 == 0
    kv = randn(1, 512, dtype=torch.bfloat16)
    store_kv(kv, pool, torch.tensor([2 * rows - 1]), kv_format="fp8")
    flat = pool.as_strided((3, rows * 584), (pool.stride(0), 1))[1]
    data, scales = flat[(rows - 1) * 576 :][:576], flat[rows * 576 + (rows - 1) * 8 :][:8]
    assert scales[7] == 0
    values = data[:448].view(torch.float8_e4m3fn).double().view(7, 64)
    values = values * 2.0 ** (scales[:7].double() - 127)[:, None]
    assert_close(values.view(1, 448), round_trip(kv[:, :448], 64))
    assert torch.equal(data[448:].view(torch.bfloat16), kv[0, 448:])


def test_norm_then_rope_then_round_trip():
    kv, weight = randn(6, 128, scale=2.0), randn(128, seed=1)
    positions, angles = torch.tensor([5, 0, 1, 7, 7, 2]), randn(9, 32, seed=2, scale=3.0)
    pool = empty_pool(2, 4, 128, dtype=torch.float32)
    store_kv(
        kv, pool, torch.arange(6), norm_weight=weight, positions=positions, cos=angles.cos(),
        sin=angles.sin(), round_trip=True, rope_dim=64,
    )  # fmt: skip
    x = kv.double()
    x = weight.double() * x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
    x = torch.stack([unrotate(row, -angles[p]) for row, p in zip(x, positions, strict=True)])
    x = torch.cat((round_trip(x[:, :64], 64), x[:, 64:]), dim=1)
    got = load_kv(pool, torch.arange(6), kv_format="bf16", dtype=torch.float32)
    near = (got.double() - x).abs() <= 1e-5 * x.abs().amax(1, keepdim=True)
    assert near.float().mean() > 0.99, "rounding flips aside"
    assert near[:, 64:].all()


def test_strided_pool_and_int32_slots():
    wide = torch.zeros(4, 8, 96, dtype=torch.float32)
    pool = wide[::2, :, :64]
    store_kv(randn(3, 64), pool, torch.tensor([0, 9, 15], dtype=torch.int32))
    assert wide[:, :, 64:].abs().sum() == 0
    assert wide[1].abs().sum() == 0
    assert wide[2, 7, 0] == randn(3, 64)[2, 0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: empty_pool(1, 1, 64, kv_format="fp8"), "head_dim is 64, expected 512 for fp8"),
        (lambda: empty_pool(1, 1, 64, kv_format="int8"), "kv_format is 'int8'"),
        (
            lambda: store_kv(torch.zeros(2, 64), torch.zeros(1, 4, 32), torch.zeros(2).long()),
            r"pool is \(1, 4, 32\), expected \[pages, rows, D\]",
        ),
        (
            lambda: store_kv(
                torch.zeros(2, 64), torch.zeros(1, 4, 64), torch.zeros(2).long(),
                positions=torch.zeros(2).long(),
            ),
            "positions, cos and sin are partly given",
        ),
    ],
)  # fmt: skip
def test_refusals(call, text):
    with pytest.raises(ValueError, match=text):
        call()
