from __future__ import annotations

import pytest
import torch

from ftkernels.moe.swiglu import swiglu_clamp, swiglu_clamp_reference
from ftkernels.testing import assert_close, randn


def formula(gate_up: torch.Tensor, limit: float, weights: torch.Tensor | None) -> torch.Tensor:
    """The expert's activation of the model's specification, in fp64."""
    inter = gate_up.shape[1] // 2
    a, b = gate_up.double()[:, :inter], gate_up.double()[:, inter:]
    if limit:
        a = torch.where(a > limit, torch.full_like(a, limit), a)
        b = torch.where(b > limit, torch.full_like(b, limit), b)
        b = torch.where(b < -limit, torch.full_like(b, -limit), b)
    h = a / (1 + torch.exp(-a)) * b
    return h if weights is None else h * weights.double()[:, None]


@pytest.mark.parametrize(("num_tokens", "inter"), [(1, 64), (7, 100), (5, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [0.0, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_matches_formula(num_tokens, inter, dtype, limit, weighted, device, run):
    gate_up = randn(num_tokens, 2 * inter, dtype=dtype, device=device, scale=8.0)
    weights = randn(num_tokens, device=device, seed=1) if weighted else None
    out = run(swiglu_clamp, gate_up, limit=limit, weights=weights)
    expected = formula(gate_up.cpu(), limit, None if weights is None else weights.cpu())
    assert_close(out.cpu(), expected.to(dtype), max_ulp=8 if dtype == torch.float32 else 1)


def test_strided_rows_and_out(device, run):
    wide = randn(6, 3 * 256, dtype=torch.bfloat16, device=device, scale=4.0)
    gate_up = wide[::2, 256:]
    out = torch.empty(3, 512, dtype=torch.bfloat16, device=device)[:, :256]
    result = run(swiglu_clamp, gate_up, limit=1.0, out=out)
    assert result is out
    assert_close(out, swiglu_clamp_reference(gate_up.contiguous(), limit=1.0), max_ulp=1)


def test_empty_launches_nothing(device, run):
    out = run(swiglu_clamp, torch.empty(0, 64, device=device), limit=1.0, launched=False)
    assert out.shape == (0, 32)


def test_extreme_values(device, run):
    gate_up = torch.tensor(
        [[1e30, -1e30, 0.0, float("inf"), 3e38, -3e38, 5.0, -5.0]], device=device
    )
    out = run(swiglu_clamp, gate_up, limit=10.0)
    expected = formula(gate_up.cpu(), 10.0, None).float()
    expected[0, 1] = 0.0  # silu(-1e30) underflows
    assert_close(out.cpu(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"limit": -1.0}, ValueError, "swiglu_clamp: limit is -1.0, expected >= 0"),
        (
            {"limit": 1.0, "weights": torch.ones(3)},
            ValueError,
            r"weights is \(3,\), expected \[T\]",
        ),
        ({"limit": 1.0, "out": torch.empty(2, 3)}, ValueError, "out is"),
        ({"limit": 1.0, "out": torch.empty(2, 2).double()}, TypeError, "out is float64"),
    ],
)
def test_refusals(kwargs, kind, text):
    for op in (swiglu_clamp, swiglu_clamp_reference):
        with pytest.raises(kind, match=text):
            op(torch.zeros(2, 4), **kwargs)


def test_refuses_other_inputs():
    with pytest.raises(TypeError, match="gate_up is list, expected a tensor"):
        swiglu_clamp([1.0], limit=1.0)
    with pytest.raises(ValueError, match="expected a contiguous last dimension"):
        swiglu_clamp(torch.zeros(4, 2).t(), limit=1.0)
    with pytest.raises(ValueError, match="even last size"):
        swiglu_clamp(torch.zeros(2, 3), limit=1.0)
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="overlapping an input"):
        swiglu_clamp(x, limit=1.0, out=x[:, :4])
