"""Join partial attention results over disjoint keys, and apply the sink once.

``out = sum_i exp(lse_i - m) partial_i / (sum_i exp(lse_i - m) + exp(sink - m))``, fp32, in split
order, with ``m`` the largest ``lse``: a sink far above it leaves the joint ``lse`` as it is.
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

Merged = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def merge_splits(
    partial: torch.Tensor, lse: torch.Tensor, *, sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Merge split results.

    Args:
        partial: ``[n, T, H, D]`` fp32, each normalized over its own keys.
        lse: ``[n, T, H]`` fp32 natural log; ``-inf`` marks an empty split, its partial is not read.
        sink: ``[H]`` fp32, a logit without a value.
        out: ``[T, H, D]`` of ``out_dtype``, with ``return_lse`` a pair with ``[T, H]`` fp32.

    Returns:
        ``out`` (and ``lse`` over the keys, without the sink); all splits empty: 0 and ``-inf``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` is given: one launch, no allocation, no host sync. Without an element
    nothing is launched.
    """
    result, total = _checked(partial, lse, sink, out_dtype, return_lse, out)
    if not result.numel():
        return _returned(result, total)
    if backend.use_reference(partial):
        return _merge(partial, lse, sink, result, total)
    num_splits, num_tokens, heads, width = partial.shape
    key = {"n": num_splits, "H": heads, "D": width}
    cfg = config.lookup("merge_splits", key, default_config)
    with backend.on_device(partial):
        _merge_splits_kernel[(num_tokens * heads, triton.cdiv(width, cfg.block_d))](
            partial, partial.stride(0), partial.stride(1), partial.stride(2),
            lse, lse.stride(0), lse.stride(1), sink,
            result, result.stride(0), result.stride(1),
            total, 0 if total is None else total.stride(0),
            num_splits, heads, width,
            HAS_SINK=sink is not None, HAS_LSE=total is not None,
            BLOCK_S=triton.next_power_of_2(max(1, num_splits)), BLOCK_N=cfg.block_n,
            BLOCK_D=cfg.block_d, num_warps=cfg.num_warps,
        )  # fmt: skip
    return _returned(result, total)


def merge_splits_reference(
    partial: torch.Tensor, lse: torch.Tensor, *, sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition in plain torch."""
    result, total = _checked(partial, lse, sink, out_dtype, return_lse, out)
    if not result.numel():
        return _returned(result, total)
    return _merge(partial, lse, sink, result, total)


def _checked(
    partial: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, out_dtype: torch.dtype,
    return_lse: bool, out: Merged | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    op, fp32 = "merge_splits", (torch.float32,)
    check.tensor(op, "partial", partial, fp32, (None, None, None, None), "[n, T, H, D]")
    check.tensor(op, "lse", lse, fp32, tuple(partial.shape[:3]), "[n, T, H]", partial)
    size = (partial.shape[1], partial.shape[2], partial.shape[3])
    if sink is not None:
        check.tensor(op, "sink", sink, fp32, (size[1],), "[H]", partial)
    check.out_dtype(op, out_dtype)
    return outputs(op, out, size, partial, out_dtype, return_lse, (lse, sink))


def _returned(result: torch.Tensor, total: torch.Tensor | None) -> Merged:
    return result if total is None else (result, total)


def _merge(
    partial: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, result: torch.Tensor,
    total: torch.Tensor | None,
) -> Merged:  # fmt: skip
    size = result.shape
    largest = lse.amax(dim=0) if lse.shape[0] else lse.new_full(size[:2], float("-inf"))
    largest = torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    weights = torch.exp(lse - largest)
    keys, mixed = largest.new_zeros(size[:2]), largest.new_zeros(size)
    for split in range(lse.shape[0]):
        keys += weights[split]
        live = weights[split, :, :, None]
        mixed += torch.where(live > 0, partial[split] * live, 0.0)
    denominator = keys if sink is None else keys + torch.exp(sink - largest)
    result.copy_(mixed / torch.where(denominator > 0, denominator, 1.0)[:, :, None])
    if total is not None:
        total.copy_(torch.log(keys) + largest)
    return _returned(result, total)


def outputs(
    op: str, out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    size: tuple[int, int, int], like: torch.Tensor, dtype: torch.dtype, return_lse: bool,
    inputs: tuple[torch.Tensor | None, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``(out, lse)`` after checking them, or new ones; ``lse`` is None unless asked for."""
    if not return_lse:
        if isinstance(out, tuple | list):
            kind = type(out).__name__
            raise ValueError(f"{op}: out is a {kind}, expected one tensor without return_lse")
        return check.output(op, out, size, like=like, dtype=dtype, inputs=inputs), None
    if out is not None and not (isinstance(out, tuple | list) and len(out) == 2):
        raise ValueError(f"{op}: out is not a pair, expected (out, lse) with return_lse")
    first, second = (None, None) if out is None else out
    result = check.output(op, first, size, like=like, dtype=dtype, inputs=inputs)
    lse = check.output(
        op, second, size[:2], like=like, dtype=torch.float32, name="lse", inputs=inputs
    )
    check.disjoint(op, ("out", result), ("lse", lse))
    return result, lse


@dataclass(frozen=True)
class MergeConfig:
    block_n: int
    block_d: int
    num_warps: int


def default_config(key: Case) -> MergeConfig:
    """Four channels a thread in one warp, and up to 16 splits under way at a time."""
    block_d = max(2, min(128, triton.next_power_of_2(key["D"])))
    return MergeConfig(
        block_n=min(16, triton.next_power_of_2(max(1, key["n"]))), block_d=block_d, num_warps=1
    )


def candidates(key: Case, target: Target) -> Iterable[MergeConfig]:
    width = max(2, triton.next_power_of_2(key["D"]))
    for block_d in sorted({min(width, 128), min(width, 256), min(width, 512)}):
        for num_warps in (1, 2, 4):
            if num_warps == 1 or 128 * num_warps <= block_d:
                yield from (MergeConfig(n, block_d, num_warps) for n in (4, 8, 16))


@triton.jit
def _merge_splits_kernel(
    partial_ptr, stride_pn, stride_pt, stride_ph,  # [n, T, H, D]
    lse_ptr, stride_ln, stride_lt,  # [n, T, H]
    sink_ptr,  # [H]
    out_ptr, stride_ot, stride_oh,  # [T, H, D]
    total_ptr, stride_tt,  # [T, H]
    num_splits, H, D,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    token, head = pid // H, pid % H
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    lse_ptr += token * stride_lt + head
    partial_ptr += token * stride_pt + head * stride_ph
    offs_s = tl.arange(0, BLOCK_S)
    lse_ptrs = lse_ptr + offs_s.to(tl.int64) * stride_ln
    top = tl.max(tl.load(lse_ptrs, mask=offs_s < num_splits, other=float("-inf")), 0)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    keys = 0.0
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, BLOCK_N):
        for i in tl.static_range(BLOCK_N):
            split = tl.full((), start + i, tl.int64)
            lse = tl.load(
                lse_ptr + split * stride_ln, mask=split < num_splits, other=float("-inf")
            )
            weight = tl.exp(lse - top)
            # what an empty split holds is never read: it may be NaN
            live = offs_d < tl.where(weight > 0.0, D, 0)
            part = tl.load(partial_ptr + split * stride_pn + offs_d, mask=live, other=0.0)
            keys += weight
            mixed = tl.fma(part, weight, mixed)
    below = keys
    if HAS_SINK:
        below += tl.exp(tl.load(sink_ptr + head) - top)
    out = mixed / tl.where(below > 0.0, below, 1.0)
    out_row = out_ptr + token * stride_ot + head * stride_oh
    tl.store(out_row + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)
    if HAS_LSE:
        logarithm = tl.log(tl.where(keys > 0.0, keys, 1.0)) + top
        total = tl.where(keys > 0.0, logarithm, float("-inf"))
        tl.store(total_ptr + token * stride_tt + head, total, mask=tl.program_id(1) == 0)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    size = (case["n"], case["T"], case["H"])
    partial = randn(*size, case["D"], device=device, seed=seed)
    lse = randn(*size, device=device, seed=seed + 1)
    return (partial, lse), {"sink": randn(case["H"], device=device, seed=seed + 2)}


SPEC = KernelSpec(
    op=merge_splits, reference=merge_splits_reference, default=default_config,
    candidates=candidates, inputs=_inputs, tolerance=8e-3,
    cases=(
        {"name": "small", "n": 3, "T": 2, "H": 3, "D": 100},
        {"name": "flash-tp8", "n": 41, "T": 1, "H": 8, "D": 512},
        {"name": "flash-tp1", "n": 16, "T": 8, "H": 64, "D": 512},
    ),
    bytes_moved=lambda c: (4 * c["n"] + 2) * c["T"] * c["H"] * c["D"],
)  # fmt: skip
