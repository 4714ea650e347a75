"""Mutants that these tests catch: comb transposed, sigmoid instead of softmax, post without its
factor 2, eps left out of pre, eps added to post, 20 full rounds starting with rows, no softmax
maximum, mean over C instead of hc*C, scales swapped, stream-minor flattening, norm before the sum.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels import scratch_bytes
from ftkernels.mhc.pre import hc_pre, hc_pre_reference
from ftkernels.testing import assert_close, randn


def parameters(hc, width, device, rows=None, seed=10):
    """Random parameters of the model's specification, section 4.2."""
    size, rows = hc * width, rows or (2 + hc) * hc
    fn = randn(rows, size, device=device, scale=size**-0.5, seed=seed)
    scale = 1.0 + randn(3, device=device, scale=0.3, seed=seed + 1)
    base = randn(rows, device=device, scale=0.5**0.5, seed=seed + 2)
    return fn, scale, base


def formula(streams, fn, scale, base, *, eps=1e-6, norm_eps=1e-6, iters=20, norm_weight=None):
    """Section 4 in fp64, token by token."""
    num_tokens, hc, width = streams.shape
    x = torch.zeros(num_tokens, width, dtype=torch.float64)
    post = torch.zeros(num_tokens, hc, dtype=torch.float64)
    comb = torch.zeros(num_tokens, hc, hc, dtype=torch.float64)
    fn, scale, base, streams = (t.double().cpu() for t in (fn, scale, base, streams))
    for t in range(num_tokens):
        f = torch.cat([streams[t, s] for s in range(hc)])
        m = (fn @ f) / torch.sqrt((f**2).mean() + norm_eps)
        pre = torch.sigmoid(m[:hc] * scale[0] + base[:hc]) + eps
        post[t] = 2 * torch.sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        c = torch.softmax((m[2 * hc :] * scale[2] + base[2 * hc :]).view(hc, hc), 1) + eps
        c = c / (c.sum(0, keepdim=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(1, keepdim=True) + eps)
            c = c / (c.sum(0, keepdim=True) + eps)
        comb[t] = c
        for s in range(hc):
            x[t] += pre[s] * streams[t, s]
    return x, post, comb


def normed(x, weight, norm_eps, dtype):
    x = x.to(dtype).double()
    return x / torch.sqrt((x**2).mean(1, keepdim=True) + norm_eps) * weight.double().cpu()


@pytest.mark.parametrize(
    ("num_tokens", "hc", "width"), [(1, 4, 256), (3, 4, 100), (5, 2, 64), (2, 3, 33), (2, 1, 40)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
def test_matches_formula(num_tokens, hc, width, dtype, with_norm, device, run):
    streams = randn(num_tokens, hc, width, dtype=dtype, device=device)
    weight = 1 + randn(width, device=device, scale=0.2, seed=3) if with_norm else None
    mixes = parameters(hc, width, device)
    x, post, comb = run(hc_pre, streams, *mixes, norm_weight=weight)
    expected = formula(streams, *mixes)
    assert_close(post.cpu(), expected[1].float(), rtol=3e-6)
    assert_close(comb.cpu(), expected[2].float(), rtol=1e-5, atol=1e-7)
    wanted = normed(expected[0], weight, 1e-6, dtype) if with_norm else expected[0]
    if dtype == torch.float32:
        assert_close(x.cpu(), wanted.float(), row_tol=2e-6)
    else:
        assert_close(x.cpu(), wanted.to(dtype), row_tol=8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert_close(comb.sum(1).cpu(), torch.ones(num_tokens, hc), atol=1e-5)


def test_many_rows(device, run, lane):
    num_tokens = 40 if lane != "interpreter" else 18
    streams, mixes = randn(num_tokens, 4, 32, device=device), parameters(4, 32, device)
    got = run(hc_pre, streams, *mixes)
    for a, b in zip(got, formula(streams, *mixes), strict=True):
        assert_close(a.cpu(), b.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("eps", "norm_eps", "iters"), [(1e-2, 0.5, 3), (1e-3, 1e-6, 1), (0.0, 0.0, 2)]
)
def test_eps_and_iterations(eps, norm_eps, iters, device, run):
    streams, mixes = randn(2, 4, 64, device=device), parameters(4, 64, device)
    got = run(hc_pre, streams, *mixes, hc_eps=eps, norm_eps=norm_eps, sinkhorn_iters=iters)
    expected = formula(streams, *mixes, eps=eps, norm_eps=norm_eps, iters=iters)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.cpu(), b.float(), rtol=1e-5, atol=1e-6)


def test_norm_is_that_of_the_rounded_sum(device, run):
    streams, mixes = (
        randn(3, 4, 128, dtype=torch.bfloat16, device=device),
        parameters(4, 128, device),
    )
    weight = randn(128, dtype=torch.bfloat16, device=device, seed=3)
    plain = run(hc_pre, streams, *mixes)
    got = run(hc_pre, streams, *mixes, norm_weight=weight, norm_eps=1e-6)
    expected = normed(plain[0].cpu(), weight, 1e-6, torch.bfloat16).to(torch.bfloat16)
    assert_close(got[0].cpu(), expected, max_ulp=1)
    assert torch.equal(got[1], plain[1])
    assert torch.equal(got[2], plain[2])


def test_a_row_does_not_depend_on_the_others(device, run, lane):
    streams, mixes = randn(40, 4, 48, device=device), parameters(4, 48, device)
    weight = randn(48, device=device, seed=3)
    sizes = [*range(1, 10), 16, 17, 23, 40] if lane != "interpreter" else [1, 2, 3, 9]
    whole = hc_pre(streams[: sizes[-1]], *mixes, norm_weight=weight)
    for n in sizes:
        part = run(hc_pre, streams[:n], *mixes, norm_weight=weight)
        assert all(torch.equal(a, b[:n]) for a, b in zip(part, whole, strict=True)), n


def test_extreme_inputs(device, run):
    fn, scale, base = parameters(4, 32, device)
    zeros = torch.zeros(1, 4, 32, device=device)
    for streams in (zeros, zeros + 1e15, randn(1, 4, 32, device=device, scale=1e-15)):
        for factor in (1.0, 1e4):
            got = run(hc_pre, streams, fn, scale, base * factor)
            for a, b in zip(got, formula(streams, fn, scale, base * factor), strict=True):
                assert_close(a.cpu(), b.float(), rtol=2e-4, atol=1e-6)


def test_strided_inputs_and_outputs(device, run):
    wide = randn(6, 5, 90, device=device)[::2, 1:, 26:]
    fn, scale, base = parameters(4, 64, device)
    fn_view = torch.cat((fn, fn), 1)[:, 256:]
    out = (
        torch.empty(3, 99, device=device)[:, 3:67],
        torch.empty(3, 8, device=device)[:, 2:6],
        torch.empty(3, 4, 7, device=device)[:, :, 1:5],
    )
    result = run(hc_pre, wide, fn_view, scale, base, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    for a, b in zip(out, formula(wide, fn, scale, base), strict=True):
        assert_close(a.cpu(), b.float(), rtol=1e-5, atol=1e-6)


def test_scratch(device, run):
    streams, mixes = randn(2, 4, 64, device=device), parameters(4, 64, device)
    scratch = torch.zeros(
        scratch_bytes("hc_pre", T=2, hc=4, C=64), dtype=torch.uint8, device=device
    )
    got = run(hc_pre, streams, *mixes, scratch=scratch)
    assert all(torch.equal(a, b) for a, b in zip(got, hc_pre(streams, *mixes), strict=True))
    assert not scratch[: 64 * 1024].any()
    with pytest.raises(ValueError, match="hc_pre: scratch is 8 bytes, expected at least"):
        hc_pre(streams, *mixes, scratch=scratch[:8])


def test_empty_launches_nothing(device, run):
    x, post, comb = run(
        hc_pre, torch.empty(0, 4, 16, device=device), *parameters(4, 16, device), launched=False
    )
    assert (x.shape, post.shape, comb.shape) == ((0, 16), (0, 4), (0, 4, 4))


@pytest.mark.gpu
def test_model_shape(device, run):
    streams = randn(64, 4, 4096, dtype=torch.bfloat16, device=device)
    mixes, weight = parameters(4, 4096, device), randn(4096, device=device, seed=3)
    got = run(hc_pre, streams, *mixes, norm_weight=weight)
    for a, b in zip(got, hc_pre_reference(streams, *mixes, norm_weight=weight), strict=True):
        assert_close(a, b, row_tol=8e-3)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        (
            {"streams": torch.zeros(2, 32)},
            ValueError,
            r"streams is \(2, 32\), expected \[T, hc, C\]",
        ),
        ({"streams": torch.zeros(2, 4, 8).double()}, TypeError, "streams is float64"),
        ({"fn": torch.zeros(24, 31)}, ValueError, r"fn is \(24, 31\), expected"),
        ({"fn": torch.zeros(24, 32).half()}, TypeError, "fn is float16, expected float32"),
        ({"scale": torch.zeros(1)}, ValueError, r"scale is \(1,\), expected \[3\]"),
        ({"base": torch.zeros(23)}, ValueError, r"base is \(23,\)"),
        ({"hc_eps": -1.0}, ValueError, "hc_pre: hc_eps is -1.0, expected >= 0"),
        ({"norm_eps": -1.0}, ValueError, "hc_pre: norm_eps is -1.0, expected >= 0"),
        ({"sinkhorn_iters": 0}, ValueError, "hc_pre: sinkhorn_iters is 0, expected >= 1"),
        ({"norm_weight": torch.zeros(9)}, ValueError, r"norm_weight is \(9,\), expected \[C\]"),
        ({"out": (torch.zeros(2, 9), None, None)}, ValueError, r"x is \(2, 9\), expected"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = dict(kwargs)
    names = {"streams": (2, 4, 8), "fn": (24, 32), "scale": (3,), "base": (24,)}
    args = [kwargs.pop(name, torch.zeros(size)) for name, size in names.items()]
    for op in (hc_pre, hc_pre_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)
