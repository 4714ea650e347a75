"""Hyper-connection input: mixes of the residual streams and their weighted sum.

Formulas: ``m = (fn @ f) * rsqrt(mean(f^2) + norm_eps)`` with ``f = flatten(streams)``,
``pre = sigmoid(m[:hc]*scale[0] + base[:hc]) + hc_eps``,
``post = 2*sigmoid(m[hc:2hc]*scale[1] + base[hc:2hc])``,
``comb = sinkhorn(m[2hc:]*scale[2] + ..)`` (row-major), ``x = sum_s pre_s * streams[s]``.
Numerics: fp32 (no TF32); ``x`` rounded once. With ``norm_weight``, the rounded ``x`` is RMS-normed
as `rms_norm` would do it, with a second rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.mhc import mixing, sinkhorn
from ftkernels.mhc.mixing import (
    MixConfig,
    inverse_rms,
    mixed_sigmoid,
    mixed_sinkhorn,
    store_mixed,
)
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target

Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hc_pre(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None, out: Mixes | None = None,
    scratch: torch.Tensor | None = None,
) -> Mixes:  # fmt: skip
    """Input of a sublayer and the mixes that take its output back into the streams.

    Args:
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous.
        fn: ``[(2+hc)*hc, hc*C]`` fp32: hc rows for pre, hc for post, hc*hc for comb.
        scale: ``[3]`` fp32 for pre, post, comb.
        base: ``[(2+hc)*hc]`` fp32.
        hc_eps: added to pre and inside Sinkhorn, ``>= 0``.
        norm_eps: of the RMS statistics, ``>= 0``.
        sinkhorn_iters: column steps, ``>= 1``.
        norm_weight: ``[C]`` float; ``x`` is RMS-normed with it.
        out: ``(x, post, comb)``; allocated when omitted.
        scratch: as ``scratch_bytes("hc_pre", T=.., hc=.., C=..)`` says; allocated when omitted.

    Returns:
        ``x [T, C]`` in ``streams.dtype``, ``post [T, hc]`` fp32, ``comb [T, hc, hc]`` fp32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, eps or iterations outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. Two launches.
    """
    _check(streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight)
    if scratch is not None:
        num_bytes = mixing.scratch_bytes(fn.shape[0], streams.shape[0])
        check.scratch("hc_pre", scratch, num_bytes, streams)
    if streams.shape[0] and streams.shape[2] and backend.use_reference(streams):
        return _reference(
            streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight, out
        )
    num_tokens, hc, width = streams.shape
    out = _outputs(streams, (fn, scale, base, norm_weight), out)
    if num_tokens == 0 or width == 0:
        return out
    x, post, comb = out
    cfg = config.lookup("hc_pre", {"hc": hc, "C": width}, default_config)
    block_c = cfg.block_c if norm_weight is None else triton.next_power_of_2(width)
    with backend.on_device(streams):
        partial = mixing.project(streams, fn, scratch, cfg)
        _hc_pre_kernel[(num_tokens, triton.cdiv(width, block_c))](
            partial, scale, base, streams, streams.stride(0), streams.stride(1), norm_weight,
            x, x.stride(0), post, post.stride(0), comb, comb.stride(0), comb.stride(1),
            width, hc_eps, norm_eps,
            HC=hc, BLOCK_HC=triton.next_power_of_2(hc), ITERS=sinkhorn_iters,
            NUM_SPLITS=partial.shape[1], BLOCK_N=partial.shape[2],
            HAS_NORM=norm_weight is not None, BLOCK_C=block_c, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _check(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, iters: int, norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    op, fp32 = "hc_pre", (torch.float32,)
    check.tensor(op, "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    _, hc, width = streams.shape
    rows = (2 + hc) * hc
    check.tensor(op, "fn", fn, fp32, (rows, hc * width), "[(2+hc)*hc, hc*C]", streams)
    check.tensor(op, "scale", scale, fp32, (3,), "[3]", streams)
    check.tensor(op, "base", base, fp32, (rows,), "[(2+hc)*hc]", streams)
    sinkhorn.check_common(op, streams, hc_eps, norm_eps, norm_weight)
    check.require(iters >= 1, lambda: f"{op}: sinkhorn_iters is {iters}, expected >= 1")


def _outputs(
    streams: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], out: Mixes | None
) -> Mixes:
    num_tokens, hc, width = streams.shape
    op, fp32 = "hc_pre", torch.float32
    given = check.parts(op, out, 3)
    x = check.output(op, given[0], (num_tokens, width), like=streams, name="x", inputs=inputs)
    post = check.output(
        op, given[1], (num_tokens, hc), like=streams, dtype=fp32, name="post", inputs=(*inputs, x)
    )
    comb = check.output(
        op, given[2], (num_tokens, hc, hc), like=streams, dtype=fp32, name="comb",
        inputs=(*inputs, x, post),
    )  # fmt: skip
    return x, post, comb


def hc_pre_reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None, out: Mixes | None = None,
) -> Mixes:  # fmt: skip
    """The definition in plain torch and, for few rows, in plain Python."""
    _check(streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight)
    if streams.shape[0] == 0 or streams.shape[2] == 0:
        return _outputs(streams, (fn, scale, base, norm_weight), out)
    return _reference(streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight, out)


def _reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, iters: int, norm_weight: torch.Tensor | None,
    out: Mixes | None,
) -> Mixes:  # fmt: skip
    mix, squares = sinkhorn.project_reference(streams, fn)
    few = sinkhorn.few_rows(streams, hc_eps, norm_eps)
    coefficients = _few_coefficients if few else _coefficients
    pre, post, comb = coefficients(mix, squares, scale, base, streams, hc_eps, norm_eps, iters)
    x = sinkhorn.combine_reference(pre, streams).to(streams.dtype)
    if norm_weight is not None:
        x = sinkhorn.norm_reference(x, norm_weight, norm_eps)
    if out is None:
        return x, post, comb
    out = _outputs(streams, (fn, scale, base, norm_weight), out)
    return out[0].copy_(x), out[1].copy_(post), out[2].copy_(comb)


def _coefficients(
    mix: torch.Tensor, squares: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    streams: torch.Tensor, hc_eps: float, norm_eps: float, iters: int,
) -> Mixes:  # fmt: skip
    num_tokens, hc, width = streams.shape
    mix, scale, base = mix.double(), scale.double(), base.double()
    rms = sinkhorn.inverse_rms_rows(squares, hc * width, norm_eps)
    rows = sinkhorn.sigmoid_rows
    pre = rows(mix[:, :hc], rms, scale[0], base[:hc], 1.0, hc_eps)
    post = rows(mix[:, hc : 2 * hc], rms, scale[1], base[hc : 2 * hc], 2.0, 0.0)
    logits = mix[:, 2 * hc :] * (rms[:, None] * scale[2]) + base[2 * hc :]
    comb = sinkhorn.sinkhorn_rows(logits.view(num_tokens, hc, hc), hc_eps, iters)
    return pre.float(), post.float(), comb.float().contiguous()


def _few_coefficients(
    mix: torch.Tensor, squares: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    streams: torch.Tensor, hc_eps: float, norm_eps: float, iters: int,
) -> Mixes:  # fmt: skip
    num_tokens, hc, width = streams.shape
    scales, bases = scale.tolist(), base.tolist()
    pre: list[float] = []
    post: list[float] = []
    comb: list[float] = []
    for m, square in zip(mix.tolist(), squares.tolist(), strict=True):
        rms = 1.0 / math.sqrt(square / (hc * width) + norm_eps)
        pre += sinkhorn.sigmoids(m[:hc], rms, scales[0], bases[:hc], 1.0, hc_eps)
        post += sinkhorn.sigmoids(m[hc : 2 * hc], rms, scales[1], bases[hc : 2 * hc], 2.0, 0.0)
        rate = rms * scales[2]
        logits = [a * rate + b for a, b in zip(m[2 * hc :], bases[2 * hc :])]  # noqa: B905
        comb += sinkhorn.sinkhorn(logits, hc, hc_eps, iters)
    flat = sinkhorn.floats32(pre + post + comb)
    n = num_tokens * hc
    return (
        flat[:n].view(num_tokens, hc),
        flat[n : 2 * n].view(num_tokens, hc),
        flat[2 * n :].view(num_tokens, hc, hc),
    )


def default_config(key: Case) -> MixConfig:
    """As `hc_head`: see `mixing.default_config`."""
    return mixing.default_config(key)


def candidates(key: Case, target: Target) -> Iterable[MixConfig]:
    return mixing.candidates(key, target)


@triton.jit
def _hc_pre_kernel(
    partial_ptr,  # [T, NUM_SPLITS, BLOCK_N]
    scale_ptr,  # [3]
    base_ptr,  # [(2+hc)*hc]
    streams_ptr, stride_st, stride_sh,  # [T, hc, C]
    norm_ptr,  # [C]
    x_ptr, stride_xt,  # [T, C]
    post_ptr, stride_pt,  # [T, hc]
    comb_ptr, stride_ct, stride_cj,  # [T, hc, hc]
    C, hc_eps, norm_eps,
    HC: tl.constexpr, BLOCK_HC: tl.constexpr, ITERS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    pid_c = tl.program_id(1)
    offs_h = tl.arange(0, BLOCK_HC)
    mask_h = offs_h < HC
    partial_ptr += pid_t * NUM_SPLITS * BLOCK_N
    rms = inverse_rms(partial_ptr, C, norm_eps, HC, (2 + HC) * HC, NUM_SPLITS, BLOCK_N)
    pre = mixed_sigmoid(
        partial_ptr, base_ptr, 0, rms, tl.load(scale_ptr), HC, BLOCK_HC, NUM_SPLITS, BLOCK_N
    )
    store_mixed(
        pre + hc_eps, streams_ptr + pid_t * stride_st, stride_sh, norm_ptr,
        x_ptr + pid_t * stride_xt, pid_c * BLOCK_C + tl.arange(0, BLOCK_C), C, norm_eps,
        HC, BLOCK_HC, HAS_NORM,
    )  # fmt: skip
    if pid_c == 0:
        post = mixed_sigmoid(
            partial_ptr, base_ptr, HC, rms, tl.load(scale_ptr + 1),
            HC, BLOCK_HC, NUM_SPLITS, BLOCK_N,
        )  # fmt: skip
        tl.store(post_ptr + pid_t * stride_pt + offs_h, 2.0 * post, mask=mask_h)
        comb = mixed_sinkhorn(
            partial_ptr, base_ptr, rms, tl.load(scale_ptr + 2), hc_eps,
            HC, BLOCK_HC, NUM_SPLITS, BLOCK_N, ITERS,
        )  # fmt: skip
        row_ptrs = comb_ptr + pid_t * stride_ct + offs_h.to(tl.int64) * stride_cj
        mask = mask_h[:, None] & mask_h[None, :]
        tl.store(row_ptrs[:, None] + offs_h[None, :], comb, mask=mask)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows = (2 + case["hc"]) * case["hc"]
    return mixing.inputs(case, rows=rows, num_scales=3, device=device, seed=seed)


SPEC = KernelSpec(
    op=hc_pre, reference=hc_pre_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 3, "hc": 4, "C": 100},
        {"name": "flash-t1", "T": 1, "hc": 4, "C": 4096, "norm": 1},
        {"name": "flash-t3456", "T": 3456, "hc": 4, "C": 4096, "norm": 1},
        {"name": "flash-t3456-plain", "T": 3456, "hc": 4, "C": 4096},
        {"name": "pro-t64", "T": 64, "hc": 4, "C": 7168, "norm": 1},
    ),
    inputs=_inputs, tolerance=8e-3, launches=lambda case: 2,
    scratch=lambda *, T, hc, C: mixing.scratch_bytes((2 + hc) * hc, T),
    bytes_moved=lambda case: case["T"] * 2 * case["C"] * (case["hc"] + 1)
    + 4 * (2 + case["hc"]) * case["hc"] ** 2 * case["C"],
    flops=lambda case: 2 * case["T"] * (2 + case["hc"]) * case["hc"] ** 2 * case["C"],
)  # fmt: skip
