"""Mutants that these tests catch: shared left out, first route left out, skipped route read, sum
in bf16, mean instead of sum.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels.moe.combine import moe_combine, moe_combine_reference
from ftkernels.testing import assert_close, randn


def formula(routed, topk_ids, shared):
    total = torch.zeros(routed.shape[0], routed.shape[2], dtype=torch.float64)
    for t in range(routed.shape[0]):
        for k in range(routed.shape[1]):
            if topk_ids is None or topk_ids[t, k] != -1:
                total[t] += routed[t, k].double()
    return total if shared is None else total + shared.double()


@pytest.mark.parametrize(("rows", "topk", "width"), [(1, 6, 256), (5, 4, 100), (3, 1, 1500)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_matches_formula(rows, topk, width, dtype, with_ids, with_shared, device, run):
    routed = randn(rows, topk, width, dtype=dtype, device=device)
    shared = randn(rows, width, dtype=dtype, device=device, seed=1) if with_shared else None
    ids = None
    if with_ids:
        ids = torch.arange(rows * topk, dtype=torch.int32, device=device).view(rows, topk) % 3 - 1
        routed[ids == -1] = float(
            "nan"
        )  # skipped routes are not written, so they may hold anything
    out = run(moe_combine, routed, topk_ids=ids, shared=shared)
    expected = formula(routed.cpu(), ids, None if shared is None else shared.cpu())
    if dtype == torch.float32:
        assert_close(out.cpu(), expected.float(), atol=2e-6)
    else:
        assert_close(out.cpu(), expected.to(dtype), max_ulp=1)


def test_out_dtype_and_mixed_inputs(device, run):
    routed = randn(2, 3, 64, dtype=torch.bfloat16, device=device)
    shared = randn(2, 64, device=device, seed=1)
    out = run(moe_combine, routed, shared=shared, out_dtype=torch.float32)
    assert_close(out.cpu(), formula(routed.cpu(), None, shared.cpu()).float(), atol=2e-6)


def test_order_of_the_sum(device, run):
    # fp32 keeps the small terms only when k runs upwards and shared comes last
    routed = torch.tensor([1e8, -1e8, 1.0, 0.25], device=device).view(1, 4, 1).expand(1, 4, 8)
    shared = torch.full((1, 8), 2.0**-24, device=device)
    out = run(moe_combine, routed.contiguous(), shared=shared)
    assert (out == 1.25).all()
    flipped = run(moe_combine, routed.flip(1).contiguous(), shared=shared)
    assert (flipped != 1.25).all()


def test_strided_route_major_and_out(device, run):
    routed = randn(3, 4, 96, device=device).transpose(0, 1)[:, :, 32:]  # [T, topk, C], topk outside
    out = torch.empty(4, 128, device=device)[:, :64]
    assert run(moe_combine, routed, out=out) is out
    assert_close(out.cpu(), formula(routed.cpu(), None, None).float(), atol=2e-6)


def test_a_row_does_not_depend_on_the_others(device, run):
    routed, shared = randn(9, 4, 33, device=device), randn(9, 33, device=device, seed=1)
    whole = moe_combine(routed, shared=shared)
    for n in range(1, 9):
        assert torch.equal(run(moe_combine, routed[:n], shared=shared[:n]), whole[:n])


def test_nothing_to_add_and_empty(device, run):
    ids = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    nan = torch.full((2, 3, 16), float("nan"), device=device)
    assert (run(moe_combine, nan, topk_ids=ids) == 0).all()
    out = run(moe_combine, torch.empty(0, 3, 16, device=device), launched=False)
    assert out.shape == (0, 16)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"routed": torch.zeros(2, 4)}, ValueError, r"routed is \(2, 4\), expected \[T, topk, C\]"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "topk_ids is"),
        ({"topk_ids": torch.zeros(2, 3)}, TypeError, "topk_ids is float32, expected int32"),
        ({"shared": torch.zeros(2, 5)}, ValueError, r"shared is \(2, 5\), expected \[T, C\]"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64"),
        ({"out": torch.zeros(2, 4).half()}, TypeError, "out is float16, expected float32"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = dict(kwargs)
    routed = kwargs.pop("routed", torch.zeros(2, 3, 4))
    for op in (moe_combine, moe_combine_reference):
        with pytest.raises(kind, match=text):
            op(routed, **kwargs)
