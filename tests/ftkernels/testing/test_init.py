"""The helpers themselves: a comparison that must fail fails, poison shows, launches are counted.

Mutants tried: infinities within rtol, ulp distance over the sign, worst place of the wrong tensor,
poison missing from new_empty, warm-ups counted as launches.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import ftkernels
from ftkernels.testing import assert_close, count_launches, nan_poison, randn

NAN, INF = float("nan"), float("inf")


@triton.jit
def _fill_kernel(out_ptr, value, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), value)


def test_equal_values_pass_in_every_mode():
    x = torch.tensor([[1.0, -0.0, NAN], [INF, -INF, 1e-40]])
    y = torch.tensor([[1.0, 0.0, NAN], [INF, -INF, 1e-40]])
    for kwargs in ({}, {"rtol": 1.0}, {"max_ulp": 0}, {"row_tol": 0.0}):
        assert_close(x, y, **kwargs)
    assert_close(torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize("kwargs", [{}, {"rtol": 0.5}, {"atol": 1e9}, {"max_ulp": 9}])
@pytest.mark.parametrize(
    ("actual", "expected"),
    [(1.0, INF), (INF, 1.0), (INF, -INF), (NAN, 1.0), (1.0, NAN), (3.4028234663852886e38, INF)],
    ids=str,
)
def test_infinity_and_nan_are_close_to_no_number(actual, expected, kwargs):
    x, y = torch.tensor([[0.0, actual]]), torch.tensor([[0.0, expected]])
    with pytest.raises(AssertionError, match=r"1 of 2 values .* worst at \(0, 1\)"):
        assert_close(x, y, **kwargs)
    with pytest.raises(AssertionError, match="1 of 2 values"):
        assert_close(x, y, row_tol=0.5)


def test_report_names_count_place_values_and_errors():
    expected = torch.zeros(2, 3)
    actual = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, -4.0]])
    with pytest.raises(AssertionError) as error:
        assert_close(actual, expected, atol=0.5)
    assert str(error.value) == (
        "2 of 6 values differ by more than rtol 0, atol 0.5; worst at (1, 2): -4, expected 0; "
        "largest error 4, rms 2.04"
    )  # sqrt((9 + 16) / 6) = 2.0412


def test_rtol_and_atol_add_up():
    expected = torch.tensor([100.0])
    assert_close(torch.tensor([101.4]), expected, rtol=0.01, atol=0.5)
    with pytest.raises(AssertionError, match=r"rtol 0\.01, atol 0\.5"):
        assert_close(torch.tensor([101.6]), expected, rtol=0.01, atol=0.5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_ulp_counts_neighbours(dtype):
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[torch.empty(0, dtype=dtype).itemsize]
    codes = torch.tensor([5, 40, 77], dtype=bits)
    x, three_up = codes.view(dtype), (codes + 3).view(dtype)
    assert_close(three_up, x, max_ulp=3)
    with pytest.raises(AssertionError, match=r"2 ulp \(largest: 3\)"):
        assert_close(three_up, x, max_ulp=2)
    one, minus_one = torch.tensor([1.0]).to(dtype), torch.tensor([-1.0]).to(dtype)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close(minus_one, one, max_ulp=9)


def test_ulp_across_zero_counts_through_both_signs():
    tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    assert_close(tiny, -tiny, max_ulp=2)
    with pytest.raises(AssertionError, match="largest: 2"):
        assert_close(tiny, -tiny, max_ulp=1)


def test_row_tolerance_is_of_the_expected_row():
    expected = torch.tensor([[1000.0, 0.0], [1.0, 0.0]])
    assert_close(expected + torch.tensor([[0.0, 9.0], [0.0, 0.009]]), expected, row_tol=0.01)
    with pytest.raises(AssertionError, match=r"worst at \(1, 1\)"):
        assert_close(expected + torch.tensor([[0.0, 9.0], [0.0, 0.011]]), expected, row_tol=0.01)


def test_shape_and_dtype_must_agree():
    with pytest.raises(AssertionError, match=r"shape \(3,\), expected \(1, 3\)"):
        assert_close(torch.zeros(3), torch.zeros(1, 3), atol=1.0)
    with pytest.raises(AssertionError, match=r"dtype torch.float16, expected torch.float32"):
        assert_close(torch.zeros(3).half(), torch.zeros(3), atol=1.0)


def test_randn_is_seeded_and_the_same_in_every_dtype():
    x = randn(1000, scale=3.0, seed=7)
    assert torch.equal(x, randn(1000, scale=3.0, seed=7))
    assert not torch.equal(x, randn(1000, scale=3.0, seed=8))
    assert torch.equal(x.bfloat16(), randn(1000, scale=3.0, seed=7, dtype=torch.bfloat16))
    assert 2.7 < x.std() < 3.3
    assert randn(2, 3, device="meta", dtype=torch.float16).shape == (2, 3)


def test_poison_fills_every_fresh_tensor():
    like = torch.zeros(3)
    with nan_poison():
        fresh = [
            torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (1,)),
            like.new_empty(3), torch.empty(3, dtype=torch.bfloat16),
            torch.empty(3, dtype=torch.float8_e4m3fn),
        ]  # fmt: skip
        assert all(x.float().isnan().all() for x in fresh)
        assert torch.empty(3, dtype=torch.uint8).tolist() == [0x5A] * 3
        assert torch.empty(3, dtype=torch.int8).tolist() == [0x5A] * 3
        assert torch.empty(3, dtype=torch.int64).tolist() == [0x5A5A] * 3
        assert torch.empty(2, dtype=torch.bool).tolist() == [True, True]
        assert torch.zeros(3).tolist() == [0.0] * 3
        assert torch.empty(3, device="meta").is_meta


def test_poison_ends_with_its_context():
    before = torch.empty
    with nan_poison():
        assert torch.empty is not before
    assert torch.empty is before


def test_launches_are_counted_where_kernels_run(device, lane):
    x = randn(4, 64, device=device)
    with count_launches() as names:
        ftkernels.rms_norm(x, None)
        ftkernels.rms_norm(x[:0], None)
        ftkernels.rms_norm_reference(x, None)
    assert names == ([] if lane == "reference" else ["_rms_norm_kernel"])


def test_a_bare_kernel_is_counted_by_name(device, lane):
    if lane == "reference":
        pytest.skip("nothing runs kernels here; captured launches are counted in test_aot.py")
    out = torch.zeros(8, device=device)
    with count_launches() as names:
        _fill_kernel[(1,)](out, 2.0, BLOCK=8)
        _fill_kernel[(1,)](out, 3.0, BLOCK=8)
    _fill_kernel[(1,)](out, 4.0, BLOCK=8)
    assert names == ["_fill_kernel", "_fill_kernel"]
    assert out.tolist() == [4.0] * 8
