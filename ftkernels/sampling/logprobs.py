"""Log-probabilities of given tokens and of the most likely ones: ``x - logsumexp(x)``.

Layout: one row of logits a token; the most likely tokens in falling order, lower id on ties.
Numerics: of the raw logits (temperature 1), fp32 results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.sampling.select import ordered, unordered
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, num_top: int, out: Logprobs | None = None
) -> Logprobs:
    """Report what the model thought of the tokens that were drawn or given.

    Args:
        logits: ``[S, V]``, bf16/fp16/fp32, rows may be strided.
        token_ids: ``[S]`` int32 or int64; -1 (no token) gets -inf.
        num_top: how many of the most likely tokens to list, ``0..V``.
        out: ``(logprob, top_ids, top_logprobs)``; allocated when omitted.

    Returns:
        ``logprob [S]`` fp32, ``top_ids [S, num_top]`` int32, ``top_logprobs [S, num_top]`` fp32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or num_top outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(logits, token_ids, num_top, out)
    if logits.numel() == 0:
        return out
    if backend.use_reference(logits):
        return _reference(logits, token_ids, num_top, out)
    rows, vocab = logits.shape
    logprob, ids, top = out
    cfg = config.lookup("top_logprobs", {"V": vocab}, default_config)
    with backend.on_device(logits):
        _top_logprobs_kernel[(rows,)](
            logits, logits.stride(0), token_ids,
            logprob, ids, ids.stride(0), top, top.stride(0),
            vocab, num_top,
            BLOCK_V=cfg.block_v, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, out: Logprobs | None
) -> Logprobs:
    op = "top_logprobs"
    check.tensor(op, "logits", logits, check.FLOATS, (None, None), "[S, V]")
    rows, vocab = logits.shape
    check.require(
        vocab > 0 or rows == 0, lambda: f"{op}: logits is {(rows, vocab)}, expected V >= 1"
    )
    check.tensor(op, "token_ids", token_ids, check.INTS, (rows,), "[S]", logits)
    check.require(
        0 <= num_top <= vocab, lambda: f"{op}: num_top is {num_top}, expected 0 to {vocab}"
    )
    given = check.parts(op, out, 3)
    fp32, inputs, size = torch.float32, (token_ids,), (rows, num_top)
    own = check.output(
        op, given[0], (rows,), like=logits, dtype=fp32, name="logprob", inputs=inputs
    )
    ids = check.output(
        op, given[1], size, like=logits, dtype=torch.int32, name="top_ids", inputs=(*inputs, own)
    )
    top = check.output(
        op, given[2], size, like=logits, dtype=fp32, name="top_logprobs",
        inputs=(*inputs, own, ids),
    )  # fmt: skip
    return own, ids, top


def top_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, *, num_top: int, out: Logprobs | None = None
) -> Logprobs:
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(logits, token_ids, num_top, out)
    return _reference(logits, token_ids, num_top, out) if logits.numel() else out


def _reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, out: Logprobs
) -> Logprobs:
    # fp64 inside, so that a value does not depend on its place in the tensor
    logprobs = logits.double().log_softmax(-1).float()
    index = token_ids.long()[:, None]
    chosen = logprobs.gather(1, index.clamp(min=0)).masked_fill(index < 0, float("-inf"))
    out[0].copy_(chosen[:, 0])
    if num_top:
        order = logits.masked_fill(logits.isnan(), float("-inf"))
        ids = order.sort(dim=-1, descending=True, stable=True)[1][:, :num_top]
        out[1].copy_(ids)
        out[2].copy_(logprobs.gather(1, ids))
    return out


@dataclass(frozen=True)
class LogprobsConfig:
    """Not for tuning: the order of a row's sum follows the block and its threads."""

    block_v: int
    num_warps: int


def default_config(key: Case) -> LogprobsConfig:
    """One row per program, at most 4096 logits at a time."""
    block_v = min(4096, max(128, triton.next_power_of_2(key["V"])))
    return LogprobsConfig(block_v=block_v, num_warps=max(4, block_v // 256))


@triton.jit
def _log_sum_exp(logits_ptr, V, BLOCK_V: tl.constexpr):
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        # nothing but -inf so far: subtract 0 rather than -inf
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = new
    return largest + tl.log(total)


@triton.jit(do_not_specialize=["num_top", "stride_is", "stride_ts"])
def _top_logprobs_kernel(
    logits_ptr, stride_ls,  # [S, V]
    token_ptr,  # [S]
    logprob_ptr,  # [S]
    ids_ptr, stride_is,  # [S, num_top]
    top_ptr, stride_ts,  # [S, num_top]
    V, num_top,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    pid_s = tl.program_id(0).to(tl.int64)
    logits_ptr += pid_s * stride_ls
    lse = _log_sum_exp(logits_ptr, V, BLOCK_V)
    token = tl.load(token_ptr + pid_s).to(tl.int64)
    x = tl.load(logits_ptr + token, mask=token >= 0, other=0.0).to(tl.float32)
    tl.store(logprob_ptr + pid_s, tl.where(token >= 0, x - lse, float("-inf")))
    last_key = tl.full([], 2147483647, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(num_top):
        # the next one after (last_key, last_id): one pass a place
        best = tl.full([], -2147483648, tl.int32)
        best_id = tl.full([], 0, tl.int32)
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)
            mask_v = offs < V
            key = ordered(tl.load(logits_ptr + offs, mask=mask_v, other=0.0).to(tl.float32))
            after = mask_v & ((key < last_key) | ((key == last_key) & (offs > last_id)))
            key = tl.where(after, key, -2147483648)
            largest = tl.max(key, 0)
            first = tl.min(tl.where(after & (key == largest), offs, V), 0)
            best_id = tl.where(largest > best, first, best_id)
            best = tl.maximum(best, largest)
        tl.store(ids_ptr + pid_s * stride_is + place, best_id)
        tl.store(top_ptr + pid_s * stride_ts + place, unordered(best) - lse)
        last_key, last_id = best, best_id


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    logits = randn(case["S"], case["V"], device=device, scale=3.0, seed=seed)
    token_ids = torch.arange(case["S"], dtype=torch.int32, device=device)
    return (logits, token_ids), {"num_top": case["top"]}


SPEC = KernelSpec(
    op=top_logprobs, reference=top_logprobs_reference, default=default_config,
    cases=(
        {"name": "small", "S": 3, "V": 300, "top": 3},
        {"name": "flash-t1", "S": 1, "V": 129280, "top": 5},
        {"name": "flash-t50", "S": 50, "V": 129280, "top": 20},
    ),
    inputs=_inputs, tolerance=1e-6,
    bytes_moved=lambda case: 4 * case["S"] * case["V"],
)  # fmt: skip
