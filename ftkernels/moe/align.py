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
            TOPK=topk_ids.shape[1], BLOCK_M=block_m, PAD_M=triton.next_power_of_2(block_m),
            BLOCK_R=cfg.block_r, BLOCK_E=triton.next_power_of_2(num_experts + 1),
            num_warps=cfg.num_warps,
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
    given = check.parts(op, out, 3)
    results: list[torch.Tensor] = []
    for one, size, name in zip(given, sizes, names, strict=True):
        results.append(check.output(op, one, size, like=topk_ids, name=name, inputs=results))
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


@dataclass(frozen=True)
class AlignConfig:
    block_r: int
    num_warps: int


def default_config(key: Case) -> AlignConfig:
    """All routes of a decode step in one block, 1024 at a time in prefill."""
    block_r = min(1024, max(128, triton.next_power_of_2(key["R"])))
    return AlignConfig(block_r=block_r, num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[AlignConfig]:
    for block_r in (128, 256, 512, 1024, 2048):
        for num_warps in (2, 4, 8):
            if block_r >= 32 * num_warps:
                yield AlignConfig(block_r, num_warps)


@triton.jit
def _expert_of(ids_ptr, stride_it, routes, R, E, TOPK: tl.constexpr):
    # routes left out and lanes past the end count as expert E
    row = (routes // TOPK).to(tl.int64)
    expert = tl.load(ids_ptr + row * stride_it + routes % TOPK, mask=routes < R, other=-1)
    return tl.where(expert >= 0, expert, E)


@triton.jit(do_not_specialize=["R", "M"])
def _moe_align_kernel(
    ids_ptr, stride_it,  # [T, topk]
    sorted_ptr,  # [M]
    expert_ptr,  # [M / BLOCK_M]
    count_ptr,  # [1]
    R, M, E,
    TOPK: tl.constexpr, BLOCK_M: tl.constexpr, PAD_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    # program e < E writes the blocks of expert e, the others what lies past the count; each counts
    # all routes for itself, so that nobody waits
    pid = tl.program_id(0)
    offs_r = tl.arange(0, BLOCK_R)
    offs_e = tl.arange(0, BLOCK_E)
    sizes = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, R, BLOCK_R):
        expert = _expert_of(ids_ptr, stride_it, start + offs_r, R, E, TOPK)
        sizes += tl.histogram(expert, BLOCK_E)
    blocks = tl.where(offs_e < E, (sizes + BLOCK_M - 1) // BLOCK_M, 0)
    num_blocks = tl.sum(blocks, 0)
    if pid >= E:
        offs = (pid - E) * BLOCK_R + offs_r
        tl.store(sorted_ptr + offs, R, mask=(offs >= num_blocks * BLOCK_M) & (offs < M))
        tl.store(expert_ptr + offs, -1, mask=(offs >= num_blocks) & (offs < M // BLOCK_M))
        if pid == E:
            tl.store(count_ptr, num_blocks * BLOCK_M)
    else:
        first = tl.sum(tl.where(offs_e < pid, blocks, 0), 0)
        mine = tl.sum(tl.where(offs_e == pid, blocks, 0), 0)
        written = 0
        for start in range(0, R, BLOCK_R):
            expert = _expert_of(ids_ptr, stride_it, start + offs_r, R, E, TOPK)
            hit = expert == pid
            place = first * BLOCK_M + written + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(sorted_ptr + place, start + offs_r, mask=hit)
            written += tl.sum(hit.to(tl.int32), 0)
        offs_m = written + tl.arange(0, PAD_M)
        tl.store(sorted_ptr + first * BLOCK_M + offs_m, R, mask=offs_m < mine * BLOCK_M)
        for start in range(0, mine, BLOCK_R):
            offs = start + offs_r
            tl.store(expert_ptr + first + offs, pid, mask=offs < mine)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows, topk, num_experts = case["T"], case["topk"], case["E"]
    logits = randn(rows, num_experts, device=device, seed=seed)
    if logits.device.type == "meta":
        ids = torch.empty(rows, topk, dtype=torch.int32, device=device)
    else:
        ids = logits.topk(topk)[1].int()
    return (ids,), {"num_experts": num_experts, "block_m": case["block_m"]}


SPEC = KernelSpec(
    op=moe_align, reference=moe_align_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 9, "topk": 4, "E": 8, "block_m": 4},
        {"name": "flash-t64", "T": 64, "topk": 6, "E": 256, "block_m": 16},
        {"name": "flash-t3456", "T": 3456, "topk": 6, "E": 256, "block_m": 64},
    ),
    inputs=_inputs, grows="R",
    bytes_moved=lambda case: 4 * case["topk"] * case["T"] * 2,
)  # fmt: skip
