"""Quantize and read back in one pass: the rounding that a stored row goes through.

The first ``channels`` of the last dimension are rounded in groups to FP8 or FP4 under a power of
two (``max|x|`` at least 1e-4, or ``6 * 2^-126`` for FP4); the rest is copied.
Numerics: ``code * scale`` in fp32, rounded once to the dtype of ``x``; exact in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.quant import formats
from ftkernels.quant.formats import (
    tl_absbits,
    tl_e2m1_round,
    tl_e4m3_round,
    tl_group_code,
    tl_ue8m0_decode,
    tl_ue8m0_inverse,
)
from ftkernels.rows import fold_rows
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def quant_round_trip(
    x: torch.Tensor, *, fmt: str, group: int, channels: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Round rows to what FP8 or FP4 storage keeps of them.

    Args:
        x: ``[..., D]``, bf16/fp16/fp32, last dimension contiguous.
        fmt: ``"fp8"`` or ``"fp4"``.
        group: channels under one scale, ``>= 1``; the last group may be short.
        channels: how many leading channels are rounded, all when None; the rest is untouched.
        out: as ``x``, may be ``x`` itself; allocated when omitted.

    Returns:
        ``out``; a group with a NaN or an infinity is all NaN. With no element nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, device, format, group or channels outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(x, fmt, group, channels, out)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    channels = width if channels is None else channels
    if backend.use_reference(x):
        return _round_trip(x, fmt, group, channels, out)
    in_place = out.data_ptr() == x.data_ptr() and x.device.type != "meta"
    columns = channels if in_place else width
    if columns == 0:
        return out
    key = {"T": x.numel() // width, "D": width, "group": group}
    cfg = config.lookup("quant_round_trip", key, default_config, grows="T")
    with backend.on_device(x):
        for rows in fold_rows(x, out):
            num_groups = triton.cdiv(columns, group)
            grid = (triton.cdiv(rows.num_rows, cfg.block_r), triton.cdiv(num_groups, cfg.block_g))
            _quant_round_trip_kernel[grid](
                rows.tensors[0], *rows.strides[0],
                rows.tensors[1], *rows.strides[1],
                rows.num_rows, rows.inner, columns, channels,
                GROUP=group, GROUP_P2=triton.next_power_of_2(group), IS_FP8=fmt == "fp8",
                BLOCK_R=cfg.block_r, BLOCK_G=cfg.block_g, num_warps=cfg.num_warps,
            )  # fmt: skip
    return out


def _checked(
    x: torch.Tensor, fmt: str, group: int, channels: int | None, out: torch.Tensor | None
) -> torch.Tensor:
    op = "quant_round_trip"
    check.dtype(op, "x", x, check.FLOATS)
    check.require(x.ndim >= 1, lambda: f"{op}: x is {tuple(x.shape)}, expected [..., D]")
    check.last_contiguous(op, "x", x)
    check.require(fmt in formats.FORMATS, lambda: f"{op}: fmt is {fmt!r}, expected 'fp8' or 'fp4'")
    check.require(group >= 1, lambda: f"{op}: group is {group}, expected >= 1")
    check.require(
        channels is None or 0 <= channels <= x.shape[-1],
        lambda: f"{op}: channels is {channels}, expected 0 to D = {x.shape[-1]}",
    )
    return check.output(op, out, x.shape, like=x, may_alias=True)


def quant_round_trip_reference(
    x: torch.Tensor, *, fmt: str, group: int, channels: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(x, fmt, group, channels, out)
    if out.numel() == 0:
        return out
    return _round_trip(x, fmt, group, x.shape[-1] if channels is None else channels, out)


def round_tripped(
    x: torch.Tensor, fmt: str, group: int, channels: int | None = None
) -> torch.Tensor:
    """The formula without checks, for references that round as a part of what they do."""
    width = x.shape[-1] if channels is None else channels
    return _round_trip(x, fmt, group, width, torch.empty_like(x))


def _round_trip(
    x: torch.Tensor, fmt: str, group: int, channels: int, out: torch.Tensor
) -> torch.Tensor:
    rounded = x[..., :channels]
    if channels:
        grouped = formats.into_groups(rounded, group)
        scale = formats.group_scale(grouped, formats.FORMATS[fmt])
        ratio = grouped / scale
        codes = formats.e4m3_round(ratio).float() if fmt == "fp8" else formats.e2m1_round(ratio)
        out[..., :channels] = codes.mul_(scale).flatten(-2)[..., :channels]
    if out.data_ptr() != x.data_ptr():
        out[..., channels:] = x[..., channels:]
    return out


@dataclass(frozen=True)
class RoundTripConfig:
    block_r: int
    block_g: int
    num_warps: int


def default_config(key: Case) -> RoundTripConfig:
    """Used when no tuned entry fits: about 1024 channels per program, in whole groups and rows."""
    group = triton.next_power_of_2(key["group"])
    num_groups = triton.next_power_of_2(-(-key["D"] // key["group"]))
    block_g = max(1, min(num_groups, 1024 // group))
    block_r = max(1, min(triton.next_power_of_2(key["T"]), 1024 // (block_g * group)))
    num_warps = 4 if block_r * block_g * group >= 512 else 1
    return RoundTripConfig(block_r=block_r, block_g=block_g, num_warps=num_warps)


def candidates(key: Case, target: Target) -> Iterable[RoundTripConfig]:
    """Whole rows where they are short; 4 to 32 values a thread, or loads are no longer wide."""
    group = triton.next_power_of_2(key["group"])
    block_g = default_config(key).block_g
    for block_r in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8):
            size = block_r * block_g * group
            if 128 * num_warps <= size <= min(4096, 1024 * num_warps):
                yield RoundTripConfig(block_r, block_g, num_warps)


@triton.jit
def _quant_round_trip_kernel(
    x_ptr, stride_xo, stride_xi,  # [rows, D]
    out_ptr, stride_oo, stride_oi,  # [rows, D]
    num_rows, inner, columns, channels,
    GROUP: tl.constexpr, GROUP_P2: tl.constexpr, IS_FP8: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    offs_rg = tl.arange(0, BLOCK_R * BLOCK_G)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + offs_rg // BLOCK_G
    offs_i = tl.arange(0, GROUP_P2)[None, :]
    offs_k = (tl.program_id(1) * BLOCK_G + offs_rg % BLOCK_G)[:, None] * GROUP + offs_i
    mask_k = (offs_r < num_rows)[:, None] & (offs_i < GROUP) & (offs_k < columns)
    x_rows = x_ptr + (offs_r // inner) * stride_xo + (offs_r % inner) * stride_xi
    x = tl.load(x_rows[:, None] + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    # channels past the rounded ones neither raise a group's scale nor change
    is_rounded = offs_k < channels
    absbits = tl.max(tl.where(is_rounded, tl_absbits(x), 0), axis=1)
    # the floors 1e-4 and 6 * 2^-126, as bits
    if IS_FP8:
        code = tl_group_code(absbits, 0x38D1B717, 1.0 / 448.0)
        q = tl_e4m3_round(x * tl_ue8m0_inverse(code)[:, None])
    else:
        code = tl_group_code(absbits, 0x01C00000, 1.0 / 6.0)
        q = tl_e2m1_round(x * tl_ue8m0_inverse(code)[:, None])
    out = tl.where(is_rounded, q * tl_ue8m0_decode(code)[:, None], x)
    out_rows = out_ptr + (offs_r // inner) * stride_oo + (offs_r % inner) * stride_oi
    tl.store(out_rows[:, None] + offs_k, out.to(out_ptr.dtype.element_ty), mask=mask_k)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = randn(case["T"], case["D"], dtype=torch.bfloat16, device=device, scale=3.0, seed=seed)
    return (x,), {"fmt": case["fmt"], "group": case["group"], "channels": case["channels"]}


SPEC = KernelSpec(
    op=quant_round_trip, reference=quant_round_trip_reference, default=default_config,
    candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "D": 80, "fmt": "fp8", "group": 24, "channels": 64},
        {"name": "small-fp4", "T": 3, "D": 72, "fmt": "fp4", "group": 32, "channels": None},
        {"name": "flash-kv", "T": 3456, "D": 512, "fmt": "fp8", "group": 64, "channels": 448},
        {"name": "flash-index", "T": 221184, "D": 128, "fmt": "fp4", "group": 32, "channels": None},
    ),
    inputs=_inputs, grows="T",
    bytes_moved=lambda case: case["T"] * case["D"] * 4,
)  # fmt: skip
