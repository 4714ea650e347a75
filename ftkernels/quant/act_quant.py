"""Activation quantization: groups of the last dimension to E4M3 codes under a power-of-two scale.

Per group ``s = 2^ceil(log2(max(max|x|, 1e-4) / 448))`` and ``q = e4m3(x / s)``, nearest even.
Layout: ``x_scale[t, g]`` holds the UE8M0 code of columns ``[g*group, (g+1)*group)`` of row ``t``.
Numerics: the scale comes from the bits of ``amax * (1/448)`` in fp32, the division by it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.quant import formats
from ftkernels.quant.formats import tl_quantized_fp8
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

Pair = tuple[torch.Tensor, torch.Tensor]


def quantize_fp8(x: torch.Tensor, *, group: int = 128, out: Pair | None = None) -> Pair:
    """Quantize each row to FP8 in groups of columns.

    Args:
        x: ``[T, K]``, bf16/fp16/fp32, last dimension contiguous; rows may be strided.
        group: columns under one scale, ``>= 1``; the last group may be short.
        out: ``(x_fp8, x_scale)`` as returned, not overlapping ``x``; allocated when omitted.

    Returns:
        ``x_fp8 [T, K]`` float8_e4m3fn and ``x_scale [T, ceil(K/group)]`` uint8 UE8M0 codes. A group
        with a NaN or an infinity has scale code 255 (NaN). With ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype, or ``out`` is not a pair of tensors.
        ValueError: shape, stride, device or group outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    x_fp8, x_scale = _checked(x, group, out)
    if x.numel() == 0:
        return x_fp8, x_scale
    if backend.use_reference(x):
        return _quantize(x, group, x_fp8, x_scale)
    num_tokens, width = x.shape
    key = {"T": num_tokens, "K": width, "group": group}
    cfg = config.lookup("quantize_fp8", key, default_config, grows="T")
    num_groups = x_scale.shape[1]
    with backend.on_device(x):
        _quantize_fp8_kernel[(num_tokens, triton.cdiv(num_groups, cfg.block_g))](
            x, x.stride(0),
            x_fp8, x_fp8.stride(0),
            x_scale, x_scale.stride(0),
            width, num_groups,
            GROUP=group, GROUP_P2=triton.next_power_of_2(group), BLOCK_G=cfg.block_g,
            num_warps=cfg.num_warps,
        )  # fmt: skip
    return x_fp8, x_scale


def _checked(x: torch.Tensor, group: int, out: Pair | None) -> Pair:
    op = "quantize_fp8"
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    check.require(group >= 1, lambda: f"{op}: group is {group}, expected >= 1")
    num_tokens, width = x.shape
    codes, scale = split_pair(op, out)
    codes = check.output(
        op, codes, (num_tokens, width), like=x, dtype=torch.float8_e4m3fn, name="out[0]"
    )
    size = (num_tokens, -(-width // group))
    scale = check.output(
        op,
        scale,
        size,
        like=x,
        dtype=torch.uint8,
        name="out[1]",
        inputs=(None if out is None else codes,),
    )
    return codes, scale


def split_pair(op: str, out: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two tensors of an `out` that must be a pair or None.

    Raises:
        TypeError: `out` is neither.
    """
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{op}: out is {type(out).__name__}, expected a pair of tensors")
    return out[0], out[1]


def quantize_fp8_reference(x: torch.Tensor, *, group: int = 128, out: Pair | None = None) -> Pair:
    """The definition in plain torch, sharing nothing with the kernel."""
    x_fp8, x_scale = _checked(x, group, out)
    return (x_fp8, x_scale) if x.numel() == 0 else _quantize(x, group, x_fp8, x_scale)


def _quantize(x: torch.Tensor, group: int, x_fp8: torch.Tensor, x_scale: torch.Tensor) -> Pair:
    grouped = formats.into_groups(x, group)
    scale = formats.group_scale(grouped, formats.FP8)
    codes = formats.e4m3_round(grouped / scale)
    x_scale.copy_(formats.ue8m0_encode(scale).squeeze(-1))
    x_fp8.copy_(codes.flatten(-2)[:, : x.shape[1]])
    return x_fp8, x_scale


@dataclass(frozen=True)
class QuantizeFp8Config:
    block_g: int
    num_warps: int


def default_config(key: Case) -> QuantizeFp8Config:
    """Used when no tuned entry fits: one row per program, at most 1024 columns, in whole groups."""
    group = triton.next_power_of_2(key["group"])
    num_groups = triton.next_power_of_2(-(-key["K"] // key["group"]))
    return QuantizeFp8Config(block_g=max(1, min(num_groups, 1024 // group)), num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[QuantizeFp8Config]:
    """4 to 32 values a thread: fewer are no wide loads, more do not stay in registers."""
    group = triton.next_power_of_2(key["group"])
    for block_g in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8):
            if 128 * num_warps <= block_g * group <= min(4096, 1024 * num_warps):
                yield QuantizeFp8Config(block_g, num_warps)


@triton.jit
def _quantize_fp8_kernel(
    x_ptr, stride_xt,  # [T, K]
    x_fp8_ptr, stride_qt,  # [T, K]
    x_scale_ptr, stride_st,  # [T, num_groups]
    K, num_groups,
    GROUP: tl.constexpr, GROUP_P2: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_i = tl.arange(0, GROUP_P2)
    offs_k = offs_g[:, None] * GROUP + offs_i[None, :]
    mask_k = (offs_i[None, :] < GROUP) & (offs_k < K)
    x = tl.load(x_ptr + pid_t * stride_xt + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    q, code = tl_quantized_fp8(x, 1)
    tl.store(x_fp8_ptr + pid_t * stride_qt + offs_k, q.to(tl.float8e4nv), mask=mask_k)
    tl.store(x_scale_ptr + pid_t * stride_st + offs_g, code.to(tl.uint8), mask=offs_g < num_groups)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = randn(case["T"], case["K"], dtype=torch.bfloat16, device=device, scale=3.0, seed=seed)
    return (x,), {"group": case["group"]}


SPEC = KernelSpec(
    op=quantize_fp8, reference=quantize_fp8_reference, default=default_config,
    candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "K": 300, "group": 128},
        {"name": "odd-group", "T": 3, "K": 101, "group": 24},
        {"name": "flash-t1", "T": 1, "K": 4096, "group": 128},
        {"name": "flash-t8", "T": 8, "K": 4096, "group": 128},
        {"name": "flash-t3456", "T": 3456, "K": 4096, "group": 128},
    ),
    inputs=_inputs, grows="T",
    bytes_moved=lambda case: case["T"] * (3 * case["K"] + -(-case["K"] // case["group"])),
)  # fmt: skip
