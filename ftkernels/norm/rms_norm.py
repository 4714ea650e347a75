"""RMS norm: ``out = x * rsqrt(mean(x^2) + eps) * weight``, with an optional residual sum in front.

Numerics: statistics and product in fp32, one rounding at the end. With ``residual`` the sum
``x + residual`` is rounded once to its dtype, stored, and that rounded value is normalized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear.linear import wide
from ftkernels.rows import fold_rows
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float = 1e-6,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Normalize each row by its root mean square.

    Args:
        x: ``[..., D]``, bf16/fp16/fp32, last dimension contiguous.
        weight: ``[D]``, bf16/fp16/fp32, or None for no weight.
        eps: added to the mean square, ``>= 0``.
        residual: as ``x``, not overlapping it; becomes ``x + residual`` in place and is normalized
            instead of ``x``.
        out: as ``x``, may be ``x`` itself; allocated when omitted.

    Returns:
        ``out``; with no element nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, device, eps or memory overlap outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    _check(x, weight, eps, residual)
    plain = backend.use_reference(x)
    if plain and out is None and residual is None:
        return normed(x, weight, eps).to(x.dtype)
    out = check.output("rms_norm", out, x.shape, like=x, may_alias=True, inputs=(weight, residual))
    if out.numel() == 0:
        return out
    if plain:
        return _rms_norm(x, weight, eps, residual, out)
    width = x.shape[-1]
    # keyed by the width only: the order of the sum must not depend on the number of rows
    cfg = config.lookup("rms_norm", {"D": width}, default_config)
    with backend.on_device(x):
        for rows in fold_rows(x, out, *(() if residual is None else (residual,))):
            has_residual = residual is not None
            _rms_norm_kernel[(rows.num_rows,)](
                rows.tensors[0], *rows.strides[0],
                weight,
                rows.tensors[2] if has_residual else None,
                *(rows.strides[2] if has_residual else (0, 0)),
                rows.tensors[1], *rows.strides[1],
                rows.inner, eps,
                D=width, HAS_WEIGHT=weight is not None, HAS_RESIDUAL=has_residual,
                BLOCK_D=cfg.block_d, num_warps=cfg.num_warps,
            )  # fmt: skip
    return out


def _check(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> None:
    op = "rms_norm"
    check.dtype(op, "x", x, check.FLOATS)
    check.require(x.ndim >= 1, lambda: f"{op}: x is {tuple(x.shape)}, expected [..., D]")
    check.last_contiguous(op, "x", x)
    check.require(eps >= 0, lambda: f"{op}: eps is {eps}, expected >= 0")
    if weight is not None:
        check.tensor(op, "weight", weight, check.FLOATS, (x.shape[-1],), "[D]", x)
    if residual is not None:
        check.tensor(op, "residual", residual, (x.dtype,), x.shape, "the shape of x", x)
        check.require(
            not check.overlaps(residual, x),
            f"{op}: residual is overlapping x in memory, expected memory of its own",
        )


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float = 1e-6,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    _check(x, weight, eps, residual)
    out = check.output("rms_norm", out, x.shape, like=x, may_alias=True, inputs=(weight, residual))
    return out if out.numel() == 0 else _rms_norm(x, weight, eps, residual, out)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    return out.copy_(normed(x, weight, eps))


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The formula in fp32 without checks, for references that norm as a part of what they do."""
    if x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32):
        return torch.rms_norm(x, x.shape[-1:], weight, eps)
    full = wide(x)
    result = full * full.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return result if weight is None else result.mul_(weight)


@dataclass(frozen=True)
class RmsNormConfig:
    """Not for tuning: the order of a row's sum follows the block and its threads."""

    block_d: int
    num_warps: int


def default_config(key: Case) -> RmsNormConfig:
    """Used when no tuned entry fits: a row per program, 16 elements a thread, loops past 8192."""
    block_d = min(8192, triton.next_power_of_2(key["D"]))
    return RmsNormConfig(block_d=block_d, num_warps=max(1, min(16, block_d // 512)))


@triton.jit
def _load_row(x_row, residual_row, offs_d, mask_d, HAS_RESIDUAL: tl.constexpr):
    x = tl.load(x_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        rounded = x.to(residual_row.dtype.element_ty)
        tl.store(residual_row + offs_d, rounded, mask=mask_d)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def _store_row(out_row, x, scale, weight_ptr, offs_d, mask_d, HAS_WEIGHT: tl.constexpr):
    out = x * scale
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(out_row + offs_d, out.to(out_row.dtype.element_ty), mask=mask_d)


@triton.jit
def _rms_norm_kernel(
    x_ptr, stride_xo, stride_xi,  # [rows, D]
    weight_ptr,  # [D]
    residual_ptr, stride_ro, stride_ri,  # [rows, D]
    out_ptr, stride_oo, stride_oi,  # [rows, D]
    inner, eps,
    D: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid_r = tl.program_id(0).to(tl.int64)
    outer, inside = pid_r // inner, pid_r % inner
    x_row = x_ptr + outer * stride_xo + inside * stride_xi
    out_row = out_ptr + outer * stride_oo + inside * stride_oi
    residual_row = residual_ptr
    if HAS_RESIDUAL:
        residual_row += outer * stride_ro + inside * stride_ri
    offs_d = tl.arange(0, BLOCK_D)
    if D <= BLOCK_D:
        x = _load_row(x_row, residual_row, offs_d, offs_d < D, HAS_RESIDUAL)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        _store_row(out_row, x, scale, weight_ptr, offs_d, offs_d < D, HAS_WEIGHT)
    else:
        squares = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            offs_k = start + offs_d
            x = _load_row(x_row, residual_row, offs_k, offs_k < D, HAS_RESIDUAL)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
        if HAS_RESIDUAL:
            # the sums stored above are read back, by other threads of the block if layouts differ
            tl.debug_barrier()
            x_row = residual_row
        for start in range(0, D, BLOCK_D):
            offs_k = start + offs_d
            x = tl.load(x_row + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
            _store_row(out_row, x, scale, weight_ptr, offs_k, offs_k < D, HAS_WEIGHT)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    dtype = torch.bfloat16
    x = randn(case["T"], case["D"], dtype=dtype, device=device, scale=3.0, seed=seed)
    weight = randn(case["D"], dtype=dtype, device=device, seed=seed + 1) if case["weight"] else None
    residual = None
    if case["residual"]:
        residual = randn(case["T"], case["D"], dtype=dtype, device=device, scale=3.0, seed=seed + 2)
    return (x, weight), {"residual": residual}


def _case(name: str, T: int, D: int, weight: bool = True, residual: bool = False) -> Case:
    return {"name": name, "T": T, "D": D, "weight": weight, "residual": residual}


SPEC = KernelSpec(
    op=rms_norm, reference=rms_norm_reference, default=default_config,
    cases=(
        _case("small", 5, 100),
        _case("wide", 2, 10000, residual=True),
        _case("flash-t1", 1, 4096),
        _case("flash-t8", 8, 4096),
        _case("flash-t3456", 3456, 4096),
        _case("flash-residual", 3456, 4096, residual=True),
        _case("flash-q_norm", 3456, 1024),
        _case("flash-kv_norm", 3456, 512),
        _case("flash-heads", 64 * 3456, 512, weight=False),
    ),
    inputs=_inputs, tolerance=8e-3,
    bytes_moved=lambda case: case["T"] * case["D"] * (8 if case["residual"] else 4),
)  # fmt: skip
