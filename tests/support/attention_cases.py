"""Ragged paged batches of the attention tests, and what one token sees by the specification."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WINDOW = 128


@dataclass
class Paged:
    """Rows of each sequence, and the same rows scattered over pages of a pool in random order."""

    rows: list[torch.Tensor]
    pool: torch.Tensor
    table: torch.Tensor


def paged(lengths: list[int], page: int, dim: int, *, dtype: torch.dtype, seed: int) -> Paged:
    """``lengths[s]`` random rows for each sequence; unused pool rows are NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = [max(1, -(-n // page)) for n in lengths]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    pool = torch.full((len(order), page, dim), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
    rows = []
    for s, n in enumerate(lengths):
        mine = torch.randn(n, dim, generator=generator).to(dtype)
        rows.append(mine)
        for logical in range(pages[s]):
            number = order.pop()
            table[s, logical] = number
            part = mine[logical * page : (logical + 1) * page]
            pool[number, : len(part)] = part
    return Paged(rows, pool, table)


def attend(
    q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 6.2 in fp64 for one token: ``q [H, D]`` over ``keys [n, D]``."""
    q, keys = q.double(), keys.double()
    s = q @ keys.T * scale
    if sink is not None:
        s = torch.cat((s, sink.double()[:, None]), dim=1)
    if s.shape[1] == 0:
        return torch.zeros_like(q), torch.full((len(q),), float("-inf"), dtype=torch.float64)
    p = torch.softmax(s, dim=1)[:, : len(keys)]
    lse = torch.logsumexp(s[:, : len(keys)], dim=1)
    return p @ keys, lse


def unrotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Inverse rotation of the last channels, pair by pair."""
    x = x.clone()
    r = 2 * len(angles)
    a, b = x[..., -r::2].clone(), x[..., -r + 1 :: 2].clone()
    c, s = angles.double().cos(), angles.double().sin()
    x[..., -r::2] = a * c + b * s
    x[..., -r + 1 :: 2] = b * c - a * s
    return x
