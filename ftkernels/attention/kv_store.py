"""Write KV rows into a paged pool, and read them back.

Order of ``store_kv`` when given: RMSNorm, RoPE, FP8 round trip of the first ``D - rope_dim``
channels in groups of 64 (packed rows are quantized anyway).
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.attention.pools import KV_GROUP, check_pool, empty_pool, read_rows, write_rows
from ftkernels.norm.rms_norm import normed
from ftkernels.quant.round_trip import round_tripped
from ftkernels.rope.rope import rotate
from ftkernels.spec import Case, Inputs, KernelSpec
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
    """
    store_kv_reference(
        kv, pool, slot_mapping, kv_format=kv_format, rope_dim=rope_dim, round_trip=round_trip,
        norm_weight=norm_weight, eps=eps, positions=positions, cos=cos, sin=sin,
    )  # fmt: skip


def store_kv_reference(
    kv: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, *, kv_format: str = "bf16",
    rope_dim: int = 64, round_trip: bool = False, norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, positions: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    op = "store_kv"
    check.tensor(op, "kv", kv, check.FLOATS, (None, None), "[T, D]")
    num_tokens, head_dim = kv.shape
    check_pool(op, "pool", pool, kv_format, head_dim, rope_dim, kv)
    check.tensor(op, "slot_mapping", slot_mapping, check.INTS, (num_tokens,), "[T]", kv)
    check.number(op, "eps", eps, 0)
    if not isinstance(rope_dim, int) or not 0 <= rope_dim <= head_dim:
        raise ValueError(f"{op}: rope_dim is {rope_dim!r}, expected 0 to D = {head_dim}")
    if norm_weight is not None:
        check.tensor(op, "norm_weight", norm_weight, check.FLOATS, (head_dim,), "[D]", kv)
    if not (positions is None) == (cos is None) == (sin is None):
        raise ValueError(f"{op}: positions, cos and sin are partly given, expected all or none")
    if positions is not None and cos is not None:
        check.tensor(op, "positions", positions, check.INTS, (num_tokens,), "[T]", kv)
        check.rope(op, cos, sin, head_dim, kv)
        if 2 * cos.shape[1] != rope_dim:
            raise ValueError(
                f"{op}: cos is {tuple(cos.shape)}, expected rope_dim/2 = {rope_dim // 2} columns"
            )
    if num_tokens == 0:
        return
    if norm_weight is not None:
        kv = normed(kv, norm_weight, eps).to(kv.dtype)
    if positions is not None and cos is not None and sin is not None:
        # a normed row is a copy already
        out = torch.empty_like(kv) if norm_weight is None else kv
        kv = rotate(kv, positions, cos, sin, False, out)
    if round_trip and kv_format == "bf16":
        kv = round_tripped(kv, "fp8", KV_GROUP, head_dim - rope_dim)
    rows = pool.shape[1]
    if num_tokens == 1 and kv_format == "bf16":
        slot = int(slot_mapping)
        if slot >= 0:
            pool[slot // rows, slot % rows] = kv[0]
        return
    slots = slot_mapping.long()
    if int(slots.min()) < 0:
        live = slots >= 0
        slots, kv = slots[live], kv[live]
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
        ``[N, D]``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    return load_kv_reference(
        pool, slots, kv_format=kv_format, rope_dim=rope_dim, dtype=dtype, out=out
    )


def load_kv_reference(
    pool: torch.Tensor, slots: torch.Tensor, *, kv_format: str, rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch."""
    op = "load_kv"
    check.dtype(op, "pool", pool, (*check.FLOATS, torch.uint8))
    check.require(pool.ndim == 3, lambda: f"{op}: pool is {tuple(pool.shape)}, expected 3 sizes")
    head_dim = pool.shape[-1] if kv_format == "bf16" else 512
    check_pool(op, "pool", pool, kv_format, head_dim, rope_dim, pool)
    check.tensor(op, "slots", slots, check.INTS, (None,), "[N]", pool)
    check.out_dtype(op, dtype)
    size = (slots.shape[0], head_dim)
    out = check.output(op, out, size, like=pool, dtype=dtype, inputs=(slots,))
    numbers, rows = slots.long(), pool.shape[1]
    live = numbers >= 0
    out.zero_()
    kept = numbers[live]
    out[live] = read_rows(pool, kept // rows, kept % rows, kv_format).to(dtype)
    return out


def _store_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, head_dim = case["T"], case["D"]
    kv = randn(tokens, head_dim, dtype=torch.bfloat16, device=device, seed=seed)
    pool = empty_pool(case["pages"], 128, head_dim, kv_format=case["kv_format"], device=device)
    pool.zero_()
    slots = torch.arange(tokens, dtype=torch.int64).flip(0).to(device)
    return (kv, pool, slots), {"kv_format": case["kv_format"], "round_trip": True}


def _load_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    (kv, pool, slots), kwargs = _store_inputs(case, device=device, seed=seed)
    if pool.device.type != "meta":
        store_kv_reference(kv, pool, slots, **kwargs)
    return (pool, slots), {"kv_format": case["kv_format"]}


_CASES: tuple[Case, ...] = (
    {"name": "small", "T": 5, "D": 128, "pages": 2, "kv_format": "bf16"},
    {"name": "flash", "T": 3456, "D": 512, "pages": 28, "kv_format": "bf16"},
    {"name": "flash-fp8", "T": 3456, "D": 512, "pages": 28, "kv_format": "fp8"},
)
SPECS = (
    KernelSpec(
        op=store_kv, reference=store_kv_reference, kernel=False, inputs=_store_inputs,
        cases=_CASES, grows="T", bytes_moved=lambda c: 4 * c["T"] * c["D"],
    ),
    KernelSpec(
        op=load_kv, reference=load_kv_reference, kernel=False, inputs=_load_inputs,
        cases=_CASES, grows="T", bytes_moved=lambda c: 4 * c["T"] * c["D"],
    ),
)  # fmt: skip
