"""``index_query`` has the bits of ``apply_rope``, ``hadamard`` and ``quant_round_trip`` one after
another, and stands within their roundings of the formula in fp64.

Mutants run, each noticed: turned the other way, Hadamard before the rotation, its factor left out,
one round of it fewer, groups of 64, the next token's position, not rounded between the steps,
another head's row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import apply_rope, hadamard, quant_round_trip
from ftkernels.attention.index_query import index_query, index_query_reference
from ftkernels.testing import assert_close, randn


def inputs(tokens, heads, width, rope, device, dtype=torch.bfloat16, seed=0):
    q = randn(tokens, heads, width, dtype=dtype, device=device, scale=2.0, seed=seed)
    angles = randn(40, rope // 2, device=device, scale=3.0, seed=seed + 1)
    positions = (torch.arange(tokens) * 7 % 40).to(device)
    return q, positions, angles.cos(), angles.sin()


def one_by_one(q, positions, cos, sin, round_trip=True):
    x = apply_rope(q, positions, cos, sin)
    return quant_round_trip(hadamard(x), fmt="fp4", group=32) if round_trip else x


def formula(q, positions, cos, sin):
    """Rotation and Hadamard in fp64, and the spacing of E2M1 in each group of 32."""
    x, half = q.double().cpu(), cos.shape[1]
    if half:
        turn = torch.complex(cos.double().cpu(), sin.double().cpu())[positions.cpu()][:, None]
        tail = torch.view_as_complex(x[..., -2 * half :].unflatten(-1, (-1, 2)).contiguous()) * turn
        x = torch.cat((x[..., : x.shape[-1] - 2 * half], torch.view_as_real(tail).flatten(-2)), -1)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = x @ matrix * x.shape[-1] ** -0.5
    largest = x.unflatten(-1, (-1, min(32, x.shape[-1]))).abs().amax(-1, keepdim=True)
    return x, torch.exp2(torch.ceil(torch.log2(largest / 6.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rope"),
    [
        (1, 64, 128, 64), (3, 5, 128, 64), (5, 1, 64, 12), (2, 3, 32, 32), (3, 2, 8, 4),
        (2, 2, 16, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("round_trip", [True, False])
def test_has_the_bits_of_the_ops_one_by_one(
    tokens, heads, width, rope, dtype, round_trip, device, run
):
    args = inputs(tokens, heads, width, rope, device, dtype)
    expected = one_by_one(*args, round_trip)
    assert torch.equal(run(index_query, *args, round_trip=round_trip), expected)
    q = args[0]
    assert run(index_query, *args, round_trip=round_trip, out=q) is q
    assert torch.equal(q, expected)


@pytest.mark.parametrize(("width", "rope"), [(128, 64), (32, 8)])
def test_matches_formula(width, rope, device, run):
    args = inputs(4, 3, width, rope, device, torch.float32)
    got = run(index_query, *args).cpu().double()
    exact, scale = formula(*args)
    # the widest spacing of E2M1 is 2, so that a rounding is off by at most 1 under its scale
    error = (got - exact).unflatten(-1, (-1, 32)).abs() / scale
    assert error.max() <= 1.0 + 1e-5
    assert error.square().mean().sqrt() < 0.3
    turned = run(index_query, *args, round_trip=False).cpu()
    assert_close(turned, apply_rope(*args).cpu(), row_tol=1e-6)
    assert torch.equal(turned[..., : width - rope], args[0].cpu()[..., : width - rope])


def test_strided_tensors(device, run):
    q, positions, cos, sin = inputs(6, 8, 64, 32, device)
    q, positions = torch.cat((q, q), 2)[::2, ::3, 64:], positions[::2]
    cos, sin = (torch.cat((x, x), 1)[:, 16:] for x in (cos, sin))
    out = torch.empty(3, 3, 80, dtype=q.dtype, device=device)[..., 8:72]
    assert run(index_query, q, positions, cos, sin, out=out) is out
    assert torch.equal(out, one_by_one(q, positions, cos, sin))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shapes_and_sizes(data):
    width = data.draw(st.sampled_from([2, 16, 64, 128]))
    rope = 2 * data.draw(st.integers(0, width // 2))
    args = inputs(
        data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), width, rope, "cpu",
        seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    scale = data.draw(st.sampled_from([1.0, 1e-30, 1e30, 0.0]))
    args = (args[0] * scale, *args[1:])
    got = index_query(*args)
    assert torch.equal(got.view(torch.int16), one_by_one(*args).view(torch.int16))


def test_a_row_that_is_not_finite_leaves_the_others(device, run):
    args = inputs(2, 3, 64, 16, device)
    args[0][1, 1, 5] = float("inf")
    got = run(index_query, *args)
    assert got[1, 1].isnan().all()
    assert got[0].isfinite().all()
    assert got[1, ::2].isfinite().all()


def test_empty_launches_nothing(device, run):
    q, positions, cos, sin = inputs(1, 2, 32, 8, device)
    got = run(index_query, q[:0], positions[:0], cos, sin, launched=False)
    assert got.shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (0, torch.zeros(2, 3), ValueError, "index_query: q is"),
        (0, torch.zeros(2, 3, 48), ValueError, "expected Di to be a power of two up to 4096"),
        (0, torch.zeros(2, 3, 32).double(), TypeError, "index_query: q is float64"),
        (1, torch.zeros(3).long(), ValueError, r"positions is \(3,\), expected \[T\]"),
        (2, torch.zeros(40, 17), ValueError, "index_query: "),
        (2, None, TypeError, "index_query: cos is NoneType, expected a tensor"),
    ],
)
def test_refusals(place, value, kind, text):
    args = list(inputs(2, 3, 32, 8, "cpu"))
    args[place] = value
    for op in (index_query, index_query_reference):
        with pytest.raises(kind, match=text):
            op(*args)


def test_refuses_partial_overlap():
    q, *rest = inputs(3, 2, 32, 8, "cpu")
    with pytest.raises(ValueError, match="index_query: out is overlapping an input"):
        index_query(q[:2], rest[0][:2], *rest[1:], out=q[1:])
