"""`hc_post` of one sublayer and `hc_pre` of the next in one launch: their formulas, their bits."""

from __future__ import annotations

import torch

from ftkernels import backend, check, config
from ftkernels.mhc import mixing
from ftkernels.mhc.mixing import MixConfig
from ftkernels.mhc.post import SPEC as _POST
from ftkernels.mhc.post import check_sublayer, mixed_plain, output
from ftkernels.mhc.pre import Mixes, QuantizedMixes, check_parameters, outputs, plain
from ftkernels.spec import Case, Inputs, KernelSpec

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
QuantizedResult = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def hc_post_pre(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, hc_eps: float = 1e-6,
    norm_eps: float = 1e-6, sinkhorn_iters: int = 20, norm_weight: torch.Tensor | None = None,
    quantize: bool = False, out: Result | QuantizedResult | None = None,
    scratch: torch.Tensor | None = None,
) -> Result | QuantizedResult:  # fmt: skip
    """Mix a sublayer's output into the residual streams and take the next sublayer's input.

    Args:
        y, streams, post, comb: as in `hc_post`, T up to 262144.
        fn, scale, base: of the next sublayer, as in `hc_pre`, and so are the numbers.
        norm_weight: ``[C]`` float; ``x`` is RMS-normed with it.
        quantize: also give ``x`` as `quantize_fp8` does.
        out: the result's tensors, the first of which may be ``streams``; allocated when omitted.
        scratch: as ``scratch_bytes("hc_post_pre", T=.., hc=.., C=..)`` says, allocated when
            omitted.

    Returns:
        The new streams ``[T, hc, C]``; ``x [T, C]``, ``post [T, hc]`` and ``comb [T, hc, hc]`` of
        the next sublayer, and with ``quantize`` ``x_fp8 [T, C]`` and ``x_scale [T, ceil(C/128)]``:
        the bits of `hc_post`, `hc_pre` and `quantize_fp8` one after another.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, eps or iterations outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given: no allocation, no host sync. One launch.
    """
    _check(
        y, streams, post, comb, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight
    )  # fmt: skip
    if scratch is not None:
        num_bytes = mixing.scratch_bytes(fn.shape[0], streams.shape[1], streams.shape[0])
        others = (
            ("y", y), ("streams", streams), ("post", post), ("comb", comb), ("fn", fn),
            ("scale", scale), ("base", base), ("norm_weight", norm_weight),
            *mixing.given_outputs(out),
        )  # fmt: skip
        check.scratch("hc_post_pre", scratch, num_bytes, streams, others)
    if streams.numel() and backend.use_reference(streams):
        return _plain(
            y, streams, post, comb, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight,
            quantize, out,
        )  # fmt: skip
    new, next_out = _outputs(y, streams, post, comb, fn, scale, base, norm_weight, quantize, out)
    if streams.numel():
        key = {"hc": streams.shape[1], "C": streams.shape[2]}
        cfg = config.lookup("hc_post_pre", key, default_config)
        with backend.on_device(streams):
            mixing.launch(
                "hc_post_pre", cfg, new, fn, scale, base, norm_weight, hc_eps, norm_eps,
                next_out[0], scratch=scratch, iters=sinkhorn_iters, post=next_out[1],
                comb=next_out[2], quantized=next_out[3:], previous=(y, streams, post, comb),
            )  # fmt: skip
    return new, *next_out


def _check(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float,
    iters: int, norm_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    op = "hc_post_pre"
    check_sublayer(op, y, streams, post, comb)
    check_parameters(op, streams, fn, scale, base, hc_eps, norm_eps, iters, norm_weight)


def _outputs(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor | None,
    quantize: bool, out: Result | QuantizedResult | None,
) -> tuple[torch.Tensor, Mixes | QuantizedMixes]:  # fmt: skip
    op, inputs = "hc_post_pre", (fn, scale, base, norm_weight)
    given = check.parts(op, out, 6 if quantize else 4)
    new = output(op, y, streams, post, comb, given[0], inputs)
    held = (*inputs, y, post, comb, new)
    return new, outputs(op, streams, held, quantize, None if out is None else given[1:])


def hc_post_pre_reference(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, hc_eps: float = 1e-6,
    norm_eps: float = 1e-6, sinkhorn_iters: int = 20, norm_weight: torch.Tensor | None = None,
    quantize: bool = False, out: Result | QuantizedResult | None = None,
) -> Result | QuantizedResult:  # fmt: skip
    """The definitions one after another."""
    _check(
        y, streams, post, comb, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight
    )  # fmt: skip
    if streams.numel() == 0:
        new, rest = _outputs(y, streams, post, comb, fn, scale, base, norm_weight, quantize, out)
        return new, *rest
    return _plain(
        y, streams, post, comb, fn, scale, base, hc_eps, norm_eps, sinkhorn_iters, norm_weight,
        quantize, out,
    )  # fmt: skip


def _plain(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float,
    iters: int, norm_weight: torch.Tensor | None, quantize: bool,
    out: Result | QuantizedResult | None,
) -> Result | QuantizedResult:  # fmt: skip
    rest: Mixes | QuantizedMixes | None = None
    if out is None:
        new = mixed_plain(y, streams, post, comb).to(streams.dtype)
    else:
        new, rest = _outputs(
            y, streams, post, comb, fn, scale, base, norm_weight, quantize, out
        )  # fmt: skip
        new.copy_(mixed_plain(y, streams, post, comb))
    return new, *plain(new, fn, scale, base, norm_weight, hc_eps, norm_eps, iters, quantize, rest)


def default_config(key: Case) -> MixConfig:
    """As `hc_pre`: with equal configs the bits are equal."""
    return mixing.default_config(key)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows = (2 + case["hc"]) * case["hc"]
    sublayer, _ = _POST.inputs(case, device=device, seed=seed + 10)
    inputs, kwargs = mixing.inputs(case, rows=rows, num_scales=3, device=device, seed=seed)
    return (*sublayer, *inputs[1:]), kwargs


SPEC = KernelSpec(
    op=hc_post_pre, reference=hc_post_pre_reference, default=default_config,
    cases=(
        {"name": "small", "T": 3, "hc": 4, "C": 100},
        {"name": "small-fp8", "T": 5, "hc": 4, "C": 300, "norm": 1, "quantize": 1},
        {"name": "flash-t1", "T": 1, "hc": 4, "C": 4096, "norm": 1, "quantize": 1},
        {"name": "flash-t8", "T": 8, "hc": 4, "C": 4096, "norm": 1, "quantize": 1},
        {"name": "flash-t3456", "T": 3456, "hc": 4, "C": 4096, "norm": 1, "quantize": 1},
        {"name": "flash-t3456-bf16", "T": 3456, "hc": 4, "C": 4096, "norm": 1},
        {"name": "pro-t64", "T": 64, "hc": 4, "C": 7168, "norm": 1, "quantize": 1},
    ),
    inputs=_inputs, tolerance=8e-3,
    scratch=lambda *, T, hc, C: mixing.scratch_bytes((2 + hc) * hc, hc, T),
    bytes_moved=lambda case: 2 * case["T"] * case["C"] * (2 * case["hc"] + 2)
    + 4 * (2 + case["hc"]) * case["hc"] ** 2 * case["C"],
    flops=lambda case: 2 * case["T"] * (3 + case["hc"]) * case["hc"] ** 2 * case["C"],
)  # fmt: skip
