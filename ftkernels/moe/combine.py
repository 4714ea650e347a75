"""Sum of a token's routed outputs and the shared expert: ``out = sum_k routed[:, k] + shared``.

Layout: ``routed`` is ``[T, topk, C]``, already multiplied by the route weights.
Numerics: fp32, ``k = 0..topk-1`` and then ``shared``, one rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def moe_combine(
    routed: torch.Tensor, *, topk_ids: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, shared: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Add up the routes of each token.

    Args:
        routed: ``[T, topk, C]``, bf16/fp16/fp32, last dimension contiguous.
        topk_ids: ``[T, topk]`` int32; routes with id -1 are skipped unread. None: all count.
        slot_of_expert: ``[E]`` int32; routes of experts with slot -1 are skipped too.
        shared: ``[T, C]``, any float dtype, added last.
        out_dtype: element type of the result, that of ``routed`` when omitted.
        out: ``[T, C]``, not aliasing an input; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(routed, topk_ids, slot_of_expert, shared, out_dtype, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(routed):
        return _reference(routed, topk_ids, slot_of_expert, shared, out)
    num_tokens, topk, width = routed.shape
    cfg = config.lookup("moe_combine", {"T": num_tokens, "C": width}, default_config, grows="T")
    with backend.on_device(routed):
        _moe_combine_kernel[(num_tokens, triton.cdiv(width, cfg.block_c))](
            routed, routed.stride(0), routed.stride(1),
            topk_ids, 0 if topk_ids is None else topk_ids.stride(0), slot_of_expert,
            shared, 0 if shared is None else shared.stride(0),
            out, out.stride(0),
            width,
            TOPK=topk, HAS_IDS=topk_ids is not None, HAS_SHARED=shared is not None,
            BLOCK_C=cfg.block_c, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    routed: torch.Tensor, topk_ids: torch.Tensor | None, slot_of_expert: torch.Tensor | None,
    shared: torch.Tensor | None, out_dtype: torch.dtype | None, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "moe_combine"
    check.tensor(op, "routed", routed, check.FLOATS, (None, None, None), "[T, topk, C]")
    num_tokens, topk, width = routed.shape
    if topk_ids is not None:
        size = (num_tokens, topk)
        check.tensor(op, "topk_ids", topk_ids, (torch.int32,), size, "[T, topk]", routed)
    if slot_of_expert is not None:
        ints = (torch.int32,)
        check.tensor(op, "slot_of_expert", slot_of_expert, ints, (None,), "[E]", routed)
        check.require(
            topk_ids is not None, f"{op}: topk_ids is None, expected ids beside slot_of_expert"
        )
    if shared is not None:
        check.tensor(op, "shared", shared, check.FLOATS, (num_tokens, width), "[T, C]", routed)
    dtype = out_dtype or routed.dtype
    if dtype not in check.FLOATS:
        raise TypeError(f"{op}: out_dtype is {dtype}, expected bfloat16, float16 or float32")
    inputs = (topk_ids, shared)
    return check.output(op, out, (num_tokens, width), like=routed, dtype=dtype, inputs=inputs)


def moe_combine_reference(
    routed: torch.Tensor, *, topk_ids: torch.Tensor | None = None,
    slot_of_expert: torch.Tensor | None = None, shared: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(routed, topk_ids, slot_of_expert, shared, out_dtype, out)
    return _reference(routed, topk_ids, slot_of_expert, shared, out)


def combined(
    routed: torch.Tensor, topk_ids: torch.Tensor | None, shared: torch.Tensor | None,
    dtype: torch.dtype, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The formula for references that combine as a part of what they do."""
    if out is None:
        out = routed.new_empty(routed.shape[0], routed.shape[2], dtype=dtype)
        return _reference(routed, topk_ids, None, shared, out)
    out = _checked(routed, topk_ids, None, shared, dtype, out)
    return _reference(routed, topk_ids, None, shared, out)


def _reference(
    routed: torch.Tensor, topk_ids: torch.Tensor | None, slot_of_expert: torch.Tensor | None,
    shared: torch.Tensor | None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if topk_ids is not None:
        skipped = topk_ids < 0
        if slot_of_expert is not None:
            skipped |= slot_of_expert[topk_ids.clamp_min(0).long()] < 0
        routed = routed.masked_fill(skipped[:, :, None], 0.0)
    terms = [*routed.unbind(1)] if shared is None else [*routed.unbind(1), shared]
    if not terms:
        return out.zero_()
    total = terms[0].float()
    for term in terms[1:]:  # one add at a time: the order is part of the contract
        total = total + term.float()
    return out.copy_(total)


@dataclass(frozen=True)
class CombineConfig:
    block_c: int
    num_warps: int


def default_config(key: Case) -> CombineConfig:
    """At most 1024 channels per program."""
    return CombineConfig(block_c=min(1024, triton.next_power_of_2(key["C"])), num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[CombineConfig]:
    for block_c in (256, 512, 1024, 2048):
        for num_warps in (1, 2, 4, 8):
            if block_c <= 2 * key["C"] and 128 * num_warps <= block_c <= 1024 * num_warps:
                yield CombineConfig(block_c, num_warps)


@triton.jit
def _moe_combine_kernel(
    routed_ptr, stride_rt, stride_rk,  # [T, topk, C]
    ids_ptr, stride_it,  # [T, topk]
    slot_ptr,  # [E]
    shared_ptr, stride_st,  # [T, C]
    out_ptr, stride_ot,  # [T, C]
    C,
    TOPK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    routed_ptrs = routed_ptr + pid_t * stride_rt + offs_c
    acc = tl.zeros([BLOCK_C], tl.float32)
    for k in tl.static_range(TOPK):
        width = C
        if HAS_IDS:
            slot = tl.load(ids_ptr + pid_t * stride_it + k)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + tl.maximum(slot, 0), mask=slot >= 0, other=-1)
            width = tl.where(slot >= 0, C, 0)
        acc += tl.load(routed_ptrs, mask=offs_c < width, other=0.0).to(tl.float32)
        routed_ptrs += stride_rk
    if HAS_SHARED:
        shared_ptrs = shared_ptr + pid_t * stride_st + offs_c
        acc += tl.load(shared_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    tl.store(out_ptr + pid_t * stride_ot + offs_c, acc.to(out_ptr.dtype.element_ty), mask=mask_c)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    num_tokens, topk, width = case["T"], case["topk"], case["C"]
    bf16 = torch.bfloat16
    routed = randn(num_tokens, topk, width, dtype=bf16, device=device, seed=seed)
    shared = randn(num_tokens, width, dtype=bf16, device=device, seed=seed + 1)
    ids = torch.arange(num_tokens * topk, device=device, dtype=torch.int32).view(-1, topk) % 5 - 1
    return (routed,), {"topk_ids": ids, "shared": shared}


SPEC = KernelSpec(
    op=moe_combine, reference=moe_combine_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "topk": 4, "C": 200},
        {"name": "flash-t1", "T": 1, "topk": 6, "C": 4096},
        {"name": "flash-t3456", "T": 3456, "topk": 6, "C": 4096},
    ),
    inputs=_inputs, tolerance=8e-3, grows="T",
    bytes_moved=lambda case: 2 * case["T"] * case["C"] * (case["topk"] + 2),
)  # fmt: skip
