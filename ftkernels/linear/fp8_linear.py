"""Block-scaled FP8 linear: ``dequantize(weight) @ quantize_fp8(x)``, fp32 sums.

Layout: ``weight [N, K]`` e4m3 with one UE8M0 code per 128x128 block. Activations are quantized per
row and 128 channels. A dequantized weight (``weight_scale`` None) is taken too.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.linear.linear import check_path, matmul_rows, wide
from ftkernels.norm.rms_norm import normed
from ftkernels.quant.round_trip import round_tripped
from ftkernels.quant.weight_quant import dequantize_fp8_reference
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

BLOCK = 128
_DENSE = (torch.bfloat16, torch.float32)


def fp8_linear(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, *, activation: str = "fp8",
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6,
    path: str | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by a block-scaled FP8 matrix.

    Args:
        x: ``[T, K]`` bf16/fp16/fp32, or ``(x_fp8 [T, K] e4m3, x_scale [T, ceil(K/128)] uint8)``.
        weight: ``[N, K]`` e4m3, or bf16/fp32 with ``weight_scale`` None.
        weight_scale: ``[ceil(N/128), ceil(K/128)]`` uint8 UE8M0.
        activation: "fp8" quantizes a dense ``x`` per 128 channels, "bf16" leaves it.
        norm_weight: ``[K]``; a dense ``x`` is RMS-normed with it first.
        eps: of that norm.
        path: "gemm" or "gemv" pins how rows are multiplied, for a caller that must get the same
            bits for any number of rows; the two agree within fp32 rounding.
        out: ``[T, N]`` of ``out_dtype``.

    Returns:
        ``[T, N]``. Within a path a row's bits do not depend on the other rows.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    if scratch is not None:
        check.given_scratch("fp8_linear", scratch, x[0] if isinstance(x, tuple) and x else x)
    return _product(x, weight, weight_scale, activation, norm_weight, eps, path, out_dtype, out)


def fp8_linear_reference(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, *, activation: str = "fp8",
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6,
    path: str | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    return _product(x, weight, weight_scale, activation, norm_weight, eps, path, out_dtype, out)


def _product(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor,
    weight_scale: torch.Tensor | None, activation: str, norm_weight: torch.Tensor | None,
    eps: float, path: str | None, out_dtype: torch.dtype, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "fp8_linear"
    check_path(op, path)
    dense = _check_x(op, x, activation, norm_weight, eps)
    rows = dense if dense is not None else x[0]
    check_weight(op, weight, weight_scale, rows.shape[1], rows)
    check.out_dtype(op, out_dtype)
    if out is not None:
        size, inputs = (rows.shape[0], weight.shape[0]), (weight, weight_scale, norm_weight)
        check.output(op, out, size, like=rows, dtype=out_dtype, inputs=inputs)
    if dense is None:
        operand = dequantize_fp8_reference(x[0], x[1], group=BLOCK, dtype=torch.float32)
    else:
        if norm_weight is not None:
            dense = normed(dense, norm_weight, eps).to(dense.dtype)
        operand = wide(dense)
        if activation == "fp8":
            operand = round_tripped(operand, "fp8", BLOCK)
    result = matmul_rows(operand, widen_weight(weight, weight_scale), path)
    if out is not None:
        return out.copy_(result)
    return result if out_dtype == torch.float32 else result.to(out_dtype)


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


def _check_x(
    op: str, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], activation: str,
    norm_weight: torch.Tensor | None, eps: float,
) -> torch.Tensor | None:  # fmt: skip
    """``x`` when it is dense, None when it is already quantized."""
    if activation not in ("fp8", "bf16"):
        raise ValueError(f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'")
    if isinstance(x, tuple):
        check.require(len(x) == 2, lambda: f"{op}: x is a tuple of {len(x)}, expected 2 tensors")
        check.tensor(op, "x", x[0], (torch.float8_e4m3fn,), (None, None), "[T, K]")
        size = (x[0].shape[0], -(-x[0].shape[1] // BLOCK))
        check.tensor(op, "x_scale", x[1], (torch.uint8,), size, "[T, ceil(K/128)]", x[0])
        check.require(
            norm_weight is None,
            f"{op}: norm_weight is given with a quantized x, expected None",
        )
        return None
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    if norm_weight is not None:
        check.number(op, "eps", eps, 0)
        check.tensor(op, "norm_weight", norm_weight, check.FLOATS, (x.shape[1],), "[K]", x)
    return x


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    n, k = case["N"], case["K"]
    x = randn(case["T"], k, dtype=torch.bfloat16, device=device, seed=seed)
    weight = randn(n, k, device=device, seed=seed + 1).to(torch.float8_e4m3fn)
    scale = torch.full((-(-n // BLOCK), -(-k // BLOCK)), 120, dtype=torch.uint8, device=device)
    return (x, weight, scale), {}


SPEC = KernelSpec(
    op=fp8_linear, reference=fp8_linear_reference, kernel=False, inputs=_inputs, tolerance=5e-3,
    grows="T", scratch=lambda **dims: 0,
    cases=(
        {"name": "small", "T": 3, "K": 200, "N": 130},
        {"name": "flash-tp1-t3456", "T": 3456, "K": 4096, "N": 1024},
        {"name": "flash-tp1-t1", "T": 1, "K": 4096, "N": 1024},
        {"name": "flash-tp1-t8", "T": 8, "K": 4096, "N": 1024},
    ),
    bytes_moved=lambda c: c["N"] * c["K"] + 2 * c["T"] * (c["K"] + c["N"]),
    flops=lambda c: 2 * c["T"] * c["N"] * c["K"],
)  # fmt: skip
