"""Ragged paged batches of the attention tests, and what one token sees by the specification."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ftkernels import backend
from ftkernels.attention.kv_store import load_kv_reference, store_kv_reference
from ftkernels.attention.pools import empty_pool
from ftkernels.testing import randn

WINDOW = 128
DEVICE = "cuda" if torch.cuda.is_available() and not backend.interpreted() else "cpu"


def carried(op: Callable[..., Any], device: str = DEVICE) -> Callable[..., Any]:
    """``op`` for tensors on the CPU: computed on the tests' device, with the strides they have.

    Results, ``out`` and ``scratch`` come back to where they were.
    """
    if device == "cpu":
        return op

    def there(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = tree_map(there, kwargs)
        result = op(*tree_map(there, args), **moved)
        for name in ("out", "scratch"):
            if kwargs.get(name) is not None:
                tree_map(lambda mine, new: mine.copy_(new), kwargs[name], moved[name])
        if kwargs.get("out") is not None:
            return kwargs["out"]
        return tree_map(lambda x: x.cpu(), result)

    return call


@dataclass
class Paged:
    """Rows of each sequence, and the same rows scattered over pages of a pool in random order."""

    rows: list[torch.Tensor]
    pool: torch.Tensor
    table: torch.Tensor


def paged(
    lengths: list[int], page: int, dim: int, *, dtype: torch.dtype, seed: int,
    kv_format: str = "bf16",
) -> Paged:  # fmt: skip
    """``lengths[s]`` random rows for each sequence; unused pool rows are NaN (packed: 0xFF)."""
    generator = torch.Generator().manual_seed(seed)
    pages = [max(1, -(-n // page)) for n in lengths]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    pool = empty_pool(len(order), page, dim, kv_format=kv_format, dtype=dtype)
    pool.fill_(255 if kv_format == "fp8" else float("nan"))
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
    rows = []
    for s, n in enumerate(lengths):
        mine = torch.randn(n, dim, generator=generator).to(dtype)
        for logical in range(pages[s]):
            table[s, logical] = order.pop()
        numbers = torch.arange(n)
        slots = table[s].long()[numbers // page] * page + numbers % page
        store_kv_reference(mine, pool, slots, kv_format=kv_format, rope_dim=min(64, dim))
        stored = load_kv_reference(
            pool, slots, kv_format=kv_format, rope_dim=min(64, dim), dtype=dtype
        )
        rows.append(stored)
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


@dataclass
class Attention:
    """One call of ``mla_prefill``, and by token what the formula gives.

    ``lengths`` and ``news`` count the tokens of each sequence and the new ones among them; two
    padded rows follow the last sequence.
    """

    lengths: list[int]
    news: list[int]
    heads: int
    ratio: int = 0
    picks: int = 0
    dim: int = 64
    rope: int = 16
    dtype: torch.dtype = torch.float32
    kv_format: str = "bf16"
    page: int = 128
    per_page: int = 0
    window: int = WINDOW
    seed: int = 0
    args: tuple[torch.Tensor, ...] = field(init=False)
    kwargs: dict[str, Any] = field(init=False)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)
    keys: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        seed, total = self.seed, sum(self.news)
        made = {"dtype": self.dtype, "kv_format": self.kv_format}
        window = paged(self.lengths, self.page, self.dim, **made, seed=seed)
        q = randn(total + 2, self.heads, self.dim, dtype=self.dtype, seed=seed + 2, scale=3.0)
        angles = randn(max(self.lengths) + 1, self.rope // 2, seed=seed + 3, scale=3.0)
        # near the log of the number of rows, so that a sink's share is neither nothing nor all
        sink = randn(self.heads, seed=seed + 1) + math.log(max(2, min(self.lengths))) + 1.0
        self.kwargs = {
            "softmax_scale": self.dim**-0.5, "sink": sink, "return_lse": True,
            "cos": angles.cos(), "sin": angles.sin(), "kv_format": self.kv_format,
            "window": self.window,
        }  # fmt: skip
        compressed = None
        if self.ratio:
            counts = [n // self.ratio for n in self.lengths]
            per_page = self.per_page or max(1, 128 // self.ratio)
            compressed = paged(counts, per_page, self.dim, **made, seed=seed + 4)
            self.kwargs |= {"cmp_kv": compressed.pool, "block_table": compressed.table}
            self.kwargs["compress_ratio"] = self.ratio
        bounds = torch.tensor([0, *torch.tensor(self.news).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.args = (q, window.pool, window.table, bounds, lens)
        self._expect(window, compressed, angles)

    def _expect(self, window: Paged, compressed: Paged | None, angles: torch.Tensor) -> None:
        q, scale, sink = self.args[0], self.kwargs["softmax_scale"], self.kwargs["sink"]
        generator = torch.Generator().manual_seed(self.seed + 5)
        chosen = torch.full((len(q), self.picks), -1, dtype=torch.int32)
        self.out = torch.zeros(*q.shape, dtype=torch.float64)
        self.lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
        self.keys = []
        for s, (length, new) in enumerate(zip(self.lengths, self.news, strict=True)):
            for p in range(length - new, length):
                t = len(self.keys)
                keys = window.rows[s][max(0, p - self.window + 1) : p + 1]
                if compressed is not None:
                    extra = torch.arange((p + 1) // self.ratio)
                    if self.picks:
                        order = torch.randperm(len(extra), generator=generator)
                        extra = order[: self.picks]
                        places = torch.randperm(self.picks, generator=generator)[: len(extra)]
                        chosen[t, places] = extra.to(torch.int32)
                    keys = torch.cat((keys, compressed.rows[s][extra]))
                mixed, self.lse[t] = attend(q[t], keys, scale, sink)
                self.out[t] = unrotate(mixed, angles[p])
                self.keys.append(keys)
        if self.picks:
            self.kwargs["index_topk"] = chosen

    def decode(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """The same call of ``mla_decode``; every sequence has one new token."""
        assert all(new == 1 for new in self.news)
        q, pool, table, _, lens = self.args
        kwargs = dict(self.kwargs)
        if self.picks:
            kwargs["index_topk"] = kwargs["index_topk"][: len(lens)]
        return (q[: len(lens)], pool, table, lens), kwargs
