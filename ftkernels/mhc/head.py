"""Hyper-connection head: the streams' weighted sum ahead of the output projection.

Formula: ``w = sigmoid((fn @ f) * rsqrt(mean(f^2) + norm_eps) * scale + base) + hc_eps`` with
``f = flatten(streams)``, ``out = sum_s w_s * streams[s]``.
Numerics: fp32 (no TF32), one rounding. With ``norm_weight``, the rounded sum is RMS-normed as
`rms_norm` would do it, with a second rounding.
"""

from __future__ import annotations

import math

import torch

from ftkernels import backend, check, config
from ftkernels.mhc import mixing, sinkhorn
from ftkernels.mhc.mixing import MixConfig
from ftkernels.spec import Case, Inputs, KernelSpec


def hc_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Collapse the residual streams into one hidden vector.

    Args:
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous.
        fn: ``[hc, hc*C]`` fp32.
        scale: ``[1]`` fp32.
        base: ``[hc]`` fp32.
        hc_eps: added to the weights, ``>= 0``.
        norm_eps: of the RMS statistics, ``>= 0``.
        norm_weight: ``[C]`` float; the result is RMS-normed with it.
        out: ``[T, C]`` in ``streams.dtype``; allocated when omitted.
        scratch: as ``scratch_bytes("hc_head", T=.., hc=.., C=..)`` says; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or eps outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. One launch.
    """
    out = _checked(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    if scratch is not None:
        num_bytes = mixing.scratch_bytes(fn.shape[0], streams.shape[1], streams.shape[0])
        others = (
            ("streams", streams), ("fn", fn), ("scale", scale), ("base", base),
            ("norm_weight", norm_weight), ("out", out),
        )  # fmt: skip
        check.scratch("hc_head", scratch, num_bytes, streams, others)
    if out.numel() == 0:
        return out
    if backend.use_reference(streams):
        return _reference(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    cfg = config.lookup("hc_head", {"hc": fn.shape[0], "C": streams.shape[2]}, default_config)
    with backend.on_device(streams):
        mixing.launch(
            "hc_head", cfg, streams, fn, scale, base, norm_weight, hc_eps, norm_eps, out,
            scratch=scratch,
        )  # fmt: skip
    return out


def _checked(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, norm_weight: torch.Tensor | None, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, fp32 = "hc_head", (torch.float32,)
    check.tensor(op, "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    num_tokens, hc, width = streams.shape
    check.tensor(op, "fn", fn, fp32, (hc, hc * width), "[hc, hc*C]", streams)
    check.tensor(op, "scale", scale, fp32, (1,), "[1]", streams)
    check.tensor(op, "base", base, fp32, (hc,), "[hc]", streams)
    sinkhorn.check_common(op, streams, hc_eps, norm_eps, norm_weight)
    inputs = (fn, scale, base, norm_weight)
    return check.output(op, out, (num_tokens, width), like=streams, inputs=inputs)


def hc_head_reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *,
    hc_eps: float = 1e-6, norm_eps: float = 1e-6, norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch and, for few rows, in plain Python."""
    out = _checked(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)
    if out.numel() == 0:
        return out
    return _reference(streams, fn, scale, base, hc_eps, norm_eps, norm_weight, out)


def _reference(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    hc_eps: float, norm_eps: float, norm_weight: torch.Tensor | None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    size = streams.shape[1] * streams.shape[2]
    mix, squares = sinkhorn.project_reference(streams, fn)
    if sinkhorn.few_rows(streams, norm_eps):
        scales, bases = scale.tolist(), base.tolist()
        values: list[float] = []
        for m, square in zip(mix.tolist(), squares.tolist(), strict=True):
            rms = 1.0 / math.sqrt(square / size + norm_eps)
            values += sinkhorn.sigmoids(m, rms, scales[0], bases, 1.0, hc_eps)
        weights = sinkhorn.floats32(values).view(mix.shape)
    else:
        inverse = sinkhorn.inverse_rms_rows(squares, size, norm_eps)
        weights = sinkhorn.sigmoid_rows(
            mix.double(), inverse, scale.double(), base.double(), 1.0, hc_eps
        ).float()
    x = sinkhorn.combine_reference(weights, streams)
    if norm_weight is not None:
        x = sinkhorn.norm_reference(x.to(streams.dtype), norm_weight, norm_eps)
    return out.copy_(x)


def default_config(key: Case) -> MixConfig:
    """As `hc_pre`: see `mixing.default_config`."""
    return mixing.default_config(key)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows = case["hc"]
    return mixing.inputs(case, rows=rows, num_scales=1, device=device, seed=seed)


SPEC = KernelSpec(
    op=hc_head, reference=hc_head_reference, default=default_config,
    cases=(
        {"name": "small", "T": 3, "hc": 4, "C": 100},
        {"name": "flash-t1", "T": 1, "hc": 4, "C": 4096, "norm": 1},
        {"name": "flash-t50", "T": 50, "hc": 4, "C": 4096},
        {"name": "pro-t50", "T": 50, "hc": 4, "C": 7168, "norm": 1},
    ),
    inputs=_inputs, tolerance=8e-3,
    scratch=lambda *, T, hc, C: mixing.scratch_bytes(hc, hc, T),
    bytes_moved=lambda case: case["T"] * 2 * case["C"] * (case["hc"] + 1)
    + 4 * case["hc"] ** 2 * case["C"],
    flops=lambda case: 2 * case["T"] * case["hc"] ** 2 * case["C"],
)  # fmt: skip
