"""``moe_gemm_fp4`` against fp64 products of the operands it promises to multiply.

Mutants run, each noticed. Of the products: halves or their codes swapped, another pair's code, the
base doubled, x's scale of the first group, left out, or read by 256 columns; scale bytes of the
other half, their table an octave off, no octaves lent or none given back, an infinity left; tails
of 32 or 96 columns dropped, taken by every cut, under another code, column, place or row; whole
groups taken twice; nibbles swapped, scales read by 128; tiles never or always cut at their last
row; rows past N read; halves not taken in turn. Of the rest: gate clamped below, up not clamped
above or below, no limit as zero, gate and up swapped; weight twice or after the rounding; a route's
row by its number, its token or a fixed stride; expert for slot, experts without
one run, rows of the next block, the second tile of a block, the last block left out, padding
written, interleaved rows always or never put back. Reference: slots, weights, slot strides. Checks:
limits that are no number, odd gated rows, rows of packed experts apart.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import config, scratch_bytes
from ftkernels.moe import gemm_fp4 as module
from ftkernels.moe.align import moe_align
from ftkernels.moe.gemm_fp4 import GemmConfig
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import count_launches, randn
from tests.support.attention_cases import carried
from tests.support.expert_cases import (
    FORMS,
    KINDS,
    activations,
    apart,
    assert_routes,
    extreme,
    fp4,
    fp8_codes,
    fp8_values,
    ordered,
    random_ids,
    routes,
    slots,
)  # fmt: skip

moe_gemm_fp4 = carried(module.moe_gemm_fp4)
FP32, NAN = torch.float32, float("nan")
each_layout = pytest.mark.parametrize("layout", ["folded", "bytes", "checkpoint"])


def call(x, given_weights, ids, experts, block_m, op=moe_gemm_fp4, **kwargs):
    """The op on routes in order, in fp32 unless told otherwise."""
    (weight, scale), options = given_weights
    per_token = ids.shape[1] if x.shape[0] == ids.shape[0] else 1
    return op(
        x, weight, scale, *ordered(ids, experts, block_m), topk=per_token, num_routes=ids.numel(),
        block_m=block_m, **{"out_dtype": FP32, **options, **kwargs},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["scaled", "bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_multiplies_the_promised_operands(form, kind, run):
    """Sizes go round: tiles of 64 rows whole and short, columns 32, 64, 96 and none past 128."""
    place = list(FORMS).index(form) + KINDS.index(kind)
    n, k = [(64, 128), (70, 160), (130, 96), (34, 320), (66, 32)][place % 5]
    block_m, tokens, topk = [(4, 5, 2), (16, 3, 3), (20, 11, 2), (1, 3, 1), (64, 7, 2)][place % 5]
    layout, limit, gated = FORMS[form]
    weights, ids = fp4(4, n, k), random_ids(tokens, topk, 4)
    x, options, rows = activations(randn(tokens, k, scale=2.0), kind)
    out = torch.full((tokens * topk, n if limit is None else n // 2), -7.0)
    given_weights = weights.given(layout, limit, gated)
    run(call, x, given_weights, ids, 4, block_m, out=out, **options)
    values, bound = routes(rows, slots(ids), weights.matrix, limit)
    assert_routes(out, values, bound)
    assert (out[values.isnan().all(1)] == -7.0).all(), "routes without a slot are not written"


@pytest.mark.parametrize(
    ("tokens", "block_m"),
    [(1, 1), (3, 1), (3, 4), (3, 128), (65, 16), (65, 20), (65, 64), (65, 128)],
)  # fmt: skip
def test_blocks_of_any_size(tokens, block_m, run):
    """One expert has most routes, one has none."""
    weights, k = fp4(3, 34, 64), 64
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    ids[::3, 1] = 2
    x, options, rows = activations(randn(tokens, k), "scaled")
    out = run(call, x, weights.given("folded"), ids, 3, block_m, **options)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


@each_layout
def test_slots_weights_and_rows_per_route(layout, run):
    """Experts are found through their slots; a scratch of experts that are not used is poison."""
    slot_of_expert = torch.tensor([2, -1, 5, 0, -1, 3, 1], dtype=torch.int32)
    n, k, ids = 34, 160, random_ids(6, 3, 7)
    weights = fp4(6, n, k)
    weights.scale[4] = 255 if layout != "folded" else 254
    x, options, rows = activations(randn(18, k), "scaled")
    factors = randn(18, seed=5)
    out = torch.full((18, n), -7.0)
    run(
        call, x, weights.given(layout), ids, 7, 4, slot_of_expert=slot_of_expert,
        route_weights=factors, out=out, **options,
    )  # fmt: skip
    places = slots(ids, slot_of_expert)
    values, bound = routes(rows, places, weights.matrix, weights=factors)
    assert_routes(out, values, bound)
    assert (out[[p < 0 for p in places]] == -7.0).all()


@pytest.mark.parametrize("form", ["folded-swiglu", "folded-halves", "checkpoint-swiglu", "bytes"])
def test_weight_comes_before_the_one_rounding(form, run):
    layout, limit, gated = FORMS[form]
    weights, ids = fp4(3, 64, 128), random_ids(5, 2, 3)
    x, _, rows = activations(randn(5, 128), "fp8")
    factors = randn(10, seed=5)
    args = (x, weights.given(layout, limit, gated), ids, 3, 16)
    for dtype in (torch.bfloat16, torch.float16, FP32):
        out = run(call, *args, route_weights=factors, out_dtype=dtype)
        assert out.dtype == dtype
        assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit, factors))


@pytest.mark.parametrize("limit", [0, 0.25, float("inf")])
def test_gate_is_clamped_from_above_only(limit, run):
    """A gate far below the bound keeps its value; up is bounded on both sides."""
    n, k = 32, 64
    weights, ids = fp4(1, n, k), torch.zeros(1, 1, dtype=torch.int32)
    x, options, rows = activations(randn(1, k), "bf16")
    values, bound = routes(rows, [0], weights.matrix, limit)
    gate, up = (weights.matrix[0] @ rows[0]).chunk(2)
    assert min(gate.min(), up.min()) < -0.25 < 0.25 < min(gate.max(), up.max())
    out = run(call, x, weights.given("folded", limit), ids, 1, 1, **options)
    assert_routes(out, values, bound)


@each_layout
@pytest.mark.parametrize("seed", range(2))
def test_scales_over_their_range(layout, seed, run, lane):
    """Weights from 2^-126 to 6 * 2^127 on rows that bring the products back to fp32."""
    n, k, ids = 66, 480, random_ids(5, 2, 3)
    low, high = (7, 254) if layout == "folded" else (1, 253)
    if lane == "reference":  # which holds both operands in fp32
        low, high = 20, 252
    weights, codes, x_scale = extreme(3, n, k, 5, seed=seed, low=low, high=high)
    rows = fp8_values(codes, x_scale)
    out = run(call, codes, weights.given(layout), ids, 3, 4, x_scale=x_scale)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


@each_layout
@pytest.mark.parametrize("kind", ["scaled", "fp16"])
def test_adversarial_sums(layout, kind, run):
    """Sums that cancel, rows of zeros, and the largest codes of both formats."""
    n, k, ids = 34, 160, torch.zeros(4, 1, dtype=torch.int32)
    weights = fp4(1, n, k, low=120, high=121)
    weights.codes[0, ::2, 1::2] = weights.codes[0, ::2, ::2]
    weights.codes[0, 1] = 0x77
    weights.codes[0, 3] = 0xF7
    weights.codes[0, 5] = 0
    x = torch.zeros(4, k)
    x[0] = randn(k)
    x[0].view(-1, 4)[:, 2:] = -x[0].view(-1, 4)[:, :2]
    x[1] = 448.0
    x[3] = randn(k) * 1e-6
    x, options, rows = activations(x, kind)
    out = run(call, x, weights.given(layout), ids, 1, 4, **options)
    values, bound = routes(rows, slots(ids), weights.matrix)
    assert_routes(out, values, bound)
    assert (values[0, ::2] == 0).all()
    assert values[1, 1] == 448.0 * 6 * 2.0**-7 * k
    assert (out[2] == 0).all()
    assert (out[:, 5] == 0).all()


@each_layout
def test_what_is_no_number_stays_in_its_row(layout, run):
    n, k, ids = 34, 160, torch.arange(12, dtype=torch.int32).view(6, 2) % 3
    weights = fp4(3, n, k)
    x = randn(6, k)
    good = call(x, weights.given(layout), ids, 3, 4)
    # row 0 stands in for what is not there, in every block
    x[0, 3], x[4, 150] = NAN, float("inf")
    if layout != "folded":
        weights.scale[1, 7, 2] = 255
    out = run(call, x, weights.given(layout), ids, 3, 4).view(6, 2, n)
    assert out[[0, 4]].isnan().all()
    same = (out == good.view(6, 2, n)) | (torch.arange(n) == 7)
    assert same[[1, 2, 3, 5]].all()
    if layout != "folded":
        assert (out[:, :, 7].isnan().flatten() >= (ids.flatten() == 1)).all()


@pytest.mark.parametrize("gated", [None, False])
def test_a_scale_that_is_no_number_passes_the_clamp(gated, run):
    """One gate row, one up row; an infinity would become the limit."""
    n, k, ids = 64, 256, torch.zeros(3, 1, dtype=torch.int32)
    weights = fp4(1, n, k)
    weights.scale[0, 5, 3] = weights.scale[0, n // 2 + 9, 4] = 255
    x, options, _ = activations(randn(3, k), "scaled")
    out = run(call, x, weights.given("bytes", 1.5, gated), ids, 1, 4, **options)
    assert out[:, [5, 9]].isnan().all()
    assert out.isfinite().sum() == 3 * (n // 2 - 2)


def test_weights_at_the_end_of_fp32_beside_ordinary_ones(run):
    """Scale bytes: a tile lends its rows' scale octaves group by group, whatever the rows are."""
    n, k, ids = 64, 384, torch.zeros(5, 1, dtype=torch.int32)
    weights = fp4(1, n, k)
    weights.scale[0, :, 4:8] = 252
    weights.scale[0, :, 8:] = 1
    codes, x_scale = fp8_codes(5, k, seed=3), torch.full((5, 3), 120, dtype=torch.uint8)
    x_scale[:, 1], x_scale[:, 2] = 0, 244
    x_scale[0, 0] = 255
    out = run(call, codes, weights.given("bytes"), ids, 1, 16, x_scale=x_scale)
    x_scale[0, 0] = 120
    rows = fp8_values(codes, x_scale)
    assert out[0].isnan().all()
    values, bound = routes(rows, slots(ids), weights.matrix)
    assert_routes(out[1:], values[1:], bound[1:])


@pytest.mark.parametrize(
    ("form", "kind"),
    [("folded-swiglu", "scaled"), ("bytes", "bf16"), ("checkpoint-swiglu", "fp8"),
     ("checkpoint", "scaled")],
)  # fmt: skip
def test_strides_and_memory_around_the_operands(form, kind, run):
    layout, limit, gated = FORMS[form]
    n, k, ids = 70, 160, random_ids(5, 2, 3)
    weights = fp4(3, n, k)
    (weight, scale), options = weights.given(layout, limit, gated)
    weight = apart(weight) if layout == "checkpoint" else torch.stack((weight, weight * 0), 1)[:, 0]
    x, given_x, rows = activations(randn(5, k), kind)
    given_x = {key: apart(v) if key == "x_scale" else v for key, v in given_x.items()}
    width = n if limit is None else n // 2
    memory = torch.full((20, width + 8), -7.0)
    out = memory[1::2, 3 : width + 3]
    args = (apart(x), ((weight, apart(scale)), options), ids, 3, 4)
    result = run(call, *args, out=out, **given_x)
    assert result.data_ptr() == out.data_ptr()
    assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit))
    memory[1::2, 3 : width + 3] = -7.0
    assert (memory == -7.0).all(), "nothing else is written"


@pytest.mark.parametrize("kind", ["fp8", "scaled", "fp32"])
@pytest.mark.parametrize("form", ["folded-swiglu", "bytes", "checkpoint"])
def test_bits_of_a_route_in_any_company(form, kind, run):
    layout, limit, gated = FORMS[form]
    # torch's silu gives the last elements past a whole number of vectors other bits
    n = 70 if limit is None else 128
    weights, ids = fp4(3, n, 160), random_ids(9, 2, 3)
    given_weights = weights.given(layout, limit, gated)
    x, options, _ = activations(randn(9, 160), kind)
    fill = torch.zeros(18, n if limit is None else n // 2)
    whole = run(call, x, given_weights, ids, 3, 32, out=fill.clone(), **options)
    for block_m in (3, 20) if kind == "scaled" else (16,):
        out = call(x, given_weights, ids, 3, block_m, out=fill.clone(), **options)
        assert torch.equal(out, whole)
    for begin, end in ((0, 1), (8, 9), (3, 7)):
        part = dict(options)
        if "x_scale" in part:
            part["x_scale"] = part["x_scale"][begin:end]
        mine = slice(2 * begin, 2 * end)
        out = call(
            x[begin:end], given_weights, ids[begin:end], 3, 4, out=fill[mine].clone(), **part
        )
        assert torch.equal(out, whole[mine])


@pytest.mark.parametrize("tile", [32, 256])
def test_tiles_do_not_matter(tile):
    ids = torch.zeros(3, 1, dtype=torch.int32)
    x, options, _ = activations(randn(3, 96), "scaled")
    for form, (layout, limit, gated) in FORMS.items():
        given_weights = fp4(1, 136, 96).given(layout, limit, gated)
        expected = call(x, given_weights, ids, 1, 16, **options)
        with config.pin("moe_gemm_fp4", GemmConfig(tile, 4, 2)):
            assert torch.equal(call(x, given_weights, ids, 1, 16, **options), expected), form


def test_takes_what_moe_align_gives(run):
    weights, ids = fp4(3, 34, 64), random_ids(7, 2, 3)
    x, _, rows = activations(randn(7, 64), "fp8")
    (weight, scale), options = weights.given("folded")
    order = carried(moe_align)(ids, num_experts=3, block_m=4)
    out = run(
        moe_gemm_fp4, x, weight, scale, *order, topk=2, num_routes=14, block_m=4, out_dtype=FP32,
        **options,
    )  # fmt: skip
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


def test_launches_and_scratch(lane):
    weights, ids = fp4(3, 34, 160).given("folded"), random_ids(7, 2, 3)
    x, options, _ = activations(randn(7, 160), "scaled")
    scratch = torch.full((scratch_bytes("moe_gemm_fp4", T=7, K=160),), 255).byte()
    scratch[:COUNTER_BYTES] = 0
    fill = torch.zeros(14, 34)
    expected = call(randn(7, 160), weights, ids, 3, 4, out=fill.clone())
    for given_x, kwargs, wanted in ((randn(7, 160), {}, 2), (x, options, 1)):
        with count_launches() as launches:
            out = call(given_x, weights, ids, 3, 4, out=fill.clone(), scratch=scratch, **kwargs)
        assert torch.equal(out, expected)
        assert len(launches) == (0 if lane == "reference" else wanted), launches
        assert not scratch[:COUNTER_BYTES].any()


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 3, 9]), topk=st.integers(1, 2), n=st.integers(1, 70),
    blocks=st.integers(1, 7), form=st.sampled_from(list(FORMS)), kind=st.sampled_from(KINDS),
    block_m=st.sampled_from([4, 5, 16, 20, 32, 128]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_sizes(tokens, topk, n, blocks, form, kind, block_m, seed):
    layout, limit, gated = FORMS[form]
    n, k = 2 * n, 32 * blocks
    weights, ids = fp4(3, n, k, seed=seed), random_ids(tokens, topk, 3, seed=seed)
    x, options, rows = activations(randn(tokens, k, scale=2.0, seed=seed), kind)
    out = call(x, weights.given(layout, limit, gated), ids, 3, block_m, **options)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit))


def test_dense_weights_run_the_reference(run):
    weights, ids = fp4(3, 34, 64), random_ids(5, 2, 3)
    x, _, rows = activations(randn(5, 64), "fp8")
    dense = ((weights.matrix.float(), None), {})
    out = run(call, x, dense, ids, 3, 4, launched=False)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


def test_nothing_to_multiply(run):
    weights, none = fp4(3, 34, 64), torch.zeros(0, 2, dtype=torch.int32)
    for layout in ("folded", "bytes", "checkpoint"):
        given_weights = weights.given(layout)
        out = run(call, torch.zeros(0, 64), given_weights, none, 3, 4, launched=False)
        assert out.shape == (0, 34)
        out = torch.full((6, 34), -7.0)
        run(call, torch.zeros(3, 64), given_weights, none.new_full((3, 2), -1), 3, 4, out=out)
        assert (out == -7.0).all()


def refused(kind, text, **change):
    weights, ids = fp4(3, 34, 160), random_ids(5, 2, 3)
    weight, scale = weights.given("folded")[0]
    order = ordered(ids, 3, 4)
    kwargs = {
        "x": randn(5, 160), "weight": weight, "weight_scale": scale, "sorted_token_ids": order[0],
        "expert_ids": order[1], "num_tokens_post_padded": order[2], "topk": 2, "num_routes": 10,
        "block_m": 4, "packed": True,
    }  # fmt: skip
    kwargs |= {name: value(kwargs[name]) if callable(value) else value
               for name, value in change.items()}  # fmt: skip
    with pytest.raises(kind, match=f"^moe_gemm_fp4: {text}"):
        module.moe_gemm_fp4(**kwargs)


def test_refusals():
    refused(TypeError, "x is int64, expected bfloat16, float16, float32", x=lambda x: x.long())
    refused(TypeError, "x is float32, expected float8_e4m3fn", x_scale=torch.zeros(5, 2).byte())
    refused(ValueError, r"K is 150, expected a multiple of 32", x=lambda x: x[:, :150])
    refused(TypeError, "weight is int32, expected uint8", weight=lambda w: w.int())
    refused(ValueError, r"weight is \(3, 34, 79\)", weight=lambda w: w[..., :79])
    refused(ValueError, r"weight is .* expected packed experts that are contiguous each",
            weight=lambda w: apart(w))  # fmt: skip
    refused(TypeError, "weight_scale is int16, expected int32, uint8",
            weight_scale=lambda s: s.short())  # fmt: skip
    text = r"weight_scale is \(3, 1, 34\), expected \[S, ceil\(K/128\), N\] = \[3, 2, 34\]"
    refused(ValueError, text, weight_scale=lambda s: s[:, :1])
    refused(ValueError, r"weight_scale is \(3, 2, 34\), expected \[S, K/32, N\] = \[3, 5, 34\]",
            weight_scale=lambda s: s.byte())  # fmt: skip
    refused(ValueError, "weight_scale is None, expected the scales of weight", weight_scale=None)
    refused(ValueError, r"weight is \(3, 33, 80\), expected an even number of gated rows",
            weight=lambda w: w[:, :33].contiguous(), weight_scale=lambda s: s[..., :33],
            gated=True)  # fmt: skip
    refused(ValueError, r"weight is \(3, 33, 80\), expected gate and up rows",
            weight=lambda w: w[:, :33].contiguous(), weight_scale=lambda s: s[..., :33],
            gated=False, swiglu_limit=1.0)  # fmt: skip
    refused(ValueError, "swiglu_limit is -1.0, expected", swiglu_limit=-1.0)
    refused(ValueError, "swiglu_limit is nan, expected", swiglu_limit=NAN)
    refused(TypeError, "swiglu_limit is 'a', expected", swiglu_limit="a")
    refused(ValueError, "activation is 'fp4', expected 'fp8' or 'bf16'", activation="fp4")
    refused(ValueError, "block_m is 3, expected a divisor of", block_m=3)
    refused(ValueError, "block_m is 0, expected >= 1", block_m=0)
    refused(ValueError, "num_routes is 9, expected T\\*topk = 5\\*2", num_routes=9)
    refused(ValueError, "topk is 0, expected >= 1", topk=0)
    refused(ValueError, r"expert_ids is", expert_ids=lambda e: e[1:])
    refused(TypeError, "sorted_token_ids is int64, expected int32",
            sorted_token_ids=lambda s: s.long())  # fmt: skip
    refused(ValueError, r"num_tokens_post_padded is \(2,\)",
            num_tokens_post_padded=lambda c: c.repeat(2))  # fmt: skip
    refused(TypeError, "route_weights is bfloat16, expected float32",
            route_weights=torch.zeros(10).bfloat16())  # fmt: skip
    refused(ValueError, r"route_weights is \(5,\), expected \[R\] = \[10\]",
            route_weights=torch.zeros(5))  # fmt: skip
    refused(TypeError, "slot_of_expert is int64, expected int32",
            slot_of_expert=torch.zeros(3).long())  # fmt: skip
    refused(TypeError, "out_dtype is torch.float64", out_dtype=torch.float64)
    refused(ValueError, r"out is \(10, 33\)", out=torch.zeros(10, 33).bfloat16())
    refused(TypeError, "out is float32, expected bfloat16", out=torch.zeros(10, 34))
