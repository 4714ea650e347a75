"""``grouped_linear`` against fp64 products, group by group.

Mutants run, each noticed: scales by a row's place in its group, the first group's rows for all,
groups of a weight taken as if they lay without gaps.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import config, scratch_bytes
from ftkernels.linear import grouped_linear as module
from ftkernels.linear.fp8_kernels import LinearConfig
from ftkernels.linear.grouped_linear import grouped_linear_reference
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import count_launches, randn
from tests.support.attention_cases import carried
from tests.support.fp8_cases import assert_product, fp8_weight

grouped_linear = carried(module.grouped_linear)
FP32 = torch.float32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_path = pytest.mark.parametrize("path", ["gemv", "gemm"])
# blocks of 128 rows that span groups, that are a group's own, and that hold many
each_form = pytest.mark.parametrize(
    ("groups", "rank", "k"), [(3, 50, 130), (2, 128, 640), (9, 4, 64), (2, 200, 260)], ids=str
)


def weights(groups: int, rank: int, k: int, seed: int = 3):
    codes, scale, matrix = fp8_weight(groups * rank, k, seed=seed)
    return codes.view(groups, rank, k), scale, matrix.view(groups, rank, k)


def assert_groups(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
    for group in range(x.shape[1]):
        assert_product(out[:, group], x[:, group].double(), matrix[group])


@each_path
@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_group_has_its_matrix(groups, rank, k, dtype, path, run):
    codes, scale, matrix = weights(groups, rank, k)
    x = randn(5, groups, k, scale=3.0, dtype=dtype)
    out = run(grouped_linear, x, codes, weight_scale=scale, path=path, out_dtype=FP32)
    assert_groups(out, x, matrix)
    rounded = grouped_linear(x, codes, weight_scale=scale, path=path)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, out.to(dtype))


@each_path
def test_strides_and_memory_around_the_operands(path, run):
    groups, rank, k = 3, 50, 140
    codes, scale, matrix = weights(groups, rank, k)
    x = torch.full((6, groups + 1, k + 9), float("nan"))
    x[::2, 1:, 4 : k + 4] = randn(3, groups, k)
    x = x[::2, 1:, 4 : k + 4]
    wide = torch.full((2 * groups, rank + 3, k + 32), float("nan")).to(torch.float8_e4m3fn)
    wide[::2, 2 : rank + 2, 16 : k + 16] = codes
    weight = wide[::2, 2 : rank + 2, 16 : k + 16]
    memory = torch.full((3, groups, rank + 5), -7.0)
    out = memory[:, :, 2 : rank + 2]
    run(grouped_linear, x, weight, weight_scale=scale, out=out, path=path)
    assert_groups(out, x, matrix)
    out.fill_(-7.0)
    assert (memory == -7.0).all(), "nothing else is written"


@each_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_row_alone_and_among_others(dtype, path, run):
    codes, scale, _ = weights(2, 24, 600)
    x = randn(70, 2, 600, dtype=dtype)

    def call(begin, end):
        kwargs = {"weight_scale": scale, "path": path, "out_dtype": FP32}
        return run(grouped_linear, x[begin:end], codes, **kwargs)

    whole = call(0, 70)
    for begin, end in ((0, 1), (64, 70), (13, 22), (20, 37)):
        assert torch.equal(call(begin, end), whole[begin:end]), (begin, end)


@pytest.mark.parametrize("tile", [(8, 16, 4), (16, 64, 2), (8, 32, 8)], ids=str)
def test_bits_do_not_depend_on_the_tiling(tile):
    codes, scale, _ = weights(2, 150, 520)
    x = randn(9, 2, 520)
    expected = grouped_linear(x, codes, weight_scale=scale, path="gemv")
    with config.pin("grouped_linear", LinearConfig(*tile, 4, 2)):
        out = grouped_linear(x, codes, weight_scale=scale, path="gemv")
    assert torch.equal(out, expected)


def test_launches_scratch_and_counters(lane):
    codes, scale, _ = weights(2, 24, 600)
    for t in (9, 70):
        x = randn(t, 2, 600, dtype=torch.bfloat16)
        scratch = torch.full((scratch_bytes("grouped_linear", T=t, G=2, R=24, K=600),), 255).byte()
        scratch[:COUNTER_BYTES] = 0
        expected = grouped_linear(x, codes, weight_scale=scale)
        for path in ("gemv", "gemm", None):
            with count_launches() as launches:
                out = grouped_linear(x, codes, weight_scale=scale, path=path, scratch=scratch)
            assert not scratch[:COUNTER_BYTES].any()
            if path is None:
                assert torch.equal(out, expected)
            wanted = 1 + (path == "gemv" and t > 64)
            assert len(launches) == (0 if lane == "reference" else wanted), launches


@settings(max_examples=30, deadline=None)
@given(
    t=st.sampled_from([1, 2, 3, 9, 65]), groups=st.integers(1, 3), rank=st.integers(1, 150),
    k=st.integers(1, 600), path=st.sampled_from(["gemv", "gemm", None]),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_sizes(t, groups, rank, k, path, dtype, seed):
    codes, scale, matrix = weights(groups, rank, k, seed)
    x = randn(t, groups, k, dtype=dtype, seed=seed)
    out = grouped_linear(x, codes, weight_scale=scale, path=path, out_dtype=FP32)
    assert_groups(out, x, matrix)


def test_dense_weights_run_the_reference(run):
    codes, scale, matrix = weights(3, 50, 130)
    x = randn(5, 3, 130)
    dense = run(grouped_linear, x, matrix.float(), launched=False)
    assert_groups(dense, x, matrix)
    assert torch.equal(dense, grouped_linear_reference(x, codes, weight_scale=scale))
    for rows in (1, 3, 4):
        assert torch.equal(grouped_linear(x[:rows], matrix.float()), dense[:rows])


def test_nothing_to_multiply(run):
    codes, scale, _ = weights(2, 3, 8)
    for path in (None, "gemv", "gemm"):
        x = torch.zeros(0, 2, 8)
        out = run(grouped_linear, x, codes, weight_scale=scale, path=path, launched=False)
        assert out.shape == (0, 2, 3)
    none = torch.zeros(2, 3, 0).to(torch.float8_e4m3fn)
    zeros = grouped_linear(
        torch.zeros(4, 2, 0), none, weight_scale=torch.zeros(1, 0, dtype=torch.uint8)
    )
    assert zeros.shape == (4, 2, 3)
    assert not zeros.any()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"weight_scale": None}, ValueError, "weight_scale is None, expected the scales"),
        ({"weight_scale": torch.zeros(2, 1).byte()}, ValueError, r"weight_scale is \(2, 1\)"),
        ({"x": torch.zeros(2, 3, 130)}, ValueError, r"weight is \(2, 50, 130\), expected"),
        ({"x": torch.zeros(2, 130)}, ValueError, r"x is \(2, 130\), expected \[T, G, K\]"),
        ({"path": "x"}, ValueError, "path is 'x'"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
        ({"scratch": torch.zeros(9).byte()}, ValueError, "scratch is 9 bytes, expected at least"),
    ],
    ids=str,
)
def test_refusals(change, kind, text):
    codes, scale, _ = weights(2, 50, 130)
    kwargs = {"x": torch.zeros(2, 2, 130), "weight": codes, "weight_scale": scale, **change}
    with pytest.raises(kind, match=f"grouped_linear: {text}"):
        module.grouped_linear(**kwargs)
