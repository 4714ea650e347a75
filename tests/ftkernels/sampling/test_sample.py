"""Mutants that these tests catch: top-p before top-k, min-p of the mean, the crossing token
dropped, higher id on ties, top-k ties all kept, the filters before the temperature, the draw by
row instead of by position, seed's high word ignored, one noise value for all ids, `u` reused
across positions.
"""

from __future__ import annotations

import math

import pytest
import torch

from ftkernels import scratch_bytes
from ftkernels.config import pin
from ftkernels.sampling.sample import SampleConfig, sample, sample_reference
from ftkernels.testing import randn


def noise(seed, token, position):
    """Gumbel noise from Philox-4x32-10 in Python integers."""
    a, b, c, d = token, position % 2**32, 0, 0
    k, m = seed % 2**32, (seed >> 32) % 2**32
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return -math.log(-math.log((a + 0.5) / 2**32))


def model_row(row, temperature, top_k, top_p, min_p, seed, position):
    """The contract's words in Python: cut a sorted list, then the largest noisy value."""
    row = [-math.inf if math.isnan(x) else x for x in row]
    if not any(math.isfinite(x) for x in row):
        return -1
    z = [x / temperature if temperature > 0 else x for x in row]
    z = torch.tensor(row, dtype=torch.float32)
    z = (z / temperature if temperature > 0 else z).tolist()
    top = max(z)
    if temperature <= 0 or math.isinf(top):
        return row.index(max(row))
    kept = sorted((i for i in range(len(z)) if z[i] > -math.inf), key=lambda i: (-z[i], i))
    kept = [i for i in kept if min_p <= 0 or math.exp(z[i] - top) >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        mass = [int(torch.tensor(math.exp(z[i] - top)).float().item() * 2**30) for i in kept]
        limit, ahead, shorter = top_p * sum(mass), 0, []
        for i, weight in zip(kept, mass, strict=True):
            if shorter and ahead >= limit:
                break
            shorter.append(i)
            ahead += weight
        kept = shorter
    return max(kept, key=lambda i: (z[i] + noise(seed, i, position), -i))


def arguments(rows, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, position=3):
    """Tensors of one value a row; lists give a value to each row."""

    def make(value, dtype):
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    return {
        "temperature": make(temperature, torch.float32), "top_k": make(top_k, torch.int32),
        "top_p": make(top_p, torch.float32), "min_p": make(min_p, torch.float32),
        "seed": make(seed, torch.int64), "position": make(position, torch.int32),
    }  # fmt: skip


def expected(logits, kwargs):
    columns = [
        kwargs[n].tolist() for n in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    ]
    return [
        model_row(row, *values)
        for row, *values in zip(logits.float().tolist(), *columns, strict=True)
    ]


FILTERS = [
    {},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 100000},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 0.0, "top_k": 3},
]


@pytest.mark.parametrize("kwargs", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 300])
def test_matches_model(kwargs, vocab, device, run):
    logits = randn(4, vocab, device=device, scale=2.5)
    kwargs = arguments(4, device, seed=[1, -5, 1 << 40, 3], position=[0, 1, 2, 1 << 20], **kwargs)
    assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits(dtype, device, run):
    logits = randn(4, 200, dtype=dtype, device=device, scale=2.0)
    kwargs = arguments(4, device, seed=[1, 2, 3, 4], top_k=30, top_p=0.9)
    assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


def test_every_row_has_its_own_parameters_over_several_blocks(device, run):
    logits = randn(6, 1000, device=device, scale=2.0)
    kwargs = arguments(
        6, device, temperature=[0.0, 1.0, 0.5, 2.0, 1.0, 1.0], top_k=[0, 0, 50, 7, 0, 3],
        top_p=[1.0, 0.5, 0.9, 1.0, 1.0, 0.2], min_p=[0.0, 0.0, 0.1, 0.0, 0.3, 0.0],
        seed=[1, 2, 3, 4, 5, 6], position=[9, 8, 7, 6, 5, 4],
    )  # fmt: skip
    with pin("sample", SampleConfig(block_v=256, num_warps=4)):
        assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


@pytest.mark.parametrize("kwargs", FILTERS, ids=str)
def test_ties(kwargs, device, run):
    # flat, two levels, mostly tied with a few larger
    logits = torch.zeros(3, 150, device=device)
    logits[1, ::3] = 1.5
    logits[2, [140, 3, 77]] = torch.tensor([2.0, 2.0, 4.0], device=device)
    kwargs = arguments(3, device, seed=[1, 2, 3], **kwargs)
    with pin("sample", SampleConfig(block_v=64, num_warps=4)):
        assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


@pytest.mark.parametrize(("top_k", "top_p", "allowed"), [(3, 1.0, 3), (0, 0.25, 3), (0, 0.26, 4)])
def test_tied_tokens_are_cut_by_id(top_k, top_p, allowed, device, run):
    kwargs = arguments(24, device, top_k=top_k, top_p=top_p, seed=list(range(24)))
    tokens = run(sample, torch.zeros(24, 12, device=device), **kwargs).tolist()
    assert set(tokens) == set(range(allowed))


@pytest.mark.parametrize("kwargs", FILTERS, ids=str)
def test_extreme_logits(kwargs, device, run):
    inf, nan = math.inf, math.nan
    rows = [
        [1.0, inf, 2.0, inf, -inf],
        [-inf, -inf, -inf, -inf, -inf],
        [nan, nan, -inf, nan, -inf],
        [nan, 1.0, 2.0, -inf, 2.0],
        [inf, inf, -inf, inf, -inf],
        [-inf, -inf, -3e38, -inf, -inf],
        [3e38, -3e38, 3e38, 0.0, -0.0],
        [0.0, -0.0, -0.0, 0.0, -1e-40],
        [50.0, 0.0, 0.0, 0.0, 0.0],
    ]
    logits = torch.tensor(rows, device=device)
    kwargs = arguments(len(rows), device, seed=list(range(len(rows))), **kwargs)
    assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


@pytest.mark.parametrize("temperature", [1e-38, 1e30, math.inf])
def test_extreme_temperatures(temperature, device, run):
    logits = randn(3, 50, device=device)
    kwargs = arguments(3, device, temperature=temperature, top_p=0.9, seed=[1, 2, 3])
    assert run(sample, logits, **kwargs).tolist() == expected(logits, kwargs)


def test_temperature_zero_is_the_lowest_of_the_largest(device, run):
    logits = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -1.0, -2.0]], device=device)
    kwargs = arguments(2, device, temperature=0.0)
    assert run(sample, logits, **kwargs).tolist() == [1, 0]
    assert sample_reference(logits, **kwargs).tolist() == [1, 0]


def test_both_zeros_are_one_value(device, run):
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=device)
    kwargs = arguments(2, device, top_k=1)
    assert run(sample, logits, **kwargs).tolist() == [1, 1]


def test_same_draw_alone_and_batched(device, run):
    logits = randn(9, 64, device=device)
    kwargs = arguments(9, device, top_p=0.9, seed=list(range(9)), position=list(range(9)))
    whole = sample(logits, **kwargs).tolist()
    for i in range(9):
        one = {name: value[i : i + 1] for name, value in kwargs.items()}
        assert run(sample, logits[i : i + 1], **one).tolist() == [whole[i]]


@pytest.mark.parametrize("along", ["position", "seed"])
def test_frequencies_follow_the_distribution(along, device, run, lane):
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    draws = 4000 if lane != "interpreter" else 80
    logits = probabilities.log().to(device).expand(draws, 6)
    kwargs = arguments(draws, device, **{along: list(range(draws))})
    counts = torch.bincount(run(sample, logits, **kwargs).long().cpu(), minlength=6)
    chi_square = ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum().item()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in 1000


def test_frequencies_of_a_nucleus(device, run, lane):
    probabilities = torch.tensor([0.04, 0.4, 0.06, 0.25, 0.15, 0.1])
    draws = 3000 if lane != "interpreter" else 60
    logits = probabilities.log().to(device).expand(draws, 6)
    kwargs = arguments(draws, device, top_p=0.7, seed=list(range(draws)))
    counts = torch.bincount(run(sample, logits, **kwargs).long().cpu(), minlength=6)
    kept = torch.tensor([0.0, 0.5, 0.0, 0.3125, 0.1875, 0.0]) * draws
    assert (counts[kept == 0] == 0).all()
    chi_square = ((counts - kept) ** 2 / kept)[kept > 0].sum().item()
    assert chi_square < 13.8  # 2 degrees of freedom: exceeded once in 1000


def test_strided_rows_scratch_and_out(device, run):
    logits = randn(6, 90, device=device)[::2, 10:70]
    kwargs = arguments(3, device, top_k=8, seed=[1, 2, 3])
    out = torch.empty(3, dtype=torch.int32, device=device)
    scratch = torch.zeros(
        max(16, scratch_bytes("sample", S=3, V=60)), dtype=torch.uint8, device=device
    )
    assert run(sample, logits, **kwargs, out=out, scratch=scratch) is out
    assert out.tolist() == expected(logits, kwargs)


def test_empty_launches_nothing(device, run):
    kwargs = arguments(0, device)
    assert run(sample, torch.empty(0, 8, device=device), launched=False, **kwargs).shape == (0,)


@pytest.mark.gpu
def test_model_shape(device, run):
    logits = randn(50, 129280, device=device, scale=3.0)
    for filters in FILTERS:
        kwargs = arguments(50, device, seed=list(range(50)), **filters)
        same = run(sample, logits, **kwargs) == sample_reference(logits, **kwargs)
        assert same.sum() >= 49  # a near tie may fall the other way


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("logits", torch.zeros(4), ValueError, r"sample: logits is \(4,\), expected \[S, V\]"),
        ("logits", torch.zeros(2, 4).double(), TypeError, "sample: logits is float64"),
        ("temperature", torch.zeros(3), ValueError, r"temperature is \(3,\), expected \[S\]"),
        ("temperature", 1.0, TypeError, "temperature is float, expected a tensor"),
        ("top_k", torch.zeros(2), TypeError, "top_k is float32, expected int32"),
        ("top_p", torch.zeros(2).double(), TypeError, "top_p is float64"),
        ("min_p", torch.zeros(1), ValueError, "min_p is"),
        ("seed", torch.zeros(2, dtype=torch.int32), TypeError, "seed is int32, expected int64"),
        ("position", torch.zeros(2), TypeError, "position is float32, expected int32, int64"),
        ("out", torch.zeros(2).long(), TypeError, "out is int64, expected int32"),
    ],
)
def test_refusals(name, value, kind, text):
    kwargs = {**arguments(2, "cpu"), name: value}
    logits = kwargs.pop("logits", torch.zeros(2, 4))
    for op in (sample, sample_reference):
        with pytest.raises(kind, match=text):
            op(logits, **kwargs)
