"""``fp8_linear`` against fp64 products of the operands it promises to multiply.

Mutants run, each noticed: the scale of the next block of rows or of channels, a row's scale left
out, code 0 or 255 decoded as any other, a split added twice or not at all, counters left, half of
the slices, splits cut by one more, SwiGLU with the gate clamped below, with up unclamped below, the
halves exchanged, its result or the norm's unrounded, the norm without eps, without weight, over the
first 1024 channels or by the padded width, quantization without rounding, with half the scale or
another floor, columns past the end, weight tiles in another order, the first 64 rows for all,
too little scratch of either kind, fp32 rows multiplied in bf16.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import config, quantize_fp8, scratch_bytes
from ftkernels.linear import fp8_linear as module
from ftkernels.linear.fp8_kernels import LinearConfig
from ftkernels.linear.fp8_linear import fp8_linear_reference
from ftkernels.moe.swiglu import swiglu_clamp
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import assert_close, count_launches, randn
from tests.support.attention_cases import carried
from tests.support.fp8_cases import assert_product, fp8_codes, fp8_weight, quantized, scales, spread

fp8_linear = carried(module.fp8_linear)
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = (BF16, torch.float16, FP32)
each_path = pytest.mark.parametrize("path", ["gemv", "gemm"])


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows quantized by the formula: codes and scales."""
    values, width = quantized(x), x.shape[1]
    amax = torch.stack([p.abs().amax(-1) for p in x.double().split(128, 1)], 1).clamp_min(1e-4)
    codes = (torch.ceil(torch.log2(amax / 448)) + 127).to(torch.uint8)
    factor = scales(codes).repeat_interleave(128, 1)[:, :width]
    return (values / factor).float().to(torch.float8_e4m3fn), codes


def activated(x: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    full = x.double()
    inverse = torch.rsqrt(full.square().mean(1, keepdim=True) + eps)
    return (full * inverse * weight.double()).to(x.dtype)


@each_path
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("t", "n", "k", "dtype"),
    [(1, 130, 100, BF16), (5, 256, 256, BF16), (9, 37, 528, torch.float16), (17, 70, 700, FP32)],
    ids=str,
)
def test_multiplies_the_promised_operands(t, n, k, dtype, activation, path, run):
    codes, scale, matrix = fp8_weight(n, k)
    x = randn(t, k, scale=3.0, dtype=dtype)
    rows = quantized(x) if activation == "fp8" else x.double()
    out = run(fp8_linear, x, codes, scale, activation=activation, out_dtype=FP32, path=path)
    assert_product(out, rows, matrix)
    if t < 9:
        rounded = fp8_linear(x, codes, scale, activation=activation, path=path)
        assert torch.equal(rounded, out.bfloat16())


@each_path
@pytest.mark.parametrize(("t", "n", "k"), [(1, 130, 100), (5, 256, 256), (33, 40, 700)], ids=str)
def test_quantized_rows(t, n, k, path, run):
    codes, scale, matrix = fp8_weight(n, k)
    x = randn(t, k, scale=3.0)
    out = run(fp8_linear, pair(x), codes, scale, out_dtype=FP32, path=path)
    assert_product(out, quantized(x), matrix)
    assert torch.equal(out, fp8_linear(x, codes, scale, out_dtype=FP32, path=path))


@each_path
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("t", "k", "dtype"), [(3, 300, BF16), (2, 260, torch.float16), (18, 1100, FP32)], ids=str
)
def test_norm_comes_first(t, k, activation, dtype, path, run):
    codes, scale, matrix = fp8_weight(70, k)
    x = randn(t, k, scale=3.0, dtype=dtype)
    weight = randn(k, dtype=dtype, seed=2)
    rows = normed(x, weight, 1e-3)
    out = run(
        fp8_linear, x, codes, scale, activation=activation, norm_weight=weight, eps=1e-3,
        out_dtype=FP32, path=path,
    )  # fmt: skip
    assert_product(out, quantized(rows) if activation == "fp8" else rows.double(), matrix, 2e-6)


@each_path
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("limit", "dtype"),
    [(0, BF16), (2.5, BF16), (2.5, FP32), (float("inf"), torch.float16)],
    ids=str,
)
def test_activation_comes_first(limit, activation, dtype, path, run):
    t, n, k = 9, 40, 260
    codes, scale, matrix = fp8_weight(n, k)
    x = randn(t, 2 * k, scale=3.0, dtype=dtype)
    rows = activated(x, limit or float("inf"))
    kwargs = {"activation": activation, "out_dtype": FP32, "path": path}
    out = run(fp8_linear, x, codes, scale, swiglu_limit=limit, **kwargs)
    assert_product(out, quantized(rows) if activation == "fp8" else rows.double(), matrix, 2e-6)
    apart = carried(swiglu_clamp)(x, limit=limit)
    assert torch.equal(out, fp8_linear(apart, codes, scale, **kwargs))


@each_path
def test_forms_agree_with_the_ops_they_stand_for(path):
    codes, scale, _ = fp8_weight(70, 640)
    for dtype in DTYPES:
        x = randn(11, 640, scale=2.0, dtype=dtype)
        out = fp8_linear(x, codes, scale, out_dtype=FP32, path=path)
        apart = fp8_linear(carried(quantize_fp8)(x), codes, scale, out_dtype=FP32, path=path)
        assert torch.equal(out, apart)


@each_path
@pytest.mark.parametrize("seed", range(3))
def test_scales_over_their_range(path, seed, run):
    """Operands and products within fp32; 448 * 2^118 is near the end of it."""
    t, n, k = 7, 140, 700
    generator = torch.Generator().manual_seed(seed)
    base = torch.tensor([1, 254, 100, 127, 30, 220])
    near = torch.randint(-10, 11, (t, 6), generator=generator)
    x_scale = (base + near).clamp(1, 245).to(torch.uint8)
    near = torch.randint(-10, 11, (2, 6), generator=generator)
    w_scale = (254 - base + near).clamp(1, 245).to(torch.uint8)
    x, w = fp8_codes(t, k, seed=seed), fp8_codes(n, k, seed=seed + 9)
    out = run(fp8_linear, (x, x_scale), w, w_scale, out_dtype=FP32, path=path)
    rows = x.double() * spread(x_scale, t, k, 1)
    assert_product(out, rows, w.double() * spread(w_scale, n, k))


@each_path
def test_each_code_of_a_scale(path):
    """One product a group: ``2^(x - 127) * 2^(w - 127)`` for every pair in range, 0 and 255 too."""
    groups = 5
    codes = torch.tensor([0, 1, 2, *range(3, 253, 8), 253, 254, 255]).to(torch.uint8)
    x = torch.zeros(len(codes), 128 * groups)
    x[:, 0] = 1.0
    x_scale = torch.full((len(codes), groups), 127, dtype=torch.uint8)
    x_scale[:, 0] = codes
    w = torch.zeros(16, 128 * groups)
    w[:, 0] = 1.0
    w_scale = torch.full((1, groups), 127, dtype=torch.uint8)
    x_fp8, w_fp8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    for code in (0, 1, 100, 127, 200, 254):
        w_scale[0, 0] = code
        out = fp8_linear((x_fp8, x_scale), w_fp8, w_scale, out_dtype=FP32, path=path)
        expected = (scales(codes) * 2.0 ** (code - 127)).float()
        expected[-1] = float("nan")
        assert_close(out[:, 3], expected)
    w_scale[0, 0] = 255
    out = fp8_linear((x_fp8, x_scale), w_fp8, w_scale, out_dtype=FP32, path=path)
    assert out.isnan().all()


@each_path
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_of_any_magnitude(dtype, path):
    """Also below 1e-4, where a group's magnitude has its floor."""
    codes, scale, matrix = fp8_weight(20, 300)
    sizes = torch.tensor([1e-9, 3e-7, 1e-5, 9e-5, 1e-4, 1.0, 1e10, 1e30])
    x = (randn(8, 300) * sizes[:, None]).to(dtype)
    x[4, :128] = 0.0
    out = fp8_linear(x, codes, scale, out_dtype=FP32, path=path)
    assert_product(out, quantized(x), matrix)


@each_path
def test_what_is_no_number_stays_in_its_row(path):
    codes, scale, _ = fp8_weight(40, 300)
    x = randn(6, 300)
    good = fp8_linear(x, codes, scale, out_dtype=FP32, path=path)
    x[1, 290], x[4, 3] = float("nan"), float("inf")
    out = fp8_linear(x, codes, scale, out_dtype=FP32, path=path)
    assert out[[1, 4]].isnan().all()
    assert torch.equal(out[[0, 2, 3, 5]], good[[0, 2, 3, 5]])


@each_path
@pytest.mark.parametrize("k", [256, 300], ids=str)
def test_strides_and_memory_around_the_operands(k, path, run):
    t, n = 9, 140
    codes, scale, matrix = fp8_weight(n, k)
    x = torch.full((2 * t, k + 37), float("nan"))
    x[::2, 5 : k + 5] = randn(t, k)
    x = x[::2, 5 : k + 5]
    wide = torch.full((2 * n, k + 64), float("nan")).to(torch.float8_e4m3fn)
    wide[: 2 * n : 2, 16 : k + 16] = codes
    wide_scale = torch.full((2 * scale.shape[0], scale.shape[1] + 3), 255, dtype=torch.uint8)
    wide_scale[::2, : scale.shape[1]] = scale
    views = wide[::2, 16 : k + 16], wide_scale[::2, : scale.shape[1]]
    memory = torch.full((2 * t, n + 8), -7.0)
    out = memory[1::2, 3 : n + 3]
    result = run(fp8_linear, x, *views, out_dtype=FP32, out=out, path=path)
    assert result.data_ptr() == out.data_ptr()
    assert_product(out, quantized(x), matrix)
    memory[1::2, 3 : n + 3] = -7.0
    assert (memory == -7.0).all(), "nothing else is written"
    same = fp8_linear(x[:1].expand(4, k), codes, scale, out_dtype=FP32, path=path)
    assert torch.equal(same, same[:1].expand(4, n))


FORMS = {
    "quantized": {}, "dense": {}, "norm": {"norm_weight": randn(600, seed=2)},
    "swiglu": {"swiglu_limit": 10.0}, "bf16": {"activation": "bf16"},
}  # fmt: skip


@each_path
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_row_alone_and_among_others(form, path, run):
    codes, scale, _ = fp8_weight(40, 600)
    x = randn(70, 1200 if form == "swiglu" else 600, dtype=BF16)
    kwargs = {"out_dtype": FP32, "path": path, **FORMS[form]}

    def call(begin, end):
        rows = pair(x[begin:end]) if form == "quantized" else x[begin:end]
        return run(fp8_linear, rows, codes, scale, **kwargs)

    whole = call(0, 70)
    for begin, end in ((0, 1), (64, 70), (13, 22), (20, 37)):
        assert torch.equal(call(begin, end), whole[begin:end]), (begin, end)


@pytest.mark.parametrize("form", ["quantized", "norm", "swiglu"])
@pytest.mark.parametrize("tile", [(8, 16, 4), (16, 64, 2), (8, 32, 8)], ids=str)
def test_bits_do_not_depend_on_the_tiling(form, tile):
    codes, scale, _ = fp8_weight(150, 520)
    x = randn(9, 1040 if form == "swiglu" else 520)
    rows, kwargs = pair(x) if form == "quantized" else x, {"out_dtype": FP32, **FORMS[form]}
    if form == "norm":
        kwargs["norm_weight"] = FORMS["norm"]["norm_weight"][:520]
    expected = fp8_linear(rows, codes, scale, path="gemv", **kwargs)
    with config.pin("fp8_linear", LinearConfig(*tile, 4, 2)):
        out = fp8_linear(rows, codes, scale, path="gemv", **kwargs)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMS)
def test_launches_scratch_and_counters(form, lane):
    """One launch a product; counters end at zero; nothing else of a scratch matters."""
    codes, scale, _ = fp8_weight(40, 600)
    for t in (9, 70):
        x = randn(t, 1200 if form == "swiglu" else 600, dtype=BF16)
        rows = pair(x) if form == "quantized" else x
        scratch = torch.full((scratch_bytes("fp8_linear", T=t, N=40, K=600),), 255).byte()
        scratch[:COUNTER_BYTES] = 0
        expected = fp8_linear(rows, codes, scale, **FORMS[form])
        for path in ("gemv", "gemm", None):
            with count_launches() as launches:
                out = fp8_linear(rows, codes, scale, path=path, scratch=scratch, **FORMS[form])
            assert not scratch[:COUNTER_BYTES].any()
            if path is None:
                assert torch.equal(out, expected)
            gemv = path == "gemv" or (path is None and t <= 64)
            prepares = not gemv and form not in ("quantized", "bf16")
            wanted = 1 + prepares + (gemv and t > 64)
            assert len(launches) == (0 if lane == "reference" else wanted), launches


@settings(max_examples=40, deadline=None)
@given(
    t=st.sampled_from([1, 2, 3, 8, 9, 17, 65]), n=st.integers(1, 150), k=st.integers(1, 700),
    form=st.sampled_from(["quantized", "dense", "swiglu", "bf16"]), path=st.sampled_from(
        ["gemv", "gemm", None]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_sizes(t, n, k, form, path, dtype, seed):
    codes, scale, matrix = fp8_weight(n, k, seed=seed)
    x = randn(t, 2 * k if form == "swiglu" else k, scale=2.0, dtype=dtype, seed=seed)
    rows = x
    if form == "swiglu":
        rows = carried(swiglu_clamp)(x, limit=10.0)
    operand = rows.double() if form == "bf16" else quantized(rows)
    given_x = pair(x) if form == "quantized" else x
    out = fp8_linear(given_x, codes, scale, path=path, out_dtype=FP32, **FORMS[form])
    assert_product(out, operand, matrix)


def test_dense_weights_run_the_reference(run):
    codes, scale, matrix = fp8_weight(130, 256)
    x = randn(5, 256)
    dense = run(fp8_linear, x, matrix.float(), None, out_dtype=FP32, launched=False)
    assert_product(dense, quantized(x), matrix)
    assert torch.equal(dense, fp8_linear_reference(x, codes, scale, out_dtype=FP32))
    whole = fp8_linear(randn(64, 256), matrix.float(), None)
    for rows in (1, 3, 4, 17):
        assert torch.equal(fp8_linear(randn(64, 256)[:rows], matrix.float(), None), whole[:rows])


def test_nothing_to_multiply(run):
    codes, scale, _ = fp8_weight(10, 128)
    for path in (None, "gemv", "gemm"):
        out = run(fp8_linear, torch.zeros(0, 128), codes, scale, path=path, launched=False)
        assert out.shape == (0, 10)
        out = run(fp8_linear, torch.zeros(3, 128), codes[:0], scale[:0], path=path, launched=False)
        assert out.shape == (3, 0)
    none = torch.zeros(10, 0).to(torch.float8_e4m3fn), torch.zeros(1, 0, dtype=torch.uint8)
    assert not fp8_linear(torch.zeros(3, 0), *none).any()


U8 = torch.uint8


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"activation": "int8"}, ValueError, "activation is 'int8', expected 'fp8' or 'bf16'"),
        ({"weight_scale": None}, ValueError, "weight_scale is None, expected the scales"),
        ({"weight_scale": torch.zeros(2, 1, dtype=U8)}, ValueError, r"weight_scale is \(2, 1\)"),
        (
            {"x": torch.zeros(2, 64)},
            ValueError,
            r"weight is \(64, 128\), expected \[N, K\] = \[\?, 64\]",
        ),
        ({"x": [1]}, TypeError, "x is list, expected a tensor"),
        ({"path": "gem"}, ValueError, "path is 'gem', expected None, 'gemm' or 'gemv'"),
        ({"swiglu_limit": 1.0}, ValueError, r"weight is \(64, 128\), expected .* \[\?, 64\]"),
        ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit is -1.0, expected >= 0"),
        ({"swiglu_limit": "1"}, TypeError, "swiglu_limit is '1', expected a number"),
        (
            {"swiglu_limit": 1.0, "x": torch.zeros(2, 255)},
            ValueError,
            r"x is \(2, 255\), expected \[T, 2\*K\] with an even last size",
        ),
        (
            {"swiglu_limit": 1.0, "norm_weight": torch.zeros(128)},
            ValueError,
            "norm_weight is given with swiglu_limit, expected None",
        ),
        ({"norm_weight": torch.zeros(128), "eps": -1.0}, ValueError, "eps is -1.0, expected >= 0"),
        (
            {"scratch": torch.zeros(COUNTER_BYTES - 1, dtype=U8)},
            ValueError,
            "scratch is 65535 bytes, expected at least 65536",
        ),
        ({"out": torch.zeros(2, 64)}, TypeError, "out is float32, expected bfloat16"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
    ],
    ids=str,
)
def test_refusals(change, kind, text):
    codes, scale, _ = fp8_weight(64, 128)
    kwargs = {"x": torch.zeros(2, 128), "weight": codes, "weight_scale": scale, **change}
    with pytest.raises(kind, match=f"fp8_linear: {text}"):
        module.fp8_linear(**kwargs)


@pytest.mark.parametrize("name", ["norm_weight", "swiglu_limit"])
def test_quantized_rows_are_taken_as_they_are(name):
    codes, scale, _ = fp8_weight(64, 128)
    value = torch.ones(128) if name == "norm_weight" else 1.0
    with pytest.raises(ValueError, match=f"{name} is given with a quantized x, expected None"):
        module.fp8_linear(pair(torch.zeros(2, 128)), codes, scale, **{name: value})


def test_memory_of_its_own():
    codes, scale, _ = fp8_weight(64, 128)
    scratch = torch.zeros(1 << 20, dtype=U8)
    x = scratch[-2048:].view(torch.float32).view(4, 128)
    with pytest.raises(ValueError, match="scratch is overlapping x in memory"):
        module.fp8_linear(x, codes, scale, scratch=scratch)
