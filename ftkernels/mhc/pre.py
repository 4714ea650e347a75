"""Hyper-connection input: mixes of the residual streams and their weighted sum.

Formulas: ``m = (fn @ f) * rsqrt(mean(f^2) + norm_eps)`` with ``f = flatten(streams)``,
``pre = sigmoid(m[:hc]*scale[0] + base[:hc]) + hc_eps``,
``post = 2*sigmoid(m[hc:2hc]*scale[1] + base[hc:2hc])``,
``comb = sinkhorn(m[2hc:]*scale[2] + ..)`` (row-major), ``x = sum_s pre_s * streams[s]``.
Numerics: fp32 (no TF32); ``x`` rounded once. With ``norm_weight``, the rounded ``x`` is RMS-normed
as `rms_norm` would do it, with a second rounding. With ``quantize``, also as `quantize_fp8` has it.
"""

from __future__ import annotations

import math

import torch

from ftkernels import backend, check, config
from ftkernels.mhc import mixing, sinkhorn
from ftkernels.mhc.mixing import MixConfig
from ftkernels.quant.act_quant import quantize_fp8_reference
from ftkernels.spec import Case, Inputs, KernelSpec

Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
QuantizedMixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
MOST_ITERS = 1000


def hc_pre(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None, quantize: bool = False,
    out: Mixes | QuantizedMixes | None = None, scratch: torch.Tensor | None = None,
) -> Mixes | QuantizedMixes:  # fmt: skip
    """Input of a sublayer and the mixes that take its output back into the streams.

    Args:
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous; T up to 262144.
        fn: ``[(2+hc)*hc, hc*C]`` fp32: hc rows for pre, hc for post, hc*hc for comb.
        scale: ``[3]`` fp32 for pre, post, comb.
        base: ``[(2+hc)*hc]`` fp32.
        hc_eps: added to pre and inside Sinkhorn, ``>= 0``.
        norm_eps: of the RMS statistics, ``>= 0``.
        sinkhorn_iters: column steps, ``>= 1``.
        norm_weight: ``[C]`` float; ``x`` is RMS-normed with it.
        quantize: also give ``x`` as `quantize_fp8` does.
        out: the result's tensors; allocated when omitted.
        scratch: as ``scratch_bytes("hc_pre", T=.., hc=.., C=..)`` says; allocated when omitted.

    Returns:
        ``x [T, C]`` in ``streams.dtype``, ``post [T, hc]`` fp32, ``comb [T, hc, hc]`` fp32; with
        ``quantize`` also ``x_fp8 [T, C]`` and ``x_scale [T, ceil(C/128)]``.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, eps or iterations outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. One launch.
    """
    _check(streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight)
    if scratch is not None:
        num_bytes = mixing.scratch_bytes(fn.shape[0], streams.shape[1], streams.shape[0])
        others = (
            ("streams", streams), ("fn", fn), ("scale", scale), ("base", base),
            ("norm_weight", norm_weight), *mixing.given_outputs(out),
        )  # fmt: skip
        check.scratch("hc_pre", scratch, num_bytes, streams, others)
    inputs = (fn, scale, base, norm_weight)
    if streams.shape[0] and streams.shape[2] and backend.use_reference(streams):
        made = None if out is None else outputs("hc_pre", streams, inputs, quantize, out)
        return plain(streams, *inputs, hc_eps, norm_eps, sinkhorn_iters, quantize, made)
    out = outputs("hc_pre", streams, inputs, quantize, out)
    if out[0].numel() == 0:
        return out
    cfg = config.lookup("hc_pre", {"hc": streams.shape[1], "C": streams.shape[2]}, default_config)
    with backend.on_device(streams):
        mixing.launch(
            "hc_pre", cfg, streams, *inputs, hc_eps, norm_eps, out[0], scratch=scratch,
            iters=sinkhorn_iters, post=out[1], comb=out[2], quantized=out[3:],
        )  # fmt: skip
    return out


def _check(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, iters: int, norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    check.tensor("hc_pre", "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    check_parameters("hc_pre", streams, fn, scale, base, hc_eps, norm_eps, iters, norm_weight)


def check_parameters(
    op: str, streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, iters: int, norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    """Refuse what does not go with streams that are checked already."""
    fp32 = (torch.float32,)
    _, hc, width = streams.shape
    rows = (2 + hc) * hc
    check.tensor(op, "fn", fn, fp32, (rows, hc * width), "[(2+hc)*hc, hc*C]", streams)
    check.tensor(op, "scale", scale, fp32, (3,), "[3]", streams)
    check.tensor(op, "base", base, fp32, (rows,), "[(2+hc)*hc]", streams)
    sinkhorn.check_common(op, streams, hc_eps, norm_eps, norm_weight)
    check.integer(op, "sinkhorn_iters", iters, 1)
    check.require(
        iters <= MOST_ITERS, lambda: f"{op}: sinkhorn_iters is {iters}, expected 1 to {MOST_ITERS}"
    )


def outputs(
    op: str, streams: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], quantize: bool,
    out: tuple[torch.Tensor | None, ...] | None,
) -> Mixes | QuantizedMixes:  # fmt: skip
    """The tensors of `out` after checking them, or new ones."""
    num_tokens, hc, width = streams.shape
    forms: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("x", (num_tokens, width), streams.dtype),
        ("post", (num_tokens, hc), torch.float32),
        ("comb", (num_tokens, hc, hc), torch.float32),
    ]
    if quantize:
        forms.append(("x_fp8", (num_tokens, width), torch.float8_e4m3fn))
        forms.append(("x_scale", (num_tokens, -(-width // mixing.GROUP)), torch.uint8))
    made: list[torch.Tensor] = []
    for given, (name, size, dtype) in zip(check.parts(op, out, len(forms)), forms, strict=True):
        made.append(
            check.output(
                op, given, size, like=streams, dtype=dtype, name=name, inputs=(*inputs, *made)
            )
        )
    if len(made) == 3:
        return made[0], made[1], made[2]
    return made[0], made[1], made[2], made[3], made[4]


def hc_pre_reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None, quantize: bool = False,
    out: Mixes | QuantizedMixes | None = None,
) -> Mixes | QuantizedMixes:  # fmt: skip
    """The definition in plain torch and, for few rows, in plain Python."""
    _check(streams, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight)
    inputs = (fn, scale, base, norm_weight)
    if streams.shape[0] == 0 or streams.shape[2] == 0:
        return outputs("hc_pre", streams, inputs, quantize, out)
    made = None if out is None else outputs("hc_pre", streams, inputs, quantize, out)
    return plain(streams, *inputs, hc_eps, norm_eps, sinkhorn_iters, quantize, made)


def plain(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    norm_weight: torch.Tensor | None, hc_eps: float, norm_eps: float, iters: int, quantize: bool,
    out: Mixes | QuantizedMixes | None,
) -> Mixes | QuantizedMixes:  # fmt: skip
    """The definition without checks, for what does more."""
    mix, squares = sinkhorn.project_reference(streams, fn)
    few = sinkhorn.few_rows(streams, hc_eps, norm_eps)
    coefficients = _few_coefficients if few else _coefficients
    pre, post, comb = coefficients(mix, squares, scale, base, streams, hc_eps, norm_eps, iters)
    x = sinkhorn.combine_reference(pre, streams).to(streams.dtype)
    if norm_weight is not None:
        x = sinkhorn.norm_reference(x, norm_weight, norm_eps)
    if out is None:
        return (x, post, comb, *quantize_fp8_reference(x)) if quantize else (x, post, comb)
    for made, value in zip(out, (x, post, comb)):  # noqa: B905
        made.copy_(value)
    if len(out) == 5:
        quantize_fp8_reference(x, out=out[3:])
    return out


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


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows = (2 + case["hc"]) * case["hc"]
    return mixing.inputs(case, rows=rows, num_scales=3, device=device, seed=seed)


SPEC = KernelSpec(
    op=hc_pre, reference=hc_pre_reference, default=default_config,
    cases=(
        {"name": "small", "T": 3, "hc": 4, "C": 100},
        {"name": "flash-t1", "T": 1, "hc": 4, "C": 4096, "norm": 1},
        {"name": "flash-t3456", "T": 3456, "hc": 4, "C": 4096, "norm": 1},
        {"name": "flash-t3456-plain", "T": 3456, "hc": 4, "C": 4096},
        {"name": "flash-t8-fp8", "T": 8, "hc": 4, "C": 4096, "norm": 1, "quantize": 1},
        {"name": "flash-t3456-fp8", "T": 3456, "hc": 4, "C": 4096, "norm": 1, "quantize": 1},
        {"name": "pro-t64", "T": 64, "hc": 4, "C": 7168, "norm": 1},
    ),
    inputs=_inputs, tolerance=8e-3,
    scratch=lambda *, T, hc, C: mixing.scratch_bytes((2 + hc) * hc, hc, T),
    bytes_moved=lambda case: case["T"] * 2 * case["C"] * (case["hc"] + 1)
    + 4 * (2 + case["hc"]) * case["hc"] ** 2 * case["C"],
    flops=lambda case: 2 * case["T"] * (2 + case["hc"]) * case["hc"] ** 2 * case["C"],
)  # fmt: skip
