"""SwiGLU with clamp: ``out = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight``.

Layout: ``gate_up`` holds gate in columns ``[0, I)`` and up in ``[I, 2*I)``.
Numerics: both halves are widened to fp32; the product, route weight included, is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear.linear import wide
from ftkernels.quant.formats import tl_clamped_swiglu
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def swiglu_clamp(
    gate_up: torch.Tensor, *, limit: float, weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Activate the hidden state of routed or shared experts.

    Args:
        gate_up: ``[T, 2*I]``, bf16/fp16/fp32, last dimension contiguous; rows may be strided.
        limit: clamp bound in activation units, ``>= 0``; 0 means no clamp (Flash: 10.0).
        weights: ``[T]`` fp32 route weights, multiplied before the rounding.
        out: ``[T, I]`` in ``gate_up.dtype``, not aliasing it; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or limit outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    _check(gate_up, limit, weights)
    num_tokens, inter = gate_up.shape[0], gate_up.shape[1] // 2
    plain = backend.use_reference(gate_up)
    if plain and out is None:
        return activated(gate_up, limit, weights).to(gate_up.dtype)
    out = check.output("swiglu_clamp", out, (num_tokens, inter), like=gate_up, inputs=(weights,))
    if num_tokens == 0 or inter == 0:
        return out
    if plain:
        return out.copy_(activated(gate_up, limit, weights))
    cfg = config.lookup("swiglu_clamp", {"T": num_tokens, "I": inter}, default_config, grows="T")
    with backend.on_device(gate_up):
        _swiglu_clamp_kernel[(num_tokens, triton.cdiv(inter, cfg.block_i))](
            gate_up, gate_up.stride(0),
            weights, 0 if weights is None else weights.stride(0),
            out, out.stride(0),
            inter, clamp_bound(limit),
            HAS_WEIGHTS=weights is not None, BLOCK_I=cfg.block_i, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _check(gate_up: torch.Tensor, limit: float, weights: torch.Tensor | None) -> None:
    op = "swiglu_clamp"
    check.tensor(op, "gate_up", gate_up, check.FLOATS, (None, None), "[T, 2*I]")
    if gate_up.shape[1] % 2:
        raise ValueError(
            f"{op}: gate_up is {tuple(gate_up.shape)}, expected [T, 2*I] with an even last size"
        )
    check_limit(op, "limit", limit)
    if weights is not None:
        check.dtype(op, "weights", weights, (torch.float32,))
        check.shape(op, "weights", weights, (gate_up.shape[0],), "[T]")
        check.device(op, "weights", weights, gate_up)


def check_limit(op: str, name: str, limit: float) -> None:
    """Refuse a clamp bound that is no number ``>= 0``; infinity clamps nothing, as 0 does."""
    if limit != float("inf"):
        check.number(op, name, limit, 0)


def clamp_bound(limit: float) -> float:
    """What a kernel clamps by: 0 means no clamp."""
    return float(limit) if limit > 0 else float("inf")


def swiglu_clamp_reference(
    gate_up: torch.Tensor, *, limit: float, weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    _check(gate_up, limit, weights)
    size = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = check.output("swiglu_clamp", out, size, like=gate_up, inputs=(weights,))
    return out.copy_(activated(gate_up, limit, weights))


def activated(gate_up: torch.Tensor, limit: float, weights: torch.Tensor | None) -> torch.Tensor:
    """The formula in fp32 without checks, for references that activate as a part of their work."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = torch.nn.functional.silu(gate).mul_(up)
    return result if weights is None else result.mul_(weights[:, None])


@dataclass(frozen=True)
class SwigluConfig:
    block_i: int
    num_warps: int


def default_config(key: Case) -> SwigluConfig:
    """Used when no tuned entry fits: one row per program, at most 1024 columns."""
    return SwigluConfig(block_i=min(1024, triton.next_power_of_2(key["I"])), num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[SwigluConfig]:
    for block_i in (256, 512, 1024, 2048):
        for num_warps in (1, 2, 4, 8):
            if block_i <= 2 * key["I"] and 128 * num_warps <= block_i <= 1024 * num_warps:
                yield SwigluConfig(block_i, num_warps)


@triton.jit
def _swiglu_clamp_kernel(
    gate_up_ptr, stride_gt,  # [T, 2*I]
    weights_ptr, stride_wt,  # [T]
    out_ptr, stride_ot,  # [T, I]
    I, limit,
    HAS_WEIGHTS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = offs_i < I
    gate_ptrs = gate_up_ptr + pid_t * stride_gt + offs_i
    gate = tl.load(gate_ptrs, mask=mask_i, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + I, mask=mask_i, other=0.0).to(tl.float32)
    out = tl_clamped_swiglu(gate, up, limit)
    if HAS_WEIGHTS:
        out *= tl.load(weights_ptr + pid_t * stride_wt)
    tl.store(out_ptr + pid_t * stride_ot + offs_i, out.to(out_ptr.dtype.element_ty), mask=mask_i)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    gate_up = randn(
        case["T"], 2 * case["I"], dtype=torch.bfloat16, device=device, scale=8.0, seed=seed
    )
    weights = randn(case["T"], device=device, seed=seed + 1)
    return (gate_up,), {"limit": 10.0, "weights": weights}


SPEC = KernelSpec(
    op=swiglu_clamp, reference=swiglu_clamp_reference, default=default_config,
    candidates=candidates,
    cases=(
        {"name": "small", "T": 7, "I": 100},
        {"name": "flash-tp1", "T": 3456, "I": 2048},
        {"name": "flash-tp8", "T": 3456, "I": 256},
    ),
    inputs=_inputs, tolerance=8e-3, grows="T",
    bytes_moved=lambda case: 3 * case["T"] * case["I"] * 2,
)  # fmt: skip
