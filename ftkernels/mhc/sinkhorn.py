"""What the hyper-connection ops share: the mixing product, the coefficients, Sinkhorn.

Formulas: ``f = flatten(streams)``, ``m = (fn @ f) * rsqrt(mean(f^2) + norm_eps)``; a coefficient is a
function of ``m * scale + base``. Sinkhorn: softmax over k plus ``hc_eps``, one column step, then
``iters - 1`` times a row step and a column step, each dividing by the sum plus ``hc_eps``.
Numerics: the product and the mean square in fp32. The reference goes on in fp64, in one fixed order
of IEEE operations, so that a row has the same bits in plain Python floats and in tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check  # noqa: F401  (backend first: it fixes interpretation)
from ftkernels.linear.linear import matmul_rows
from ftkernels.spec import COUNTER_BYTES, Case
from ftkernels.target import Target

_FEW_ROWS = 16  # below, Python floats cost less than the calls of tensor operations
_MIN_COLUMNS = 4
MAX_SPLITS = 32
_EXP_LIMIT = -700.0  # exp(-x) stays finite in fp64

Floats = list[float]


def project_reference(streams: torch.Tensor, fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``fn @ f`` ``[T, N]`` and ``sum(f^2)`` ``[T]``, fp32; a row does not depend on ``T``."""
    flat = streams.reshape(streams.shape[0], -1).float()
    num_rows = fn.shape[0]
    if num_rows < _MIN_COLUMNS:  # narrower products take another path for one row than for several
        fn = torch.nn.functional.pad(fn, (0, 0, 0, _MIN_COLUMNS - num_rows))
    return matmul_rows(flat, fn)[:, :num_rows], (flat * flat).sum(-1)


def floats32(values: Floats) -> torch.Tensor:
    """A new fp32 CPU tensor; a quarter of the cost of ``torch.tensor``."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)


def few_rows(x: torch.Tensor, *eps: float) -> bool:
    """Whether plain Python floats do the coefficients: few rows, on the host, no division by zero."""
    return x.device.type == "cpu" and x.shape[0] <= _FEW_ROWS and min(eps) > 0


def sigmoids(
    mix: Floats, inverse_rms: float, scale: float, base: Floats, numerator: float, eps: float
) -> Floats:
    """``numerator * sigmoid(mix * inverse_rms * scale + base) + eps``."""
    return [
        numerator / (1.0 + math.exp(-max(m * inverse_rms * scale + b, _EXP_LIMIT))) + eps
        for m, b in zip(mix, base)
    ]


def sigmoid_rows(
    mix: torch.Tensor, inverse_rms: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    numerator: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """`sigmoids` of all rows, the same operations in fp64 tensors; all arguments fp64."""
    z = (mix * inverse_rms[:, None] * scale + base).clamp(min=_EXP_LIMIT)
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
    for j in range(hc):
        row = logits[j * hc : (j + 1) * hc]
        top = max(row)
        e = [math.exp(a - top) for a in row]
        r = 1.0 / _sum(e)
        c += [v * r + eps for v in e]
    if hc == 4:
        return _sinkhorn4(c, eps, iters)
    for i in range(2 * iters - 1):
        if i % 2:
            rates = [1.0 / (_sum(c[j * hc : (j + 1) * hc]) + eps) for j in range(hc)]
            c = [v * rates[n // hc] for n, v in enumerate(c)]
        else:
            rates = [1.0 / (_sum(c[k::hc]) + eps) for k in range(hc)]
            c = [v * rates[n % hc] for n, v in enumerate(c)]
    return c


def _sum(values: Sequence[float]) -> float:
    total = values[0]  # left to right: sum() compensates since Python 3.12
    for value in values[1:]:
        total += value
    return total


def _sinkhorn4(c: Floats, eps: float, iters: int) -> Floats:
    # unrolled for the model's four streams: the loop form takes five times as long
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = c
    for i in range(iters):
        if i:
            r = 1.0 / (a0 + a1 + a2 + a3 + eps)
            a0, a1, a2, a3 = a0 * r, a1 * r, a2 * r, a3 * r
            r = 1.0 / (b0 + b1 + b2 + b3 + eps)
            b0, b1, b2, b3 = b0 * r, b1 * r, b2 * r, b3 * r
            r = 1.0 / (c0 + c1 + c2 + c3 + eps)
            c0, c1, c2, c3 = c0 * r, c1 * r, c2 * r, c3 * r
            r = 1.0 / (d0 + d1 + d2 + d3 + eps)
            d0, d1, d2, d3 = d0 * r, d1 * r, d2 * r, d3 * r
        r = 1.0 / (a0 + b0 + c0 + d0 + eps)
        a0, b0, c0, d0 = a0 * r, b0 * r, c0 * r, d0 * r
        r = 1.0 / (a1 + b1 + c1 + d1 + eps)
        a1, b1, c1, d1 = a1 * r, b1 * r, c1 * r, d1 * r
        r = 1.0 / (a2 + b2 + c2 + d2 + eps)
        a2, b2, c2, d2 = a2 * r, b2 * r, c2 * r, d2 * r
        r = 1.0 / (a3 + b3 + c3 + d3 + eps)
        a3, b3, c3, d3 = a3 * r, b3 * r, c3 * r, d3 * r
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
    """``sum_s weights[:, s] * streams[:, s]`` in fp32, in order of s; ``[T, C]``."""
    return _sum_tensors((streams.float() * weights[:, :, None]).unbind(1))


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of rows ``[T, C]``: fp32 statistics and product, one rounding to the dtype of `x`."""
    wide = x.float()
    mean = (wide * wide).sum(-1, keepdim=True) / x.shape[1]
    return (wide * (mean + eps).rsqrt() * weight).to(x.dtype)


def check_common(
    op: str, streams: torch.Tensor, hc_eps: float, norm_eps: float,
    norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    """The refusals that `hc_pre` and `hc_head` share."""
    check.require(streams.shape[1] >= 1, f"{op}: streams has hc = 0, expected at least one stream")
    check.require(hc_eps >= 0, lambda: f"{op}: hc_eps is {hc_eps}, expected >= 0")
    check.require(norm_eps >= 0, lambda: f"{op}: norm_eps is {norm_eps}, expected >= 0")
    if norm_weight is not None:
        size = (streams.shape[2],)
        check.tensor(op, "norm_weight", norm_weight, check.FLOATS, size, "[C]", streams)


@dataclass(frozen=True)
class MixConfig:
    """Both launches of `hc_pre` and `hc_head`; the same for every number of rows."""

    num_splits: int
    block_t: int
    block_k: int
    project_warps: int
    block_c: int
    num_warps: int


def default_config(key: Case) -> MixConfig:
    """At least 256 channels per split; whole rows where they are normed."""
    splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, key["hc"] * key["C"] // 256)))
    return MixConfig(
        num_splits=splits, block_t=16, block_k=32, project_warps=4,
        block_c=min(1024, triton.next_power_of_2(key["C"])), num_warps=4,
    )  # fmt: skip


def candidates(key: Case, target: Target) -> Iterable[MixConfig]:
    base = default_config(key)
    for num_splits in (8, 16, 32):
        for block_k, warps in ((16, 4), (32, 4), (32, 8), (64, 8)):
            for block_c, num_warps in ((512, 4), (1024, 4), (1024, 8)):
                yield MixConfig(num_splits, base.block_t, block_k, warps, block_c, num_warps)


def scratch_bytes(rows: int, num_tokens: int) -> int:
    """Scratch of `hc_pre` and `hc_head` for `rows` rows of ``fn``, at the largest split."""
    return COUNTER_BYTES + num_tokens * MAX_SPLITS * _block_n(rows) * 4


def _block_n(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows + 1))  # one more column: the sum of squares


def project(
    streams: torch.Tensor, fn: torch.Tensor, scratch: torch.Tensor | None, cfg: MixConfig
) -> torch.Tensor:
    """Launches the mixing product; partial sums ``[T, num_splits, BLOCK_N]`` in scratch."""
    num_tokens, hc, width = streams.shape
    rows = fn.shape[0]
    if scratch is None:
        num_bytes = scratch_bytes(rows, num_tokens)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=streams.device)
    block_n = _block_n(rows)
    used = COUNTER_BYTES + num_tokens * cfg.num_splits * block_n * 4
    partial = scratch[COUNTER_BYTES:used].view(torch.float32)
    partial = partial.view(num_tokens, cfg.num_splits, block_n)
    _hc_project_kernel[(triton.cdiv(num_tokens, cfg.block_t), cfg.num_splits)](
        streams, streams.stride(0), streams.stride(1), fn, fn.stride(0), partial,
        num_tokens, width,
        HC=hc, N=rows, BLOCK_N=block_n, BLOCK_T=cfg.block_t, BLOCK_K=cfg.block_k,
        NUM_SPLITS=cfg.num_splits, num_warps=cfg.project_warps,
    )  # fmt: skip
    return partial


@triton.jit
def _hc_project_kernel(
    streams_ptr, stride_st, stride_sh,  # [T, hc, C]
    fn_ptr, stride_fn,  # [N, hc*C]
    partial_ptr,  # [T, NUM_SPLITS, BLOCK_N]
    T, C,
    HC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    pid_s = tl.program_id(1)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < T
    blocks_per_stream = tl.cdiv(C, BLOCK_K)
    num_blocks = HC * blocks_per_stream
    per_split = tl.cdiv(num_blocks, NUM_SPLITS)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for block in range(pid_s * per_split, tl.minimum((pid_s + 1) * per_split, num_blocks)):
        h = block // blocks_per_stream
        offs_c = (block - h * blocks_per_stream) * BLOCK_K + offs_k
        mask_c = offs_c < C
        row_ptrs = streams_ptr + offs_t * stride_st + h.to(tl.int64) * stride_sh
        x_ptrs = row_ptrs[:, None] + offs_c[None, :]
        x = tl.load(x_ptrs, mask=mask_t[:, None] & mask_c[None, :], other=0.0).to(tl.float32)
        w_ptrs = fn_ptr + (offs_n.to(tl.int64) * stride_fn)[None, :] + (h * C + offs_c)[:, None]
        w = tl.load(w_ptrs, mask=(offs_n < N)[None, :] & mask_c[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    acc = tl.where((offs_n == N)[None, :], squares[:, None], acc)
    out_ptrs = partial_ptr + (offs_t[:, None] * NUM_SPLITS + pid_s) * BLOCK_N + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=mask_t[:, None] & (offs_n <= N)[None, :])


@triton.jit
def inverse_rms(
    partial_ptr, C, norm_eps,
    HC: tl.constexpr, N: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of one token's flattened streams; `partial_ptr` is the token's partial sums."""
    squares = tl.sum(tl.load(partial_ptr + tl.arange(0, NUM_SPLITS) * BLOCK_N + N), 0)
    return 1.0 / tl.sqrt_rn(squares / (HC * C) + norm_eps)


@triton.jit
def mixed_sigmoid(
    partial_ptr, base_ptr, first, rms, scale,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``sigmoid(m * scale + base)`` of the rows from `first` on, [BLOCK_HC]."""
    offs_h = tl.arange(0, BLOCK_HC)
    ptrs = partial_ptr + tl.arange(0, NUM_SPLITS)[:, None] * BLOCK_N + first + offs_h[None, :]
    mix = tl.sum(tl.load(ptrs, mask=(offs_h < HC)[None, :], other=0.0), 0)
    base = tl.load(base_ptr + first + offs_h, mask=offs_h < HC, other=0.0)
    return tl.sigmoid(mix * rms * scale + base)


@triton.jit
def mixed_sinkhorn(
    partial_ptr, base_ptr, rms, scale, hc_eps,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    ITERS: tl.constexpr,
):  # fmt: skip
    """The doubly normalized matrix of one token, [BLOCK_HC, BLOCK_HC]; zero outside [HC, HC]."""
    offs_h = tl.arange(0, BLOCK_HC)
    mask = (offs_h < HC)[:, None] & (offs_h < HC)[None, :]
    rows = 2 * HC + offs_h[:, None] * HC + offs_h[None, :]  # [j, k]
    offs_s = tl.arange(0, NUM_SPLITS) * BLOCK_N
    ptrs = partial_ptr + offs_s[:, None, None] + rows[None, :, :]
    mix = tl.sum(tl.load(ptrs, mask=mask[None, :, :], other=0.0), 0)
    a = mix * rms * scale + tl.load(base_ptr + rows, mask=mask, other=0.0)
    a = tl.where(mask, a, float("-inf"))
    c = tl.where(mask, tl.exp(a - tl.max(a, 1)[:, None]), 0.0)
    c = tl.where(mask, c / tl.sum(c, 1)[:, None] + hc_eps, 0.0)
    c = tl.where(mask, c / (tl.sum(c, 0)[None, :] + hc_eps), 0.0)
    for _ in range(ITERS - 1):
        c = tl.where(mask, c / (tl.sum(c, 1)[:, None] + hc_eps), 0.0)
        c = tl.where(mask, c / (tl.sum(c, 0)[None, :] + hc_eps), 0.0)
    return c


@triton.jit
def store_mixed(
    weights, streams_ptr, stride_sh, norm_ptr, out_ptr, offs_c, C, norm_eps,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """``sum_s weights[s] * streams[s]`` of one token's channels; a normed row must be whole."""
    offs_h = tl.arange(0, BLOCK_HC)
    mask_c = offs_c < C
    acc = tl.zeros_like(offs_c).to(tl.float32)
    for h in tl.static_range(HC):
        weight = tl.sum(tl.where(offs_h == h, weights, 0.0), 0)
        acc += weight * tl.load(streams_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        streams_ptr += stride_sh
    x = acc.to(out_ptr.dtype.element_ty)
    if HAS_NORM:
        wide = x.to(tl.float32)
        rms = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / C + norm_eps)
        gain = tl.load(norm_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        x = (wide * rms * gain).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_c, x, mask=mask_c)
