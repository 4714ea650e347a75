"""Weights as FP4 or FP8 codes under power-of-two scales: the FP4 quantizer and both inverses.

FP4 layout: byte ``[n, c]`` holds column ``2c`` in its low nibble and ``2c + 1`` in its high one;
``scale[n, g]`` is the UE8M0 code of columns ``[g*group, (g+1)*group)`` of row ``n``.
FP8 layout: groups of columns as above, or tiles: ``scale[n // gn, k // gk]``, ``group=(gn, gk)``.
Numerics: code times scale in fp32, rounded once; exact in bf16 as long as bf16 holds the exponent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.quant import formats
from ftkernels.quant.act_quant import Pair, split_pair
from ftkernels.quant.formats import (
    tl_absbits,
    tl_e2m1_decode,
    tl_e2m1_encode,
    tl_e2m1_round,
    tl_group_code,
    tl_ue8m0_decode,
    tl_ue8m0_inverse,
)
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

Group = int | tuple[int, int]


def quantize_fp4(x: torch.Tensor, *, group: int = 32, out: Pair | None = None) -> Pair:
    """Quantize each row to FP4 in groups of columns.

    Args:
        x: ``[N, K]``, bf16/fp16/fp32, last dimension contiguous; rows may be strided.
        group: columns under one scale, even; ``K`` is a multiple of it.
        out: ``(packed, scale)`` as returned, not overlapping ``x``; allocated when omitted.

    Returns:
        ``packed [N, K/2]`` and ``scale [N, K/group]`` UE8M0 codes, both uint8. A group with a NaN
        or an infinity has scale code 255 (NaN). With ``N == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype, or ``out`` is not a pair of tensors.
        ValueError: shape, stride, device or group outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    packed, scale = _checked_quantize(x, group, out)
    if x.numel() == 0:
        return packed, scale
    if backend.use_reference(x):
        return _quantize(x, group, packed, scale)
    num_rows, width = x.shape
    cfg = config.lookup(
        "quantize_fp4", {"N": num_rows, "K": width, "group": group}, quantize_config, grows="N"
    )
    num_groups = width // group
    with backend.on_device(x):
        _quantize_fp4_kernel[(num_rows, triton.cdiv(num_groups, cfg.block_g))](
            x, x.stride(0),
            packed, packed.stride(0),
            scale, scale.stride(0),
            num_groups,
            GROUP=group, GROUP_P2=triton.next_power_of_2(group), BLOCK_G=cfg.block_g,
            num_warps=cfg.num_warps,
        )  # fmt: skip
    return packed, scale


def quantize_fp4_reference(x: torch.Tensor, *, group: int = 32, out: Pair | None = None) -> Pair:
    """The definition in plain torch, sharing nothing with the kernel."""
    packed, scale = _checked_quantize(x, group, out)
    return (packed, scale) if x.numel() == 0 else _quantize(x, group, packed, scale)


def _checked_quantize(x: torch.Tensor, group: int, out: Pair | None) -> Pair:
    op = "quantize_fp4"
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[N, K]")
    num_rows, width = x.shape
    check.require(
        group >= 2 and group % 2 == 0,
        lambda: f"{op}: group is {group}, expected an even number >= 2",
    )
    check.require(
        width % group == 0,
        lambda: f"{op}: x is {tuple(x.shape)}, expected [N, K] with K a multiple of group {group}",
    )
    packed, scale = split_pair(op, out)
    packed = check.output(
        op, packed, (num_rows, width // 2), like=x, dtype=torch.uint8, name="out[0]"
    )
    scale = check.output(
        op,
        scale,
        (num_rows, width // group),
        like=x,
        dtype=torch.uint8,
        name="out[1]",
        inputs=(packed,),
    )
    return packed, scale


def _quantize(x: torch.Tensor, group: int, packed: torch.Tensor, scale: torch.Tensor) -> Pair:
    grouped = formats.into_groups(x, group)
    value = formats.group_scale(grouped, formats.FP4)
    codes = formats.e2m1_encode(grouped / value).flatten(-2)
    scale.copy_(formats.ue8m0_encode(value).squeeze(-1))
    packed.copy_(formats.pack_nibbles(codes))
    return packed, scale


def dequantize_fp8(
    x_fp8: torch.Tensor, scale: torch.Tensor, *, group: Group = 128,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Read FP8 codes back under their scales.

    Args:
        x_fp8: ``[N, K]`` float8_e4m3fn, last dimension contiguous.
        scale: uint8 UE8M0 codes; ``[N, ceil(K/group)]``, or ``[ceil(N/gn), ceil(K/gk)]`` for tiles.
        group: columns under one scale, or ``(gn, gk)``: rows and columns of a tile.
        dtype: bf16, fp16 or fp32.
        out: ``[N, K]`` in ``dtype``, not overlapping an input; allocated when omitted.

    Returns:
        ``out``; scale code 0 is ``2^-127``, 255 gives NaN. With no element nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, device or group outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked_fp8(x_fp8, scale, group, dtype, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(x_fp8):
        return _dequantize_fp8(x_fp8, scale, group, out)
    num_rows, width = x_fp8.shape
    group_n, group_k = (1, group) if isinstance(group, int) else group
    cfg = config.lookup("dequantize_fp8", {"N": num_rows, "K": width}, dequantize_config, grows="N")
    with backend.on_device(x_fp8):
        _dequantize_fp8_kernel[(num_rows, triton.cdiv(width, cfg.block_k))](
            x_fp8, x_fp8.stride(0),
            scale, scale.stride(0),
            out, out.stride(0),
            width,
            GROUP_N=group_n, GROUP_K=group_k, BLOCK_K=cfg.block_k, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def dequantize_fp8_reference(
    x_fp8: torch.Tensor, scale: torch.Tensor, *, group: Group = 128,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked_fp8(x_fp8, scale, group, dtype, out)
    return out if out.numel() == 0 else _dequantize_fp8(x_fp8, scale, group, out)


def _checked_fp8(
    x_fp8: torch.Tensor,
    scale: torch.Tensor,
    group: Group,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    op = "dequantize_fp8"
    check.tensor(op, "x_fp8", x_fp8, (torch.float8_e4m3fn,), (None, None), "[N, K]")
    pair = (1, group) if isinstance(group, int) else tuple(group)
    check.require(
        len(pair) == 2 and min(pair) >= 1,
        lambda: f"{op}: group is {group}, expected a number >= 1 or a pair of them",
    )
    num_rows, width = x_fp8.shape
    size = (-(-num_rows // pair[0]), -(-width // pair[1]))
    check.tensor(op, "scale", scale, (torch.uint8,), size, "[ceil(N/gn), ceil(K/gk)]", x_fp8)
    _check_result(op, dtype)
    return check.output(op, out, (num_rows, width), like=x_fp8, dtype=dtype, inputs=(scale,))


def _check_result(op: str, dtype: torch.dtype) -> None:
    if dtype not in check.FLOATS:
        raise TypeError(f"{op}: dtype is {dtype}, expected bfloat16, float16 or float32")


def _dequantize_fp8(
    x_fp8: torch.Tensor, scale: torch.Tensor, group: Group, out: torch.Tensor
) -> torch.Tensor:
    num_rows, width = x_fp8.shape
    group_n, group_k = (1, group) if isinstance(group, int) else group
    value = formats.ue8m0_decode(scale).repeat_interleave(group_k, dim=1)[:, :width]
    if group_n > 1:
        value = value.repeat_interleave(group_n, dim=0)[:num_rows]
    return out.copy_(x_fp8.float() * value)


def dequantize_fp4(
    packed: torch.Tensor, scale: torch.Tensor, *, group: int = 32,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Read FP4 codes back under their scales.

    Args:
        packed: ``[N, K/2]`` uint8, low nibble = even column, last dimension contiguous.
        scale: ``[N, K/group]`` uint8 UE8M0 codes.
        group: columns under one scale, even; ``K`` is a multiple of it.
        dtype: bf16, fp16 or fp32.
        out: ``[N, K]`` in ``dtype``, not overlapping an input; allocated when omitted.

    Returns:
        ``out``; scale code 0 is ``2^-127``, 255 gives NaN. With no element nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, device or group outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked_fp4(packed, scale, group, dtype, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(packed):
        return _dequantize_fp4(packed, scale, group, out)
    num_rows, half = packed.shape
    cfg = config.lookup(
        "dequantize_fp4", {"N": num_rows, "K": 2 * half}, dequantize_config, grows="N"
    )
    with backend.on_device(packed):
        _dequantize_fp4_kernel[(num_rows, triton.cdiv(2 * half, cfg.block_k))](
            packed, packed.stride(0),
            scale, scale.stride(0),
            out, out.stride(0),
            half,
            GROUP=group, BLOCK_K=cfg.block_k, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def dequantize_fp4_reference(
    packed: torch.Tensor, scale: torch.Tensor, *, group: int = 32,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked_fp4(packed, scale, group, dtype, out)
    return out if out.numel() == 0 else _dequantize_fp4(packed, scale, group, out)


def _checked_fp4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    op = "dequantize_fp4"
    check.tensor(op, "packed", packed, (torch.uint8,), (None, None), "[N, K/2]")
    check.require(
        group >= 2 and group % 2 == 0,
        lambda: f"{op}: group is {group}, expected an even number >= 2",
    )
    num_rows, width = packed.shape[0], 2 * packed.shape[1]
    check.require(
        width % group == 0,
        lambda: (
            f"{op}: packed is {tuple(packed.shape)}, expected [N, K/2] with K a multiple of {group}"
        ),
    )
    check.tensor(
        op, "scale", scale, (torch.uint8,), (num_rows, width // group), "[N, K/group]", packed
    )
    _check_result(op, dtype)
    return check.output(op, out, (num_rows, width), like=packed, dtype=dtype, inputs=(scale,))


def _dequantize_fp4(
    packed: torch.Tensor, scale: torch.Tensor, group: int, out: torch.Tensor
) -> torch.Tensor:
    values = formats.e2m1_decode(formats.unpack_nibbles(packed)).unflatten(-1, (-1, group))
    return out.copy_((values * formats.ue8m0_decode(scale).unsqueeze(-1)).flatten(-2))


@dataclass(frozen=True)
class QuantizeConfig:
    block_g: int
    num_warps: int


@dataclass(frozen=True)
class DequantizeConfig:
    block_k: int
    num_warps: int


def quantize_config(key: Case) -> QuantizeConfig:
    """Used when no tuned entry fits: one row per program, at most 1024 columns, in whole groups."""
    group = triton.next_power_of_2(key["group"])
    num_groups = triton.next_power_of_2(key["K"] // key["group"])
    return QuantizeConfig(block_g=max(1, min(num_groups, 1024 // group)), num_warps=4)


def quantize_candidates(key: Case, target: Target) -> Iterable[QuantizeConfig]:
    """4 to 32 values a thread: fewer are no wide loads, more do not stay in registers."""
    group = triton.next_power_of_2(key["group"])
    for block_g in (4, 8, 16, 32, 64, 128):
        for num_warps in (1, 2, 4, 8):
            if 128 * num_warps <= block_g * group <= min(4096, 1024 * num_warps):
                yield QuantizeConfig(block_g, num_warps)


def dequantize_config(key: Case) -> DequantizeConfig:
    """Used when no tuned entry fits: one row per program, at most 2048 columns."""
    return DequantizeConfig(
        block_k=max(32, min(2048, triton.next_power_of_2(key["K"]))), num_warps=4
    )


def dequantize_candidates(key: Case, target: Target) -> Iterable[DequantizeConfig]:
    """4 to 32 values a thread, as in `quantize_candidates`."""
    for block_k in (512, 1024, 2048, 4096):
        for num_warps in (1, 2, 4, 8):
            if block_k <= 2 * key["K"] and 128 * num_warps <= block_k <= 1024 * num_warps:
                yield DequantizeConfig(block_k, num_warps)


@triton.jit
def _quantize_fp4_kernel(
    x_ptr, stride_xn,  # [N, K]
    packed_ptr, stride_pn,  # [N, K/2]
    scale_ptr, stride_sn,  # [N, num_groups]
    num_groups,
    GROUP: tl.constexpr, GROUP_P2: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    tl.static_assert(GROUP % 2 == 0)
    pid_n = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    mask_g = offs_g < num_groups
    offs_i = tl.arange(0, GROUP_P2)
    mask_k = (offs_i[None, :] < GROUP) & mask_g[:, None]
    x_ptrs = x_ptr + pid_n * stride_xn + offs_g[:, None] * GROUP + offs_i[None, :]
    x = tl.load(x_ptrs, mask=mask_k, other=0.0).to(tl.float32)
    # FLOOR_BITS is 6 * 2^-126, INVERSE 1/6
    code = tl_group_code(tl.max(tl_absbits(x), axis=1), 0x01C00000, 1.0 / 6.0)
    nibbles = tl_e2m1_encode(tl_e2m1_round(x * tl_ue8m0_inverse(code)[:, None]))
    low, high = tl.split(tl.reshape(nibbles, (BLOCK_G, GROUP_P2 // 2, 2)))
    offs_c = tl.arange(0, GROUP_P2 // 2)
    mask_c = (offs_c[None, :] < GROUP // 2) & mask_g[:, None]
    packed_ptrs = packed_ptr + pid_n * stride_pn + offs_g[:, None] * (GROUP // 2) + offs_c[None, :]
    tl.store(packed_ptrs, (low | (high << 4)).to(tl.uint8), mask=mask_c)
    tl.store(scale_ptr + pid_n * stride_sn + offs_g, code.to(tl.uint8), mask=mask_g)


@triton.jit
def _dequantize_fp8_kernel(
    x_fp8_ptr, stride_xn,  # [N, K]
    scale_ptr, stride_sn,  # [ceil(N/GROUP_N), ceil(K/GROUP_K)]
    out_ptr, stride_on,  # [N, K]
    K,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    x = tl.load(x_fp8_ptr + pid_n * stride_xn + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    scale_ptrs = scale_ptr + (pid_n // GROUP_N) * stride_sn + offs_k // GROUP_K
    scale = tl_ue8m0_decode(tl.load(scale_ptrs, mask=mask_k, other=0).to(tl.int32))
    out = (x * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pid_n * stride_on + offs_k, out, mask=mask_k)


@triton.jit
def _dequantize_fp4_kernel(
    packed_ptr, stride_pn,  # [N, K/2]
    scale_ptr, stride_sn,  # [N, K/GROUP]
    out_ptr, stride_on,  # [N, K]
    half,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    mask_c = offs_c < half
    byte = tl.load(packed_ptr + pid_n * stride_pn + offs_c, mask=mask_c, other=0).to(tl.int32)
    scale_ptrs = scale_ptr + pid_n * stride_sn + offs_c // (GROUP // 2)
    scale = tl_ue8m0_decode(tl.load(scale_ptrs, mask=mask_c, other=0).to(tl.int32))
    low, high = tl_e2m1_decode(byte & 15) * scale, tl_e2m1_decode(byte >> 4) * scale
    out = tl.interleave(low, high).to(out_ptr.dtype.element_ty)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    tl.store(out_ptr + pid_n * stride_on + offs_k, out, mask=offs_k < 2 * half)


def _codes(*size: int, device: str, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    if device == "meta":
        return torch.empty(*size, dtype=torch.uint8, device="meta")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, size, dtype=torch.uint8, generator=generator).to(device)


def _quantize_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = randn(case["N"], case["K"], dtype=torch.bfloat16, device=device, scale=3.0, seed=seed)
    return (x,), {"group": case["group"]}


def _fp8_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    group_n, group_k = case["group_n"], case["group_k"]
    x = randn(case["N"], case["K"], device=device, scale=50.0, seed=seed).to(torch.float8_e4m3fn)
    size = (-(-case["N"] // group_n), -(-case["K"] // group_k))
    scale = _codes(*size, device=device, seed=seed, low=110, high=130)
    return (x, scale), {"group": group_k if group_n == 1 else (group_n, group_k)}


def _fp4_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    packed = _codes(case["N"], case["K"] // 2, device=device, seed=seed)
    scale = _codes(
        case["N"], case["K"] // case["group"], device=device, seed=seed, low=110, high=130
    )
    return (packed, scale), {"group": case["group"]}


SPECS = (
    KernelSpec(
        op=quantize_fp4, reference=quantize_fp4_reference, default=quantize_config,
        candidates=quantize_candidates,
        cases=(
            {"name": "small", "N": 3, "K": 96, "group": 32},
            {"name": "odd-group", "N": 2, "K": 60, "group": 12},
            {"name": "flash-w13", "N": 4096, "K": 4096, "group": 32},
            {"name": "flash-w2", "N": 4096, "K": 2048, "group": 32},
        ),
        inputs=_quantize_inputs, grows="N",
        bytes_moved=lambda case: case["N"] * (case["K"] * 5 // 2 + case["K"] // case["group"]),
    ),
    KernelSpec(
        op=dequantize_fp8, reference=dequantize_fp8_reference, default=dequantize_config,
        candidates=dequantize_candidates,
        cases=(
            {"name": "small", "N": 5, "K": 300, "group_n": 1, "group_k": 128},
            {"name": "small-tiles", "N": 130, "K": 200, "group_n": 128, "group_k": 128},
            {"name": "flash-wq_b", "N": 32768, "K": 1024, "group_n": 128, "group_k": 128},
            {"name": "flash-x", "N": 3456, "K": 4096, "group_n": 1, "group_k": 128},
        ),
        inputs=_fp8_inputs, grows="N",
        bytes_moved=lambda case: case["N"] * case["K"] * 3,
    ),
    KernelSpec(
        op=dequantize_fp4, reference=dequantize_fp4_reference, default=dequantize_config,
        candidates=dequantize_candidates,
        cases=(
            {"name": "small", "N": 3, "K": 96, "group": 32},
            {"name": "flash-w13", "N": 4096, "K": 4096, "group": 32},
            {"name": "flash-w2", "N": 4096, "K": 2048, "group": 32},
        ),
        inputs=_fp4_inputs, grows="N",
        bytes_moved=lambda case: case["N"] * (case["K"] * 5 // 2 + case["K"] // case["group"]),
    ),
)  # fmt: skip
