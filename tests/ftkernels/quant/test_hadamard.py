from __future__ import annotations

import pytest
import torch

from ftkernels.quant.hadamard import hadamard, hadamard_reference
from ftkernels.testing import assert_close, randn


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (5, 32), (2, 3, 128), (128,), (1, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_formula(size, dtype, device, run):
    x = randn(*size, dtype=dtype, device=device, scale=3.0)
    width = size[-1]
    expected = x.cpu().double() @ sylvester(width).T * width**-0.5
    got = run(hadamard, x).cpu()
    if dtype == torch.float32:
        assert_close(got, expected.float(), row_tol=4e-7)
    else:
        assert_close(got, expected.to(dtype), row_tol=torch.finfo(dtype).eps)


def test_columns_are_in_sylvester_order(device, run):
    got = run(hadamard, torch.eye(16, device=device))
    assert torch.equal(got.cpu().double(), sylvester(16) / 4)


def test_is_its_own_inverse(device, run):
    x = randn(6, 128, device=device)
    assert_close(run(hadamard, run(hadamard, x)), x, row_tol=1e-6)


def test_kernel_has_the_bits_of_the_reference(device, run):
    x = randn(7, 128, device=device)
    assert torch.equal(run(hadamard, x), hadamard_reference(x))


def test_row_does_not_depend_on_others(device, run):
    x = randn(40, 128, device=device)
    whole = run(hadamard, x)
    for first, last in ((0, 1), (3, 5), (7, 10), (0, 39)):
        assert torch.equal(run(hadamard, x[first:last]), whole[first:last])


def test_strides_out_and_input_kept(device, run):
    wide = randn(4, 3, 5, 80, device=device)
    for x in (wide[::2, :, 1:4, 8:72], wide.transpose(0, 2)[..., :64], wide[0, 1, 2, :64]):
        before = x.clone()
        out = torch.empty(*x.shape[:-1], 70, device=device)[..., 3:67]
        assert run(hadamard, x, out=out) is out
        assert torch.equal(out, hadamard_reference(before))
        assert torch.equal(x, before)


def test_extremes(device, run):
    x = torch.tensor(
        [[1e-30, -1e-30, 0.0, 0.0], [1e38, 1e38, 0.0, 1e37], [float("inf"), 0, 0, 0]], device=device
    )
    got = run(hadamard, x).cpu()
    assert_close(got[:2], (x[:2].cpu().double() @ sylvester(4) / 2).float(), row_tol=1e-6)
    assert got[2].isinf().all()


def test_empty_launches_nothing(device, run):
    assert run(hadamard, torch.empty(0, 4, 8, device=device), launched=False).shape == (0, 4, 8)


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("x", "kwargs", "kind", "text"),
    [
        (1.0, {}, TypeError, "hadamard: x is float, expected a tensor"),
        (X.double(), {}, TypeError, "x is float64"),
        (torch.zeros(2, 6), {}, ValueError, r"x is \(2, 6\), expected .* D a power of two"),
        (torch.zeros(2, 0), {}, ValueError, "D a power of two"),
        (torch.zeros(1, 8192), {}, ValueError, "up to 4096"),
        (torch.tensor(1.0), {}, ValueError, r"x is \(\)"),
        (torch.zeros(8, 2).t(), {}, ValueError, "contiguous last dimension"),
        (
            X,
            {"out": X},
            ValueError,
            "out is overlapping an input in memory, expected memory of its own",
        ),
        (X, {"out": torch.zeros(2, 4)}, ValueError, r"out is \(2, 4\)"),
    ],
)
def test_refusals(x, kwargs, kind, text):
    for op in (hadamard, hadamard_reference):
        with pytest.raises(kind, match=text):
            op(x, **kwargs)


@pytest.mark.gpu
def test_flash_shape(run):
    x = randn(3456, 64, 128, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(run(hadamard, x), hadamard_reference(x))
