"""Index queries from their projection: rotation, Hadamard and FP4 round trip in one launch.

The formulas, roundings and bits of `apply_rope`, `hadamard` and `quant_round_trip` one after
another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.attention.pools import INDEX_GROUP
from ftkernels.quant.formats import (
    tl_absbits,
    tl_e2m1_round,
    tl_group_code,
    tl_ue8m0_decode,
    tl_ue8m0_inverse,
)
from ftkernels.quant.hadamard import butterflies, hadamard_reference
from ftkernels.quant.round_trip import round_tripped
from ftkernels.rope.rope import rope_tables, rotate
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

_WIDEST = 4096


def index_query(
    q: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *,
    round_trip: bool = True, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Make `index_select`'s queries of a projection.

    Args:
        q: ``[T, Hi, Di]``, bf16/fp16/fp32, ``Di`` a power of two up to 4096, last dimension
            contiguous.
        positions: ``[T]`` int32 or int64, below ``max_positions`` (not checked).
        cos, sin: ``[max_positions, r/2]`` fp32; the last ``r`` channels are rotated.
        round_trip: Hadamard rotation and FP4 round trip in groups of 32 after that.
        out: as ``q``, may be ``q`` itself; allocated when omitted.

    Returns:
        ``out``; empty input launches nothing.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(q, positions, cos, sin, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(q):
        return _query(q, positions, cos, sin, round_trip, out)
    num_tokens, heads, width = q.shape
    key = {"T": num_tokens * heads, "D": width}
    cfg = config.lookup("index_query", key, default_config, grows="T")
    with backend.on_device(q):
        _index_query_kernel[(triton.cdiv(num_tokens * heads, cfg.block_r),)](
            q, q.stride(0), q.stride(1), positions, positions.stride(0),
            cos, cos.stride(0), sin, sin.stride(0),
            out, out.stride(0), out.stride(1),
            num_tokens * heads, heads, width**-0.5,
            D=width, LOG2_D=width.bit_length() - 1, HALF=cos.shape[1],
            GROUP=min(INDEX_GROUP, width), ROUND_TRIP=round_trip, BLOCK_R=cfg.block_r,
            num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def index_query_reference(
    q: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *,
    round_trip: bool = True, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The three definitions one after another."""
    out = _checked(q, positions, cos, sin, out)
    return out if out.numel() == 0 else _query(q, positions, cos, sin, round_trip, out)


def _checked(
    q: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "index_query"
    check.tensor(op, "q", q, check.FLOATS, (None, None, None), "[T, Hi, Di]")
    num_tokens, _, width = q.shape
    if not 0 < width <= _WIDEST or width & (width - 1):
        raise ValueError(
            f"{op}: q is {tuple(q.shape)}, expected Di to be a power of two up to {_WIDEST}"
        )
    check.dtype(op, "positions", positions, check.INTS)
    check.shape(op, "positions", positions, (num_tokens,), "[T]")
    check.device(op, "positions", positions, q)
    for name, table in (("cos", cos), ("sin", sin)):
        check.dtype(op, name, table, (torch.float32,))
    check.rope(op, cos, sin, width, q)
    return check.output(op, out, q.shape, like=q, may_alias=True, inputs=(positions, cos, sin))


def _query(
    q: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    round_trip: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    rotated = rotate(q, positions, cos, sin, False, out) if cos.shape[1] else out.copy_(q)
    if not round_trip:
        return rotated
    return out.copy_(round_tripped(hadamard_reference(rotated), "fp4", INDEX_GROUP))


@dataclass(frozen=True)
class QueryConfig:
    block_r: int
    num_warps: int


def default_config(key: Case) -> QueryConfig:
    """Used when no tuned entry fits: heads of up to 2048 channels together in one program."""
    rows = min(triton.next_power_of_2(key["T"]), max(1, 2048 // key["D"]))
    return QueryConfig(block_r=rows, num_warps=4 if rows * key["D"] >= 1024 else 1)


def candidates(key: Case, target: Target) -> Iterable[QueryConfig]:
    """4 to 32 values a thread: fewer are no wide loads, more do not stay in registers."""
    for block_r in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8):
            if 128 * num_warps <= block_r * key["D"] <= min(4096, 1024 * num_warps):
                yield QueryConfig(block_r, num_warps)


@triton.jit
def _rotated(
    x, position, live, cos_ptr, stride_cp, sin_ptr, stride_sp,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows ``[BLOCK_R, D]`` with the last 2 * HALF channels turned by their positions."""
    pair = tl.arange(0, D // 2)[None, :] - (D // 2 - HALF)
    turns = pair >= 0
    mask = live[:, None] & turns
    cos = tl.load(cos_ptr + (position * stride_cp)[:, None] + pair, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + (position * stride_sp)[:, None] + pair, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(x, (BLOCK_R, D // 2, 2)))
    first = tl.where(turns, even * cos - odd * sin, even)
    second = tl.where(turns, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(first, second), (BLOCK_R, D))


@triton.jit(do_not_specialize=["num_rows"])
def _index_query_kernel(
    q_ptr, stride_qt, stride_qh,  # [T, H, D]
    positions_ptr, stride_pt,  # [T]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    out_ptr, stride_ot, stride_oh,  # [T, H, D]
    num_rows, H, factor,
    D: tl.constexpr, LOG2_D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ROUND_TRIP: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = offs_r < num_rows
    token, head = offs_r // H, offs_r % H
    offs_d = tl.arange(0, D)[None, :]
    mask = live[:, None] & (offs_d < D)
    rows = q_ptr + token * stride_qt + head * stride_qh
    x = tl.load(rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
    # out may be q: no store before every thread has read
    tl.debug_barrier()
    if HALF > 0:
        position = tl.load(positions_ptr + token * stride_pt, mask=live, other=0).to(tl.int64)
        x = _rotated(
            x, position, live, cos_ptr, stride_cp, sin_ptr, stride_sp, D, HALF, BLOCK_R
        ).to(dtype).to(tl.float32)  # fmt: skip
    if ROUND_TRIP:
        x = (butterflies(x, BLOCK_R, D, LOG2_D) * factor).to(dtype).to(tl.float32)
        grouped = tl.reshape(x, (BLOCK_R, D // GROUP, GROUP))
        # the floor is 6 * 2^-126, as bits
        code = tl_group_code(tl.max(tl_absbits(grouped), 2), 0x01C00000, 1.0 / 6.0)
        values = tl_e2m1_round(grouped * tl_ue8m0_inverse(code)[:, :, None])
        x = tl.reshape(values * tl_ue8m0_decode(code)[:, :, None], (BLOCK_R, D))
    out_rows = out_ptr + token * stride_ot + head * stride_oh
    tl.store(out_rows[:, None] + offs_d, x.to(dtype), mask=mask)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens = case["T"]
    q = randn(tokens, case["H"], case["D"], dtype=torch.bfloat16, device=device, seed=seed)
    cos, sin = rope_tables(dim=case["r"], max_positions=tokens, theta=160000.0)
    positions = torch.arange(tokens).to(device)
    kwargs = {"round_trip": bool(case["round_trip"])}
    return (q, positions, cos.to(device), sin.to(device)), kwargs


def _case(name: str, T: int, H: int, D: int, r: int, round_trip: int = 1) -> Case:
    return {"name": name, "T": T, "H": H, "D": D, "r": r, "round_trip": round_trip}


SPEC = KernelSpec(
    op=index_query, reference=index_query_reference, default=default_config,
    candidates=candidates,
    cases=(
        _case("small", 3, 5, 64, 12),
        _case("small-rope", 3, 5, 32, 8, round_trip=0),
        _case("flash-t1", 1, 64, 128, 64),
        _case("flash-t8", 8, 64, 128, 64),
        _case("flash-t3456", 3456, 64, 128, 64),
        _case("flash-exact", 8, 64, 128, 64, round_trip=0),
    ),
    inputs=_inputs, tolerance=8e-3, grows="T",
    bytes_moved=lambda case: case["T"] * case["H"] * case["D"] * 4,
    flops=lambda case: case["T"] * case["H"] * (3 * case["r"] + 7 * case["D"]),
)  # fmt: skip
