"""`store_kv` and `compress_kv` of the same tokens in one launch, for a layer that has both pools.

Two kinds of block: those of the compressor come first, then one for each token's window row, of
as many threads; the sum of a window row's norm may run in another order than in `store_kv`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.attention import compressor, kv_store
from ftkernels.attention.compressor import (
    CompressConfig,
    check_compress,
    check_snapshots,
    compress_plain,
    snapshot_arguments,
)
from ftkernels.attention.kv_store import check_store, store_plain, store_token
from ftkernels.attention.pooling import (
    CSA_RATIO,
    csa_rows,
    hca_rows,
    num_programs,
    place,
    sequence_lanes,
)
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target

_NAMES = ("row", "window_kv", "row_norm_weight")


def append_kv(
    row: torch.Tensor, window_kv: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor,
    gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor, cmp_kv: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, compress_ratio: int,
    row_norm_weight: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    eps: float = 1e-6, round_trip: bool = True, kv_format: str = "bf16",
    carry_snapshots: torch.Tensor | None = None, snapshot_table: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Store the window rows of new tokens and append the compressed rows they close.

    Args:
        row, window_kv, slot_mapping: ``kv``, ``pool`` and ``slot_mapping`` of `store_kv`.
        kv, gate, ape, norm_weight, state, state_index, block_table: as in `compress_kv`.
        cmp_kv: its ``pool``.
        cu_seqlens, seq_lens, compress_ratio: as in `compress_kv`.
        row_norm_weight: ``[D]``, ``norm_weight`` of `store_kv`.
        positions: ``[T]`` int32/int64 of the tokens.
        cos, sin: rope tables of both kinds of row; ``rope_dim`` is twice their width.
        eps: of both norms.
        round_trip: quantize and dequantize both kinds of row, which ``store="kv"`` does there.
        kv_format: of both pools.
        carry_snapshots, snapshot_table: as in `compress_kv`, where a page has as many compressed
            rows as ``cmp_kv``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a token nothing is launched.
    """
    _check(
        row, window_kv, slot_mapping, kv, gate, ape, norm_weight, state, state_index, cmp_kv,
        block_table, cu_seqlens, seq_lens, compress_ratio, row_norm_weight, positions, cos, sin,
        eps, round_trip, kv_format, carry_snapshots, snapshot_table,
    )  # fmt: skip
    if kv.numel() == 0 or row.numel() == 0 or state_index.shape[0] == 0:
        return
    if backend.use_reference(row):
        _append(
            row, window_kv, slot_mapping, kv, gate, ape, norm_weight, state, state_index, cmp_kv,
            block_table, cu_seqlens, seq_lens, compress_ratio, row_norm_weight, positions, cos,
            sin, eps, round_trip, kv_format, carry_snapshots, snapshot_table,
        )  # fmt: skip
        return
    num_tokens, dim = row.shape
    width, sequences = norm_weight.shape[0], state_index.shape[0]
    rope_dim = 2 * cos.shape[1]
    cfg = config.lookup("append_kv", {"c": width, "ratio": compress_ratio}, default_config)
    programs = num_programs(compress_ratio, num_tokens, sequences)
    with backend.on_device(row):
        _append_kv_kernel[(programs + num_tokens,)](
            row, row.stride(0), slot_mapping, row_norm_weight, positions,
            window_kv, window_kv.stride(0), window_kv.stride(1), window_kv.shape[1],
            kv, kv.stride(0), gate, gate.stride(0), ape, ape.stride(0), norm_weight,
            state, *state.stride()[:3], state_index,
            cmp_kv, cmp_kv.stride(0), cmp_kv.stride(1), cmp_kv.shape[1],
            block_table, block_table.stride(0), cu_seqlens, seq_lens,
            cos, cos.stride(0), sin, sin.stride(0),
            *snapshot_arguments(carry_snapshots, snapshot_table),
            programs, sequences, eps, width**-0.5,
            D=dim, BLOCK_D=triton.next_power_of_2(dim),
            CHANNELS=dim - rope_dim if round_trip else 0,
            C=width, BLOCK_C=triton.next_power_of_2(width), HALF=cos.shape[1],
            LOG2_C=width.bit_length() - 1, STORE="kv" if round_trip else "raw",
            PACKED=kv_format == "fp8", BLOCK_S=sequence_lanes(sequences),
            IS_CSA=compress_ratio == CSA_RATIO, SNAPSHOTS=carry_snapshots is not None,
            STAGES=cfg.stages, num_warps=cfg.num_warps,
        )  # fmt: skip


def append_kv_reference(
    row: torch.Tensor, window_kv: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor,
    gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor, cmp_kv: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, compress_ratio: int,
    row_norm_weight: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    eps: float = 1e-6, round_trip: bool = True, kv_format: str = "bf16",
    carry_snapshots: torch.Tensor | None = None, snapshot_table: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The two definitions one after the other."""
    _check(
        row, window_kv, slot_mapping, kv, gate, ape, norm_weight, state, state_index, cmp_kv,
        block_table, cu_seqlens, seq_lens, compress_ratio, row_norm_weight, positions, cos, sin,
        eps, round_trip, kv_format, carry_snapshots, snapshot_table,
    )  # fmt: skip
    if kv.numel() and row.numel() and state_index.shape[0]:
        _append(
            row, window_kv, slot_mapping, kv, gate, ape, norm_weight, state, state_index, cmp_kv,
            block_table, cu_seqlens, seq_lens, compress_ratio, row_norm_weight, positions, cos,
            sin, eps, round_trip, kv_format, carry_snapshots, snapshot_table,
        )  # fmt: skip


def _check(
    row: torch.Tensor, window_kv: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor,
    gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor, cmp_kv: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, ratio: int, row_norm_weight: torch.Tensor,
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, round_trip: bool,
    kv_format: str, carry_snapshots: torch.Tensor | None, snapshot_table: torch.Tensor | None,
) -> None:  # fmt: skip
    op, store = "append_kv", "kv" if round_trip else "raw"
    check_compress(
        op, kv, gate, ape, norm_weight, state, state_index, cmp_kv, block_table, cu_seqlens,
        seq_lens, ratio, cos, store, kv_format, sin, eps, "cmp_kv",
    )  # fmt: skip
    check_snapshots(
        op, carry_snapshots, snapshot_table, kv, gate, state, state_index, cmp_kv, ratio, "cmp_kv"
    )
    for name, given in (("row_norm_weight", row_norm_weight), ("positions", positions)):
        if given is None:
            raise TypeError(f"{op}: {name} is NoneType, expected a tensor")
    check_store(
        op, row, window_kv, slot_mapping, kv_format, 2 * cos.shape[1], row_norm_weight, eps,
        positions, cos, sin, _NAMES,
    )  # fmt: skip
    check.device(op, "kv", kv, row)
    if row.shape[0] != kv.shape[0]:
        raise ValueError(
            f"{op}: row is {tuple(row.shape)}, expected [T, D] with T = {kv.shape[0]} as in kv"
        )
    check.written(op, "window_kv", window_kv, (("cmp_kv", cmp_kv), ("state", state)))


def _append(
    row: torch.Tensor, window_kv: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor,
    gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, state: torch.Tensor,
    state_index: torch.Tensor, cmp_kv: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, ratio: int, row_norm_weight: torch.Tensor,
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, round_trip: bool,
    kv_format: str, carry_snapshots: torch.Tensor | None, snapshot_table: torch.Tensor | None,
) -> None:  # fmt: skip
    store_plain(
        row, window_kv, slot_mapping, kv_format, 2 * cos.shape[1], round_trip, row_norm_weight,
        eps, positions, cos, sin,
    )  # fmt: skip
    compress_plain(
        kv, gate, ape, norm_weight, state, state_index, cmp_kv, block_table, cu_seqlens, seq_lens,
        ratio, cos, sin, eps, "kv" if round_trip else "raw", kv_format, carry_snapshots,
        snapshot_table,
    )  # fmt: skip


def default_config(key: Case) -> CompressConfig:
    """As `compress_kv`, the longer of the two."""
    return compressor.default_config(key)


def candidates(key: Case, target: Target) -> Iterable[CompressConfig]:
    return compressor.candidates(key, target)


@triton.jit(do_not_specialize=["programs", "stride_ts", "stride_st"])
def _append_kv_kernel(
    row_ptr, stride_rt,  # [T, D]
    slots_ptr,  # [T]
    row_norm_ptr,  # [D]
    positions_ptr,  # [T]
    window_ptr, stride_wp, stride_wr,  # [pages, P, D], or packed
    window_rows,
    kv_ptr, stride_kt, gate_ptr, stride_gt,  # [T, m*C]
    ape_ptr, stride_ap,  # [ratio, m*C]
    norm_ptr,  # [C]
    state_ptr, stride_sn, stride_sb, stride_sr,  # [num_states, 2, 8, 2*C] or [num_states, 2, 3, C]
    index_ptr,  # [S]
    cmp_ptr, stride_cp, stride_cr,  # [pages, rows, C], or packed
    cmp_rows,
    table_ptr, stride_ts,  # [S, max_pages]
    cu_ptr, lens_ptr,  # [S+1], [S]
    cos_ptr, stride_cos, sin_ptr, stride_sin,  # [max_positions, HALF]
    snaps_ptr, stride_nn, stride_nb, stride_nr,  # [N, 2, 4, C]
    snap_table_ptr, stride_st,  # [S, max_pages]
    programs, S, eps, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, LOG2_C: tl.constexpr,
    STORE: tl.constexpr, PACKED: tl.constexpr, BLOCK_S: tl.constexpr, IS_CSA: tl.constexpr,
    SNAPSHOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid >= programs:
        store_token(
            (pid - programs).to(tl.int64), row_ptr, stride_rt, slots_ptr, row_norm_ptr,
            positions_ptr, cos_ptr, stride_cos, sin_ptr, stride_sin, window_ptr, stride_wp,
            stride_wr, window_rows, eps, D, BLOCK_D, True, HALF, CHANNELS, PACKED,
        )  # fmt: skip
    else:
        sequence, number = place(pid, index_ptr, cu_ptr, lens_ptr, S, IS_CSA, BLOCK_S)
        if sequence < S:
            if IS_CSA:
                csa_rows(
                    sequence, number, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
                    norm_ptr, state_ptr, stride_sn, stride_sb, stride_sr, index_ptr, cmp_ptr,
                    stride_cp, stride_cr, cmp_rows, table_ptr, stride_ts, cu_ptr, lens_ptr,
                    cos_ptr, stride_cos, sin_ptr, stride_sin, snaps_ptr, stride_nn, stride_nb,
                    stride_nr, snap_table_ptr, stride_st, eps, factor, C, BLOCK_C, HALF, LOG2_C,
                    STORE, PACKED, SNAPSHOTS,
                )  # fmt: skip
            else:
                hca_rows(
                    sequence, number, kv_ptr, stride_kt, gate_ptr, stride_gt, ape_ptr, stride_ap,
                    norm_ptr, state_ptr, stride_sn, stride_sb, stride_sr, index_ptr, cmp_ptr,
                    stride_cp, stride_cr, cmp_rows, table_ptr, stride_ts, cu_ptr, lens_ptr,
                    cos_ptr, stride_cos, sin_ptr, stride_sin, eps, factor, C, BLOCK_C, HALF,
                    LOG2_C, STORE, PACKED, STAGES,
                )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, width, rope = case["T"], case["c"], case["rope"]
    pages = -(-tokens // 128)
    window = {"T": tokens, "D": width, "rope": rope, "pages": pages, "kv_format": case["kv_format"]}
    (row, pool, slots), stored = kv_store.SPECS[0].inputs(window, device=device, seed=seed + 20)
    args, kwargs = compressor.SPEC.inputs(case, device=device, seed=seed)
    length = case["pos0"] + tokens // case["S"]
    positions = (torch.arange(tokens, dtype=torch.int64) % length).to(device)
    kwargs.pop("store")
    kwargs |= {"row_norm_weight": stored["norm_weight"], "positions": positions}
    return (row, pool, slots, *args), {**kwargs, "round_trip": case["store"] == "kv"}


def _cases() -> Iterable[Case]:
    for name in (
        "small-hca", "flash-csa-t8", "flash-hca-t8", "flash-csa", "flash-hca", "flash-csa-fp8",
        "flash-hca-fp8", "flash-csa-snapshots", "flash-csa-snapshots-fp8",
    ):  # fmt: skip
        yield next(case for case in compressor.SPEC.cases if case["name"] == name)
    small = next(case for case in compressor.SPEC.cases if case["name"] == "small-csa")
    yield {**small, "store": "kv"}


SPEC = KernelSpec(
    op=append_kv, reference=append_kv_reference, default=default_config, candidates=candidates,
    inputs=_inputs, tolerance=8e-3, cases=tuple(_cases()),
    bytes_moved=lambda c: compressor.SPEC.bytes_moved(c) + 4 * c["T"] * c["c"],
)  # fmt: skip
