"""``x @ weight.T`` in true fp32: router, compressor and index-weight projections, head.

Numerics: products of the operands' own values, fp32 sums, no TF32; one rounding to ``out_dtype``.
Few rows (the path "gemv") share the weight's columns out over blocks; of each tile the last block
to finish adds up the sums of all, in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear import products
from ftkernels.linear.products import (
    MAX_ROWS,
    Pieces,
    block_tile,
    candidates,
    default_config,
    gemv_block,
    gemv_call,
    is_even,
    is_gemv,
    operand_type,
    product_key,
    sums_bytes,
)  # fmt: skip
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.testing import randn

WEIGHTS = (torch.bfloat16, torch.float32)
_MIN_ROWS = 4


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    path: str | None = None, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by a matrix in fp32.

    Args:
        x: ``[T, K]``, bf16/fp16/fp32, rows may be strided.
        weight: ``[N, K]``, bf16 or fp32; rows or columns contiguous (on the host one row of ``x``
            takes a little over half the time with columns, a card wants rows).
        out_dtype: element type of the result, that of ``x`` when omitted.
        path: "gemm" or "gemv" pins how rows are multiplied, for a caller that must get the same
            bits for any number of rows; the two agree within fp32 rounding. Omitted: "gemv" up to
            64 rows.
        out: ``[T, N]``; allocated when omitted.
        scratch: as ``scratch_bytes("linear", T=.., N=.., K=..)`` says, for the path "gemv";
            allocated when omitted.

    Returns:
        ``[T, N]``. Within a path a row's bits do not depend on the other rows.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given. One launch; by "gemv" one for 256 rows each.
    """
    out = _checked(x, weight, out_dtype, path, out)
    gemv = is_gemv(path, x.shape[0])
    if scratch is not None:
        num_bytes = _scratch(T=x.shape[0], N=weight.shape[0], K=x.shape[1]) if gemv else 0
        others = (("x", x), ("weight", weight), ("out", out))
        scratch = check.scratch("linear", scratch, num_bytes, x, others)
    if backend.use_reference(x):
        return _reference(x, weight, out_dtype, path, out)
    if out is None:
        size = (x.shape[0], weight.shape[0])
        out = torch.empty(size, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    with backend.on_device(x):
        for start in range(0, x.shape[0], MAX_ROWS if gemv else x.shape[0]):
            rows = slice(start, start + MAX_ROWS) if gemv else slice(None)
            _launch(x[rows], weight, gemv, out[rows], scratch)
    return out


def _checked(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None, path: str | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    op = "linear"
    check_operands(op, x, weight, path)
    dtype = x.dtype if out_dtype is None else out_dtype
    check.out_dtype(op, dtype)
    if out is None:
        return None
    size = (x.shape[0], weight.shape[0])
    return check.output(op, out, size, like=x, dtype=dtype, inputs=(weight,))


def check_operands(op: str, x: torch.Tensor, weight: torch.Tensor, path: str | None) -> None:
    """The refusals that all fp32 products of ``x [T, K]`` and ``weight [N, K]`` share."""
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    check.matrix(op, "weight", weight, WEIGHTS, (None, x.shape[1]), "[N, K]", x)
    check_path(op, path)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    path: str | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch: both sides widened to fp32."""
    out = _checked(x, weight, out_dtype, path, out)
    return _reference(x, weight, out_dtype, path, out)


def _reference(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None, path: str | None,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    result = matmul_rows(wide(x), wide(weight), path)
    if out is not None:
        return out.copy_(result)
    dtype = x.dtype if out_dtype is None else out_dtype
    return result if dtype == torch.float32 else result.to(dtype)


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


def _scratch(*, T: int, N: int, K: int) -> int:
    """Counters, then the sums of every split."""
    return COUNTER_BYTES + sums_bytes(min(T, MAX_ROWS), N, K)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, gemv: bool, out: torch.Tensor,
    scratch: torch.Tensor | None,
) -> None:  # fmt: skip
    cfg = config.lookup("linear", product_key(x, weight, gemv), default_config, grows="T")
    launch = {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages}
    if gemv:
        if Pieces.of(*weight.shape).splits > 1:
            num_bytes = _scratch(T=x.shape[0], N=weight.shape[0], K=x.shape[1])
            scratch = check.scratch("linear", scratch, num_bytes, x)
        grid, arguments, constants = gemv_call(cfg, x, weight, out, scratch)
        _linear_gemv_kernel[grid](*arguments, **constants, **launch)
        return
    (num_tokens, width), num_outputs = x.shape, weight.shape[0]
    tiles = triton.cdiv(num_tokens, cfg.block_t), triton.cdiv(num_outputs, cfg.block_n)
    _linear_gemm_kernel[tiles](
        x, x.stride(0), weight, weight.stride(0), weight.stride(1), out, out.stride(0),
        num_tokens, num_outputs, width,
        BLOCK_T=cfg.block_t, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k,
        EVEN_K=is_even(width, None, cfg), DTYPE=operand_type(x, weight), **launch,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _linear_gemm_kernel(
    x_ptr, stride_xt,  # [T, K]
    w_ptr, stride_wn, stride_wk,  # [N, K]
    out_ptr, stride_ot,  # [T, N]
    T, N, K,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = block_tile(
        x_ptr, stride_xt, 1, offs_t, T, w_ptr, stride_wn, stride_wk, offs_n, N, K,
        BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, DTYPE,
    )  # fmt: skip
    out_ptrs = out_ptr + (offs_t.to(tl.int64) * stride_ot)[:, None] + offs_n[None, :]
    mask = (offs_t < T)[:, None] & (offs_n < N)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_gemv_kernel(
    x_ptr, stride_xt,  # [T, K]
    w_ptr, stride_wn, stride_wk,  # [N, K]
    out_ptr, stride_ot,  # [T, N]
    T, N, K,
    counters_ptr,  # [token tiles, row tiles]
    partial_ptr,  # [SPLITS, T, N]
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr, SLICES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    gemv_block(
        tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2),
        x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, out_ptr, stride_ot, T, N, K,
        counters_ptr, partial_ptr, BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, SPLITS, SLICES, SIZE, DTYPE,
    )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    dtype = torch.float32 if case.get("fp32") else torch.bfloat16
    x = randn(case["T"], case["K"], dtype=dtype, device=device, seed=seed)
    weight = randn(case["N"], case["K"], dtype=dtype, device=device, seed=seed + 1)
    return (x, weight), {"out_dtype": torch.float32}


# attention projections of a layer, stacked: compressor (and indexer) wkv and wgate, index weights
_WEIGHT_SHAPES = {
    "flash-router": (256, 4096), "flash-csa": (2 * 1024 + 2 * 256 + 64, 4096),
    "flash-hca": (2 * 512, 4096), "pro-router": (384, 7168),
    "pro-csa": (2 * 1024 + 2 * 256 + 64, 7168), "pro-hca": (2 * 512, 7168),
}  # fmt: skip

SPEC = KernelSpec(
    op=linear, reference=linear_reference, default=default_config, candidates=candidates,
    inputs=_inputs, tolerance=1e-5, grows="T", scratch=_scratch,
    cases=(
        {"name": "small", "T": 3, "K": 100, "N": 7},
        {"name": "small-fp32", "T": 3, "K": 260, "N": 20, "fp32": 1},
        *({"name": f"{name}-t{T}", "T": T, "K": K, "N": N}
          for name, (N, K) in _WEIGHT_SHAPES.items() for T in (1, 8, 64, 3456)),
        *({"name": f"flash-head-t{T}", "T": T, "K": 4096, "N": 129280} for T in (1, 64)),
        *({"name": f"pro-head-t{T}", "T": T, "K": 7168, "N": 129280} for T in (1, 64)),
        *({"name": f"exact-router-t{T}", "T": T, "K": 4096, "N": 256, "fp32": 1}
          for T in (1, 3456)),
    ),
    bytes_moved=lambda c: (4 if c.get("fp32") else 2) * c["K"] * (c["T"] + c["N"])
    + 4 * c["T"] * c["N"],
    flops=lambda c: 2 * c["T"] * c["N"] * c["K"],
    work=lambda c, _, config: products.work(c["T"], c["N"], c["K"], config),
)  # fmt: skip
