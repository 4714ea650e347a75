"""Carry of a ratio-4 compressor at page edges: kept by page, given back to a row that starts there.

At a position that is a multiple of 8 the rows to come read series A of the four tokens before it
and nothing older, so an edge is ``[2, 4, c]``: their raw ``kv`` and ``gate``. That is what
``state[i, :, 4:8, :c]`` of `compress_kv` holds there. Nothing is computed: fp32 is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.attention.pooling import CSA_RATIO
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

_RATIO = tl.constexpr(CSA_RATIO)
_EDGE = (2, CSA_RATIO)
_FP32, _INT32 = (torch.float32,), (torch.int32,)


def save_carry(
    kv: torch.Tensor, gate: torch.Tensor, edges: torch.Tensor, slot_mapping: torch.Tensor, *,
    page_tokens: int = 128,
) -> None:  # fmt: skip
    """Keep what the last four tokens of a page leave to the page behind it.

    Args:
        kv, gate: ``[T, 2*c]`` fp32 raw projections of the new tokens, as in `compress_kv`.
        edges: ``[pages, 2, 4, c]`` fp32, written in place: page ``slot // page_tokens`` of tokens
            whose ``slot % page_tokens`` is one of the last four.
        slot_mapping: ``[T]`` int32/int64, as in `store_kv`; -1 skips a token.
        page_tokens: tokens of a page, a multiple of 8.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a token nothing is launched.
    """
    _check_save(kv, gate, edges, slot_mapping, page_tokens)
    if kv.numel() == 0:
        return
    if backend.use_reference(kv):
        _save(kv, gate, edges, slot_mapping, page_tokens)
        return
    width = edges.shape[3]
    cfg = config.lookup("save_carry", {"c": width}, default_config)
    with backend.on_device(kv):
        _save_carry_kernel[(kv.shape[0],)](
            kv, kv.stride(0), gate, gate.stride(0), edges, *edges.stride()[:3], slot_mapping,
            page_tokens,
            C=width, BLOCK_C=triton.next_power_of_2(width), num_warps=cfg.num_warps,
        )  # fmt: skip


def save_carry_reference(
    kv: torch.Tensor, gate: torch.Tensor, edges: torch.Tensor, slot_mapping: torch.Tensor, *,
    page_tokens: int = 128,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    _check_save(kv, gate, edges, slot_mapping, page_tokens)
    _save(kv, gate, edges, slot_mapping, page_tokens)


def load_carry(
    edges: torch.Tensor, pages: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    """Let rows go on behind pages that `save_carry` has seen the end of.

    Args:
        edges: ``[num_pages, 2, 4, c]`` fp32.
        pages: ``[S]`` int32, the page before each row's next token; -1 skips a row.
        state: ``[num_states, 2, 8, 2*c]`` fp32, the carry of `compress_kv` at ratio 4; of row
            ``state_index[s]`` the entries ``[:, 4:8, :c]`` are written in place.
        state_index: ``[S]`` int32, each row once; -1 skips.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a row nothing is launched.
    """
    _check_load(edges, pages, state, state_index)
    if pages.numel() == 0:
        return
    if backend.use_reference(edges):
        _load(edges, pages, state, state_index)
        return
    width = edges.shape[3]
    cfg = config.lookup("load_carry", {"c": width}, default_config)
    with backend.on_device(edges):
        _load_carry_kernel[(pages.shape[0], 2 * CSA_RATIO)](
            edges, *edges.stride()[:3], pages, state, *state.stride()[:3], state_index,
            C=width, BLOCK_C=triton.next_power_of_2(width), num_warps=cfg.num_warps,
        )  # fmt: skip


def load_carry_reference(
    edges: torch.Tensor, pages: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    """The definition in plain torch."""
    _check_load(edges, pages, state, state_index)
    _load(edges, pages, state, state_index)


def _check_save(
    kv: torch.Tensor, gate: torch.Tensor, edges: torch.Tensor, slot_mapping: torch.Tensor,
    page_tokens: int,
) -> None:  # fmt: skip
    op = "save_carry"
    check.tensor(op, "kv", kv, _FP32, (None, None), "[T, 2*c]")
    check.tensor(op, "gate", gate, _FP32, tuple(kv.shape), "[T, 2*c]", kv)
    check.tensor(op, "edges", edges, _FP32, (None, *_EDGE, None), "[pages, 2, 4, c]", kv)
    check.require(
        2 * edges.shape[3] == kv.shape[1],
        lambda: f"{op}: edges is {tuple(edges.shape)}, expected half of kv's {kv.shape[1]} columns",
    )
    check.tensor(op, "slot_mapping", slot_mapping, check.INTS, (kv.shape[0],), "[T]", kv)
    check.integer(op, "page_tokens", page_tokens, 1)
    check.require(
        page_tokens % (2 * CSA_RATIO) == 0,
        lambda: f"{op}: page_tokens is {page_tokens}, expected a multiple of 8",
    )
    check.written(op, "edges", edges, (("kv", kv), ("gate", gate), ("slot_mapping", slot_mapping)))


def _check_load(
    edges: torch.Tensor, pages: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    op = "load_carry"
    check.tensor(op, "edges", edges, _FP32, (None, *_EDGE, None), "[num_pages, 2, 4, c]")
    check.tensor(op, "pages", pages, _INT32, (None,), "[S]", edges)
    shape = (None, 2, 2 * CSA_RATIO, 2 * edges.shape[3])
    check.tensor(op, "state", state, _FP32, shape, "[num_states, 2, 8, 2*c]", edges)
    check.tensor(op, "state_index", state_index, _INT32, (pages.shape[0],), "[S]", edges)
    sources = (("edges", edges), ("pages", pages), ("state_index", state_index))
    check.written(op, "state", state, sources)


def _save(
    kv: torch.Tensor, gate: torch.Tensor, edges: torch.Tensor, slot_mapping: torch.Tensor,
    page_tokens: int,
) -> None:  # fmt: skip
    slots, width = slot_mapping.long(), edges.shape[3]
    last = page_tokens - CSA_RATIO
    kept = ((slots >= 0) & (slots % page_tokens >= last)).nonzero()[:, 0]
    slots = slots[kept]
    pages, places = slots // page_tokens, slots % page_tokens - last
    edges[pages, 0, places] = kv[kept, :width]
    edges[pages, 1, places] = gate[kept, :width]


def _load(
    edges: torch.Tensor, pages: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    live = (pages >= 0) & (state_index >= 0)
    rows, width = state_index[live].long(), edges.shape[3]
    state[rows, :, CSA_RATIO:, :width] = edges[pages[live].long()]


@dataclass(frozen=True)
class CarryConfig:
    num_warps: int


def default_config(key: Case) -> CarryConfig:
    """Four channels a thread."""
    return CarryConfig(num_warps=max(1, min(8, triton.next_power_of_2(key["c"]) // 128)))


@triton.jit
def _save_carry_kernel(
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, 2*C]
    edges_ptr, stride_ep, stride_eb, stride_er,  # [pages, 2, 4, C]
    slots_ptr,  # [T]
    page_tokens,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pid_t).to(tl.int64)
    place = slot % page_tokens - (page_tokens - _RATIO)
    if (slot >= 0) & (place >= 0):
        offs_c = tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        kv = tl.load(kv_ptr + pid_t * stride_kt + offs_c, mask=mask_c, other=0.0)
        gate = tl.load(gate_ptr + pid_t * stride_gt + offs_c, mask=mask_c, other=0.0)
        page = slot // page_tokens
        edge_ptrs = edges_ptr + page * stride_ep + place * stride_er + offs_c
        tl.store(edge_ptrs, kv, mask=mask_c)
        tl.store(edge_ptrs + stride_eb, gate, mask=mask_c)


@triton.jit
def _load_carry_kernel(
    edges_ptr, stride_ep, stride_eb, stride_er,  # [pages, 2, 4, C]
    pages_ptr,  # [S]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 8, 2*C]
    index_ptr,  # [S]
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_s, line = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages_ptr + pid_s).to(tl.int64)
    owner = tl.load(index_ptr + pid_s).to(tl.int64)
    if (page >= 0) & (owner >= 0):
        half, place = (line // _RATIO).to(tl.int64), (line % _RATIO).to(tl.int64)
        offs_c = tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        edge_ptrs = edges_ptr + page * stride_ep + half * stride_eb + place * stride_er + offs_c
        state_ptrs = state_ptr + owner * stride_sn + half * stride_sb + offs_c
        state_ptrs += (place + _RATIO) * stride_sr
        tl.store(state_ptrs, tl.load(edge_ptrs, mask=mask_c, other=0.0), mask=mask_c)


def _save_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, width = case["T"], case["c"]
    kv = randn(tokens, 2 * width, device=device, seed=seed)
    gate = randn(tokens, 2 * width, device=device, seed=seed + 1)
    pages = -(-(tokens + case["start"]) // 128)
    edges = torch.zeros(pages, *_EDGE, width, device=device)
    slots = torch.arange(case["start"], case["start"] + tokens).to(device)
    return (kv, gate, edges, slots), {}


def _load_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows, width = case["S"], case["c"]
    edges = randn(rows, *_EDGE, width, device=device, seed=seed)
    state = torch.zeros(rows, 2, 2 * CSA_RATIO, 2 * width, device=device)
    index = torch.arange(rows, dtype=torch.int32).to(device)
    return (edges, index.flip(0), state, index), {}


def _num_saved(start: int, tokens: int) -> int:
    """How many of these positions are the last ones of a page."""
    return sum(t % 128 >= 128 - CSA_RATIO for t in range(start, start + tokens))


SPECS = (
    KernelSpec(
        op=save_carry, reference=save_carry_reference, default=default_config,
        inputs=_save_inputs,
        cases=(
            {"name": "small", "T": 9, "start": 120, "c": 12},
            {"name": "flash-t1", "T": 1, "start": 127, "c": 512},
            {"name": "flash", "T": 3456, "start": 0, "c": 512},
            {"name": "flash-index", "T": 3456, "start": 0, "c": 128},
        ),
        bytes_moved=lambda c: 16 * c["c"] * _num_saved(c["start"], c["T"]) + 8 * c["T"],
    ),
    KernelSpec(
        op=load_carry, reference=load_carry_reference, default=default_config,
        inputs=_load_inputs,
        cases=(
            {"name": "small", "S": 3, "c": 12},
            {"name": "flash", "S": 1, "c": 512},
            {"name": "flash-index", "S": 8, "c": 128},
        ),
        bytes_moved=lambda c: c["S"] * 64 * c["c"],
    ),
)  # fmt: skip
