"""Sorts routes by expert and pads each expert to whole blocks, for grouped matrix products.

Layout: ``sorted_token_ids`` holds route numbers ``t*topk + k``, expert after expert in blocks of
``block_m``, ascending within an expert; padding and everything past the count is ``R = T*topk``.
Deterministic: the order depends on ``topk_ids`` alone.
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

Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def moe_align(
    topk_ids: torch.Tensor, *, num_experts: int, block_m: int, out: Aligned | None = None
) -> Aligned:
    """Group the routes of a step by expert.

    Args:
        topk_ids: ``[T, topk]`` int32, ids in ``[0, num_experts)`` or -1, which is left out.
        num_experts: number of experts, ``>= 1``.
        block_m: rows of a block, ``>= 1``.
        out: ``(sorted_token_ids, expert_ids, num_tokens_post_padded)``; allocated when omitted.

    Returns:
        int32 ``sorted_token_ids [M]``, ``expert_ids [M/block_m]`` (-1 past the count) and
        ``num_tokens_post_padded [1]``, with ``M = roundup(R + num_experts*(block_m-1), block_m)``.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, num_experts or block_m outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(topk_ids, num_experts, block_m, out)
    if topk_ids.numel() == 0:
        return _nothing(out)
    if backend.use_reference(topk_ids):
        return _reference(topk_ids, num_experts, block_m, out)
    num_routes = topk_ids.numel()
    sorted_ids, expert_ids, count = out
    key = {"R": num_routes, "E": num_experts, "block_m": block_m}
    cfg = config.lookup("moe_align", key, default_config, grows="R")
    tail_programs = triton.cdiv(sorted_ids.numel(), cfg.block_r)
    with backend.on_device(topk_ids):
        _moe_align_kernel[(num_experts + tail_programs,)](
            topk_ids, topk_ids.stride(0), sorted_ids, expert_ids, count,
            num_routes, sorted_ids.numel(), num_experts,
            TOPK=topk_ids.shape[1], BLOCK_M=block_m, BLOCK_R=cfg.block_r,
            BLOCK_E=triton.next_power_of_2(num_experts + 1), num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, out: Aligned | None
) -> Aligned:
    op = "moe_align"
    check.tensor(op, "topk_ids", topk_ids, (torch.int32,), (None, None), "[T, topk]")
    check.require(num_experts >= 1, lambda: f"{op}: num_experts is {num_experts}, expected >= 1")
    check.require(block_m >= 1, lambda: f"{op}: block_m is {block_m}, expected >= 1")
    rows = triton.cdiv(topk_ids.numel() + num_experts * (block_m - 1), block_m) * block_m
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    sizes = ((rows,), (rows // block_m,), (1,))
    given = (None, None, None) if out is None else out
    results = [
        check.output(op, one, size, like=topk_ids, name=name)
        for one, size, name in zip(given, sizes, names)
    ]
    return results[0], results[1], results[2]


def _nothing(out: Aligned) -> Aligned:
    out[0].fill_(0)
    out[1].fill_(-1)
    out[2].fill_(0)
    return out


def moe_align_reference(
    topk_ids: torch.Tensor, *, num_experts: int, block_m: int, out: Aligned | None = None
) -> Aligned:
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(topk_ids, num_experts, block_m, out)
    if topk_ids.numel() == 0:
        return _nothing(out)
    return _reference(topk_ids, num_experts, block_m, out)


def _reference(topk_ids: torch.Tensor, num_experts: int, block_m: int, out: Aligned) -> Aligned:
    sorted_ids, expert_ids, count = out
    routes = topk_ids.reshape(-1).long()
    routes = routes.where(routes >= 0, num_experts)  # left out: behind the last expert
    order = routes.argsort(stable=True)
    sizes = routes.bincount(minlength=num_experts + 1)[:num_experts]
    blocks = (sizes + block_m - 1) // block_m
    first_block = blocks.cumsum(0) - blocks
    first_route = sizes.cumsum(0) - sizes
    kept = order[: int(sizes.sum())]
    expert = routes[kept]
    place = torch.arange(len(kept), device=kept.device) - first_route[expert]
    sorted_ids.fill_(len(routes))
    sorted_ids[first_block[expert] * block_m + place] = kept.int()
    expert_ids.fill_(-1)
    num_blocks = int(blocks.sum())
    experts = torch.arange(num_experts, device=kept.device, dtype=torch.int32)
    expert_ids[:num_blocks] = experts.repeat_interleave(blocks)
    count.fill_(num_blocks * block_m)
    return out
