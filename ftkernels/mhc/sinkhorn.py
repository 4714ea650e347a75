"""Reference of what the hyper-connection ops share: product, coefficients, Sinkhorn.

Formulas: ``f = flatten(streams)``, ``m = (fn @ f) * rsqrt(mean(f^2) + norm_eps)``; a coefficient
is a function of ``m * scale + base``. Sinkhorn: softmax over k plus ``hc_eps``, one column step,
then ``iters - 1`` times a row step and a column step, each dividing by the sum plus ``hc_eps``.
Numerics: the product and the mean square in fp32. The reference goes on in fp64, in one fixed
order of IEEE operations, so that a row has the same bits in plain Python floats and in tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch

from ftkernels import check
from ftkernels.linear.linear import matmul_rows, wide
from ftkernels.mhc.mixing import MOST_TOKENS
from ftkernels.norm.rms_norm import normed

_FEW_ROWS = 16  # below, Python floats cost less than the calls of tensor operations
_MIN_COLUMNS = 4
_EXP_LIMIT = -700.0  # exp(-x) stays finite in fp64

Floats = list[float]


def project_reference(streams: torch.Tensor, fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``fn @ f`` ``[T, N]`` and ``sum(f^2)`` ``[T]``, fp32; a row does not depend on ``T``."""
    flat = wide(streams.reshape(streams.shape[0], -1))
    num_rows = fn.shape[0]
    if num_rows < _MIN_COLUMNS:  # narrower products take another path for one row than for several
        fn = torch.nn.functional.pad(fn, (0, 0, 0, _MIN_COLUMNS - num_rows))
    return matmul_rows(flat, fn)[:, :num_rows], (flat * flat).sum(-1)


def floats32(values: Floats) -> torch.Tensor:
    """A new fp32 CPU tensor; a quarter of the cost of ``torch.tensor``."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)


def few_rows(x: torch.Tensor, *eps: float) -> bool:
    """Whether plain floats do the coefficients: few rows, on the host, no division by zero."""
    return x.device.type == "cpu" and x.shape[0] <= _FEW_ROWS and min(eps) > 0


def sigmoids(
    mix: Floats, inverse_rms: float, scale: float, base: Floats, numerator: float, eps: float
) -> Floats:
    """``numerator * sigmoid(mix * (inverse_rms * scale) + base) + eps``."""
    rate, exp = inverse_rms * scale, math.exp
    z = [m * rate + b for m, b in zip(mix, base)]  # noqa: B905
    if min(z) < _EXP_LIMIT:
        z = [max(v, _EXP_LIMIT) for v in z]
    return [numerator / (1.0 + exp(-v)) + eps for v in z]


def sigmoid_rows(
    mix: torch.Tensor, inverse_rms: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    numerator: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """`sigmoids` of all rows, the same operations in fp64 tensors; all arguments fp64."""
    z = (mix * (inverse_rms[:, None] * scale) + base).clamp(min=_EXP_LIMIT)
    return numerator / (1.0 + _exp(-z)) + eps


def inverse_rms_rows(sum_squares: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """``1 / sqrt(sum_squares / width + eps)`` in fp64."""
    return (sum_squares.double() / width + eps).sqrt().reciprocal()


def _exp(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return x.exp()
    # the C library's exp, as in the few-rows path; torch's own differs from it in the last bit
    values = list(map(math.exp, x.flatten().tolist()))
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def sinkhorn(logits: Floats, hc: int, eps: float, iters: int) -> Floats:
    """The doubly normalized matrix of one row, row-major."""
    c: Floats = []
    if hc == 4:
        for j in (0, 4, 8, 12):
            c += _softmax4(logits[j], logits[j + 1], logits[j + 2], logits[j + 3], eps)
        return _sinkhorn4(c, eps, iters)
    for j in range(hc):
        row = logits[j * hc : (j + 1) * hc]
        top = max(row)
        e = [math.exp(a - top) for a in row]
        r = 1.0 / _sum(e)
        c += [v * r + eps for v in e]
    for i in range(2 * iters - 1):
        if i % 2:
            rates = [1.0 / (_sum(c[j * hc : (j + 1) * hc]) + eps) for j in range(hc)]
            c = [v * rates[n // hc] for n, v in enumerate(c)]
        else:
            rates = [1.0 / (_sum(c[k::hc]) + eps) for k in range(hc)]
            c = [v * rates[n % hc] for n, v in enumerate(c)]
    return c


def _softmax4(a: float, b: float, c: float, d: float, eps: float) -> Floats:
    top, exp = max(a, b, c, d), math.exp
    a, b, c, d = exp(a - top), exp(b - top), exp(c - top), exp(d - top)
    r = 1.0 / (a + b + c + d)
    return [a * r + eps, b * r + eps, c * r + eps, d * r + eps]


def _sum(values: Sequence[float]) -> float:
    total = values[0]  # left to right: sum() compensates since Python 3.12
    for value in values[1:]:
        total += value
    return total


def _sinkhorn4(c: Floats, eps: float, iters: int) -> Floats:
    # unrolled for the model's four streams: the loop form takes five times as long; pairs are
    # assigned without building a tuple
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = c
    for i in range(iters):
        if i:
            r = 1.0 / (a0 + a1 + a2 + a3 + eps)
            a0, a1 = a0 * r, a1 * r
            a2, a3 = a2 * r, a3 * r
            r = 1.0 / (b0 + b1 + b2 + b3 + eps)
            b0, b1 = b0 * r, b1 * r
            b2, b3 = b2 * r, b3 * r
            r = 1.0 / (c0 + c1 + c2 + c3 + eps)
            c0, c1 = c0 * r, c1 * r
            c2, c3 = c2 * r, c3 * r
            r = 1.0 / (d0 + d1 + d2 + d3 + eps)
            d0, d1 = d0 * r, d1 * r
            d2, d3 = d2 * r, d3 * r
        r = 1.0 / (a0 + b0 + c0 + d0 + eps)
        a0, b0 = a0 * r, b0 * r
        c0, d0 = c0 * r, d0 * r
        r = 1.0 / (a1 + b1 + c1 + d1 + eps)
        a1, b1 = a1 * r, b1 * r
        c1, d1 = c1 * r, d1 * r
        r = 1.0 / (a2 + b2 + c2 + d2 + eps)
        a2, b2 = a2 * r, b2 * r
        c2, d2 = c2 * r, d2 * r
        r = 1.0 / (a3 + b3 + c3 + d3 + eps)
        a3, b3 = a3 * r, b3 * r
        c3, d3 = c3 * r, d3 * r
    return [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3]


def sinkhorn_rows(logits: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """`sinkhorn` of all rows, the same operations in the same order; ``[T, hc, hc]`` fp64."""
    c = logits.permute(1, 2, 0).contiguous()  # [j, k, T]
    e = _exp(c - c.amax(1, keepdim=True))
    c = e * _sum_tensors(e.unbind(1)).reciprocal()[:, None] + eps
    for i in range(2 * iters - 1):
        if i % 2:
            c = c * (_sum_tensors(c.unbind(1)) + eps).reciprocal()[:, None]
        else:
            c = c * (_sum_tensors(c.unbind(0)) + eps).reciprocal()
    return c.permute(2, 0, 1)


def _sum_tensors(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def combine_reference(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """``sum_s weights[:, s] * streams[:, s]`` in fp32, ``[T, C]``."""
    return torch.bmm(weights[:, None], wide(streams))[:, 0]


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of rows ``[T, C]``: fp32 statistics and product, one rounding."""
    return normed(x, weight, eps).to(x.dtype)


def check_common(
    op: str, streams: torch.Tensor, hc_eps: float, norm_eps: float,
    norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    """The refusals that `hc_pre` and `hc_head` share."""
    tokens = streams.shape[0]
    check.require(
        tokens <= MOST_TOKENS,
        lambda: f"{op}: streams has {tokens} tokens, expected at most {MOST_TOKENS}",
    )
    check.require(streams.shape[1] >= 1, f"{op}: streams has hc = 0, expected at least one stream")
    check.number(op, "hc_eps", hc_eps, 0)
    check.number(op, "norm_eps", norm_eps, 0)
    if norm_weight is not None:
        size = (streams.shape[2],)
        check.tensor(op, "norm_weight", norm_weight, check.FLOATS, size, "[C]", streams)
