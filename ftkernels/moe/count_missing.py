"""How many routes of a step have no slot: ``sum over t, k of id >= 0 and slot_of_expert[id] < 0``,
where an id past the last expert has none.

A decode step that only looks up its experts asks this afterwards; 0 means that nothing was left
out. Deterministic: integers, one block.
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


def count_missing(
    slot_of_expert: torch.Tensor, topk_ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the routes whose expert has no slot.

    Args:
        slot_of_expert: ``[E]`` int32, -1 for an expert without a slot.
        topk_ids: ``[T, topk]`` int32; ids below 0 are not counted, those from E on are missing.
        out: ``[1]`` int32; allocated when omitted.

    Returns:
        ``[1]`` int32 on the device.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(slot_of_expert, topk_ids, out)
    if topk_ids.numel() == 0:
        return out.fill_(0)
    if backend.use_reference(topk_ids):
        return _reference(slot_of_expert, topk_ids, out)
    num_routes = topk_ids.numel()
    cfg = config.lookup("count_missing", {"R": num_routes}, default_config, grows="R")
    with backend.on_device(topk_ids):
        _count_missing_kernel[(1,)](
            slot_of_expert, topk_ids, topk_ids.stride(0), out, num_routes, len(slot_of_expert),
            TOPK=topk_ids.shape[1], BLOCK_R=cfg.block_r, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    slot_of_expert: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    op, ints = "count_missing", (torch.int32,)
    check.tensor(op, "slot_of_expert", slot_of_expert, ints, (None,), "[E]")
    check.tensor(op, "topk_ids", topk_ids, ints, (None, None), "[T, topk]", slot_of_expert)
    return check.output(op, out, (1,), like=topk_ids, inputs=(slot_of_expert,))


def count_missing_reference(
    slot_of_expert: torch.Tensor, topk_ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(slot_of_expert, topk_ids, out)
    return _reference(slot_of_expert, topk_ids, out)


def _reference(
    slot_of_expert: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    ids = topk_ids[topk_ids >= 0].long()
    known = ids[ids < len(slot_of_expert)]
    return out.fill_(len(ids) - int((slot_of_expert[known] >= 0).sum()))


@dataclass(frozen=True)
class CountConfig:
    block_r: int
    num_warps: int


def default_config(key: Case) -> CountConfig:
    """All routes of a decode step in one pass, 1024 at a time in prefill."""
    block_r = min(1024, max(32, triton.next_power_of_2(key["R"])))
    return CountConfig(block_r=block_r, num_warps=max(1, block_r // 256))


def candidates(key: Case, target: Target) -> Iterable[CountConfig]:
    for block_r in (32, 256, 1024):
        for num_warps in (1, 4):
            if block_r >= 32 * num_warps:
                yield CountConfig(block_r, num_warps)


@triton.jit(do_not_specialize=["R"])
def _count_missing_kernel(
    slot_ptr,  # [E]
    ids_ptr, stride_it,  # [T, topk]
    out_ptr,  # [1]
    R, E,
    TOPK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_r = tl.arange(0, BLOCK_R)
    missing = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, R, BLOCK_R):
        routes = start + offs_r
        row = (routes // TOPK).to(tl.int64)
        expert = tl.load(ids_ptr + row * stride_it + routes % TOPK, mask=routes < R, other=-1)
        slot = tl.load(slot_ptr + expert, mask=(expert >= 0) & (expert < E), other=-1)
        missing += ((expert >= 0) & (slot < 0)).to(tl.int32)
    tl.store(out_ptr, tl.sum(missing, 0))


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    logits = randn(case["T"], case["E"], device=device, seed=seed)
    slots = torch.arange(case["E"], dtype=torch.int32, device=device)
    if logits.is_meta:
        return (slots, torch.empty(case["T"], case["topk"], dtype=torch.int32, device=device)), {}
    return (slots - case["E"] // 2, logits.topk(case["topk"])[1].int()), {}


SPEC = KernelSpec(
    op=count_missing, reference=count_missing_reference, default=default_config,
    candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "topk": 4, "E": 16},
        {"name": "flash-t1", "T": 1, "topk": 6, "E": 256},
        {"name": "flash-t64", "T": 64, "topk": 6, "E": 256},
    ),
    inputs=_inputs, grows="R",
    bytes_moved=lambda case: 8 * case["T"] * case["topk"],
)  # fmt: skip
