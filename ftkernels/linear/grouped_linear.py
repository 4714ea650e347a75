"""Output projection by groups: ``out[t, g] = weight[g] @ x[t, g]``, activations never quantized.

Layout: ``weight [G, R, K]``; an e4m3 weight has one UE8M0 code per 128x128 block of the flat
``[G*R, K]`` matrix, so a block may span two groups.
"""

from __future__ import annotations

import torch

from ftkernels import backend, check
from ftkernels.linear import fp8_product
from ftkernels.linear.fp8_kernels import BLOCK, candidates, default_config, work
from ftkernels.linear.fp8_linear import widen_weight
from ftkernels.linear.fp8_product import Rows
from ftkernels.linear.linear import batched_matmul_rows, check_path, wide
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

_DENSE = (torch.bfloat16, torch.float32)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, *, weight_scale: torch.Tensor | None = None,
    path: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply each group of channels by its own matrix.

    Args:
        x: ``[T, G, K]``, bf16/fp16/fp32.
        weight: ``[G, R, K]``, e4m3 (with ``weight_scale``), bf16 or fp32 (without).
        weight_scale: ``[ceil(G*R/128), ceil(K/128)]`` uint8 UE8M0, by the flat row ``g*R + r``.
        path: "gemm" or "gemv", as in ``fp8_linear``.
        out_dtype: that of ``x`` when omitted.
        out: ``[T, G, R]``.
        scratch: as ``scratch_bytes("grouped_linear", T=.., G=.., R=.., K=..)`` says; allocated
            when omitted.

    Returns:
        ``[T, G, R]``. Within a path a row's bits do not depend on the other rows.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. One launch, with "gemv" one for every 64
    rows; a weight without scales runs the plain path on every device.
    """
    op = "grouped_linear"
    dtype = _checked(x, weight, weight_scale, path, out_dtype, out)
    if scratch is not None:
        size = 0 if weight_scale is None else fp8_product.rows_bytes(Rows(x), weight, path)
        check.scratch(op, scratch, size, x, (("x", x), ("out", out)))
    if weight_scale is None or not weight.numel() or backend.use_reference(x):
        return _product(x, weight, weight_scale, path, dtype, out)
    if out is None:
        out = check.output(op, None, (x.shape[0], *weight.shape[:2]), like=x, dtype=dtype)
    if out.numel():
        fp8_product.multiply(op, Rows(x), weight, weight_scale, path, out, scratch)
    return out


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, *, weight_scale: torch.Tensor | None = None,
    path: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    dtype = _checked(x, weight, weight_scale, path, out_dtype, out)
    return _product(x, weight, weight_scale, path, dtype, out)


def _checked(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, path: str | None,
    out_dtype: torch.dtype | None, out: torch.Tensor | None,
) -> torch.dtype:  # fmt: skip
    """Element type of the result."""
    op = "grouped_linear"
    check_path(op, path)
    check.tensor(op, "x", x, check.FLOATS, (None, None, None), "[T, G, K]")
    groups, k = x.shape[1:]
    if weight_scale is None:
        if isinstance(weight, torch.Tensor) and weight.dtype == torch.float8_e4m3fn:
            raise ValueError(f"{op}: weight_scale is None, expected the scales of an e4m3 weight")
        check.matrix(op, "weight", weight, _DENSE, (groups, None, k), "[G, R, K]", x)
    else:
        fp8, form = (torch.float8_e4m3fn,), (groups, None, k)
        check.tensor(op, "weight", weight, fp8, form, "[G, R, K]", x)
    rank, dtype = weight.shape[1], x.dtype if out_dtype is None else out_dtype
    check.out_dtype(op, dtype)
    if weight_scale is not None:
        blocks = (-(-groups * rank // BLOCK), -(-k // BLOCK))
        text = "[ceil(G*R/128), ceil(K/128)]"
        check.tensor(op, "weight_scale", weight_scale, (torch.uint8,), blocks, text, x)
    if out is not None:
        size, inputs = (x.shape[0], groups, rank), (weight, weight_scale)
        check.output(op, out, size, like=x, dtype=dtype, inputs=inputs)
    return dtype


def _product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, path: str | None,
    dtype: torch.dtype, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if weight_scale is not None:
        groups, rank, k = weight.shape
        flat = weight.reshape(groups * rank, k)
        weight = widen_weight(flat, weight_scale).view(groups, rank, k)
    result = batched_matmul_rows(wide(x).transpose(0, 1), wide(weight), path).transpose(0, 1)
    return result.to(dtype) if out is None else out.copy_(result)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    groups, rank, k = case["G"], case["R"], case["K"]
    dtype = torch.float32 if case.get("fp32") else torch.bfloat16
    x = randn(case["T"], groups, k, dtype=dtype, device=device, seed=seed)
    weight = randn(groups, rank, k, device=device, seed=seed + 1).to(torch.float8_e4m3fn)
    blocks = (-(-groups * rank // BLOCK), -(-k // BLOCK))
    scale = torch.full(blocks, 120, dtype=torch.uint8, device=device)
    return (x, weight), {"weight_scale": scale}


def _scratch(*, T: int, G: int, R: int, K: int) -> int:
    return fp8_product.num_bytes(T, G, R, K, item=0, gemv=True, gemm=False)


SPEC = KernelSpec(
    op=grouped_linear, reference=grouped_linear_reference, inputs=_inputs, tolerance=5e-3,
    default=default_config, candidates=candidates, grows="T",
    scratch=_scratch,
    cases=(
        {"name": "small", "T": 3, "G": 3, "R": 50, "K": 130},
        {"name": "small-t70", "T": 70, "G": 3, "R": 50, "K": 130},
        {"name": "small-fp32", "T": 3, "G": 2, "R": 50, "K": 600, "fp32": 1},
        {"name": "small-fp32-t70", "T": 70, "G": 2, "R": 50, "K": 600, "fp32": 1},
        *(
            {"name": f"flash-tp{tp}-t{tokens}", "T": tokens, "G": 8 // tp, "R": 1024, "K": 4096}
            for tp in (1, 2, 4, 8)
            for tokens in (1, 8, 64, 3456)
        ),
        {"name": "pro-tp1-t1", "T": 1, "G": 16, "R": 1024, "K": 4096},
    ),
    bytes_moved=lambda c: c["G"] * (c["R"] * c["K"] + 2 * c["T"] * (c["K"] + c["R"])),
    flops=lambda c: 2 * c["T"] * c["G"] * c["R"] * c["K"],
    work=lambda c, kernel, config: work(c["T"], c["G"], c["R"], c["K"], kernel, config),
)  # fmt: skip
