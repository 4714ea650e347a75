"""``moe_fp4`` against section 9.4 in fp64: every layout, both paths, in groups and whole.

Mutants run, each noticed: hidden states not rounded, or to the result's type, or always to bf16;
another floor of a group's magnitude; what stands past the last row in a group's scale; the first
group's scale for all, or the first part's; GEMM: down's rows by token, weights again, skipped
experts added; weights and results by fixed strides; GEMV: routes without a slot counted or added,
routes of one loop counted, arrival one early or by blocks, counters left, tokens without routes not
written, eight tokens alone, routes not rounded, added backwards, the shared expert of the first
part or of none; tiles of a short last group; experts as many as slots; a scratch for the result's
type; a path not pinned; no shared expert without routes.
One after another, as programs run here, finishing once for each cut and finishing at a skipped
first route too are the same; so is a cast to E4M3 that is left to round.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import moe_combine as combine_op
from ftkernels import scratch_bytes
from ftkernels.moe import gemm_fp4, gemv_fp4
from ftkernels.moe import moe_fp4 as module
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import assert_close, count_launches, randn
from tests.support.attention_cases import carried
from tests.support.expert_cases import (
    Fp4,
    activations,
    apart,
    fp4,
    ordered,
    random_ids,
    routes,
    slots,
)
from tests.support.fp8_cases import quantized

moe_fp4, moe_combine = carried(module.moe_fp4), carried(combine_op)
moe_gemm_fp4, moe_gemv_fp4 = carried(gemm_fp4.moe_gemm_fp4), carried(gemv_fp4.moe_gemv_fp4)
LIMIT, FP32, NAN = 1.5, torch.float32, float("nan")
each_path = pytest.mark.parametrize("path", ["gemm", "gemv"])


class Layer:
    """Experts of a layer, and what the specification makes of them."""

    def __init__(
        self, num_slots: int = 4, inter: int = 96, channels: int = 96, seed: int = 1, **scales: int
    ) -> None:
        self.inter, self.channels = inter, channels
        self.w13: Fp4 = fp4(num_slots, 2 * inter, channels, seed=seed, **scales)
        self.w2: Fp4 = fp4(num_slots, channels, inter, seed=seed + 1, **scales)

    def weights(self, layout: str):
        """Tensors and keyword arguments."""
        if layout == "dense":
            return (self.w13.matrix.float(), None, self.w2.matrix.float(), None), {}
        form, gated = ("folded", False) if layout == "halves" else (layout, None)
        w13, kwargs = self.w13.given(form, LIMIT, gated)
        kwargs = {"packed": kwargs["packed"], "gated": gated is None}
        return (*w13, *self.w2.given(form)[0]), kwargs

    def formula(
        self, rows, weights, ids, *, limit=LIMIT, shared=None, table=None, hidden=FP32,
        result=None, quantizes=True,
    ):  # fmt: skip
        """``rows`` in fp64 as they are multiplied; each rounding the op promises."""
        top = limit or float("inf")
        places = torch.tensor(slots(ids, table)).view(ids.shape)
        out = torch.zeros(len(rows), self.channels, dtype=torch.float64)
        w13, w2 = self.w13.matrix, self.w2.matrix
        for t, k in (places >= 0).nonzero().tolist():
            gate, up = (w13[places[t, k]] @ rows[t]).chunk(2)
            gate, up = gate.clamp(max=top), up.clamp(-top, top)
            h = gate * torch.sigmoid(gate) * up * float(weights[t, k])
            h = h.float().to(hidden).double()
            y = w2[places[t, k]] @ (quantized(h[None])[0] if quantizes else h)
            out[t] += y if result is None else y.float().to(result).double()
        return out if shared is None else out + shared.double()

    def bound(self, rows, weights, ids, step: float) -> torch.Tensor:
        """By how much sums in fp32 and hidden values ``step`` off may miss the formula."""
        out = torch.zeros(len(rows), self.channels, dtype=torch.float64)
        w13, w2 = self.w13.matrix, self.w2.matrix.abs()
        for t, k in (ids >= 0).nonzero().tolist():
            expert = int(ids[t, k])
            h, off = routes(rows[t : t + 1], [expert], w13, LIMIT, weights[t, k : k + 1])
            out[t] += w2[expert] @ (off + (step + 1e-6) * h.abs() + 1e-7 * (step > 0))[0]
        return out


def call(layer, x, weights, ids, layout="folded", **kwargs):
    tensors, options = layer.weights(layout)
    args = (x, *tensors, weights, ids)
    return moe_fp4(*args, **{"swiglu_limit": LIMIT, **options, **kwargs})


def close(out, expected, quantizes=True):
    """A hidden value that rounds the other way moves a row by an FP8 step of one channel."""
    step = torch.finfo(out.dtype).eps
    tolerance = (2e-3 if quantizes else 1e-6) + (step if out.dtype != FP32 else 0)
    assert_close(out.double(), expected, row_tol=tolerance)


@each_path
@pytest.mark.parametrize("layout", ["folded", "halves", "bytes", "checkpoint", "dense"])
@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_matches_the_formula(layout, path, kind, run):
    layer, ids = Layer(inter=64), random_ids(3, 2, 4)
    ids[1] = 2
    weights, shared = randn(3, 2, seed=4), randn(3, 96, seed=5)
    x, options, rows = activations(randn(3, 96), kind)
    quantizes = kind != "fp32"
    out = run(
        call, layer, x, weights, ids, layout, path=path, shared=shared, out_dtype=FP32,
        launched=layout != "dense", **options,
    )  # fmt: skip
    hidden = torch.bfloat16 if quantizes else FP32
    close(
        out, layer.formula(rows, weights, ids, shared=shared, hidden=hidden, quantizes=quantizes),
        quantizes,
    )  # fmt: skip


@each_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_dtypes_and_roundings(dtype, activation, path, run):
    """Hidden states and routes are rounded to the dtype; the shared expert may have another."""
    layer, ids = Layer(inter=64), random_ids(3, 2, 4)
    x, weights = randn(3, 96, dtype=dtype), randn(3, 2, seed=4)
    shared = randn(3, 96, seed=5)
    out = run(call, layer, x, weights, ids, path=path, activation=activation, shared=shared)
    assert out.dtype == dtype
    quantizes = activation == "fp8"
    rows = quantized(x) if quantizes else x.double()
    expected = layer.formula(
        rows, weights, ids, shared=shared, hidden=dtype, result=dtype, quantizes=quantizes
    )
    close(out, expected, quantizes)


@each_path
@pytest.mark.parametrize("limit", [0, 0.25])
def test_limit(limit, path, run):
    layer, ids = Layer(inter=32), random_ids(3, 2, 4)
    x, weights = randn(3, 96), randn(3, 2, seed=4)
    out = run(call, layer, x, weights, ids, path=path, activation="bf16", swiglu_limit=limit)
    close(out, layer.formula(x.double(), weights, ids, limit=limit, quantizes=False), False)


@each_path
def test_narrow_result_of_wide_activations(path, run):
    """The hidden state keeps the dtype of ``x``, in a scratch that counts it."""
    layer, ids = Layer(1, inter=64, channels=32), torch.zeros(2, 1, dtype=torch.int32)
    x, weights = randn(2, 32), randn(2, 1, seed=4)
    kwargs = {"path": path, "activation": "bf16", "out_dtype": torch.bfloat16}
    out = run(call, layer, x, weights, ids, **kwargs)
    expected = layer.formula(x.double(), weights, ids, quantizes=False, result=torch.bfloat16)
    # a hidden value rounded to bf16 would be off by more
    assert torch.equal(out, expected.bfloat16())


@each_path
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("fp8", "folded"), ("scaled", "folded"), ("fp8", "bytes"), ("scaled", "checkpoint")],
)
def test_bits_are_those_of_the_ops_it_stands_for(kind, layout, path, run):
    """Weight, one rounding, quantization; down; each route rounded; the sum in order."""
    layer = Layer(3, inter=160, channels=64)
    ids = torch.tensor([[1, -1, 2], [0, 2, 1], [2, 2, 0]], dtype=torch.int32)
    # the second group is small, and what stands in for rows past the last one is not
    layer.w13.scale[:, 128:160] -= 7
    layer.w13.scale[:, -1] += 3
    layer.w13.codes[:, 159] = 0
    x, options, _ = activations(randn(3, 64), kind)
    dtype = torch.bfloat16 if kind == "fp8" else FP32
    weights, shared = randn(3, 3, seed=4), randn(3, 64, seed=5)
    # under the floor of a group's magnitude
    weights[0], shared[0] = 1e-7, 0
    fused = run(
        call, layer, x, weights, ids, layout, path=path, shared=shared, out_dtype=dtype, **options
    )
    up, up_kwargs = layer.w13.given(layout, LIMIT)
    down, down_kwargs = layer.w2.given(layout)
    op, order = moe_gemv_fp4, (ids,)
    if path == "gemm":
        op, order = moe_gemm_fp4, ordered(ids, 3, 16)
        size = {"num_routes": 9, "block_m": 16}
        up_kwargs, down_kwargs = up_kwargs | size | {"topk": 3}, down_kwargs | size | {"topk": 1}
    hidden, routed = torch.zeros(9, 160, dtype=dtype), torch.zeros(9, 64, dtype=dtype)
    kwargs = {"route_weights": weights.flatten(), "out": hidden, "out_dtype": dtype}
    op(x, *up, *order, **up_kwargs, **options, **kwargs)
    op(hidden, *down, *order, **down_kwargs, out=routed, out_dtype=dtype)
    step_by_step = moe_combine(routed.view(3, 3, 64), topk_ids=ids, shared=shared)
    assert torch.equal(fused, step_by_step)


@each_path
@pytest.mark.parametrize("layout", ["folded", "checkpoint"])
def test_groups_give_the_bits_of_the_whole(layout, path, run):
    layer, ids = Layer(inter=32), random_ids(4, 3, 4)
    x, weights = randn(4, 96, dtype=torch.bfloat16), randn(4, 3, seed=4)
    whole = run(call, layer, x, weights, ids, layout, path=path)
    # a view of wider memory: neither tokens nor routes lie one after another
    memory = torch.full((8, 5, 120), NAN, dtype=torch.bfloat16)
    routed = memory[::2, 1:4, 8:104]
    for group in ([0, 3], [1], [2]):
        table = torch.full((4,), -1, dtype=torch.int32)
        table[group] = torch.tensor(group, dtype=torch.int32)
        got = run(
            call, layer, x, weights, ids, layout, path=path, slot_of_expert=table,
            routed_out=routed,
        )  # fmt: skip
        assert got.data_ptr() == routed.data_ptr()
    assert torch.equal(routed.isnan().all(2), ids < 0), "a skipped route is not written"
    assert torch.equal(moe_combine(routed, topk_ids=ids), whole)
    contiguous = torch.full((4, 3, 96), NAN, dtype=torch.bfloat16)
    call(layer, x, weights, ids, layout, path=path, routed_out=contiguous)
    assert contiguous.nan_to_num(9).equal(routed.nan_to_num(9))
    memory[::2, 1:4, 8:104] = NAN
    assert memory.isnan().all(), "nothing else is written"


@each_path
def test_one_route_a_token_into_any_stride(path, run):
    layer, ids = Layer(inter=32), random_ids(5, 1, 4)
    x, weights = randn(5, 96), randn(5, 1, seed=4)
    memory = torch.full((5, 3, 96), -7.0)
    routed = run(call, layer, x, weights, ids, path=path, routed_out=memory[:, 1:2])
    table = torch.where(ids < 0, 0, 1)[:, :, None] > 0
    expected = torch.where(table, call(layer, x, weights, ids, path=path)[:, None], -7.0)
    assert torch.equal(routed, expected)
    assert (memory[:, ::2] == -7.0).all()


@each_path
def test_slots_and_poison(path, run):
    """More experts than slots; scales of slots that nobody reaches are NaN or huge."""
    table = torch.tensor([2, -1, 5, 0, -1, 3, 1], dtype=torch.int32)
    for layout in ("folded", "bytes"):
        layer, ids = Layer(6, inter=32), random_ids(5, 3, 7)
        ids[1] = torch.tensor([6, 1, 6])
        for weights in (layer.w13, layer.w2):
            weights.scale[4] = 255 if layout == "bytes" else 254
        x, factors = randn(5, 96), randn(5, 3, seed=4)
        out = run(
            call, layer, x, factors, ids, layout, path=path, slot_of_expert=table, out_dtype=FP32
        )
        close(out, layer.formula(quantized(x), factors, ids, table=table))


@each_path
@pytest.mark.parametrize("layout", ["folded", "checkpoint"])
def test_strided_operands_and_result(layout, path, run):
    layer, ids = Layer(inter=32), random_ids(5, 3, 4)
    x, weights = randn(5, 96, dtype=torch.bfloat16), randn(5, 3, seed=4)
    expected = call(layer, x, weights, ids, layout, path=path, shared=x)
    (w13, w13_scale, w2, w2_scale), options = layer.weights(layout)
    if layout == "checkpoint":
        w13, w2 = apart(w13), apart(w2)
    memory = torch.full((20, 100), -7.0, dtype=torch.bfloat16)
    out = memory[::4, 2:98]
    result = run(
        moe_fp4, apart(x), w13, apart(w13_scale), w2, apart(w2_scale), apart(weights), apart(ids),
        swiglu_limit=LIMIT, path=path, shared=apart(x), out=out, **options,
    )  # fmt: skip
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    memory[::4, 2:98] = -7.0
    assert (memory == -7.0).all(), "nothing else is written"


@each_path
@pytest.mark.parametrize("layout", ["folded", "checkpoint"])
def test_bits_of_a_token_in_any_batch(layout, path, run):
    layer, ids = Layer(inter=64, channels=64), random_ids(6, 2, 4)
    x, weights = randn(6, 64, dtype=torch.bfloat16), randn(6, 2, seed=4)
    ids[4] = -1
    whole = run(call, layer, x, weights, ids, layout, path=path, out_dtype=FP32)
    for part in (slice(0, 1), slice(3, 6), slice(4, 5)):
        args = (layer, x[part], weights[part], ids[part], layout)
        assert torch.equal(call(*args, path=path, out_dtype=FP32), whole[part])
    x[4], x[0] = NAN, float("inf")
    again = call(layer, x, weights, ids, layout, path=path, out_dtype=FP32)
    assert torch.equal(again[1:], whole[1:]), "a token without routes is not read either"
    assert again[0].isnan().all(), "what is no number passes the clamps"


def test_cuts_of_the_down_projection(run):
    """Blocks of two routes and of one arrive; each cut of a route counts."""
    layer, ids = Layer(2, inter=416, channels=32), torch.tensor([[0], [0], [1]]).int()
    weights, scratch = randn(3, 1, seed=4), torch.zeros(1 << 17, dtype=torch.uint8)
    x, options, rows = activations(randn(3, 32), "scaled")
    kwargs = {"path": "gemv", "out_dtype": FP32, "scratch": scratch, **options}
    out = run(call, layer, x, weights, ids, **kwargs)
    close(out, layer.formula(rows, weights, ids))
    assert not scratch[:COUNTER_BYTES].any()


def test_quantized_rows_are_those_of_dense_ones(run):
    layer, ids = Layer(inter=32), random_ids(3, 2, 4)
    x, weights = randn(3, 96), randn(3, 2, seed=4)
    codes, options, _ = activations(x, "scaled")
    for path in ("gemm", "gemv"):
        dense = run(call, layer, x, weights, ids, path=path)
        assert torch.equal(
            run(call, layer, codes, weights, ids, path=path, out_dtype=FP32, **options), dense
        )
        assert call(layer, codes, weights, ids, path=path, **options).dtype == torch.bfloat16


def test_more_tokens_than_a_launch_takes(run, lane):
    layer, ids = Layer(2, inter=32, channels=32), random_ids(66, 2, 2)
    x, weights = randn(66, 32, dtype=torch.bfloat16), randn(66, 2, seed=4)
    with count_launches() as launches:
        out = run(call, layer, x, weights, ids, path="gemv", shared=x)
    assert launches.count("_moe_gemv_fp4_kernel") == (0 if lane == "reference" else 4)
    for part in (slice(0, 3), slice(62, 66)):
        alone = call(layer, x[part], weights[part], ids[part], path="gemv", shared=x[part])
        assert torch.equal(alone, out[part])
    few = call(layer, x[:2], weights[:2], ids[:2], shared=x[:2])
    assert torch.equal(few, out[:2]), "a few tokens: by GEMV"


def test_parts_when_the_counters_do_not_suffice(lane, monkeypatch):
    layer, ids = Layer(2, inter=32, channels=416), random_ids(3, 2, 2)
    x, weights = randn(3, 416), randn(3, 2, seed=4)
    whole = call(layer, x, weights, ids, path="gemv", shared=x)
    monkeypatch.setattr(gemv_fp4, "_COUNTERS", 2)
    with count_launches() as launches:
        assert torch.equal(call(layer, x, weights, ids, path="gemv", shared=x), whole)
    wanted = 0 if lane == "reference" else 3 + 1
    assert launches.count("_moe_gemv_fp4_kernel") == wanted, launches


def test_scratch_is_given_back(lane):
    """Counters end at zero; whatever else it held changes nothing; GEMM and GEMV take turns."""
    layer, ids = Layer(2, inter=32, channels=416), torch.tensor([[1, 0]], dtype=torch.int32)
    weights = randn(1, 2, seed=4)
    x = randn(1, 416, dtype=torch.bfloat16)
    size = scratch_bytes("moe_fp4", T=1, topk=2, I=32, C=416, E=2)
    scratch = torch.full((size,), 255, dtype=torch.uint8)
    scratch[:COUNTER_BYTES] = 0
    for path in ("gemv", "gemm", "gemv"):
        expected = call(layer, x, weights, ids, path=path, shared=x)
        with count_launches() as launches:
            out = call(layer, x, weights, ids, path=path, shared=x, scratch=scratch)
        assert torch.equal(out, expected)
        assert not scratch[:COUNTER_BYTES].any()
        wanted = 3 if path == "gemv" else 5
        assert len(launches) == (0 if lane == "reference" else wanted), launches


@pytest.mark.parametrize("path", ["gemm", "gemv", None])
def test_no_routes_and_no_tokens(path, run):
    layer, none = Layer(inter=32), torch.full((3, 2), -1, dtype=torch.int32)
    x, weights = randn(3, 96), torch.full((3, 2), NAN)
    out = run(call, layer, x, weights, none, path=path)
    assert (out == 0).all()
    assert torch.equal(run(call, layer, x, weights, none, path=path, shared=2 * x), 2 * x)
    table = torch.full((4,), -1, dtype=torch.int32)
    out = run(call, layer, x, weights, none + 1, path=path, slot_of_expert=table, shared=2 * x)
    assert torch.equal(out, 2 * x)
    out = run(call, layer, x[:0], weights[:0], none[:0], path=path, launched=False)
    assert out.shape == (0, 96)
    out = run(call, layer, x, weights[:, :0], none[:, :0], path=path, shared=x, launched=False)
    assert torch.equal(out, x)
    out = run(call, layer, x, weights[:, :0], none[:, :0], path=path, launched=False)
    assert (out == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.sampled_from([1, 2]), topk=st.integers(1, 2), inter=st.sampled_from([1, 2, 5]),
    channels=st.integers(1, 3), layout=st.sampled_from(["folded", "halves", "bytes", "checkpoint"]),
    kind=st.sampled_from(["fp8", "scaled", "bf16", "fp32"]), path=st.sampled_from(["gemm", "gemv"]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_sizes(tokens, topk, inter, channels, layout, kind, path, seed):
    layer = Layer(3, inter=32 * inter, channels=32 * channels, seed=seed, low=120, high=125)
    ids, weights = random_ids(tokens, topk, 3, seed=seed), randn(tokens, topk, seed=seed)
    x, options, rows = activations(randn(tokens, 32 * channels, seed=seed), kind)
    out = call(layer, x, weights, ids, layout, path=path, out_dtype=FP32, **options)
    quantizes = kind in ("fp8", "scaled")
    hidden = FP32 if kind in ("scaled", "fp32") else torch.bfloat16
    expected = layer.formula(rows, weights, ids, hidden=hidden, quantizes=quantizes)
    # a hidden value may round the other way: a step of FP8 or of bf16
    step = 2**-3 if quantizes else 2**-7 if kind == "bf16" else 0
    assert ((out - expected).abs() <= layer.bound(rows, weights, ids, step)).all()


def refused(kind, text, layout="folded", **change):
    layer, ids = Layer(inter=160), random_ids(5, 2, 4)
    (w13, w13_scale, w2, w2_scale), options = layer.weights(layout)
    kwargs = {
        "x": randn(5, 96), "w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale,
        "topk_weights": randn(5, 2), "topk_ids": ids, "swiglu_limit": LIMIT, **options,
    }  # fmt: skip
    kwargs |= {name: value(kwargs[name]) if callable(value) else value
               for name, value in change.items()}  # fmt: skip
    with pytest.raises(kind, match=f"^moe_fp4: {text}"):
        module.moe_fp4(**kwargs)


def test_refusals():
    refused(TypeError, "x is int64, expected bfloat16, float16, float32", x=lambda x: x.long())
    refused(TypeError, "x is float32, expected float8_e4m3fn", x_scale=torch.zeros(5, 1).byte())
    refused(TypeError, "topk_ids is int64, expected int32", topk_ids=lambda t: t.long())
    refused(ValueError, r"topk_ids is \(4, 2\)", topk_ids=lambda t: t[:4])
    refused(TypeError, "topk_weights is bfloat16", topk_weights=lambda w: w.bfloat16())
    refused(ValueError, r"topk_weights is \(5, 1\)", topk_weights=lambda w: w[:, :1])
    refused(TypeError, "w13 is int8, expected uint8", w13=lambda w: w.view(torch.int8))
    refused(ValueError, r"w13 is .* expected packed experts that are contiguous each",
            w13=lambda w: apart(w))  # fmt: skip
    refused(ValueError, r"w2 is .* expected packed experts that are contiguous each",
            w2=lambda w: apart(w))  # fmt: skip
    refused(TypeError, "w13_scale is int16, expected int32, uint8",
            w13_scale=lambda s: s.short())  # fmt: skip
    text = r"expected \[S, ceil\(K/128\), N\] = "
    refused(ValueError, rf"w13_scale is \(4, 1, 319\), {text}\[4, 1, 320\]",
            w13_scale=lambda s: s[..., :319])  # fmt: skip
    refused(ValueError, rf"w2_scale is \(4, 1, 96\), {text}\[4, 2, 96\]",
            w2_scale=lambda s: s[:, :1])  # fmt: skip
    refused(ValueError, r"w13_scale is \(4, 320, 2\), expected \[S, N, K/32\] = \[4, 320, 3\]",
            "checkpoint", w13_scale=lambda s: s[..., :2])  # fmt: skip
    refused(ValueError, "w13_scale is None, expected the scales of w13", w13_scale=None)
    refused(ValueError, "w2_scale is None, expected the scales of w2", w2_scale=None)
    refused(ValueError, r"w13 is \(4, 319, 48\), expected an even number of gated rows",
            w13=lambda w: w[:, :319].contiguous(), w13_scale=lambda s: s[..., :319])  # fmt: skip
    refused(ValueError, r"w13 is \(4, 319, 48\), expected gate and up rows", "halves",
            w13=lambda w: w[:, :319].contiguous(), w13_scale=lambda s: s[..., :319])  # fmt: skip
    refused(ValueError, r"w2 is \(3, 96, 80\), expected 4 experts of 96 rows",
            w2=lambda w: w[:3], w2_scale=lambda s: s[:3])  # fmt: skip
    refused(TypeError, "swiglu_limit is 'a', expected a number", swiglu_limit="a")
    refused(TypeError, "swiglu_limit is None, expected a number", swiglu_limit=None)
    refused(ValueError, "swiglu_limit is -1.0, expected >= 0", swiglu_limit=-1.0)
    refused(ValueError, "activation is 'fp4', expected 'fp8' or 'bf16'", activation="fp4")
    refused(ValueError, "activation is 'bf16', expected 'fp8' for an e4m3 x", activation="bf16",
            x=lambda x: x.to(torch.float8_e4m3fn), x_scale=torch.zeros(5, 1).byte())  # fmt: skip
    refused(ValueError, "path is 'auto', expected None, 'gemm' or 'gemv'", path="auto")
    refused(TypeError, "slot_of_expert is int64, expected int32",
            slot_of_expert=torch.zeros(4).long())  # fmt: skip
    refused(TypeError, "shared is float64", shared=torch.zeros(5, 96).double())
    refused(ValueError, r"shared is \(5, 95\), expected \[T, C\] = \[5, 96\]",
            shared=torch.zeros(5, 95))  # fmt: skip
    refused(TypeError, "out_dtype is torch.float64", out_dtype=torch.float64)
    refused(TypeError, "out is bfloat16, expected float32", out=torch.zeros(5, 96).bfloat16())
    refused(ValueError, r"routed_out is \(5, 3, 96\)", routed_out=torch.zeros(5, 3, 96))
    refused(ValueError, "routed_out has strides", routed_out=torch.zeros(5, 1, 96).expand(5, 2, 96))
    refused(TypeError, "scratch is float32, expected uint8", scratch=torch.zeros(64))
