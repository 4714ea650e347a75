"""Changes single logits: penalties, logit bias and banned tokens in one pass.

Formula, for each listed ``(row, token)``: ``l = l / repetition if l > 0 else l * repetition``, then
``l += offset``; an offset of -inf bans the token. All other logits are copied.
Numerics: fp32, one rounding.
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


def adjust_logits(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, *, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale and shift the listed logits.

    Args:
        logits: ``[S, V]``, bf16/fp16/fp32, rows may be strided.
        row_ids: ``[N]`` int32; -1 skips the entry.
        token_ids: ``[N]`` int32. No ``(row, token)`` is listed twice.
        repetition: ``[N]`` fp32 factor, 1 for none.
        offset: ``[N]`` fp32 added afterwards, 0 for none, -inf to ban.
        out: ``[S, V]`` in ``logits.dtype``, may be ``logits``; allocated when omitted.

    Returns:
        ``out``; with ``N == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch, after a copy unless
    ``out`` is ``logits``.
    """
    out = _checked(logits, row_ids, token_ids, repetition, offset, out)
    _copy(logits, out)
    if row_ids.shape[0] == 0 or logits.numel() == 0:
        return out
    if backend.use_reference(logits):
        return _reference(row_ids, token_ids, repetition, offset, out)
    num_entries = row_ids.shape[0]
    cfg = config.lookup("adjust_logits", {"N": num_entries}, default_config, grows="N")
    with backend.on_device(logits):
        _adjust_logits_kernel[(triton.cdiv(num_entries, cfg.block_n),)](
            row_ids, token_ids, repetition, offset, out, out.stride(0),
            num_entries,
            BLOCK_N=cfg.block_n, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, int32, fp32 = "adjust_logits", (torch.int32,), (torch.float32,)
    check.tensor(op, "logits", logits, check.FLOATS, (None, None), "[S, V]")
    check.tensor(op, "row_ids", row_ids, int32, (None,), "[N]", logits)
    entries = (row_ids.shape[0],)
    check.tensor(op, "token_ids", token_ids, int32, entries, "[N]", logits)
    check.tensor(op, "repetition", repetition, fp32, entries, "[N]", logits)
    check.tensor(op, "offset", offset, fp32, entries, "[N]", logits)
    inputs = (row_ids, token_ids, repetition, offset)
    return check.output(op, out, logits.shape, like=logits, may_alias=True, inputs=inputs)


def _copy(logits: torch.Tensor, out: torch.Tensor) -> None:
    if out is not logits and logits.numel():
        out.copy_(logits)


def adjust_logits_reference(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor,
    repetition: torch.Tensor, offset: torch.Tensor, *, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(logits, row_ids, token_ids, repetition, offset, out)
    _copy(logits, out)
    return _reference(row_ids, token_ids, repetition, offset, out)


def _reference(
    row_ids: torch.Tensor, token_ids: torch.Tensor, repetition: torch.Tensor, offset: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    used = row_ids >= 0
    place = (row_ids[used].long(), token_ids[used].long())
    values = out[place].float()
    factor = repetition[used]
    values = torch.where(values > 0, values / factor, values * factor) + offset[used]
    return out.index_put_(place, values.to(out.dtype))


@dataclass(frozen=True)
class AdjustConfig:
    block_n: int
    num_warps: int


def default_config(key: Case) -> AdjustConfig:
    """128 entries per program: each is a scattered read and write."""
    return AdjustConfig(block_n=128, num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[AdjustConfig]:
    return [AdjustConfig(32 * num_warps, num_warps) for num_warps in (1, 2, 4, 8)]


@triton.jit(do_not_specialize=["N"])
def _adjust_logits_kernel(
    row_ptr, token_ptr, repetition_ptr, offset_ptr,  # [N]
    out_ptr, stride_os,  # [S, V]
    N,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    row = tl.load(row_ptr + offs_n, mask=mask_n, other=-1).to(tl.int64)
    mask_n = row >= 0
    token = tl.load(token_ptr + offs_n, mask=mask_n, other=0)
    repetition = tl.load(repetition_ptr + offs_n, mask=mask_n, other=1.0)
    offset = tl.load(offset_ptr + offs_n, mask=mask_n, other=0.0)
    out_ptrs = out_ptr + row * stride_os + token
    x = tl.load(out_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) + offset
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=mask_n)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows, vocab, num_entries = case["S"], case["V"], case["N"]
    logits = randn(rows, vocab, device=device, scale=3.0, seed=seed)
    place = torch.arange(num_entries, device=device, dtype=torch.int32)
    repetition = 1.0 + randn(num_entries, device=device, scale=0.1, seed=seed + 1).abs()
    offset = randn(num_entries, device=device, seed=seed + 2)
    return (logits, place % (rows + 1) - 1, place % vocab, repetition, offset), {}


SPEC = KernelSpec(
    op=adjust_logits, reference=adjust_logits_reference, default=default_config,
    candidates=candidates,
    cases=(
        {"name": "small", "S": 3, "V": 300, "N": 40},
        {"name": "flash-t50", "S": 50, "V": 129280, "N": 20000},
    ),
    inputs=_inputs, tolerance=1e-6, grows="N",
    bytes_moved=lambda case: 8 * case["S"] * case["V"] + 24 * case["N"],
)  # fmt: skip
