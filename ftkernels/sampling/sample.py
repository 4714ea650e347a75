"""Draws one token a row: greedy, or by the Gumbel trick with temperature, min-p, top-k and top-p.

Order: ``z = logits / temperature``; min-p (of the largest probability); the ``top_k`` largest,
lower id on ties; the shortest head of those whose probability reaches ``top_p``, the token that
crosses included. The draw is the largest ``z - log(-log u)`` of what is left, ``u`` from
Philox-4x32-10 with key ``seed`` and counter ``(id, position, 0, 0)`` (see `philox`): a function of
the row, its seed and its position alone.
Numerics: ``z`` in fp32. Probabilities are summed for top-p as integers,
``floor(exp(z - max(z)) * 2^30)``, so that the cut does not depend on the order of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.sampling.philox import gumbel_at, gumbel_reference
from ftkernels.sampling.select import (
    KEY_LOWEST,
    is_kept,
    load_scaled,
    ordered,
    tighten,
    total_mass,
)  # fmt: skip
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

_MASS = 1 << 30


def sample(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    out: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Draw the next token of each row.

    Args:
        logits: ``[S, V]``, bf16/fp16/fp32, rows may be strided. NaN counts as -inf.
        temperature: ``[S]`` fp32; 0 (and below) is argmax, lowest id on ties.
        top_k: ``[S]`` int32, ``<= 0`` is off.
        top_p: ``[S]`` fp32, ``>= 1`` is off; at 0 the most likely token is left.
        min_p: ``[S]`` fp32, ``<= 0`` is off.
        seed: ``[S]`` int64.
        position: ``[S]`` int32 or int64, the position the token will have.
        out: ``[S]`` int32; allocated when omitted.
        scratch: as ``scratch_bytes("sample", S=.., V=..)`` says: none is needed.

    Returns:
        ``out``: token ids, -1 for a row without a finite logit. A row that holds +inf is greedy.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync. One launch.
    """
    out = _checked(logits, temperature, top_k, top_p, min_p, seed, position, out)
    if scratch is not None:
        check.scratch("sample", scratch, 0, logits)
    if logits.numel() == 0:
        return out.fill_(-1)
    if backend.use_reference(logits):
        return _reference(logits, temperature, top_k, top_p, min_p, seed, position, out)
    rows, vocab = logits.shape
    cfg = config.lookup("sample", {"S": rows, "V": vocab}, default_config, grows="S")
    with backend.on_device(logits):
        _sample_kernel[(rows,)](
            logits, logits.stride(0), temperature, top_k, top_p, min_p, seed, position, out,
            vocab,
            BLOCK_V=cfg.block_v, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op, fp32 = "sample", (torch.float32,)
    check.tensor(op, "logits", logits, check.FLOATS, (None, None), "[S, V]")
    rows = (logits.shape[0],)
    for name, x, dtypes in (
        ("temperature", temperature, fp32), ("top_k", top_k, (torch.int32,)),
        ("top_p", top_p, fp32), ("min_p", min_p, fp32), ("seed", seed, (torch.int64,)),
        ("position", position, check.INTS),
    ):  # fmt: skip
        check.tensor(op, name, x, dtypes, rows, "[S]", logits)
    inputs = (temperature, top_k, top_p, min_p, seed, position)
    return check.output(op, out, rows, like=logits, dtype=torch.int32, inputs=inputs)


def sample_reference(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(logits, temperature, top_k, top_p, min_p, seed, position, out)
    if logits.numel() == 0:
        return out.fill_(-1)
    return _reference(logits, temperature, top_k, top_p, min_p, seed, position, out)


def _reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    largest, first = logits.max(-1)
    all_greedy = logits.device.type == "cpu" and max(temperature.tolist()) <= 0
    if all_greedy and bool(largest.isfinite().all()):
        return out.copy_(first)
    wide = logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    greedy = wide.argmax(-1)
    z = wide / torch.where(temperature > 0, temperature, 1.0)[:, None]
    z = z.masked_fill(wide == float("-inf"), float("-inf"))
    top = z.amax(-1, keepdim=True)
    kept = _kept(z, top, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1], device=logits.device)
    score = z.double() + gumbel_reference(seed[:, None], ids, position[:, None])
    drawn = score.masked_fill(~kept, float("-inf")).argmax(-1)
    token = torch.where((temperature > 0) & top[:, 0].isfinite(), drawn, greedy)
    return out.copy_(token.masked_fill(~wide.isfinite().any(-1), -1))


def _kept(
    z: torch.Tensor, top: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Mask of the tokens that min-p, top-k and top-p leave; meaningless where `top` is infinite."""
    if z.device.type == "cpu" and _all_off(top_k, top_p, min_p):
        return z > float("-inf")
    falling, order = z.sort(dim=-1, descending=True, stable=True)
    weight = (falling - top).double().exp().float()  # relative to the largest probability
    kept = (falling > float("-inf")) & ((weight >= min_p[:, None]) | (min_p[:, None] <= 0))
    rank = torch.arange(z.shape[1], device=z.device)
    kept &= (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    mass = torch.where(kept, (weight * _MASS).nan_to_num(0.0).long(), 0)
    before = mass.cumsum(-1) - mass
    limit = (top_p.double() * mass.sum(-1)).clamp(min=1.0)  # the first token always stays
    kept &= (before < limit[:, None]) | (top_p[:, None] >= 1)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _all_off(top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> bool:
    return max(top_k.tolist()) <= 0 and min(top_p.tolist()) >= 1 and max(min_p.tolist()) <= 0


@dataclass(frozen=True)
class SampleConfig:
    block_v: int
    num_warps: int


def default_config(key: Case) -> SampleConfig:
    """One row per program, 4096 logits at a time; 2048 on 8 warps spill, 4096 on 8 do not."""
    small = max(128, triton.next_power_of_2(key["V"]))
    block_v = small if small <= 1024 else 4096
    return SampleConfig(block_v=block_v, num_warps=8 if block_v >= 1024 else 4)


def candidates(key: Case, target: Target) -> Iterable[SampleConfig]:
    for block_v in (2048, 4096, 8192):
        for num_warps in (8, 16, 32):
            yield SampleConfig(block_v, num_warps)


@triton.jit
def _sample_kernel(
    logits_ptr, stride_ls,  # [S, V]
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,  # [S]
    out_ptr,  # [S]
    V,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    pid_s = tl.program_id(0).to(tl.int64)
    logits_ptr += pid_s * stride_ls
    temperature = tl.load(temperature_ptr + pid_s)
    token, num_finite, largest = _argmax(logits_ptr, V, BLOCK_V)
    top = tl.div_rn(largest, tl.where(temperature > 0, temperature, 1.0))
    if (temperature > 0) & (tl.abs(top) < float("inf")):
        cut_key, cut_id = _last_kept(
            logits_ptr, V, temperature, top, tl.load(top_k_ptr + pid_s),
            tl.load(top_p_ptr + pid_s), tl.load(min_p_ptr + pid_s), BLOCK_V,
        )  # fmt: skip
        token = _draw(
            logits_ptr, V, temperature, cut_key, cut_id,
            tl.load(seed_ptr + pid_s), tl.load(position_ptr + pid_s), BLOCK_V,
        )  # fmt: skip
    tl.store(out_ptr + pid_s, tl.where(num_finite > 0, token, -1))


@triton.jit
def _argmax(logits_ptr, V, BLOCK_V: tl.constexpr):
    token = tl.full([], 0, tl.int32)
    num_finite = tl.full([], 0, tl.int32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        x = load_scaled(logits_ptr, offs, V, 1.0)
        best = tl.max(x, 0)
        first = tl.min(tl.where(x == best, offs, V), 0)
        token = tl.where(best > largest, first, token)
        largest = tl.maximum(largest, best)
        num_finite += tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0)
    return token, num_finite, largest


@triton.jit
def _last_kept(
    logits_ptr, V, temperature, top, top_k, top_p, min_p, BLOCK_V: tl.constexpr
):  # fmt: skip
    """The cut that min-p, top-k and top-p leave."""
    high = ordered(top)
    cut_key = tl.full([], KEY_LOWEST, tl.int32)
    cut_id = tl.full([], -1, tl.int32)
    if (min_p > 0) | (top_k > 0) | (top_p < 1):
        cut_key, cut_id = high, V
        floor = tl.maximum(min_p, 0.0)
        for start in range(0, V, BLOCK_V):
            z = load_scaled(logits_ptr, start + tl.arange(0, BLOCK_V), V, temperature)
            likely = (z > float("-inf")) & (tl.exp(z - top) >= floor)
            cut_key = tl.minimum(cut_key, tl.min(tl.where(likely, ordered(z), high), 0))
    if top_k > 0:
        cut_key, cut_id = tighten(
            logits_ptr, V, temperature, top, high, cut_key, cut_id, top_k.to(tl.int64),
            False, BLOCK_V,
        )  # fmt: skip
    if top_p < 1:
        mass = total_mass(logits_ptr, V, temperature, top, cut_key, cut_id, BLOCK_V)
        # less than a fraction is less than the next integer; the first token always stays
        limit = tl.maximum(top_p.to(tl.float64) * mass.to(tl.float64), 1.0)
        target = limit.to(tl.int64)
        target += (target.to(tl.float64) < limit).to(tl.int64)
        cut_key, cut_id = tighten(
            logits_ptr, V, temperature, top, high, cut_key, cut_id, target, True, BLOCK_V
        )
    return cut_key, cut_id


@triton.jit
def _draw(logits_ptr, V, temperature, cut_key, cut_id, seed, position, BLOCK_V: tl.constexpr):
    token = tl.full([], 0, tl.int32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        z = load_scaled(logits_ptr, offs, V, temperature)
        kept = is_kept(ordered(z), offs, cut_key, cut_id)
        if tl.max(kept.to(tl.int32), 0) > 0:
            score = tl.where(kept, z + gumbel_at(seed, offs, position), float("-inf"))
            best = tl.max(score, 0)
            first = tl.min(tl.where(kept & (score == best), offs, V), 0)
            token = tl.where(best > largest, first, token)
            largest = tl.maximum(largest, best)
    return token


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    rows = case["S"]
    logits = randn(rows, case["V"], device=device, scale=3.0, seed=seed)
    kwargs = {
        "temperature": torch.full((rows,), 0.8, device=device),
        "top_k": torch.full((rows,), 20, dtype=torch.int32, device=device),
        "top_p": torch.full((rows,), 0.9, device=device),
        "min_p": torch.full((rows,), 0.01, device=device),
        "seed": torch.arange(rows, device=device) * 7919 + seed,
        "position": torch.arange(rows, dtype=torch.int32, device=device),
    }
    return (logits,), kwargs


SPEC = KernelSpec(
    op=sample, reference=sample_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "S": 3, "V": 300},
        {"name": "flash-t1", "S": 1, "V": 129280},
        {"name": "flash-t50", "S": 50, "V": 129280},
    ),
    inputs=_inputs, grows="S", scratch=lambda *, S, V: 0,
    bytes_moved=lambda case: 4 * case["S"] * case["V"],
)  # fmt: skip
