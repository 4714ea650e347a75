"""Routed expert products against fp64 products of the quantized operands."""

from __future__ import annotations

import pytest
import torch

from ftkernels.moe.align import moe_align
from ftkernels.moe.combine import moe_combine
from ftkernels.moe.gemm_fp4 import moe_gemm_fp4
from ftkernels.moe.gemv_fp4 import moe_gemv_fp4
from ftkernels.moe.moe_fp4 import moe_fp4
from ftkernels.quant.pack import pack_fp4
from ftkernels.testing import assert_close, randn

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
SLOTS, INTER, HIDDEN, LIMIT = 5, 64, 128, 1.5


def experts(n: int, k: int, seed: int):
    """Packed codes, scales and the fp64 matrices they stand for."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (SLOTS, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 126, (SLOTS, n, k // 32), generator=generator, dtype=torch.uint8)
    values = torch.stack((E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]), -1).flatten(2)
    return packed, scale, values * (2.0 ** (scale.double() - 127)).repeat_interleave(32, 2)


def quantized(x: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in x.double().split(128, dim=-1):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(amax / 448))
        parts.append(
            (part / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale
        )
    return torch.cat(parts, dim=-1)


def hidden(row: torch.Tensor, w13: torch.Tensor, weight: float) -> torch.Tensor:
    gate, up = (w13 @ row).chunk(2)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate) * up * weight


@pytest.fixture
def layer():
    w13, w2 = experts(2 * INTER, HIDDEN, 1), experts(HIDDEN, INTER, 2)
    x = randn(7, HIDDEN, scale=0.7)
    ids = torch.randint(0, SLOTS, (7, 3), generator=torch.Generator().manual_seed(3))
    ids = ids.to(torch.int32)
    ids[2, 1] = -1
    ids[3] = 4  # all routes of a token on one expert
    return x, w13, w2, randn(7, 3, seed=4).abs(), ids


def formula(layer, activation="fp8", shared=None):
    x, w13, w2, weights, ids = layer
    rows = quantized(x) if activation == "fp8" else x.double()
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64) if shared is None else shared.double()
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            if (e := int(ids[t, k])) >= 0:
                h = hidden(rows[t], w13[2][e], float(weights[t, k]))
                h = quantized(h[None].float())[0] if activation == "fp8" else h
                out[t] += w2[2][e] @ h
    return out


@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize("form", ["checkpoint", "dense", "packed"])
@pytest.mark.parametrize("path", ["gemm", "gemv", None])
def test_moe_matches_formula(layer, activation, form, path):
    x, w13, w2, weights, ids = layer
    shared = randn(7, HIDDEN, seed=5)
    if form == "dense":
        args = (w13[2].float(), None, w2[2].float(), None)
    elif form == "packed":
        args = (*pack_fp4(w13[0], w13[1], gated=True), *pack_fp4(w2[0], w2[1]))
    else:
        args = (w13[0], w13[1], w2[0], w2[1])
    out = moe_fp4(
        x, *args, weights, ids, swiglu_limit=LIMIT, shared=shared, activation=activation,
        path=path, packed=form == "packed",
    )  # fmt: skip
    # a hidden value that rounds the other way moves a row by an FP8 step of one channel
    tolerance = 1e-6 if activation == "bf16" else 2e-3
    assert_close(out.double(), formula(layer, activation, shared), row_tol=tolerance)


def test_groups_give_the_same_bits(layer):
    x, w13, w2, weights, ids = layer
    args = (x, w13[0], w13[1], w2[0], w2[1], weights, ids)
    whole = moe_fp4(*args, swiglu_limit=LIMIT)
    routed = torch.full((7, 3, HIDDEN), float("nan"))
    for group in ([0, 3], [1], [2, 4]):
        slots = torch.full((SLOTS,), -1, dtype=torch.int32)
        slots[group] = torch.tensor(group, dtype=torch.int32)
        moe_fp4(*args, swiglu_limit=LIMIT, slot_of_expert=slots, routed_out=routed)
    assert routed[2, 1].isnan().all(), "a skipped route is not written"
    assert torch.equal(moe_combine(routed, topk_ids=ids), whole)


def test_tokens_do_not_depend_on_their_batch(layer):
    x, w13, w2, weights, ids = layer
    whole = moe_fp4(x, w13[0], w13[1], w2[0], w2[1], weights, ids, swiglu_limit=LIMIT)
    for t in range(len(x)):
        row = slice(t, t + 1)
        one = moe_fp4(
            x[row], w13[0], w13[1], w2[0], w2[1], weights[row], ids[row], swiglu_limit=LIMIT
        )
        assert torch.equal(one[0], whole[t])


@pytest.mark.parametrize("gated", [True, False])
def test_gemm_and_gemv_agree_with_the_formula(layer, gated):
    x, w13, _, weights, ids = layer
    slots = torch.tensor([4, 3, -1, 1, 0], dtype=torch.int32)
    limit = LIMIT if gated else None
    flat, routes = weights.flatten(), ids.numel()
    order = moe_align(ids, num_experts=SLOTS, block_m=4)
    fill = torch.full((routes, INTER if gated else 2 * INTER), 7.0)
    gemm = moe_gemm_fp4(
        x, w13[0], w13[1], *order, topk=3, num_routes=routes, block_m=4, slot_of_expert=slots,
        swiglu_limit=limit, route_weights=flat, out_dtype=torch.float32, out=fill.clone(),
    )  # fmt: skip
    gemv = moe_gemv_fp4(
        x, w13[0], w13[1], ids, slot_of_expert=slots, swiglu_limit=limit, route_weights=flat,
        out_dtype=torch.float32, out=fill.clone(),
    )  # fmt: skip
    rows, expected = quantized(x), fill.double()
    for q, e in enumerate(ids.flatten().tolist()):
        if e >= 0 and slots[e] >= 0:
            matrix, weight = w13[2][slots[e]], float(flat[q])
            row = rows[q // 3]
            expected[q] = hidden(row, matrix, weight) if gated else matrix @ row * weight
    assert_close(gemm.double(), expected, row_tol=1e-6)
    assert_close(gemv.double(), expected, row_tol=1e-6)


@pytest.mark.parametrize("mutant", ["nibbles", "scale", "limit", "weight", "halves"])
def test_mutants_fail(layer, mutant):
    x, w13, w2, weights, ids = layer
    expected = formula(layer, "bf16")
    codes, scale, limit = w13[0], w13[1], LIMIT
    if mutant == "nibbles":
        codes = (codes >> 4) | (codes << 4)
    elif mutant == "scale":
        scale = scale.roll(1, 2)
    elif mutant == "limit":
        limit = 0.0
    elif mutant == "weight":
        weights = torch.ones_like(weights)
    else:
        codes, scale = codes.roll(INTER, 1), scale.roll(INTER, 1)
    out = moe_fp4(
        x, codes, scale, w2[0], w2[1], weights, ids, swiglu_limit=limit, activation="bf16"
    )
    with pytest.raises(AssertionError, match="differ by more"):
        assert_close(out.double(), expected, row_tol=1e-6)


def test_empty_and_refusals(layer):
    x, w13, w2, weights, ids = layer
    args = (w13[0], w13[1], w2[0], w2[1])
    out = moe_fp4(x[:0], *args, weights[:0], ids[:0], swiglu_limit=LIMIT)
    assert out.shape == (0, HIDDEN)
    for change, kind, text in (
        ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit is -1.0, expected >= 0"),
        ({"path": "auto"}, ValueError, "path is 'auto', expected None, 'gemm' or 'gemv'"),
        ({"activation": "fp4"}, ValueError, "activation is 'fp4'"),
        ({"topk_ids": ids.long()}, TypeError, "topk_ids is int64, expected int32"),
        ({"w2": w2[0][:3]}, ValueError, "w2"),
    ):
        kwargs = {
            "x": x, "w13": w13[0], "w13_scale": w13[1], "w2": w2[0], "w2_scale": w2[1],
            "topk_weights": weights, "topk_ids": ids, "swiglu_limit": LIMIT, **change,
        }  # fmt: skip
        with pytest.raises(kind, match=text):
            moe_fp4(**kwargs)
