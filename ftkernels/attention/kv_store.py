"""Write KV rows into a paged pool, and read them back.

Order of ``store_kv`` when given: RMSNorm, RoPE, FP8 round trip of the first ``D - rope_dim``
channels in groups of 64 (packed rows are quantized anyway).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.attention.pools import KV_GROUP, check_pool, empty_pool, read_rows, write_rows
from ftkernels.attention.stores import (
    fp8_round_trip,
    load_packed_row,
    normed_row,
    rotated_row,
    store_packed_row,
    store_row,
)
from ftkernels.norm.rms_norm import normed
from ftkernels.quant.round_trip import round_tripped
from ftkernels.rope.rope import rotate
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def store_kv(
    kv: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, *, kv_format: str = "bf16",
    rope_dim: int = 64, round_trip: bool = False, norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, positions: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Store the rows of new tokens.

    Args:
        kv: ``[T, D]``, bf16/fp16/fp32.
        pool: ``[pages, P, D]``, or packed ``[pages, P, 584]`` uint8 with ``kv_format="fp8"``.
        kv_format: "bf16" (rows in the dtype of ``pool``) or "fp8".
        slot_mapping: ``[T]`` int32/int64; row ``slot % P`` of page ``slot // P``, -1 to skip a
            token.
        rope_dim: rotated channels, the last ones.
        round_trip: quantize and dequantize the channels before them.
        norm_weight: ``[D]``; RMSNorm first.
        positions, cos, sin: ``[T]`` and tables ``[max_positions, rope_dim/2]``; RoPE second.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a token nothing is launched.
    """
    check_store(
        "store_kv", kv, pool, slot_mapping, kv_format, rope_dim, norm_weight, eps, positions, cos,
        sin,
    )  # fmt: skip
    if kv.numel() == 0:
        return
    if backend.use_reference(kv):
        store_plain(
            kv, pool, slot_mapping, kv_format, rope_dim, round_trip, norm_weight, eps, positions,
            cos, sin,
        )  # fmt: skip
        return
    width = kv.shape[1]
    rope = positions is not None and rope_dim > 0
    cfg = config.lookup("store_kv", {"D": width}, default_config)
    with backend.on_device(kv):
        _store_kv_kernel[(kv.shape[0],)](
            kv, kv.stride(0), slot_mapping, norm_weight,
            positions, cos, cos.stride(0) if rope and cos is not None else 0,
            sin, sin.stride(0) if rope and sin is not None else 0,
            pool, pool.stride(0), pool.stride(1), pool.shape[1], eps,
            D=width, BLOCK_D=triton.next_power_of_2(width), HAS_NORM=norm_weight is not None,
            HALF=rope_dim // 2 if rope else 0,
            CHANNELS=width - rope_dim if round_trip else 0, PACKED=kv_format == "fp8",
            num_warps=cfg.num_warps,
        )  # fmt: skip


def store_kv_reference(
    kv: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, *, kv_format: str = "bf16",
    rope_dim: int = 64, round_trip: bool = False, norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, positions: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    check_store(
        "store_kv", kv, pool, slot_mapping, kv_format, rope_dim, norm_weight, eps, positions, cos,
        sin,
    )  # fmt: skip
    if kv.numel():
        store_plain(
            kv, pool, slot_mapping, kv_format, rope_dim, round_trip, norm_weight, eps, positions,
            cos, sin,
        )  # fmt: skip


def check_store(
    op: str, kv: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, kv_format: str,
    rope_dim: int, norm_weight: torch.Tensor | None, eps: float, positions: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None,
    names: tuple[str, str, str] = ("kv", "pool", "norm_weight"),
) -> None:  # fmt: skip
    """Refuse what `store_kv` does; ``names`` are what ``op`` calls its rows, pool and weight."""
    row, rows, weight = names
    check.tensor(op, row, kv, check.FLOATS, (None, None), "[T, D]")
    num_tokens, head_dim = kv.shape
    check_pool(op, rows, pool, kv_format, head_dim, rope_dim, kv)
    check.tensor(op, "slot_mapping", slot_mapping, check.INTS, (num_tokens,), "[T]", kv)
    check.written(op, rows, pool, ((row, kv),))
    check.number(op, "eps", eps, 0)
    check.integer(op, "rope_dim", rope_dim, 0)
    if rope_dim > head_dim:
        raise ValueError(f"{op}: rope_dim is {rope_dim!r}, expected 0 to D = {head_dim}")
    if norm_weight is not None:
        check.tensor(op, weight, norm_weight, check.FLOATS, (head_dim,), "[D]", kv)
    if not (positions is None) == (cos is None) == (sin is None):
        raise ValueError(f"{op}: positions, cos and sin are partly given, expected all or none")
    if positions is not None and cos is not None:
        check.tensor(op, "positions", positions, check.INTS, (num_tokens,), "[T]", kv)
        check.rope(op, cos, sin, head_dim, kv)
        if 2 * cos.shape[1] != rope_dim:
            raise ValueError(
                f"{op}: cos is {tuple(cos.shape)}, expected rope_dim/2 = {rope_dim // 2} columns"
            )


def store_plain(
    kv: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, kv_format: str, rope_dim: int,
    round_trip: bool, norm_weight: torch.Tensor | None, eps: float, positions: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None,
) -> None:  # fmt: skip
    """The definition without checks; there is a token."""
    num_tokens, head_dim = kv.shape
    rows, slots = pool.shape[1], slot_mapping.long()
    if (int(slots) if num_tokens == 1 else int(slots.min())) < 0:
        # nothing of a skipped token is read
        live = slots >= 0
        slots, kv = slots[live], kv[live]
        positions = None if positions is None else positions[live]
        if not slots.numel():
            return
    if norm_weight is not None:
        kv = normed(kv, norm_weight, eps).to(kv.dtype)
    if positions is not None and cos is not None and sin is not None:
        # a normed row is a copy already
        out = torch.empty_like(kv) if norm_weight is None else kv
        kv = rotate(kv, positions, cos, sin, False, out)
    if round_trip and kv_format == "bf16":
        kv = round_tripped(kv, "fp8", KV_GROUP, head_dim - rope_dim)
    if kv.shape[0] == 1 and kv_format == "bf16":
        slot = int(slots)
        pool[slot // rows, slot % rows] = kv[0]
        return
    write_rows(pool, slots // rows, slots % rows, kv, kv_format)


def load_kv(
    pool: torch.Tensor, slots: torch.Tensor, *, kv_format: str, rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Read rows of a pool, for prefix snapshots, other engines and tests.

    Args:
        pool, kv_format, rope_dim: as in ``store_kv``.
        slots: ``[N]`` int32/int64, -1 gives zeros.
        dtype: of the result.

    Returns:
        ``[N, D]``; with no slot nothing is launched.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` is given: one launch, no allocation, no host sync.
    """
    out = _checked_load(pool, slots, kv_format, rope_dim, dtype, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(pool):
        return _load(pool, slots, kv_format, out)
    width = out.shape[1]
    cfg = config.lookup("load_kv", {"D": width}, default_config)
    with backend.on_device(pool):
        _load_kv_kernel[(out.shape[0],)](
            pool, pool.stride(0), pool.stride(1), pool.shape[1], slots, out, out.stride(0),
            D=width, BLOCK_D=triton.next_power_of_2(width), PACKED=kv_format == "fp8",
            num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def load_kv_reference(
    pool: torch.Tensor, slots: torch.Tensor, *, kv_format: str, rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    return _load(
        pool, slots, kv_format, _checked_load(pool, slots, kv_format, rope_dim, dtype, out)
    )


def _checked_load(
    pool: torch.Tensor, slots: torch.Tensor, kv_format: str, rope_dim: int, dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "load_kv"
    check.dtype(op, "pool", pool, (*check.FLOATS, torch.uint8))
    check.require(pool.ndim == 3, lambda: f"{op}: pool is {tuple(pool.shape)}, expected 3 sizes")
    head_dim = pool.shape[-1] if kv_format == "bf16" else 512
    check_pool(op, "pool", pool, kv_format, head_dim, rope_dim, pool)
    check.tensor(op, "slots", slots, check.INTS, (None,), "[N]", pool)
    check.out_dtype(op, dtype, "dtype")
    size = (slots.shape[0], head_dim)
    return check.output(op, out, size, like=pool, dtype=dtype, inputs=(slots,))


def _load(
    pool: torch.Tensor, slots: torch.Tensor, kv_format: str, out: torch.Tensor
) -> torch.Tensor:
    numbers, rows = slots.long(), pool.shape[1]
    live = numbers >= 0
    out.zero_()
    kept = numbers[live]
    out[live] = read_rows(pool, kept // rows, kept % rows, kv_format).to(out.dtype)
    return out


@dataclass(frozen=True)
class StoreConfig:
    """Tuned for `load_kv` only: the order of the norm's sum in `store_kv` follows the threads."""

    num_warps: int


def default_config(key: Case) -> StoreConfig:
    """One row per program; 16 channels a thread, in one warp up to 512."""
    return StoreConfig(num_warps=max(1, min(16, triton.next_power_of_2(key["D"]) // 512)))


def candidates(key: Case, target: Target) -> Iterable[StoreConfig]:
    width = triton.next_power_of_2(key["D"])
    for num_warps in (1, 2, 4, 8, 16):
        if 64 * num_warps <= max(64, width):
            yield StoreConfig(num_warps)


@triton.jit
def store_token(
    pid_t,
    kv_ptr, stride_kt,  # [T, D]
    slots_ptr,  # [T]
    norm_ptr,  # [D]
    positions_ptr,  # [T]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, D], or packed
    num_rows, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, HALF: tl.constexpr,
    CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The row of token ``pid_t`` (int64) to its slot."""
    slot = tl.load(slots_ptr + pid_t).to(tl.int64)
    if slot >= 0:
        dtype: tl.constexpr = kv_ptr.dtype.element_ty
        offs_d = tl.arange(0, BLOCK_D)
        x = tl.load(kv_ptr + pid_t * stride_kt + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        if HAS_NORM:
            x = normed_row(x, norm_ptr, eps, D, BLOCK_D, dtype)
        if HALF > 0:
            position = tl.load(positions_ptr + pid_t).to(tl.int64)
            cos_row, sin_row = cos_ptr + position * stride_cp, sin_ptr + position * stride_sp
            x = rotated_row(x, cos_row, sin_row, D, HALF, BLOCK_D, dtype)
        page_ptr = pool_ptr + (slot // num_rows) * stride_pp
        row = slot % num_rows
        if PACKED:
            store_packed_row(x, page_ptr, row, num_rows)
        else:
            if CHANNELS > 0:
                x = fp8_round_trip(x, CHANNELS, BLOCK_D, dtype)
            store_row(x, page_ptr + row * stride_pr, D, BLOCK_D)


@triton.jit
def _store_kv_kernel(
    kv_ptr, stride_kt,  # [T, D]
    slots_ptr,  # [T]
    norm_ptr,  # [D]
    positions_ptr,  # [T]
    cos_ptr, stride_cp, sin_ptr, stride_sp,  # [max_positions, HALF]
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, D], or packed
    num_rows, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, HALF: tl.constexpr,
    CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    store_token(
        tl.program_id(0).to(tl.int64), kv_ptr, stride_kt, slots_ptr, norm_ptr, positions_ptr,
        cos_ptr, stride_cp, sin_ptr, stride_sp, pool_ptr, stride_pp, stride_pr, num_rows, eps,
        D, BLOCK_D, HAS_NORM, HALF, CHANNELS, PACKED,
    )  # fmt: skip


@triton.jit
def _load_kv_kernel(
    pool_ptr, stride_pp, stride_pr,  # [pages, rows, D], or packed
    num_rows,
    slots_ptr,  # [N]
    out_ptr, stride_on,  # [N, D]
    D: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pid_n).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    page_ptr = pool_ptr + (slot // num_rows) * stride_pp
    row = slot % num_rows
    if PACKED:
        x = load_packed_row(page_ptr, row, num_rows, live)
    else:
        offs_d = tl.arange(0, BLOCK_D)
        mask = offs_d < tl.where(live, D, 0)
        x = tl.load(page_ptr + row * stride_pr + offs_d, mask=mask, other=0.0).to(tl.float32)
    store_row(x, out_ptr + pid_n * stride_on, D, BLOCK_D)


def _store_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, width, rope = case["T"], case["D"], case["rope"]
    kv = randn(tokens, width, dtype=torch.bfloat16, device=device, seed=seed)
    pool = empty_pool(case["pages"], 128, width, kv_format=case["kv_format"], device=device)
    pool.zero_()
    slots = torch.arange(tokens, dtype=torch.int64).flip(0).to(device)
    kwargs = {"kv_format": case["kv_format"], "round_trip": True, "rope_dim": rope}
    angles = randn(tokens, rope // 2, device=device, seed=seed + 1)
    kwargs |= {"positions": slots, "cos": angles.cos(), "sin": angles.sin()}
    kwargs["norm_weight"] = randn(width, dtype=torch.bfloat16, device=device, seed=seed + 2)
    return (kv, pool, slots), kwargs


def _load_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    (kv, pool, slots), kwargs = _store_inputs(case, device=device, seed=seed)
    if pool.device.type != "meta":
        store_kv_reference(kv, pool, slots, **kwargs)
    return (pool, slots), {"kv_format": case["kv_format"], "rope_dim": case["rope"]}


def _case(name: str, T: int, D: int, rope: int, kv_format: str = "bf16") -> Case:
    return {
        "name": name, "T": T, "D": D, "rope": rope, "pages": -(-T // 128), "kv_format": kv_format
    }  # fmt: skip


_CASES: tuple[Case, ...] = (
    _case("small", 5, 100, 12),
    _case("flash-t1", 1, 512, 64),
    _case("flash-t1-fp8", 1, 512, 64, "fp8"),
    _case("flash", 3456, 512, 64),
    _case("flash-fp8", 3456, 512, 64, "fp8"),
)
SPECS = (
    KernelSpec(
        op=store_kv, reference=store_kv_reference, default=default_config,
        inputs=_store_inputs, cases=_CASES, tolerance=8e-3,
        bytes_moved=lambda c: 4 * c["T"] * c["D"],
    ),
    KernelSpec(
        op=load_kv, reference=load_kv_reference, default=default_config, candidates=candidates,
        inputs=_load_inputs, cases=_CASES, bytes_moved=lambda c: 4 * c["T"] * c["D"],
    ),
)  # fmt: skip
