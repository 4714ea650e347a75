from __future__ import annotations

import math

import pytest
import torch

from ftkernels.rope.rope import apply_rope, apply_rope_reference, rope_tables, rope_tables_reference
from ftkernels.testing import assert_close, randn

YARN = {"factor": 16, "original_max_positions": 65536, "beta_fast": 32, "beta_slow": 1}
# freq_i / g_i of the specification, r = 64
RATIOS = (
    [1.0] * 16
    + [0.90625, 0.8125, 0.71875, 0.625, 0.53125, 0.4375, 0.34375, 0.25, 0.15625]
    + [0.0625] * 7
)


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def angle(position: int, freq: float) -> float:
    """The reference's angle: frequency and product each rounded to fp32."""
    return fp32(position * fp32(freq))


def expect_row(cos, sin, position, freqs) -> None:
    for i, freq in enumerate(freqs):
        a = angle(position, freq)
        assert cos[position, i].item() == pytest.approx(math.cos(a), abs=6e-8)
        assert sin[position, i].item() == pytest.approx(math.sin(a), abs=6e-8)


@pytest.mark.parametrize(("dim", "theta"), [(64, 10000.0), (16, 10000.0), (2, 500.0)])
def test_plain_tables(dim, theta):
    cos, sin = rope_tables(dim=dim, max_positions=70001, theta=theta)
    assert cos.shape == sin.shape == (70001, dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for position in (0, 1, 127, 65535, 65536, 70000):
        expect_row(cos, sin, position, [theta ** (-2 * i / dim) for i in range(dim // 2)])


def test_yarn_tables_have_the_specified_frequencies():
    cos, sin = rope_tables(dim=64, max_positions=2000, theta=160000.0, yarn=YARN)
    for position in (1, 2, 777, 1999):
        expect_row(
            cos, sin, position, [r * 160000.0 ** (-2 * i / 64) for i, r in enumerate(RATIOS)]
        )


def test_yarn_of_another_size():
    """r = 16: the ramp runs between the channels that make 32 turns and 1 turn over the context."""
    b, r = 160000.0, 16

    def dim(turns):
        return r * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(b))

    low, high = max(math.floor(dim(32)), 0), min(math.ceil(dim(1)), r - 1)
    freqs = []
    for i in range(8):
        g, ramp = b ** (-2 * i / r), min(max((i - low) / (high - low), 0), 1)
        freqs.append(g * (1 - ramp) + g / 16 * ramp)
    assert 0 < low < high < 8
    cos, sin = rope_tables(dim=r, max_positions=500, theta=b, yarn=YARN)
    expect_row(cos, sin, 499, freqs)


def test_yarn_with_equal_ends_is_a_step():
    yarn = {"factor": 4, "original_max_positions": 6, "beta_fast": 1, "beta_slow": 1}
    cos, sin = rope_tables(dim=8, max_positions=50, theta=10.0, yarn=yarn)
    # fewer than one turn everywhere: low = max(-1, 0), high = ceil(-0.08) = 0
    freqs = [10.0 ** (-2 * i / 8) / (1 if i == 0 else 4) for i in range(4)]
    expect_row(cos, sin, 49, freqs)


def test_far_positions_use_the_fp32_angle():
    cos, sin = rope_tables(dim=4, max_positions=1048576, theta=10000.0)
    expect_row(cos, sin, 1048575, [1.0, 0.01])
    exact = 1048575 * fp32(0.01)
    assert abs(exact - angle(1048575, 0.01)) > 1e-5


def test_no_positions():
    cos, sin = rope_tables(dim=4, max_positions=0, theta=10000.0)
    assert cos.shape == sin.shape == (0, 2)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"dim": 3}, "rope_tables: dim is 3, expected an even number >= 2"),
        ({"dim": 0}, "dim is 0"),
        ({"max_positions": -1}, "max_positions is -1, expected >= 0"),
        ({"theta": 1.0}, "theta is 1.0, expected > 1"),
        (
            {"yarn": {"factor": 16}},
            "yarn is .*, expected the fields factor, original_max_positions",
        ),
        ({"yarn": {**YARN, "mscale": 1.0}}, "expected the fields"),
        ({"yarn": {**YARN, "factor": 0}}, "expected values > 0"),
    ],
)
def test_table_refusals(kwargs, text):
    for op in (rope_tables, rope_tables_reference):
        with pytest.raises(ValueError, match=text):
            op(**{"dim": 4, "max_positions": 8, "theta": 10000.0, **kwargs})


def formula(x, positions, freqs, inverse=False) -> torch.Tensor:
    """The specification's rotation in fp64, on [T, D] or [T, H, D]."""
    out = x.double().clone()
    kept = x.shape[-1] - 2 * len(freqs)
    for t, p in enumerate(positions.tolist()):
        for i, freq in enumerate(freqs):
            a = -angle(p, freq) if inverse else angle(p, freq)
            even, odd = x[t, ..., kept + 2 * i].double(), x[t, ..., kept + 2 * i + 1].double()
            out[t, ..., kept + 2 * i] = even * math.cos(a) - odd * math.sin(a)
            out[t, ..., kept + 2 * i + 1] = even * math.sin(a) + odd * math.cos(a)
    return out


def tables(dim, device, n=3000):
    cos, sin = rope_tables(dim=dim, max_positions=n, theta=10000.0)
    return cos.to(device), sin.to(device), [10000.0 ** (-2 * i / dim) for i in range(dim // 2)]


@pytest.mark.parametrize(
    ("size", "dim"),
    [((3, 5, 36), 12), ((4, 64), 16), ((2, 3, 16), 16), ((1, 64, 128), 64), ((7, 2), 2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_matches_formula(size, dim, dtype, inverse, device, run):
    x = randn(*size, dtype=dtype, device=device)
    cos, sin, freqs = tables(dim, device)
    positions = torch.tensor([0, 1, 2999, 5, 128, 128, 64])[: size[0]]
    got = run(apply_rope, x, positions.to(device), cos, sin, inverse=inverse).cpu()
    expected = formula(x.cpu(), positions, freqs, inverse)
    kept = size[-1] - dim
    assert torch.equal(got[..., :kept], x.cpu()[..., :kept])
    eps = 2e-7 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert_close(
        got, expected.to(dtype), rtol=eps * 2, atol=2 * eps if dtype == torch.float32 else 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_position_types_and_strides(dtype, device, run):
    x = randn(4, 3, 32, device=device)
    cos, sin, freqs = tables(16, device)
    positions = torch.tensor([9, 0, 8, 0, 7, 0, 2500, 0], dtype=dtype, device=device)[::2]
    got = run(apply_rope, x, positions, cos, sin)
    assert_close(got.cpu(), formula(x.cpu(), positions.cpu(), freqs).float(), atol=1e-6)


@pytest.mark.parametrize("size", [(5, 4, 32), (5, 32)], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_in_place(size, inverse, device, run):
    x = randn(*size, dtype=torch.bfloat16, device=device)
    cos, sin, _ = tables(16, device)
    positions = torch.arange(5, device=device)
    expected = apply_rope_reference(x, positions, cos, sin, inverse=inverse)
    assert run(apply_rope, x, positions, cos, sin, inverse=inverse, out=x) is x
    assert torch.equal(x, expected)


def test_inverse_undoes(device, run):
    x = randn(6, 3, 64, device=device)
    cos, sin, _ = tables(64, device)
    positions = torch.tensor([0, 3, 70, 999, 2000, 2999], device=device)
    there = run(apply_rope, x, positions, cos, sin)
    assert_close(run(apply_rope, there, positions, cos, sin, inverse=True), x, atol=2e-6)
    assert_close(there.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_product_depends_on_distance_only(device, run):
    q, k = randn(1, 16, device=device), randn(1, 16, device=device, seed=1)
    cos, sin, _ = tables(16, device)

    def product(a, b):
        at = [torch.tensor([p], device=device) for p in (a, b)]
        return (run(apply_rope, q, at[0], cos, sin) * run(apply_rope, k, at[1], cos, sin)).sum()

    assert_close(product(107, 100), product(7, 0), atol=1e-4)
    assert abs(product(107, 100) - product(100, 107)) > 1e-2


def test_strides_and_out(device, run):
    x = randn(4, 6, 48, device=device)[::2, 1::2, 8:40]
    cos, sin, freqs = tables(16, device)
    cos, sin = (torch.nn.functional.pad(t, (0, 3))[:, :8] for t in (cos, sin))
    positions = torch.tensor([17, 2], device=device)
    out = torch.empty(3, 2, 40, device=device).transpose(0, 1)[..., 4:36]
    assert run(apply_rope, x, positions, cos, sin, out=out) is out
    assert_close(out.cpu(), formula(x.cpu(), positions.cpu(), freqs).float(), atol=1e-6)


def test_row_does_not_depend_on_others(device, run):
    x, (cos, sin, _) = randn(9, 3, 32, device=device), tables(32, device)
    positions = torch.arange(9, device=device) * 300
    whole = run(apply_rope, x, positions, cos, sin)
    for t in (0, 4, 8):
        assert torch.equal(
            run(apply_rope, x[t : t + 1], positions[t : t + 1], cos, sin), whole[t : t + 1]
        )


def test_extremes(device, run):
    x = torch.tensor([[0.0, -0.0, 1e30, 1e30], [3e38, 0.0, 1e-38, 0.0]], device=device)
    cos, sin, freqs = tables(4, device)
    positions = torch.tensor([1, 2], device=device)
    got = run(apply_rope, x, positions, cos, sin)
    assert_close(got.cpu(), formula(x.cpu(), positions.cpu(), freqs).float(), rtol=1e-6)


def test_empty_launches_nothing(device, run):
    cos, sin, _ = tables(4, device)
    positions = torch.empty(0, dtype=torch.int32, device=device)
    for size in ((0, 3, 8), (0, 8)):
        x = torch.empty(size, device=device)
        assert run(apply_rope, x, positions, cos, sin, launched=False).shape == size
    x = torch.empty(2, 0, 8, device=device)
    assert run(apply_rope, x, positions.new_zeros(2), cos, sin, launched=False).shape == (2, 0, 8)


X, AT, TABLE = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        ((None, AT, TABLE, TABLE), {}, TypeError, "apply_rope: x is NoneType, expected a tensor"),
        ((X.double(), AT, TABLE, TABLE), {}, TypeError, "x is float64"),
        (
            (X[0], AT, TABLE, TABLE),
            {},
            ValueError,
            r"x is \(8,\), expected \[T, H, D\] or \[T, D\]",
        ),
        ((torch.zeros(8, 2).t(), AT, TABLE, TABLE), {}, ValueError, "contiguous last dimension"),
        (
            (X, AT.float(), TABLE, TABLE),
            {},
            TypeError,
            "positions is float32, expected int32, int64",
        ),
        ((X, AT[:1], TABLE, TABLE), {}, ValueError, r"positions is \(1,\), expected \[T\] = \[2\]"),
        ((X, AT, TABLE.half(), TABLE), {}, TypeError, "cos is float16, expected float32"),
        ((X, AT, TABLE, TABLE[:4]), {}, ValueError, r"sin is \(4, 2\), expected the shape of cos"),
        ((X[:, :3], AT, TABLE, TABLE), {}, ValueError, "expected at least r = 4 channels"),
        ((X, AT, TABLE, TABLE), {"out": X[:1]}, ValueError, r"out is \(1, 8\)"),
        ((X, AT, TABLE, TABLE), {"out": X.half()}, TypeError, "out is float16"),
        (
            (X[:, :4], AT, TABLE, TABLE),
            {"out": X[:, 2:6]},
            ValueError,
            "out is overlapping an input",
        ),
    ],
)
def test_refusals(args, kwargs, kind, text):
    for op in (apply_rope, apply_rope_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.gpu
def test_flash_shape(run):
    x = randn(3456, 64, 512, dtype=torch.bfloat16, device="cuda")
    cos, sin, _ = tables(64, "cuda", n=3456)
    positions = torch.arange(3456, device="cuda")
    got = run(apply_rope, x, positions, cos, sin)
    assert_close(got, apply_rope_reference(x, positions, cos, sin), max_ulp=1)
