"""Carry of a ratio-4 compressor given back to a row that starts at the edge of a page.

At a position that is a multiple of 8 the rows to come read series A of the four tokens before it
and nothing older: a snapshot ``[2, 4, c]`` is their raw ``kv`` and ``gate``, as `compress_kv` keeps
it when it fills a page. Nothing is computed: fp32 is copied.
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


def load_carry(
    carry_snapshots: torch.Tensor, entries: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor,
) -> None:  # fmt: skip
    """Let rows go on behind pages that `compress_kv` or `append_kv` filled for other rows.

    Args:
        carry_snapshots: ``[N, 2, 4, c]`` fp32, as those ops write them.
        entries: ``[S]`` int32, the snapshot that each row starts from; -1 skips a row.
        state: ``[num_states, 2, 8, 2*c]`` fp32, the carry of `compress_kv` at ratio 4; of row
            ``state_index[s]`` the entries ``[:, 4:8, :c]`` are written in place.
        state_index: ``[S]`` int32, each row once; -1 skips.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a row nothing is launched.
    """
    _check(carry_snapshots, entries, state, state_index)
    if entries.numel() == 0:
        return
    if backend.use_reference(carry_snapshots):
        _load(carry_snapshots, entries, state, state_index)
        return
    width = carry_snapshots.shape[3]
    cfg = config.lookup("load_carry", {"c": width}, default_config)
    with backend.on_device(carry_snapshots):
        _load_carry_kernel[(entries.shape[0], 2 * CSA_RATIO)](
            carry_snapshots, *carry_snapshots.stride()[:3], entries,
            state, *state.stride()[:3], state_index,
            C=width, BLOCK_C=triton.next_power_of_2(width), num_warps=cfg.num_warps,
        )  # fmt: skip


def load_carry_reference(
    carry_snapshots: torch.Tensor, entries: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    _check(carry_snapshots, entries, state, state_index)
    _load(carry_snapshots, entries, state, state_index)


def _check(
    snapshots: torch.Tensor, entries: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    op, fp32, int32 = "load_carry", (torch.float32,), (torch.int32,)
    kept = (None, 2, CSA_RATIO, None)
    check.tensor(op, "carry_snapshots", snapshots, fp32, kept, "[N, 2, 4, c]")
    check.tensor(op, "entries", entries, int32, (None,), "[S]", snapshots)
    shape = (None, 2, 2 * CSA_RATIO, 2 * snapshots.shape[3])
    check.tensor(op, "state", state, fp32, shape, "[num_states, 2, 8, 2*c]", snapshots)
    check.tensor(op, "state_index", state_index, int32, (entries.shape[0],), "[S]", snapshots)
    sources = (
        ("carry_snapshots", snapshots), ("entries", entries), ("state_index", state_index)
    )  # fmt: skip
    check.written(op, "state", state, sources)


def _load(
    snapshots: torch.Tensor, entries: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor
) -> None:
    live = (entries >= 0) & (state_index >= 0)
    rows, width = state_index[live].long(), snapshots.shape[3]
    state[rows, :, CSA_RATIO:, :width] = snapshots[entries[live].long()]


@dataclass(frozen=True)
class CarryConfig:
    num_warps: int


def default_config(key: Case) -> CarryConfig:
    """Four channels a thread."""
    return CarryConfig(num_warps=max(1, min(8, triton.next_power_of_2(key["c"]) // 128)))


@triton.jit
def _load_carry_kernel(
    snaps_ptr, stride_nn, stride_nb, stride_nr,  # [N, 2, 4, C]
    entries_ptr,  # [S]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 8, 2*C]
    index_ptr,  # [S]
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_s, line = tl.program_id(0), tl.program_id(1)
    entry = tl.load(entries_ptr + pid_s).to(tl.int64)
    owner = tl.load(index_ptr + pid_s).to(tl.int64)
    if (entry >= 0) & (owner >= 0):
        half, place = (line // _RATIO).to(tl.int64), (line % _RATIO).to(tl.int64)
        offs_c = tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        snap_ptrs = snaps_ptr + entry * stride_nn + half * stride_nb + place * stride_nr + offs_c
        state_ptrs = state_ptr + owner * stride_sn + half * stride_sb + offs_c
        state_ptrs += (place + _RATIO) * stride_sr
        tl.store(state_ptrs, tl.load(snap_ptrs, mask=mask_c, other=0.0), mask=mask_c)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows, width = case["S"], case["c"]
    snapshots = randn(rows, 2, CSA_RATIO, width, device=device, seed=seed)
    state = torch.zeros(rows, 2, 2 * CSA_RATIO, 2 * width, device=device)
    index = torch.arange(rows, dtype=torch.int32).to(device)
    return (snapshots, index.flip(0), state, index), {}


SPEC = KernelSpec(
    op=load_carry, reference=load_carry_reference, default=default_config, inputs=_inputs,
    cases=(
        {"name": "small", "S": 3, "c": 12},
        {"name": "flash", "S": 1, "c": 512},
        {"name": "flash-index", "S": 8, "c": 128},
    ),
    bytes_moved=lambda c: c["S"] * 64 * c["c"],
)  # fmt: skip
