"""Hadamard rotation ``out = (H x) * D**-0.5``, Sylvester's matrix ``H_2m = [[H, H], [H, -H]]``.

Numerics: log2(D) rounds of sums and differences in fp32, neighbours first, then the factor, then
one rounding. The order is fixed, so kernel and reference give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.rows import fold_rows
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

_WIDEST = 4096


def hadamard(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate each row by the normalized Hadamard matrix, its own inverse.

    Args:
        x: ``[..., D]``, bf16/fp16/fp32, ``D`` a power of two up to 4096, last dimension contiguous.
        out: as ``x``, not overlapping it; allocated when omitted.

    Returns:
        ``out``; with no row nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(x, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(x):
        return _hadamard(x, out)
    width = x.shape[-1]
    key = {"T": x.numel() // width, "D": width}
    cfg = config.lookup("hadamard", key, default_config, grows="T")
    with backend.on_device(x):
        for rows in fold_rows(x, out):
            _hadamard_kernel[(triton.cdiv(rows.num_rows, cfg.block_r),)](
                rows.tensors[0], *rows.strides[0],
                rows.tensors[1], *rows.strides[1],
                rows.num_rows, rows.inner, width**-0.5,
                D=width, LOG2_D=width.bit_length() - 1, BLOCK_R=cfg.block_r,
                num_warps=cfg.num_warps,
            )  # fmt: skip
    return out


def _checked(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    op = "hadamard"
    check.dtype(op, "x", x, check.FLOATS)
    width = x.shape[-1] if x.ndim else 0
    check.require(
        0 < width <= _WIDEST and width & (width - 1) == 0,
        lambda: (
            f"{op}: x is {tuple(x.shape)}, expected [..., D] with D a power of two up to {_WIDEST}"
        ),
    )
    check.last_contiguous(op, "x", x)
    return check.output(op, out, x.shape, like=x)


def hadamard_reference(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(x, out)
    return out if out.numel() == 0 else _hadamard(x, out)


def _hadamard(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # sums of single elements, not a matrix product: a row's bits must not depend on the other rows;
    # transposed, so that every round adds whole runs of memory
    width = x.shape[-1]
    if width == 1:
        return out.copy_(x)
    pair = torch.empty(2, width, x.numel() // width, device=x.device)
    values, other = pair.unbind(0)
    values.copy_(x.reshape(-1, width).t())
    views = [(*v.unflatten(0, (-1, 2)).unbind(1), *v.chunk(2)) for v in (values, other)]
    for step in range(width.bit_length() - 1):
        even, odd = views[step % 2][:2]
        low, high = views[1 - step % 2][2:]
        torch.add(even, odd, out=low)
        torch.sub(even, odd, out=high)
    result = values if width.bit_length() % 2 else other
    return out.copy_(result.mul_(width**-0.5).t().view(x.shape))


@dataclass(frozen=True)
class HadamardConfig:
    block_r: int
    num_warps: int


def default_config(key: Case) -> HadamardConfig:
    """Used when no tuned entry fits: rows of up to 2048 elements in one program."""
    rows = min(triton.next_power_of_2(key["T"]), max(1, 2048 // key["D"]))
    return HadamardConfig(block_r=rows, num_warps=4 if rows * key["D"] >= 1024 else 1)


def candidates(key: Case, target: Target) -> Iterable[HadamardConfig]:
    """4 to 32 values a thread: fewer are no wide loads, more do not stay in registers."""
    for block_r in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8):
            if 128 * num_warps <= block_r * key["D"] <= min(4096, 1024 * num_warps):
                yield HadamardConfig(block_r, num_warps)


@triton.jit
def butterflies(x, ROWS: tl.constexpr, D: tl.constexpr, LOG2_D: tl.constexpr):
    """Rows ``[ROWS, D]`` times the Sylvester matrix, unscaled."""
    for _ in tl.static_range(LOG2_D):
        # pairs of neighbours become [all sums, all differences], so that each round looks alike
        # and after LOG2_D rounds every index bit is back in its place
        even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, D))
    return x


@triton.jit
def _hadamard_kernel(
    x_ptr, stride_xo, stride_xi,  # [rows, D]
    out_ptr, stride_oo, stride_oi,  # [rows, D]
    num_rows, inner, factor,
    D: tl.constexpr, LOG2_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, D)
    mask = (offs_r < num_rows)[:, None] & (offs_d < D)[None, :]
    x_rows = x_ptr + (offs_r // inner) * stride_xo + (offs_r % inner) * stride_xi
    x = tl.load(x_rows[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    x = butterflies(x, BLOCK_R, D, LOG2_D)
    out_rows = out_ptr + (offs_r // inner) * stride_oo + (offs_r % inner) * stride_oi
    out = (x * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_rows[:, None] + offs_d[None, :], out, mask=mask)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return (randn(case["T"], case["D"], dtype=torch.bfloat16, device=device, seed=seed),), {}


SPEC = KernelSpec(
    op=hadamard, reference=hadamard_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "D": 32},
        {"name": "flash-t1", "T": 64, "D": 128},
        {"name": "flash-t3456", "T": 64 * 3456, "D": 128},
    ),
    inputs=_inputs, grows="T",
    bytes_moved=lambda case: case["T"] * case["D"] * 4,
    flops=lambda case: case["T"] * case["D"] * (case["D"].bit_length() - 1),
)  # fmt: skip
