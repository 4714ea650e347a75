"""Pooled KV rows: one row per 4 tokens (two overlapping series) or per 128 (one), carry in and out.

Ratio 4: row ``j`` pools series A of tokens ``4j-4..4j-1`` and series B of ``4j..4j+3`` by a softmax
over the 8 slots, per channel. Ratio 128: a running softmax over the 128 tokens, in position order.
Then rounding to bf16 (unless the pool is fp32), RMSNorm, RoPE at position ``ratio*j``, and the
store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton

from ftkernels import backend, check, config
from ftkernels.attention.pooling import (
    CSA_RATIO,
    HCA_RATIO,
    csa_kernel,
    hca_kernel,
    num_programs,
    sequence_lanes,
)
from ftkernels.attention.pools import (
    INDEX_GROUP,
    KV_GROUP,
    check_index_pool,
    check_pool,
    empty_pool,
    write_index_rows,
    write_rows,
)  # fmt: skip
from ftkernels.norm.rms_norm import normed
from ftkernels.quant.hadamard import hadamard_reference
from ftkernels.quant.round_trip import round_tripped
from ftkernels.rope.rope import rotate
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

_RING = 2 * CSA_RATIO
_STORES = ("kv", "index", "raw")


def compressor_state_shape(compress_ratio: int, width: int) -> tuple[int, ...]:
    """Carry of one sequence: ``(2, 8, 2*width)`` for ratio 4, ``(2, 3, width)`` for 128, fp32.

    Raises:
        ValueError: another ratio.
    """
    for name, value in (("compress_ratio", compress_ratio), ("width", width)):
        check.integer("compressor_state_shape", name, value, 1)
    check.require(
        compress_ratio in (CSA_RATIO, HCA_RATIO),
        lambda: f"compressor_state_shape: compress_ratio is {compress_ratio}, expected 4 or 128",
    )
    return (2, _RING, 2 * width) if compress_ratio == CSA_RATIO else (2, 3, width)


def compress_kv(
    kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor,
    state: torch.Tensor, state_index: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, compress_ratio: int, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6, store: str = "kv", kv_format: str = "bf16",
    carry_snapshots: torch.Tensor | None = None, snapshot_table: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Append the rows that the new tokens close to ``pool`` and move ``state`` on, both in place.

    Args:
        kv, gate: ``[T, m*c]`` fp32 raw projections of the new tokens; ``m`` = 2 for ratio 4, else
            1.
        ape: ``[ratio, m*c]`` fp32, added to the gate.
        norm_weight: ``[c]``.
        state: ``[num_states, *compressor_state_shape(ratio, c)]`` fp32.
        state_index: ``[S]`` int32, -1 skips a sequence.
        pool: ``[pages, Rc, c]`` or packed.
        block_table: ``[S, max_pages]`` int32; row ``j`` lies in page ``block_table[s, j // Rc]``.
        cu_seqlens, seq_lens: ``[S+1]``, ``[S]`` int32; new tokens are a sequence's last ones.
        compress_ratio: 4 or 128.
        cos, sin: rope tables of the compressed layers.
        eps: of the RMSNorm.
        store: "kv" (FP8 round trip of ``c - r`` channels, or packing), "index" (Hadamard and FP4
            round trip, or packing) or "raw".
        kv_format: "bf16"/"fp8" for KV rows, "bf16"/"fp4" for index rows.
        carry_snapshots: ``[N, 2, 4, c]`` fp32, written in place (ratio 4): with the last row of a
            page, the raw ``kv`` and ``gate`` of series A of that row's tokens, for `load_carry`.
        snapshot_table: ``[S, max_pages]`` int32; page ``n`` of a sequence goes to entry
            ``snapshot_table[s, n]``, -1 for nowhere.
        scratch: accepted, and none is needed.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe: one launch, no allocation, no host sync. Without a token nothing is launched.
    """
    if scratch is not None:
        check.given_scratch("compress_kv", scratch, kv)
    check_compress(
        "compress_kv", kv, gate, ape, norm_weight, state, state_index, pool, block_table,
        cu_seqlens, seq_lens, compress_ratio, cos, store, kv_format, sin, eps,
    )  # fmt: skip
    check_snapshots(
        "compress_kv", carry_snapshots, snapshot_table, kv, gate, state, state_index, pool,
        compress_ratio,
    )  # fmt: skip
    sequences = state_index.shape[0]
    if kv.numel() == 0 or sequences == 0:
        return
    if backend.use_reference(kv):
        compress_plain(
            kv, gate, ape, norm_weight, state, state_index, pool, block_table, cu_seqlens, seq_lens,
            compress_ratio, cos, sin, eps, store, kv_format, carry_snapshots, snapshot_table,
        )  # fmt: skip
        return
    width = norm_weight.shape[0]
    is_csa = compress_ratio == CSA_RATIO
    # keyed by the row alone: the order of the norm's sum must not depend on the batch
    cfg = config.lookup("compress_kv", {"c": width, "ratio": compress_ratio}, default_config)
    kernel = csa_kernel if is_csa else hca_kernel
    snapshots = (*snapshot_arguments(carry_snapshots, snapshot_table),) if is_csa else ()
    chosen = {"SNAPSHOTS": carry_snapshots is not None} if is_csa else {"STAGES": cfg.stages}
    with backend.on_device(kv):
        kernel[(num_programs(compress_ratio, kv.shape[0], sequences),)](
            kv, kv.stride(0), gate, gate.stride(0), ape, ape.stride(0), norm_weight,
            state, *state.stride()[:3], state_index,
            pool, pool.stride(0), pool.stride(1), pool.shape[1],
            block_table, block_table.stride(0), cu_seqlens, seq_lens,
            cos, cos.stride(0), sin, sin.stride(0), *snapshots,
            sequences, eps, width**-0.5,
            C=width, BLOCK_C=triton.next_power_of_2(width), HALF=cos.shape[1],
            LOG2_C=width.bit_length() - 1, STORE=store, PACKED=pool.dtype == torch.uint8,
            BLOCK_S=sequence_lanes(sequences), **chosen, num_warps=cfg.num_warps,
        )  # fmt: skip


def compress_kv_reference(
    kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor,
    state: torch.Tensor, state_index: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, *, compress_ratio: int, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6, store: str = "kv", kv_format: str = "bf16",
    carry_snapshots: torch.Tensor | None = None, snapshot_table: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The definition in plain torch, one sequence after another."""
    check_compress(
        "compress_kv", kv, gate, ape, norm_weight, state, state_index, pool, block_table,
        cu_seqlens, seq_lens, compress_ratio, cos, store, kv_format, sin, eps,
    )  # fmt: skip
    check_snapshots(
        "compress_kv", carry_snapshots, snapshot_table, kv, gate, state, state_index, pool,
        compress_ratio,
    )  # fmt: skip
    compress_plain(
        kv, gate, ape, norm_weight, state, state_index, pool, block_table, cu_seqlens, seq_lens,
        compress_ratio, cos, sin, eps, store, kv_format, carry_snapshots, snapshot_table,
    )  # fmt: skip


def compress_plain(
    kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor,
    state: torch.Tensor, state_index: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, compress_ratio: int, cos: torch.Tensor,
    sin: torch.Tensor, eps: float, store: str, kv_format: str,
    carry_snapshots: torch.Tensor | None, snapshot_table: torch.Tensor | None,
) -> None:  # fmt: skip
    """The definition without checks."""
    bounds, lens, owners = cu_seqlens.tolist(), seq_lens.tolist(), state_index.tolist()
    pooled = _pool_csa if compress_ratio == CSA_RATIO else _pool_hca
    for s, owner in enumerate(owners):
        begin, end = bounds[s], bounds[s + 1]
        if owner < 0 or begin == end or lens[s] == 0:
            continue
        pos0 = lens[s] - (end - begin)
        if carry_snapshots is not None and snapshot_table is not None:
            _keep_carry(
                carry_snapshots, snapshot_table[s], CSA_RATIO * pool.shape[1], kv[begin:end],
                gate[begin:end], state[owner], pos0,
            )  # fmt: skip
        rows = pooled(kv[begin:end], gate[begin:end], ape, state[owner], pos0)
        if rows is not None:
            first = pos0 // compress_ratio
            _finish(
                rows, first, norm_weight, pool, block_table[s], compress_ratio, cos, sin, eps,
                store, kv_format,
            )  # fmt: skip


def _pool_csa(
    kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, state: torch.Tensor, pos0: int
) -> torch.Tensor | None:
    """Rows closed by tokens ``pos0..``, ``[n, c]`` fp32 or None; the ring of 8 tokens moves on."""
    num_new, width = kv.shape[0], kv.shape[1] // 2
    end = pos0 + num_new
    first, last = pos0 // CSA_RATIO, end // CSA_RATIO
    rows = None
    if last > first:
        begin = max(0, CSA_RATIO * (first - 1))
        if begin < pos0:
            old = [p % _RING for p in range(begin, pos0)]
            values = torch.cat((state[0, old], kv))
            gates = torch.cat((state[1, old], gate))
        else:
            values, gates = kv, gate
        windows = last - begin // CSA_RATIO
        size = (windows, CSA_RATIO, 2 * width)
        values = values[: windows * CSA_RATIO].view(size)
        gates = gates[: windows * CSA_RATIO].view(size) + ape
        if begin == 0 and first == 0:
            # the slots before the first window do not exist
            values = torch.cat((torch.zeros_like(values[:1]), values))
            gates = torch.cat((torch.full_like(gates[:1], float("-inf")), gates))
        z = torch.cat((gates[:-1, :, :width], gates[1:, :, width:]), dim=1)
        v = torch.cat((values[:-1, :, :width], values[1:, :, width:]), dim=1)
        p = torch.exp(z - z.amax(dim=1, keepdim=True))
        rows = (p * v).sum(dim=1) / p.sum(dim=1)
    kept = range(max(pos0, end - _RING), end)
    if num_new == 1:
        state[0, pos0 % _RING] = kv[0]
        state[1, pos0 % _RING] = gate[0]
        return rows
    places = [p % _RING for p in kept]
    state[0, places] = kv[-len(places) :]
    state[1, places] = gate[-len(places) :]
    return rows


def _keep_carry(
    snapshots: torch.Tensor, table: torch.Tensor, page_tokens: int, kv: torch.Tensor,
    gate: torch.Tensor, state: torch.Tensor, pos0: int,
) -> None:  # fmt: skip
    """Series A of the last four tokens of each page that tokens ``pos0..`` fill; before the ring
    moves on."""
    width, end = snapshots.shape[3], pos0 + kv.shape[0]
    for page in range(pos0 // page_tokens, end // page_tokens):
        entry = int(table[page])
        if entry < 0:
            continue
        last = (page + 1) * page_tokens
        for place, position in enumerate(range(last - CSA_RATIO, last)):
            for half, new in enumerate((kv, gate)):
                ring = state[half, position % _RING]
                token = new[position - pos0] if position >= pos0 else ring
                snapshots[entry, half, place] = token[:width]


def _pool_hca(
    kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, state: torch.Tensor, pos0: int
) -> torch.Tensor | None:
    """Rows closed by tokens ``pos0..``; all windows advance together, offset by offset."""
    num_new, width = kv.shape
    end = pos0 + num_new
    first, last = pos0 // HCA_RATIO, (end - 1) // HCA_RATIO
    windows = last - first + 1
    running = kv.new_zeros(3, windows, width)
    running[0] = float("-inf")
    if pos0 % HCA_RATIO:
        running[:, 0] = state[(pos0 - 1) % 2]
    offsets = range(HCA_RATIO) if num_new > 1 else (pos0 % HCA_RATIO,)
    for offset in offsets:
        # windows whose token at this offset is new: a contiguous run of them
        lo = first if HCA_RATIO * first + offset >= pos0 else first + 1
        hi = last if HCA_RATIO * last + offset < end else last - 1
        if lo > hi:
            continue
        tokens = slice(
            HCA_RATIO * lo + offset - pos0, HCA_RATIO * hi + offset - pos0 + 1, HCA_RATIO
        )
        _advance(running[:, lo - first : hi - first + 1], gate[tokens] + ape[offset], kv[tokens])
    state[(end - 1) % 2] = running[:, -1]
    closed = end // HCA_RATIO - first
    return running[2, :closed] / running[1, :closed] if closed else None


def _advance(running: torch.Tensor, z: torch.Tensor, value: torch.Tensor) -> None:
    """One token of each window into its running ``(max, sum, weighted sum)``."""
    largest, total, weighted = running
    new = torch.maximum(largest, z)
    old_weight, weight = torch.exp(largest - new), torch.exp(z - new)
    total.mul_(old_weight).add_(weight)
    weighted.mul_(old_weight).add_(weight * value)
    largest.copy_(new)


def _finish(
    rows: torch.Tensor, first: int, norm_weight: torch.Tensor, pool: torch.Tensor,
    pages: torch.Tensor, ratio: int, cos: torch.Tensor, sin: torch.Tensor, eps: float, store: str,
    kv_format: str,
) -> None:  # fmt: skip
    """Norm, RoPE, round trip and store of rows ``first..``."""
    dtype = torch.float32 if pool.dtype == torch.float32 else torch.bfloat16
    numbers = torch.arange(first, first + rows.shape[0], device=rows.device)
    rows = normed(rows.to(dtype), norm_weight, eps).to(dtype)
    rows = rotate(rows, numbers * ratio, cos, sin, False, rows)
    per_page = pool.shape[1]
    where = pages[numbers // per_page].long()
    if store == "index":
        rows = hadamard_reference(rows)
        if kv_format == "bf16":
            rows = round_tripped(rows, "fp4", INDEX_GROUP)
        write_index_rows(pool, where, numbers % per_page, rows, kv_format)
        return
    if store == "kv" and kv_format == "bf16":
        channels = rows.shape[1] - 2 * cos.shape[1]
        rows = round_tripped(rows, "fp8", KV_GROUP, channels)
    write_rows(pool, where, numbers % per_page, rows, kv_format)


def check_compress(
    op: str, kv: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor,
    state: torch.Tensor, state_index: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor,
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, ratio: int, cos: torch.Tensor, store: str,
    kv_format: str, sin: torch.Tensor, eps: float, name: str = "pool",
) -> None:  # fmt: skip
    """Refuse what `compress_kv` does; ``name`` is what ``op`` calls its pool."""
    fp32, int32 = (torch.float32,), (torch.int32,)
    check.number(op, "eps", eps, 0)
    check.integer(op, "compress_ratio", ratio, 1)
    check.require(
        ratio in (CSA_RATIO, HCA_RATIO),
        lambda: f"{op}: compress_ratio is {ratio}, expected 4 or 128",
    )
    check.require(
        store in _STORES, lambda: f"{op}: store is {store!r}, expected 'kv', 'index' or 'raw'"
    )
    check.tensor(op, "kv", kv, fp32, (None, None), "[T, m*c]")
    check.tensor(op, "gate", gate, fp32, tuple(kv.shape), "[T, m*c]", kv)
    check.tensor(op, "ape", ape, fp32, (ratio, kv.shape[1]), "[ratio, m*c]", kv)
    series = 2 if ratio == CSA_RATIO else 1
    width = kv.shape[1] // series
    check.require(
        width * series == kv.shape[1],
        lambda: f"{op}: kv is {tuple(kv.shape)}, expected two series of the same width",
    )
    check.tensor(op, "norm_weight", norm_weight, check.FLOATS, (width,), "[c]", kv)
    check.require(
        isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor),
        f"{op}: cos and sin are not both tensors, expected rope tables",
    )
    check.rope(op, cos, sin, width, kv)
    shape = (None, *compressor_state_shape(ratio, width))
    check.tensor(op, "state", state, fp32, shape, "[num_states, *compressor_state_shape]", kv)
    check.written(op, "state", state, (("kv", kv), ("gate", gate), (name, pool)))
    check.tensor(op, "state_index", state_index, int32, (None,), "[S]", kv)
    sequences = state_index.shape[0]
    check.tensor(op, "block_table", block_table, int32, (sequences, None), "[S, max_pages]", kv)
    check.tensor(op, "cu_seqlens", cu_seqlens, int32, (sequences + 1,), "[S+1]", kv)
    check.tensor(op, "seq_lens", seq_lens, int32, (sequences,), "[S]", kv)
    if store == "index":
        check.require(
            width & (width - 1) == 0,
            lambda: f"{op}: kv is {tuple(kv.shape)}, expected rows of a power of two for 'index'",
        )
        check_index_pool(op, name, pool, kv_format, width, kv, "kv_format")
    else:
        check.require(
            store == "kv" or kv_format != "fp8",
            f"{op}: kv_format is 'fp8' with store 'raw', expected 'bf16'",
        )
        check_pool(op, name, pool, kv_format, width, 2 * cos.shape[1], kv)
    check.written(op, name, pool, (("kv", kv), ("gate", gate)))


def check_snapshots(
    op: str, snapshots: torch.Tensor | None, table: torch.Tensor | None, kv: torch.Tensor,
    gate: torch.Tensor, state: torch.Tensor, state_index: torch.Tensor, pool: torch.Tensor,
    ratio: int, name: str = "pool",
) -> None:  # fmt: skip
    """Refuse snapshots that `compress_kv` cannot keep; after `check_compress`."""
    if snapshots is None and table is None:
        return
    for given, value in (("carry_snapshots", snapshots), ("snapshot_table", table)):
        if value is None:
            raise TypeError(f"{op}: {given} is None, expected a tensor beside the other")
    assert snapshots is not None
    assert table is not None
    check.require(
        ratio == CSA_RATIO,
        lambda: f"{op}: compress_ratio is {ratio} with carry_snapshots, expected 4",
    )
    check.require(
        pool.shape[1] % 2 == 0,
        lambda: f"{op}: {name} has pages of {pool.shape[1]} rows, expected an even number",
    )
    shape = (None, 2, CSA_RATIO, kv.shape[1] // 2)
    check.tensor(
        op, "carry_snapshots", snapshots, (torch.float32,), shape, "[N, 2, 4, c]", kv
    )
    rows = (state_index.shape[0], None)
    check.tensor(op, "snapshot_table", table, (torch.int32,), rows, "[S, max_pages]", kv)
    sources = (("kv", kv), ("gate", gate), ("state", state), (name, pool))
    check.written(op, "carry_snapshots", snapshots, sources)


def snapshot_arguments(
    snapshots: torch.Tensor | None, table: torch.Tensor | None
) -> tuple[torch.Tensor | int | None, ...]:
    """Snapshots and table with their strides, as the kernels take them."""
    if snapshots is None or table is None:
        return None, 0, 0, 0, None, 0
    return snapshots, *snapshots.stride()[:3], table, table.stride(0)


@dataclass(frozen=True)
class CompressConfig:
    stages: int
    num_warps: int


def default_config(key: Case) -> CompressConfig:
    """Four channels a thread; ratio 128 copies four tokens ahead, ratio 4 has no loop."""
    num_warps = max(1, min(16, triton.next_power_of_2(key["c"]) // 128))
    return CompressConfig(stages=5 if key["ratio"] == HCA_RATIO else 1, num_warps=num_warps)


def candidates(key: Case, target: Target) -> Iterable[CompressConfig]:
    """Stages only: the order of the norm's sum follows the threads."""
    for stages in (4, 5, 6, 8) if key["ratio"] == HCA_RATIO else ():
        yield replace(default_config(key), stages=stages)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    tokens, sequences, width, ratio = case["T"], case["S"], case["c"], case["ratio"]
    length = case["pos0"] + tokens // sequences
    wide = width * (2 if ratio == CSA_RATIO else 1)
    kv, gate = (randn(tokens, wide, device=device, seed=seed + i) for i in range(2))
    ape = randn(ratio, wide, device=device, seed=seed + 2)
    norm_weight = randn(width, device=device, seed=seed + 3)
    shape = (sequences + 1, *compressor_state_shape(ratio, width))
    state = randn(*shape, device=device, seed=seed + 4).abs_()
    pages = -(-length // HCA_RATIO)
    pool = empty_pool(
        sequences * pages + 1, HCA_RATIO // ratio, width, kv_format=case["kv_format"], device=device
    ).zero_()
    int32 = torch.int32
    table = torch.arange(1, sequences * pages + 1, dtype=int32).view(sequences, pages).to(device)
    bounds = torch.arange(0, tokens + 1, tokens // sequences, dtype=int32).to(device)
    lens = torch.full((sequences,), length, dtype=int32).to(device)
    index = torch.arange(1, sequences + 1, dtype=int32).to(device)
    angles = randn(length, case["rope"] // 2, device=device, seed=seed + 5)
    args = (kv, gate, ape, norm_weight, state, index, pool, table, bounds, lens)
    kwargs = {"compress_ratio": ratio, "cos": angles.cos(), "sin": angles.sin()}
    if case["snapshots"]:
        count = sequences * pages + 1
        kwargs["carry_snapshots"] = torch.zeros(count, 2, CSA_RATIO, width, device=device)
        kwargs["snapshot_table"] = table.flip(1)
    return args, {**kwargs, "store": case["store"], "kv_format": case["kv_format"]}


def _case(
    name: str, T: int, S: int, ratio: int, pos0: int, *, c: int = 512, rope: int = 64,
    store: str = "kv", kv_format: str = "bf16", snapshots: bool = False,
) -> Case:  # fmt: skip
    return {
        "name": name, "T": T, "S": S, "c": c, "ratio": ratio, "pos0": pos0, "rope": rope,
        "store": store, "kv_format": kv_format, "snapshots": snapshots,
    }  # fmt: skip


SPEC = KernelSpec(
    op=compress_kv, reference=compress_kv_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=8e-3, scratch=lambda **dims: 0,
    cases=(
        _case("small-csa", 18, 2, 4, 6, c=128),
        _case("small-hca", 6, 2, 128, 125, c=100, rope=12, store="raw"),
        _case("small-index", 9, 1, 4, 3, c=64, rope=32, store="index"),
        _case("small-snapshots", 12, 2, 4, 124, c=64, rope=32, store="raw", snapshots=True),
        _case("flash-csa", 3456, 1, 4, 3456),
        _case("flash-csa-fp8", 3456, 1, 4, 3456, kv_format="fp8"),
        _case("flash-hca", 3456, 1, 128, 3456),
        _case("flash-hca-fp8", 3456, 1, 128, 3456, kv_format="fp8"),
        _case("flash-index", 3456, 1, 4, 3456, c=128, store="index"),
        _case("flash-index-fp4", 3456, 1, 4, 3456, c=128, store="index", kv_format="fp4"),
        _case("flash-csa-t8", 8, 8, 4, 4099),
        _case("flash-hca-t8", 8, 8, 128, 4223),
        _case("flash-index-t8", 8, 8, 4, 4099, c=128, store="index"),
        _case("flash-csa-snapshots", 3456, 1, 4, 3456, snapshots=True),
        _case("flash-csa-snapshots-fp8", 3456, 1, 4, 3456, kv_format="fp8", snapshots=True),
        _case("flash-index-snapshots", 3456, 1, 4, 3456, c=128, store="index", snapshots=True),
        _case("flash-index-snapshots-fp4", 3456, 1, 4, 3456, c=128, store="index",
              kv_format="fp4", snapshots=True),
    ),
    bytes_moved=lambda c: 8 * c["T"] * c["c"] * (2 if c["ratio"] == CSA_RATIO else 1),
)  # fmt: skip
