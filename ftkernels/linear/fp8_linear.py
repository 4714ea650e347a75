"""Block-scaled FP8 linear: ``dequantize(weight) @ quantize_fp8(x)``, fp32 sums.

Layout: ``weight [N, K]`` e4m3 with one UE8M0 code per 128x128 block. Activations are quantized per
row and 128 channels. A dequantized weight (``weight_scale`` None) is taken too; it runs the plain
path on every device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ftkernels import backend, check
from ftkernels.linear import fp8_product
from ftkernels.linear.fp8_kernels import BLOCK, candidates, default_config, work
from ftkernels.linear.fp8_product import Rows
from ftkernels.linear.linear import check_path, matmul_rows, wide
from ftkernels.moe.swiglu import activated, check_limit, clamp_bound
from ftkernels.norm.rms_norm import normed
from ftkernels.quant.round_trip import round_tripped
from ftkernels.quant.weight_quant import dequantize_fp8_reference
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

_DENSE = (torch.bfloat16, torch.float32)


def fp8_linear(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, *, activation: str = "fp8",
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6,
    swiglu_limit: float | None = None, path: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by a block-scaled FP8 matrix.

    Args:
        x: ``[T, K]`` bf16/fp16/fp32, or ``(x_fp8 [T, K] e4m3, x_scale [T, ceil(K/128)] uint8)``.
        weight: ``[N, K]`` e4m3, or bf16/fp32 with ``weight_scale`` None.
        weight_scale: ``[ceil(N/128), ceil(K/128)]`` uint8 UE8M0.
        activation: "fp8" quantizes a dense ``x`` per 128 channels, "bf16" leaves it.
        norm_weight: ``[K]``; a dense ``x`` is RMS-normed with it first and rounded to its dtype.
        eps: of that norm.
        swiglu_limit: a dense ``x`` is ``[T, 2*K]``, gate columns first, and goes through
            ``swiglu_clamp`` with this limit first; not together with ``norm_weight``.
        path: "gemm" or "gemv" pins how rows are multiplied, for a caller that must get the same
            bits for any number of rows; the two agree within fp32 rounding. When omitted up to 64
            rows take "gemv".
        out: ``[T, N]`` of ``out_dtype``.
        scratch: as ``scratch_bytes("fp8_linear", T=.., N=.., K=..)`` says; allocated when omitted.

    Returns:
        ``[T, N]``. Within a path a row's bits do not depend on the other rows.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. One launch, with "gemv" one for every 64
    rows; "gemm" takes one more to prepare rows that are not yet what the product multiplies.
    """
    op = "fp8_linear"
    dense = _checked(
        x, weight, weight_scale, activation, norm_weight, eps, swiglu_limit, path, out_dtype, out
    )
    given = x[0] if dense is None else dense
    if scratch is not None:
        rows = _rows(x, activation, norm_weight, eps, swiglu_limit)
        size = fp8_product.rows_bytes(rows, weight[None], path) if weight_scale is not None else 0
        check.scratch(op, scratch, size, given, (("x", given), ("out", out)))
    if weight_scale is None or not weight.numel() or backend.use_reference(given):
        return product_reference(
            x, weight, weight_scale, activation, norm_weight, eps, swiglu_limit, path, out_dtype,
            out,
        )  # fmt: skip
    if out is None:
        out = check.output(op, None, (given.shape[0], weight.shape[0]), like=given, dtype=out_dtype)
    if out.numel():
        rows = _rows(x, activation, norm_weight, eps, swiglu_limit)
        fp8_product.multiply(op, rows, weight[None], weight_scale, path, out[:, None], scratch)
    return out


def fp8_linear_reference(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, *, activation: str = "fp8",
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6,
    swiglu_limit: float | None = None, path: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    _checked(
        x, weight, weight_scale, activation, norm_weight, eps, swiglu_limit, path, out_dtype, out
    )
    return product_reference(
        x, weight, weight_scale, activation, norm_weight, eps, swiglu_limit, path, out_dtype, out
    )


def product_reference(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, activation: str, norm_weight: torch.Tensor | None,
    eps: float, swiglu_limit: float | None, path: str | None, out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`fp8_linear` in plain torch, its arguments checked."""
    if isinstance(x, tuple):
        operand = dequantize_fp8_reference(x[0], x[1], group=BLOCK, dtype=torch.float32)
    else:
        if swiglu_limit is not None:
            x = activated(x, swiglu_limit, None).to(x.dtype)
        if norm_weight is not None:
            x = normed(x, norm_weight, eps).to(x.dtype)
        operand = wide(x)
        if activation == "fp8":
            operand = round_tripped(operand, "fp8", BLOCK)
    result = matmul_rows(operand, widen_weight(weight, weight_scale), path)
    if out is not None:
        return out.copy_(result)
    return result if out_dtype == torch.float32 else result.to(out_dtype)


def _rows(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], activation: str,
    norm_weight: torch.Tensor | None, eps: float, swiglu_limit: float | None,
) -> Rows:  # fmt: skip
    if isinstance(x, tuple):
        return Rows(x[0][:, None], x[1])
    limit = None if swiglu_limit is None else clamp_bound(swiglu_limit)
    return Rows(x[:, None], None, activation == "fp8", norm_weight, float(eps), limit)


def check_weight(
    op: str, weight: torch.Tensor, scale: torch.Tensor | None, k: int, like: torch.Tensor
) -> None:
    """Refuse a weight ``[N, k]`` that is neither scaled e4m3 nor dense without a scale."""
    if scale is None:
        if isinstance(weight, torch.Tensor) and weight.dtype == torch.float8_e4m3fn:
            raise ValueError(f"{op}: weight_scale is None, expected the scales of an e4m3 weight")
        check.matrix(op, "weight", weight, _DENSE, (None, k), "[N, K]", like)
        return
    check.tensor(op, "weight", weight, (torch.float8_e4m3fn,), (None, k), "[N, K]", like)
    blocks = (-(-weight.shape[0] // BLOCK), -(-k // BLOCK))
    text = "[ceil(N/128), ceil(K/128)]"
    check.tensor(op, "weight_scale", scale, (torch.uint8,), blocks, text, like)


def widen_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``weight`` in fp32, its block scales applied."""
    if scale is None:
        return wide(weight)
    return dequantize_fp8_reference(weight, scale, group=(BLOCK, BLOCK), dtype=torch.float32)


def _checked(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, activation: str, norm_weight: torch.Tensor | None,
    eps: float, swiglu_limit: float | None, path: str | None, out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """``x`` when it is dense, None when it is already quantized."""
    op = "fp8_linear"
    check_path(op, path)
    dense, k = _check_x(op, x, activation, norm_weight, eps, swiglu_limit)
    rows = dense if dense is not None else x[0]
    check_weight(op, weight, weight_scale, k, rows)
    check.out_dtype(op, out_dtype)
    if out is not None:
        size = (rows.shape[0], weight.shape[0])
        inputs = (weight, weight_scale, norm_weight, None if dense is not None else x[1])
        check.output(op, out, size, like=rows, dtype=out_dtype, inputs=inputs)
    return dense


def _check_x(
    op: str, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], activation: str,
    norm_weight: torch.Tensor | None, eps: float, swiglu_limit: float | None,
) -> tuple[torch.Tensor | None, int]:  # fmt: skip
    """``x`` when it is dense, None when it is already quantized; and K."""
    if activation not in ("fp8", "bf16"):
        raise ValueError(f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'")
    if isinstance(x, tuple):
        check.require(len(x) == 2, lambda: f"{op}: x is a tuple of {len(x)}, expected 2 tensors")
        check.tensor(op, "x", x[0], (torch.float8_e4m3fn,), (None, None), "[T, K]")
        size = (x[0].shape[0], -(-x[0].shape[1] // BLOCK))
        check.tensor(op, "x_scale", x[1], (torch.uint8,), size, "[T, ceil(K/128)]", x[0])
        for name, value in (("norm_weight", norm_weight), ("swiglu_limit", swiglu_limit)):
            if value is not None:
                raise ValueError(f"{op}: {name} is given with a quantized x, expected None")
        return None, x[0].shape[1]
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    if norm_weight is not None:
        check.number(op, "eps", eps, 0)
        check.tensor(op, "norm_weight", norm_weight, check.FLOATS, (x.shape[1],), "[K]", x)
    if swiglu_limit is None:
        return x, x.shape[1]
    check_limit(op, "swiglu_limit", swiglu_limit)
    if norm_weight is not None:
        raise ValueError(f"{op}: norm_weight is given with swiglu_limit, expected None")
    if x.shape[1] % 2:
        raise ValueError(
            f"{op}: x is {tuple(x.shape)}, expected [T, 2*K] with an even last size"
        )
    return x, x.shape[1] // 2


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    n, k, form = case["N"], case["K"], case.get("form", "dense")
    width = 2 * k if form == "swiglu" else k
    rows = randn(case["T"], width, dtype=torch.bfloat16, device=device, seed=seed)
    weight = randn(n, k, device=device, seed=seed + 1).to(torch.float8_e4m3fn)
    scale = torch.full((-(-n // BLOCK), -(-k // BLOCK)), 120, dtype=torch.uint8, device=device)
    kwargs: dict[str, object] = {}
    if form == "norm":
        kwargs["norm_weight"] = randn(k, dtype=torch.bfloat16, device=device, seed=seed + 2)
    elif form == "swiglu":
        kwargs["swiglu_limit"] = 10.0
    elif form == "bf16":
        kwargs["activation"] = "bf16"
    elif form == "fp32":
        rows, kwargs["activation"] = rows.float(), "bf16"
    elif form == "quantized":
        codes = torch.full((case["T"], -(-k // BLOCK)), 127, dtype=torch.uint8, device=device)
        return ((rows.to(torch.float8_e4m3fn), codes), weight, scale), kwargs
    return (rows, weight, scale), kwargs


def _scratch(*, T: int, N: int, K: int) -> int:
    """For every form of a call; above 64 rows also for ``path="gemv"``."""
    return fp8_product.num_bytes(T, 1, N, K, item=4, gemv=True, gemm=True)


def _launches(case: Case) -> int:
    gemv = fp8_product.takes_gemv(None, case["T"])
    return 1 if gemv or case.get("form") in ("quantized", "bf16", "fp32") else 2


def _cases() -> Iterator[Case]:
    forms = ("dense", "norm", "swiglu", "quantized", "bf16", "fp32")
    for form in forms:
        yield {"name": f"small-{form}", "T": 3, "K": 200, "N": 130, "form": form}
        yield {"name": f"small-{form}-t70", "T": 70, "K": 200, "N": 130, "form": form}
    # matrices of the model: what stands before the product, rows and channels on one of tp cards;
    # without a name the shared expert's gate and up
    flash = {
        "": ("quantized", lambda tp: (4096 // tp, 4096), (1, 2, 4, 8)),
        "latent-": ("quantized", lambda tp: (1536, 4096), (1,)),
        "wq_b-": ("norm", lambda tp: (32768 // tp, 1024), (1, 8)),
        "wo_b-": ("dense", lambda tp: (4096, 8192 // tp), (1, 8)),
        "w2-": ("swiglu", lambda tp: (4096, 2048 // tp), (1, 8)),
    }
    for matrix, (form, shape, cards) in flash.items():
        for tp in cards:
            for tokens in (1, 8, 64, 3456):
                n, k = shape(tp)
                name = f"flash-tp{tp}-{matrix}t{tokens}"
                yield {"name": name, "T": tokens, "N": n, "K": k, "form": form}
    for form in ("bf16", "fp32"):
        for tokens in (1, 64, 3456):
            name = f"flash-latent-{form}-t{tokens}"
            yield {"name": name, "T": tokens, "N": 1536, "K": 4096, "form": form}
    for form in ("quantized", "bf16"):
        name = f"flash-latent-{form}-t128"
        yield {"name": name, "T": 128, "N": 1536, "K": 4096, "form": form}
    yield {"name": "flash-index-t8", "T": 8, "N": 8192, "K": 1024, "form": "quantized"}
    for name, form, n, k in (
        ("latent", "quantized", 2048, 7168), ("wq_b", "norm", 65536, 1536),
        ("wo_b", "dense", 7168, 16384), ("w2", "swiglu", 7168, 3072),
    ):  # fmt: skip
        for tokens in (1, 3456):
            yield {"name": f"pro-{name}-t{tokens}", "T": tokens, "N": n, "K": k, "form": form}


SPEC = KernelSpec(
    op=fp8_linear, reference=fp8_linear_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=5e-3, grows="T",
    scratch=_scratch, launches=_launches, cases=tuple(_cases()),
    bytes_moved=lambda c: c["N"] * c["K"] + 2 * c["T"] * (c["K"] + c["N"]),
    flops=lambda c: 2 * c["T"] * c["N"] * c["K"],
    work=lambda c, kernel, config: work(c["T"], 1, c["N"], c["K"], kernel, config),
)  # fmt: skip
