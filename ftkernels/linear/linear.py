"""``x @ weight.T`` in true fp32: router, compressor and index-weight projections, head.

Numerics: both sides widened to fp32, fp32 sums, no TF32; one rounding to ``out_dtype``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ftkernels import check
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

_WEIGHTS = (torch.bfloat16, torch.float32)
_MIN_ROWS = 4


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    path: str | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by a matrix in fp32.

    Args:
        x: ``[T, K]``, bf16/fp16/fp32, rows may be strided.
        weight: ``[N, K]``, bf16 or fp32; rows or columns contiguous (on the host one row of ``x``
            takes a little over half the time with columns).
        out_dtype: element type of the result, that of ``x`` when omitted.
        path: "gemm" or "gemv" pins how rows are multiplied, for a caller that must get the same
            bits for any number of rows; the two agree within fp32 rounding.
        out: ``[T, N]``; allocated when omitted.

    Returns:
        ``[T, N]``. Within a path a row's bits do not depend on the other rows.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.
    """
    op = "linear"
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    check.matrix(op, "weight", weight, _WEIGHTS, (None, x.shape[1]), "[N, K]", x)
    size = (x.shape[0], weight.shape[0])
    dtype = x.dtype if out_dtype is None else out_dtype
    check.out_dtype(op, dtype)
    if out is not None:
        out = check.output(op, out, size, like=x, dtype=dtype, inputs=(weight,))
    check_path(op, path)
    result = matmul_rows(wide(x), wide(weight), path)
    if out is not None:
        return out.copy_(result)
    return result if dtype == torch.float32 else result.to(dtype)


linear_reference = linear


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32, itself when it is."""
    return x if x.dtype == torch.float32 else x.float()


def check_path(op: str, path: str | None) -> None:
    if path not in (None, "gemm", "gemv"):
        raise ValueError(f"{op}: path is {path!r}, expected None, 'gemm' or 'gemv'")


def matmul_rows(x: torch.Tensor, weight: torch.Tensor, path: str | None = None) -> torch.Tensor:
    """fp32 ``x [T, K] @ weight [N, K].T`` whose rows do not depend on ``T``.

    CPU libraries switch algorithms below four rows: a GEMM pads fewer to four, a GEMV takes them
    one
    by one.
    """
    num_rows = x.shape[0]
    if path == "gemv" and x.device.type == "cpu":
        if num_rows == 1:
            return F.linear(x, weight)
        rows = [F.linear(row, weight) for row in x[:, None].unbind(0)]
        return torch.cat(rows) if rows else x.new_empty(0, weight.shape[0])
    if num_rows >= _MIN_ROWS or x.device.type != "cpu":
        return F.linear(x, weight)
    return F.linear(torch.constant_pad_nd(x, (0, 0, 0, _MIN_ROWS - num_rows)), weight)[:num_rows]


def batched_matmul_rows(
    x: torch.Tensor, weight: torch.Tensor, path: str | None = None
) -> torch.Tensor:
    """fp32 ``x [B, T, K] @ weight [B, N, K].T`` whose rows do not depend on ``T``."""
    num_rows = x.shape[1]
    if path == "gemv" and x.device.type == "cpu":
        if num_rows == 1:
            return torch.bmm(x, weight.transpose(1, 2))
        rows = [torch.bmm(row, weight.transpose(1, 2)) for row in x.split(1, dim=1)]
        return torch.cat(rows, dim=1) if rows else x.new_empty(x.shape[0], 0, weight.shape[1])
    if num_rows >= _MIN_ROWS or x.device.type != "cpu":
        return torch.bmm(x, weight.transpose(1, 2))
    padded = torch.constant_pad_nd(x, (0, 0, 0, _MIN_ROWS - num_rows))
    return torch.bmm(padded, weight.transpose(1, 2))[:, :num_rows]


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = randn(case["T"], case["K"], dtype=torch.bfloat16, device=device, seed=seed)
    weight = randn(case["N"], case["K"], dtype=torch.bfloat16, device=device, seed=seed + 1)
    return (x, weight), {"out_dtype": torch.float32}


SPEC = KernelSpec(
    op=linear, reference=linear_reference, kernel=False, inputs=_inputs, tolerance=1e-5, grows="T",
    cases=(
        {"name": "small", "T": 3, "K": 100, "N": 7},
        {"name": "flash-router", "T": 64, "K": 4096, "N": 256},
    ),
    bytes_moved=lambda c: 2 * c["T"] * c["K"] + 2 * c["N"] * c["K"] + 4 * c["T"] * c["N"],
    flops=lambda c: 2 * c["T"] * c["N"] * c["K"],
)  # fmt: skip
