"""``moe_gemv_fp4`` against fp64 products of the operands it promises to multiply.

Mutants run, each noticed: ranks off by one or of one loop alone, one tile of routes an expert, each
tile from the first route, the second loop's places; a cut not added, added twice, of all columns,
in another's place, columns left over; arrival one early, counters left or of all routes; weight
missing or after the rounding, gate and up swapped, no limit as zero, interleaved rows always put
back; expert for slot; a row per route read by tokens; parts with the first part's rows, scales or
weights, or by another number of counters; sums not aligned, or their room cut short.
One after another, as programs run here, these are the same: every route of a tile computes it, the
first to arrive finishes too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import config, scratch_bytes
from ftkernels.moe import gemv_fp4 as module
from ftkernels.moe.gemv_fp4 import GemvConfig
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
    fp8_values,
    random_ids,
    routes,
    slots,
)  # fmt: skip

moe_gemv_fp4 = carried(module.moe_gemv_fp4)
FP32, NAN = torch.float32, float("nan")
SPLIT = 416  # columns that are cut in two
each_layout = pytest.mark.parametrize("layout", ["folded", "bytes", "checkpoint"])


def call(x, given_weights, ids, **kwargs):
    """The op in fp32 unless told otherwise."""
    (weight, scale), options = given_weights
    return moe_gemv_fp4(x, weight, scale, ids, **{"out_dtype": FP32, **options, **kwargs})


def test_columns_are_cut_by_the_shape_of_the_weight():
    assert module.num_splits(34, 384) == 1
    assert module.num_splits(34, SPLIT) == 2
    assert module.num_splits(4096, 4096) == 1
    assert module.num_splits(512, 4096) == 8
    assert module.num_splits(34, 8192) == 16


@pytest.mark.parametrize("kind", ["scaled", "bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_multiplies_the_promised_operands(form, kind, run):
    """Sizes go round: tiles of 64 rows whole and short, columns past 128 and cuts of them."""
    place = list(FORMS).index(form) + KINDS.index(kind)
    n, k = [(64, 128), (70, 160), (130, 96), (34, SPLIT), (66, 32)][place % 5]
    tokens, topk = [(5, 2), (1, 6), (3, 1), (2, 2), (9, 2)][place % 5]
    layout, limit, gated = FORMS[form]
    weights, ids = fp4(4, n, k), random_ids(tokens, topk, 4)
    x, options, rows = activations(randn(tokens, k, scale=2.0), kind)
    out = torch.full((tokens * topk, n if limit is None else n // 2), -7.0)
    given_weights = weights.given(layout, limit, gated)
    run(call, x, given_weights, ids, out=out, **options)
    values, bound = routes(rows, slots(ids), weights.matrix, limit)
    assert_routes(out, values, bound)
    assert (out[values.isnan().all(1)] == -7.0).all(), "routes without a slot are not written"


@pytest.mark.parametrize("k", range(32, 544, 96))
def test_few_sums_behind_rows_of_any_width(k, run):
    """Where they begin in a scratch is rounded up, and what is left still holds them."""
    weights, ids = fp4(1, 2, k), torch.zeros(1, 1, dtype=torch.int32)
    x, _, rows = activations(randn(1, k), "fp8")
    out = run(call, x, weights.given("folded"), ids)
    assert_routes(out, *routes(rows, [0], weights.matrix))


@pytest.mark.parametrize(("tokens", "topk"), [(3, 6), (36, 2), (64, 1)])
@pytest.mark.parametrize("k", [64, SPLIT], ids=str)
def test_many_routes_of_one_expert(tokens, topk, k, run):
    """More than a tile of routes, all of a token on one expert; the others have one or none."""
    weights, ids = fp4(3, 34, k), torch.zeros(tokens, topk, dtype=torch.int32)
    ids[1, topk - 1], ids[2, 0] = -1, 2
    x, options, rows = activations(randn(tokens, k), "scaled")
    out = run(call, x, weights.given("folded"), ids, **options)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


def test_the_last_of_three_cuts_finishes(run):
    """One that finishes before would miss a cut, and leave its counter."""
    weights, ids = fp4(2, 34, 800), torch.tensor([[0], [1]], dtype=torch.int32)
    x, options, rows = activations(randn(2, 800), "scaled")
    scratch = torch.zeros(scratch_bytes("moe_gemv_fp4", T=2, topk=1, N=34, K=800)).byte()
    out = run(call, x, weights.given("folded"), ids, scratch=scratch, **options)
    assert_routes(out, *routes(rows, [0, 1], weights.matrix))
    assert not scratch[:COUNTER_BYTES].any()


@each_layout
@pytest.mark.parametrize("per_route", [False, True])
def test_slots_weights_and_rows_per_route(layout, per_route, run):
    """Experts are found through their slots; scales of experts that are not used are poison."""
    slot_of_expert = torch.tensor([2, -1, 5, 0, -1, 3, 1], dtype=torch.int32)
    n, k, ids = 34, 160, random_ids(6, 3, 7)
    weights = fp4(6, n, k)
    weights.scale[4] = 255 if layout != "folded" else 254
    x, options, rows = activations(randn(18 if per_route else 6, k), "scaled")
    factors = randn(18, seed=5)
    out = torch.full((18, n), -7.0)
    run(
        call, x, weights.given(layout), ids, slot_of_expert=slot_of_expert,
        route_weights=factors, out=out, **options,
    )  # fmt: skip
    places = slots(ids, slot_of_expert)
    assert_routes(out, *routes(rows, places, weights.matrix, weights=factors))
    assert (out[[p < 0 for p in places]] == -7.0).all()


@pytest.mark.parametrize("form", ["folded-swiglu", "folded-halves", "checkpoint-swiglu", "bytes"])
def test_weight_comes_before_the_one_rounding(form, run):
    layout, limit, gated = FORMS[form]
    k = SPLIT if form == "folded-halves" else 128
    weights, ids = fp4(3, 64, k), random_ids(5, 2, 3)
    x, _, rows = activations(randn(5, k), "fp8")
    factors = randn(10, seed=5)
    for dtype in (torch.bfloat16, torch.float16, FP32):
        given_weights = weights.given(layout, limit, gated)
        out = run(call, x, given_weights, ids, route_weights=factors, out_dtype=dtype)
        assert out.dtype == dtype
        assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit, factors))


@pytest.mark.parametrize("limit", [0, 0.25, float("inf")])
def test_gate_is_clamped_from_above_only(limit, run):
    """A gate far below the bound keeps its value; up is bounded on both sides."""
    n, k = 32, 64
    weights, ids = fp4(1, n, k), torch.zeros(1, 1, dtype=torch.int32)
    x, options, rows = activations(randn(1, k), "bf16")
    gate, up = (weights.matrix[0] @ rows[0]).chunk(2)
    assert min(gate.min(), up.min()) < -0.25 < 0.25 < min(gate.max(), up.max())
    out = run(call, x, weights.given("folded", limit), ids, **options)
    assert_routes(out, *routes(rows, [0], weights.matrix, limit))


@each_layout
@pytest.mark.parametrize("seed", range(2))
def test_scales_over_their_range(layout, seed, run, lane):
    """Weights from 2^-126 to 6 * 2^127 on rows that bring the products back to fp32."""
    n, k, ids = 66, 416, random_ids(2, 1, 3)
    low, high = (7, 254) if layout == "folded" else (1, 253)
    if lane == "reference":  # which holds both operands in fp32
        low, high = 20, 252
    weights, codes, x_scale = extreme(3, n, k, 2, seed=seed, low=low, high=high)
    rows = fp8_values(codes, x_scale)
    out = run(call, codes, weights.given(layout), ids, x_scale=x_scale)
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
    out = run(call, x, weights.given(layout), ids, **options)
    values, bound = routes(rows, slots(ids), weights.matrix)
    assert_routes(out, values, bound)
    assert (values[0, ::2] == 0).all()
    assert (out[2] == 0).all()
    assert (out[:, 5] == 0).all()


@each_layout
def test_what_is_no_number_stays_in_its_row(layout, run):
    n, k, ids = 34, 160, torch.arange(12, dtype=torch.int32).view(6, 2) % 3
    weights = fp4(3, n, k)
    x = randn(6, k)
    good = call(x, weights.given(layout), ids)
    # row 0 stands in for what is not there, in every block
    x[0, 3], x[4, 150] = NAN, float("inf")
    if layout != "folded":
        weights.scale[1, 7, 2] = 255
    out = run(call, x, weights.given(layout), ids).view(6, 2, n)
    assert out[[0, 4]].isnan().all()
    same = (out == good.view(6, 2, n)) | (torch.arange(n) == 7)
    assert same[[1, 2, 3, 5]].all()
    if layout != "folded":
        assert (out[:, :, 7].isnan().flatten() >= (ids.flatten() == 1)).all()


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
    result = run(call, apart(x), ((weight, apart(scale)), options), apart(ids), out=out, **given_x)
    assert result.data_ptr() == out.data_ptr()
    assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit))
    memory[1::2, 3 : width + 3] = -7.0
    assert (memory == -7.0).all(), "nothing else is written"


@pytest.mark.parametrize(
    ("form", "kind"),
    [("folded-swiglu", "scaled"), ("bytes", "fp8"), ("checkpoint", "scaled"), ("folded", "fp32")],
)
def test_bits_of_a_route_in_any_company(form, kind, run):
    layout, limit, gated = FORMS[form]
    # torch's silu gives the last elements past a whole number of vectors other bits
    n, k = (34, SPLIT) if limit is None else (128, 96)
    weights, ids = fp4(3, n, k), random_ids(5, 2, 3)
    given_weights = weights.given(layout, limit, gated)
    x, options, _ = activations(randn(5, k), kind)
    fill = torch.zeros(10, n if limit is None else n // 2)
    whole = run(call, x, given_weights, ids, out=fill.clone(), **options)
    for begin, end in ((0, 1), (4, 5), (1, 3)):
        part = dict(options)
        if "x_scale" in part:
            part["x_scale"] = part["x_scale"][begin:end]
        mine = slice(2 * begin, 2 * end)
        out = call(x[begin:end], given_weights, ids[begin:end], out=fill[mine].clone(), **part)
        assert torch.equal(out, whole[mine])


def test_bits_do_not_depend_on_the_number_of_tokens(run):
    """Eight, sixteen or thirty-two routes together; neighbours on the expert and elsewhere."""
    weights = fp4(2, 34, 96).given("folded")
    x, options, _ = activations(randn(64, 96), "scaled")
    ids = random_ids(64, 1, 2)
    ids[:2] = torch.tensor([[0], [1]])
    whole = run(call, x, weights, ids, out=torch.zeros(64, 34), **options)
    for tokens in (1, 8, 9, 33):
        part = {"x_scale": options["x_scale"][:tokens], "out": torch.zeros(tokens, 34)}
        assert torch.equal(call(x[:tokens], weights, ids[:tokens], **part), whole[:tokens])
        others = torch.zeros_like(ids[:tokens])
        others[0] = ids[0]
        part["out"] = torch.zeros(tokens, 34)
        assert torch.equal(call(x[:tokens], weights, others, **part)[0], whole[0])


@pytest.mark.parametrize(("tile", "n"), [(16, 40), (128, 70)])
def test_tiles_do_not_matter(tile, n):
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for form, (layout, limit, gated) in FORMS.items():
        k = SPLIT if form == "folded-halves" else 96
        x, options, _ = activations(randn(2, k), "scaled")
        given_weights = fp4(1, n, k).given(layout, limit, gated)
        expected = call(x, given_weights, ids, **options)
        with config.pin("moe_gemv_fp4", GemvConfig(tile, 4, 2)):
            assert torch.equal(call(x, given_weights, ids, **options), expected), form


@pytest.mark.parametrize(("kind", "per_route"), [("fp8", False), ("scaled", True)])
def test_parts_when_the_counters_do_not_suffice(kind, per_route, lane, monkeypatch):
    weights, ids = fp4(3, 34, SPLIT), random_ids(5, 2, 3)
    x, options, _ = activations(randn(10 if per_route else 5, SPLIT), kind)
    kwargs = {"route_weights": randn(10, seed=5), **options}
    fill = torch.zeros(10, 34)
    expected = call(x, weights.given("folded"), ids, out=fill.clone(), **kwargs)
    monkeypatch.setattr(module, "_COUNTERS", 4)
    with count_launches() as launches:
        out = call(x, weights.given("folded"), ids, out=fill.clone(), **kwargs)
    assert torch.equal(out, expected)
    wanted = 0 if lane == "reference" else 3
    assert launches.count("_moe_gemv_fp4_kernel") == wanted, launches


def test_launches_scratch_and_counters(lane):
    """Counters end at zero, so that ops of any shape take turns; the rest may be anything."""
    scratch = torch.full((scratch_bytes("moe_gemv_fp4", T=4, topk=2, N=130, K=SPLIT),), 255).byte()
    scratch[:COUNTER_BYTES] = 0
    for tokens, n, k, kind in ((4, 34, SPLIT, "fp8"), (1, 130, 96, "fp8"), (2, 70, 96, "scaled")):
        weights, ids = fp4(3, n, k).given("folded"), random_ids(tokens, 2, 3)
        x, options, _ = activations(randn(tokens, k), kind)
        expected = call(x, weights, ids, out=torch.zeros(2 * tokens, n), **options)
        for _ in range(2):
            with count_launches() as launches:
                out = torch.zeros(2 * tokens, n)
                call(x, weights, ids, out=out, scratch=scratch, **options)
            assert torch.equal(out, expected)
            assert not scratch[:COUNTER_BYTES].any()
            wanted = 0 if lane == "reference" else 2 - (kind == "scaled")
            assert len(launches) == wanted, launches


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 5]), topk=st.integers(1, 2), n=st.integers(1, 35),
    blocks=st.sampled_from([1, 2, 3, 4, 5, 7, 13]), form=st.sampled_from(list(FORMS)),
    kind=st.sampled_from(KINDS), per_route=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_sizes(tokens, topk, n, blocks, form, kind, per_route, seed):
    layout, limit, gated = FORMS[form]
    n, k = 2 * n, 32 * blocks
    weights, ids = fp4(3, n, k, seed=seed), random_ids(tokens, topk, 3, seed=seed)
    num_rows = tokens * topk if per_route else tokens
    x, options, rows = activations(randn(num_rows, k, scale=2.0, seed=seed), kind)
    out = call(x, weights.given(layout, limit, gated), ids, **options)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix, limit))


def test_dense_weights_run_the_reference(run):
    weights, ids = fp4(3, 34, 64), random_ids(5, 2, 3)
    x, _, rows = activations(randn(5, 64), "fp8")
    out = run(call, x, ((weights.matrix.float(), None), {}), ids, launched=False)
    assert_routes(out, *routes(rows, slots(ids), weights.matrix))


def test_nothing_to_multiply(run):
    weights, none = fp4(3, 34, 64), torch.zeros(0, 2, dtype=torch.int32)
    for layout in ("folded", "bytes", "checkpoint"):
        given_weights = weights.given(layout)
        out = run(call, torch.zeros(0, 64), given_weights, none, launched=False)
        assert out.shape == (0, 34)
        out = torch.full((6, 34), -7.0)
        run(call, torch.zeros(3, 64), given_weights, none.new_full((3, 2), -1), out=out)
        assert (out == -7.0).all()


def refused(kind, text, **change):
    weights, ids = fp4(3, 34, 160), random_ids(5, 2, 3)
    weight, scale = weights.given("folded")[0]
    kwargs = {
        "x": randn(5, 160), "weight": weight, "weight_scale": scale, "topk_ids": ids,
        "packed": True,
    }  # fmt: skip
    kwargs |= {name: value(kwargs[name]) if callable(value) else value
               for name, value in change.items()}  # fmt: skip
    with pytest.raises(kind, match=f"^moe_gemv_fp4: {text}"):
        module.moe_gemv_fp4(**kwargs)


def test_refusals():
    refused(TypeError, "x is int64, expected bfloat16, float16, float32", x=lambda x: x.long())
    refused(TypeError, "x is float32, expected float8_e4m3fn", x_scale=torch.zeros(5, 2).byte())
    refused(ValueError, r"x_scale is \(5, 1\), expected \[T, ceil\(K/128\)\] = \[5, 2\]",
            x=lambda x: x.to(torch.float8_e4m3fn), x_scale=torch.zeros(5, 1).byte())  # fmt: skip
    refused(ValueError, r"x is \(4, 160\), expected 5 or 10 rows", x=lambda x: x[:4])
    refused(TypeError, "topk_ids is int64, expected int32", topk_ids=lambda t: t.long())
    refused(ValueError, "T is 65, expected at most 64", x=randn(65, 160),
            topk_ids=torch.zeros(65, 1, dtype=torch.int32))  # fmt: skip
    refused(ValueError, "K is 150, expected a multiple of 32", x=lambda x: x[:, :150])
    refused(TypeError, "weight is int32, expected uint8", weight=lambda w: w.int())
    refused(ValueError, r"weight is .* expected packed experts that are contiguous each",
            weight=lambda w: apart(w))  # fmt: skip
    text = r"weight_scale is \(3, 1, 34\), expected \[S, ceil\(K/128\), N\] = \[3, 2, 34\]"
    refused(ValueError, text, weight_scale=lambda s: s[:, :1])
    refused(ValueError, r"weight is \(3, 33, 80\), expected gate and up rows",
            weight=lambda w: w[:, :33].contiguous(), weight_scale=lambda s: s[..., :33],
            gated=False, swiglu_limit=1.0)  # fmt: skip
    refused(ValueError, "swiglu_limit is -1.0, expected", swiglu_limit=-1.0)
    refused(TypeError, "swiglu_limit is 'a', expected", swiglu_limit="a")
    refused(ValueError, "activation is 'fp4', expected 'fp8' or 'bf16'", activation="fp4")
    refused(ValueError, r"route_weights is \(5,\), expected \[R\] = \[10\]",
            route_weights=torch.zeros(5))  # fmt: skip
    refused(TypeError, "slot_of_expert is int64, expected int32",
            slot_of_expert=torch.zeros(3).long())  # fmt: skip
    refused(TypeError, "out_dtype is torch.float64", out_dtype=torch.float64)
    refused(ValueError, r"out is \(10, 33\)", out=torch.zeros(10, 33).bfloat16())


def test_scratch_is_checked():
    for scratch, kind, text in (
        (torch.zeros(64), TypeError, "scratch is float32, expected uint8"),
        (torch.zeros(1 << 20, dtype=torch.uint8)[1:], ValueError, "scratch is not 16-byte aligned"),
    ):
        refused(kind, text, scratch=scratch)
