"""Draws one token a row: greedy, or by the Gumbel trick with temperature, min-p, top-k and top-p.

Order: ``z = logits / temperature``; min-p (of the largest probability); the ``top_k`` largest, lower id
on ties; the shortest head of those whose probability reaches ``top_p``, the token that crosses included.
The draw is the largest ``z - log(-log u)`` of what is left, ``u`` from Philox-4x32-10 with key ``seed`` and
counter ``(id, position, 0, 0)`` (see `philox`): a function of the row, its seed and its position alone.
Numerics: ``z`` in fp32. Probabilities are summed for top-p as integers, ``floor(exp(z - max(z)) * 2^30)``,
so that the cut does not depend on the order of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.sampling.philox import gumbel_reference
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
    if logits.device.type == "cpu" and max(temperature.tolist()) <= 0:
        if bool(largest.isfinite().all()):
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
