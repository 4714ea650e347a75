"""Expectations are section 4 in fp64, and the bits of the three ops one after another, which have
tests of their own.

Mutants that these tests catch: comb transposed, streams overwritten before they are read, the
product taken of the old streams, of new ones before their rounding, a slice left out, the counter
not set back, the quantized row taken before the norm, scales of 64 channels.
"""

from __future__ import annotations

import re

import pytest
import torch

from ftkernels import backend, registry, scratch_bytes
from ftkernels.mhc.post import hc_post
from ftkernels.mhc.post_pre import hc_post_pre, hc_post_pre_reference
from ftkernels.mhc.pre import hc_pre
from ftkernels.offline import compile_launches
from ftkernels.quant.act_quant import quantize_fp8
from ftkernels.testing import aot, assert_close, randn


def inputs(num_tokens, hc, width, device, dtype=torch.float32):
    """The sublayer's output with the streams and mixes, and the next one's parameters."""
    size, rows = hc * width, (2 + hc) * hc
    sublayer = (
        randn(num_tokens, width, dtype=dtype, device=device),
        randn(num_tokens, hc, width, dtype=dtype, device=device, seed=1),
        randn(num_tokens, hc, device=device, seed=2),
        randn(num_tokens, hc, hc, device=device, seed=3),
    )
    parameters = (
        randn(rows, size, device=device, scale=size**-0.5, seed=4),
        1.0 + randn(3, device=device, scale=0.3, seed=5),
        randn(rows, device=device, scale=0.5**0.5, seed=6),
    )
    return sublayer, parameters


def formula(sublayer, parameters, norm_weight, eps=1e-6, iters=20):
    """Section 4 in fp64."""
    y, streams, post, comb = (t.double().cpu() for t in sublayer)
    fn, scale, base = (t.double().cpu() for t in parameters)
    hc = streams.shape[1]
    new = post[:, :, None] * y[:, None] + torch.einsum("tjk,tjc->tkc", comb, streams)
    flat = new.flatten(1)
    m = flat @ fn.T / torch.sqrt((flat**2).mean(1, keepdim=True) + eps)
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + eps
    next_post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    c = torch.softmax((m[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(-1, hc, hc), 2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    x = (pre[:, :, None] * new).sum(1)
    if norm_weight is not None:
        x = x / torch.sqrt((x**2).mean(1, keepdim=True) + eps) * norm_weight.double().cpu()
    return new, x, next_post, c


def one_by_one(sublayer, parameters, **kwargs):
    new = hc_post(*sublayer)
    mixes = hc_pre(new, *parameters, **kwargs)
    return new, *mixes, *quantize_fp8(mixes[0])


def same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("num_tokens", "hc", "width"), [(1, 4, 256), (3, 4, 100), (5, 2, 64), (2, 3, 33), (2, 1, 40)]
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_matches_formula(num_tokens, hc, width, with_norm, device, run):
    sublayer, parameters = inputs(num_tokens, hc, width, device)
    weight = 1 + randn(width, device=device, scale=0.2, seed=7) if with_norm else None
    got = run(hc_post_pre, *sublayer, *parameters, norm_weight=weight)
    expected = formula(sublayer, parameters, weight)
    assert_close(got[0].cpu(), expected[0].float(), row_tol=1e-6)
    assert_close(got[1].cpu(), expected[1].float(), row_tol=3e-6)
    assert_close(got[2].cpu(), expected[2].float(), rtol=5e-6)
    assert_close(got[3].cpu(), expected[3].float(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(2, 384), (6, 100), (1, 200)])
@pytest.mark.parametrize("in_place", [False, True])
def test_has_the_bits_of_the_ops_one_by_one(num_tokens, width, dtype, in_place, device, run):
    sublayer, parameters = inputs(num_tokens, 4, width, device, dtype)
    kwargs = {"norm_weight": randn(width, dtype=dtype, device=device, seed=7), "hc_eps": 1e-3}
    expected = one_by_one(sublayer, parameters, **kwargs)
    out = None
    if in_place:
        out = (sublayer[1], *(torch.empty_like(x) for x in expected[1:]))
    got = run(hc_post_pre, *sublayer, *parameters, quantize=True, out=out, **kwargs)
    same_bits(got, expected)
    if out is not None:
        assert all(a is b for a, b in zip(got, out, strict=True))
    plain = hc_pre(expected[0], *parameters, quantize=True, **kwargs)
    same_bits(plain, expected[1:])


def test_a_row_does_not_depend_on_the_others(device, run, lane):
    """Tiles change at 64 tokens, and a row keeps its bits."""
    many = 70 if lane != "interpreter" else 66
    sublayer, parameters = inputs(many, 4, 36, device)
    weight = randn(36, device=device, seed=7)
    whole = hc_post_pre(*sublayer, *parameters, norm_weight=weight, quantize=True)
    for n in (1, 3, 23, 64) if lane != "interpreter" else (3, 18):
        part = [x[:n] for x in sublayer]
        got = run(hc_post_pre, *part, *parameters, norm_weight=weight, quantize=True)
        same_bits(got, [x[:n] for x in whole])


def test_strided_inputs_and_outputs(device, run):
    sublayer, parameters = inputs(6, 8, 96, device)
    y, streams, post, comb = sublayer
    sublayer = (y[::2, 32:], streams[::2, ::2, 32:], post[::2, 4:], comb[::2, 1:8:2, 2:6])
    _, parameters = inputs(1, 4, 64, device)
    out = (
        torch.empty(3, 4, 80, device=device)[:, :, 8:72],
        torch.empty(3, 99, device=device)[:, 3:67],
        torch.empty(3, 8, device=device)[:, 2:6],
        torch.empty(3, 4, 7, device=device)[:, :, 1:5],
        torch.zeros(3, 80, dtype=torch.uint8, device=device)[:, 3:67].view(torch.float8_e4m3fn),
        torch.zeros(3, 9, dtype=torch.uint8, device=device)[:, 4:5],
    )
    got = run(hc_post_pre, *sublayer, *parameters, quantize=True, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    same_bits(got, one_by_one(sublayer, parameters))


def test_extreme_values_and_scratch(device, run):
    sublayer, parameters = inputs(3, 4, 160, device)
    scratch = torch.zeros(
        scratch_bytes("hc_post_pre", T=3, hc=4, C=160), dtype=torch.uint8, device=device
    )
    for factor in (0.0, 1e-15, 1e15):
        scaled = (sublayer[0] * factor, sublayer[1] * factor, *sublayer[2:])
        got = run(hc_post_pre, *scaled, *parameters, quantize=True, scratch=scratch)
        assert not scratch[: 64 * 1024].any()
        same_bits(got, one_by_one(scaled, parameters))
    sublayer[1][1, 2, 3] = float("nan")
    got = run(hc_post_pre, *sublayer, *parameters, quantize=True)
    assert got[1][1].isnan().all()
    assert (got[5][1] == 255).all()
    assert got[1][::2].isfinite().all()
    with pytest.raises(ValueError, match="hc_post_pre: scratch is 8 bytes, expected at least"):
        hc_post_pre(*sublayer, *parameters, scratch=scratch[:8])


def test_empty_launches_nothing(device, run):
    sublayer, parameters = inputs(1, 4, 16, device)
    got = run(
        hc_post_pre, *(x[:0] for x in sublayer), *parameters, quantize=True, launched=False
    )  # fmt: skip
    assert [tuple(x.shape) for x in got] == [
        (0, 4, 16), (0, 16), (0, 4), (0, 4, 4), (0, 16), (0, 1),
    ]  # fmt: skip


@pytest.mark.gpu
def test_model_shape(device, run):
    sublayer, parameters = inputs(3456, 4, 4096, device, torch.bfloat16)
    weight = randn(4096, dtype=torch.bfloat16, device=device, seed=7)
    got = run(hc_post_pre, *sublayer, *parameters, norm_weight=weight, quantize=True)
    same_bits(got, one_by_one(sublayer, parameters, norm_weight=weight))
    for n in (1, 8, 64):
        part = run(
            hc_post_pre, *(x[:n] for x in sublayer), *parameters, norm_weight=weight, quantize=True
        )
        same_bits(part, [x[:n] for x in got])


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"y": torch.zeros(2, 9)}, ValueError, r"hc_post_pre: y is \(2, 9\), expected \[T, C\]"),
        ({"streams": torch.zeros(2, 4)}, ValueError, "hc_post_pre: streams is"),
        ({"comb": torch.zeros(2, 4, 3)}, ValueError, "hc_post_pre: comb is"),
        ({"fn": torch.zeros(24, 31)}, ValueError, r"hc_post_pre: fn is \(24, 31\), expected"),
        ({"scale": torch.zeros(1)}, ValueError, r"scale is \(1,\), expected \[3\]"),
        ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters is 0, expected >= 1"),
        ({"out": (None,) * 6}, ValueError, "out is a tuple of 6, expected 4 tensors"),
        (
            {"out": (None,) * 4, "quantize": True}, ValueError,
            "out is a tuple of 4, expected 6 tensors",
        ),
        ({"out": (None, torch.zeros(2, 7), None, None)}, ValueError, "x is"),
    ],
)  # fmt: skip
def test_refusals(kwargs, kind, text):
    kwargs = dict(kwargs)
    names = {
        "y": (2, 8), "streams": (2, 4, 8), "post": (2, 4), "comb": (2, 4, 4), "fn": (24, 32),
        "scale": (3,), "base": (24,),
    }  # fmt: skip
    args = [kwargs.pop(name, torch.zeros(size)) for name, size in names.items()]
    for op in (hc_post_pre, hc_post_pre_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


def test_refuses_memory_that_is_shared():
    sublayer, parameters = inputs(2, 4, 8, "cpu")
    memory = torch.zeros(3, 4, 8)
    shifted = (sublayer[0], memory[:2], *sublayer[2:])
    with pytest.raises(ValueError, match="hc_post_pre: out is overlapping an input"):
        hc_post_pre(*shifted, *parameters, out=(memory[1:], None, None, None))
    with pytest.raises(ValueError, match="hc_post_pre: x is overlapping an input"):
        hc_post_pre(*sublayer, *parameters, out=(None, sublayer[0], None, None))
    too_many = torch.empty(262145, 1, 1, device="meta")
    with pytest.raises(ValueError, match="streams has 262145 tokens, expected at most 262144"):
        hc_pre(
            too_many, *(torch.empty(*size, device="meta") for size in ((3, 1), (3,), (3,)))
        )  # fmt: skip


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles need their own process")
def test_every_form_of_the_kernel_sums_in_the_same_order(monkeypatch):
    """A sum's order follows from how its values lie in threads; bits are equal only if that is."""
    orders = []

    def note(compiled, *args, **kwargs):
        text = compiled.asm["ttgir"]
        layouts = dict(re.findall(r"(#\w+) = (#ttg\.blocked<\{.*?\}>)", text))
        sums = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(\w+)xf32, (#\w+)>\)', text, re.S)
        orders.append({size: layouts[name] for size, name in sums})
        return report_of(compiled, *args, **kwargs)

    report_of = aot.report_of
    monkeypatch.setattr(aot, "report_of", note)
    specs = {spec.name: spec for spec in registry()}
    for name in ("hc_pre", "hc_post_pre"):
        for tokens in (1, 3456):
            for quantize in (0, 1):
                case = {"T": tokens, "hc": 4, "C": 4096, "norm": 1, "quantize": quantize}
                compile_launches(specs[name], case)
    assert len(orders) == 8
    assert set(orders[0]) == {"16x64", "4096"}
    assert all(order == orders[0] for order in orders)
