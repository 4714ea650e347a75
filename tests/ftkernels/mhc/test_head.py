"""Mutants that these tests catch: eps left out, softmax instead of sigmoid, statistics per stream,
scale on the base, norm before the sum.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels import scratch_bytes
from ftkernels.mhc.head import hc_head, hc_head_reference
from ftkernels.testing import assert_close, randn


def parameters(hc, width, device):
    size = hc * width
    return (
        randn(hc, size, device=device, scale=size**-0.5, seed=10),
        1.0 + randn(1, device=device, scale=0.3, seed=11),
        randn(hc, device=device, scale=0.5**0.5, seed=12),
    )


def formula(streams, fn, scale, base, eps=1e-6, norm_eps=1e-6):
    """Section 4.4 in fp64."""
    streams, fn, scale, base = (t.double().cpu() for t in (streams, fn, scale, base))
    flat = streams.flatten(1)
    mix = flat @ fn.T / torch.sqrt((flat**2).mean(1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(mix * scale + base) + eps
    return (weights[:, :, None] * streams).sum(1)


@pytest.mark.parametrize(
    ("num_tokens", "hc", "width"), [(1, 4, 256), (3, 4, 100), (5, 2, 64), (2, 3, 33), (2, 1, 40)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
def test_matches_formula(num_tokens, hc, width, dtype, with_norm, device, run):
    streams = randn(num_tokens, hc, width, dtype=dtype, device=device)
    weight = 1 + randn(width, device=device, scale=0.2, seed=3) if with_norm else None
    mixes = parameters(hc, width, device)
    out = run(hc_head, streams, *mixes, norm_weight=weight)
    expected = formula(streams, *mixes)
    if with_norm:
        x = expected.to(dtype).double()
        expected = x / torch.sqrt((x**2).mean(1, keepdim=True) + 1e-6) * weight.double().cpu()
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_close(out.cpu(), expected.to(dtype), row_tol=tolerance)


@pytest.mark.parametrize(("eps", "norm_eps"), [(0.5, 1.0), (0.0, 0.0)])
def test_eps(eps, norm_eps, device, run):
    streams, mixes = randn(3, 4, 64, device=device), parameters(4, 64, device)
    out = run(hc_head, streams, *mixes, hc_eps=eps, norm_eps=norm_eps)
    assert_close(out.cpu(), formula(streams, *mixes, eps, norm_eps).float(), row_tol=2e-6)


def test_a_row_does_not_depend_on_the_others(device, run, lane):
    streams, mixes = randn(40, 4, 48, device=device), parameters(4, 48, device)
    sizes = [*range(1, 10), 16, 17, 40] if lane != "interpreter" else [1, 2, 3, 9]
    whole = hc_head(streams[: sizes[-1]], *mixes)
    for n in sizes:
        assert torch.equal(run(hc_head, streams[:n], *mixes), whole[:n]), n


def test_strided_and_out(device, run):
    wide, mixes = randn(6, 5, 90, device=device)[::2, 1:, 26:], parameters(4, 64, device)
    out = torch.empty(3, 99, device=device)[:, 3:67]
    assert run(hc_head, wide, *mixes, out=out) is out
    assert_close(out.cpu(), formula(wide, *mixes).float(), row_tol=2e-6)


def test_extreme_scratch_and_empty(device, run):
    fn, scale, base = parameters(4, 32, device)
    scratch = torch.zeros(
        scratch_bytes("hc_head", T=1, hc=4, C=32), dtype=torch.uint8, device=device
    )
    for streams in (
        torch.zeros(1, 4, 32, device=device),
        randn(1, 4, 32, device=device, scale=1e15),
    ):
        out = run(hc_head, streams, fn, scale, base * 1e4, scratch=scratch)
        assert_close(out.cpu(), formula(streams, fn, scale, base * 1e4).float(), row_tol=2e-5)
    empty = torch.empty(0, 4, 32, device=device)
    assert run(hc_head, empty, fn, scale, base, launched=False).shape == (0, 32)


@pytest.mark.gpu
def test_model_shape(device, run):
    streams, mixes = randn(50, 4, 4096, device=device), parameters(4, 4096, device)
    assert_close(run(hc_head, streams, *mixes), hc_head_reference(streams, *mixes), row_tol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"streams": torch.zeros(2, 32)}, ValueError, "hc_head: streams is"),
        ({"fn": torch.zeros(3, 32)}, ValueError, r"fn is \(3, 32\), expected \[hc, hc\*C\]"),
        ({"scale": torch.zeros(3)}, ValueError, r"scale is \(3,\), expected \[1\]"),
        ({"base": torch.zeros(4).half()}, TypeError, "base is float16"),
        ({"hc_eps": -1.0}, ValueError, "hc_head: hc_eps is -1.0"),
        ({"out": torch.zeros(2, 7)}, ValueError, "out is"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = dict(kwargs)
    names = {"streams": (2, 4, 8), "fn": (4, 32), "scale": (1,), "base": (4,)}
    args = [kwargs.pop(name, torch.zeros(size)) for name, size in names.items()]
    for op in (hc_head, hc_head_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)
