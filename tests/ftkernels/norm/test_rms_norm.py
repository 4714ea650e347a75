from __future__ import annotations

import pytest
import torch

from ftkernels.config import pin
from ftkernels.norm.rms_norm import RmsNormConfig, rms_norm, rms_norm_reference
from ftkernels.testing import assert_close, randn


def formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return normed if weight is None else weight.double() * normed


def ulps(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float32 else 1


@pytest.mark.parametrize(
    "size", [(1, 64), (5, 100), (3, 1), (2, 3, 512), (2, 4100), (96,)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_matches_formula(size, dtype, weighted, device, run):
    x = randn(*size, dtype=dtype, device=device, scale=3.0)
    weight = randn(size[-1], dtype=dtype, device=device, seed=1) if weighted else None
    got = run(rms_norm, x, weight, eps=1e-3)
    expected = formula(x.cpu(), None if weight is None else weight.cpu(), 1e-3)
    assert_close(got.cpu(), expected.to(dtype), max_ulp=ulps(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [100, 9000])
def test_residual(dtype, width, device, run):
    x = randn(3, width, dtype=dtype, device=device, scale=3.0)
    residual = randn(3, width, dtype=dtype, device=device, seed=1)
    weight = randn(width, device=device, seed=2)
    before = x.clone()
    summed = (x.double() + residual.double()).to(dtype)
    got = run(rms_norm, x, weight, residual=residual)
    assert torch.equal(residual, summed)
    assert torch.equal(x, before)
    expected = formula(summed.cpu(), weight.cpu(), 1e-6).to(dtype)
    assert_close(got.cpu(), expected, max_ulp=ulps(dtype))
    if dtype == torch.bfloat16:
        # the rounded sum is normalized: otherwise a quarter of the values are a step away
        assert (got.cpu() != expected).float().mean() < 0.02


@pytest.mark.parametrize("has_residual", [False, True])
def test_in_place(has_residual, device, run):
    x = randn(4, 100, dtype=torch.bfloat16, device=device)
    residual = randn(4, 100, dtype=torch.bfloat16, device=device, seed=1) if has_residual else None
    weight = randn(100, device=device, seed=2)
    expected = rms_norm_reference(
        x, weight, residual=None if residual is None else residual.clone()
    )
    assert run(rms_norm, x, weight, residual=residual, out=x) is x
    assert_close(x, expected, max_ulp=1)


@pytest.mark.parametrize("has_residual", [False, True])
def test_row_longer_than_a_block(has_residual, device, run):
    x = randn(3, 200, device=device)
    residual = randn(3, 200, device=device, seed=1) if has_residual else None
    summed = x if residual is None else x + residual
    with pin("rms_norm", RmsNormConfig(block_d=64, num_warps=1)):
        got = run(rms_norm, x, None, residual=residual)
    assert_close(got.cpu(), formula(summed.cpu(), None, 1e-6).float(), max_ulp=8)
    if residual is not None:
        assert torch.equal(residual, summed)


def test_strided_rows_and_out(device, run):
    wide = randn(4, 3, 5, 6, 48, device=device)
    weight = randn(32, device=device, seed=1)
    for x in (
        wide[::2, :, 1:4, :, 8:40],
        wide.permute(2, 0, 3, 1, 4)[..., :32],
        wide[0, ::2, 0, 0, :32],
    ):
        out = torch.empty(*x.shape[:-1], 40, device=device)[..., 4:36]
        residual = randn(*x.shape[:-1], 40, device=device, seed=2)[..., :32]
        summed = x + residual
        assert run(rms_norm, x, weight, residual=residual, out=out) is out
        assert torch.equal(residual, summed)
        assert_close(out.cpu(), formula(summed.cpu(), weight.cpu(), 1e-6).float(), max_ulp=8)


@pytest.mark.parametrize("width", [7, 512, 4096])
def test_row_does_not_depend_on_others(width, device, run):
    x, weight = randn(70, width, device=device), randn(width, device=device, seed=1)
    whole = rms_norm_reference(x, weight)
    for first, last in ((0, 1), (3, 5), (6, 9), (1, 65)):
        assert torch.equal(rms_norm_reference(x[first:last], weight), whole[first:last])
    few = run(rms_norm, x[:5], weight)
    assert torch.equal(run(rms_norm, x[2:3], weight), few[2:3])


def test_extremes(device, run):
    x = torch.tensor(
        [[0.0, 0.0], [1e-30, -1e-30], [1e18, -1e18], [-0.0, 3e-3], [float("nan"), 1.0]],
        device=device,
    )
    got = run(rms_norm, x, None).cpu()
    assert_close(got, formula(x.cpu(), None, 1e-6).float(), rtol=1e-6)
    assert got[4].isnan().all()
    # squares past fp32: the row's root mean square is infinite
    assert run(rms_norm, torch.tensor([[3e38, 1.0]], device=device), None).tolist() == [[0.0, 0.0]]


def test_scale_does_not_matter_without_eps(device, run):
    x = randn(3, 64, device=device)
    assert_close(run(rms_norm, x * 16, None, eps=0.0), run(rms_norm, x, None, eps=0.0), max_ulp=0)


@pytest.mark.parametrize("size", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty_launches_nothing(size, device, run):
    x = torch.empty(size, device=device)
    weight = torch.ones(size[-1], device=device)
    assert run(rms_norm, x, weight, launched=False).shape == size


X = torch.zeros(2, 8)
ONES = torch.ones(8)


@pytest.mark.parametrize(
    ("x", "weight", "kwargs", "kind", "text"),
    [
        ([1.0], None, {}, TypeError, "rms_norm: x is list, expected a tensor"),
        (X.double(), None, {}, TypeError, "x is float64"),
        (torch.tensor(1.0), None, {}, ValueError, r"x is \(\), expected \[..., D\]"),
        (torch.zeros(8, 2).t(), None, {}, ValueError, "contiguous last dimension"),
        (X, ONES[:4], {}, ValueError, r"weight is \(4,\), expected \[D\] = \[8\]"),
        (X, ONES.int(), {}, TypeError, "weight is int32"),
        (X, torch.ones(16)[::2], {}, ValueError, r"weight is \(8,\) with strides \(2,\)"),
        (X, ONES, {"eps": -1.0}, ValueError, "eps is -1.0, expected >= 0"),
        (X, ONES, {"residual": X[:1]}, ValueError, r"residual is \(1, 8\)"),
        (X, ONES, {"residual": X.half()}, TypeError, "residual is float16, expected float32"),
        (X, ONES, {"residual": X}, ValueError, "residual is overlapping x in memory"),
        (X, ONES, {"out": torch.zeros(2, 4)}, ValueError, r"out is \(2, 4\)"),
        (X, ONES, {"out": torch.zeros(2, 8).half()}, TypeError, "out is float16"),
        (X[:1], ONES, {"out": ONES.view(1, 8)}, ValueError, "out is overlapping an input"),
    ],
)
def test_refusals(x, weight, kwargs, kind, text):
    for op in (rms_norm, rms_norm_reference):
        with pytest.raises(kind, match=text):
            op(x, weight, **kwargs)


def test_refuses_out_on_residual():
    residual = torch.zeros(2, 8)
    for op in (rms_norm, rms_norm_reference):
        with pytest.raises(ValueError, match="out is overlapping an input"):
            op(X, ONES, residual=residual, out=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 1024, 4096])
def test_flash_shape(width, run):
    x = randn(3456, width, dtype=torch.bfloat16, device="cuda")
    weight = randn(width, dtype=torch.bfloat16, device="cuda", seed=1)
    assert_close(run(rms_norm, x, weight), rms_norm_reference(x, weight), max_ulp=1)
