"""Checks that prefill and decode share, and their softmax over gathered rows in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftkernels import check
from ftkernels.attention.pools import check_pool, read_rows
from ftkernels.linear.linear import matmul_rows, wide


class Pools(NamedTuple):
    """What an attention op reads besides its queries; names as in its signature."""

    window_kv: torch.Tensor
    window_block_table: torch.Tensor
    window: int
    cmp_kv: torch.Tensor | None
    block_table: torch.Tensor | None
    compress_ratio: int
    kv_format: str

    def check(self, op: str, q: torch.Tensor, count: int, rope_dim: int) -> None:
        ints, dim = (torch.int32,), q.shape[-1]
        check_pool(op, "window_kv", self.window_kv, self.kv_format, dim, rope_dim, q)
        size = (count, None)
        text = "[S, max_wpages]"
        check.tensor(op, "window_block_table", self.window_block_table, ints, size, text, q)
        check.require(self.window >= 1, lambda: f"{op}: window is {self.window}, expected >= 1")
        check.require(
            (self.cmp_kv is None) == (self.block_table is None) == (self.compress_ratio == 0),
            lambda: (
                f"{op}: cmp_kv, block_table and compress_ratio {self.compress_ratio} are "
                "partly given, expected all (ratio >= 1) or none (ratio 0)"
            ),
        )
        if self.cmp_kv is not None and self.block_table is not None:
            check_pool(op, "cmp_kv", self.cmp_kv, self.kv_format, dim, rope_dim, q)
            check.tensor(op, "block_table", self.block_table, ints, size, "[S, max_pages]", q)
            ratio = self.compress_ratio
            check.require(ratio >= 1, lambda: f"{op}: compress_ratio is {ratio}, expected >= 1")

    def window_rows(self, s: int, positions: torch.Tensor) -> torch.Tensor:
        """Rows at ``positions [n]``, fp32; zeros where the page is -1 or the position negative."""
        size = self.window_kv.shape[1]
        return _gather(self.window_kv, self.window_block_table[s], positions, size, self.kv_format)

    def newest_rows(self, s: int, length: int) -> torch.Tensor:
        """Rows the token at ``length - 1`` sees of its window, fp32, in order."""
        size = self.window_kv.shape[1]
        low = max(0, length - self.window)
        first, last = low // size, (length - 1) // size
        pages = self.window_block_table[s, first : last + 1].tolist()
        if self.kv_format != "bf16":
            return self.window_rows(s, torch.arange(low, length, device=self.window_kv.device))
        parts = [
            self.window_kv[page, max(0, low - logical * size) : length - logical * size]
            for logical, page in enumerate(pages, start=first)
        ]
        return wide(torch.cat(parts) if len(parts) > 1 else parts[0])

    def compressed_rows(self, s: int, numbers: torch.Tensor) -> torch.Tensor:
        """Compressed rows ``numbers [n]``, fp32; zeros where there is none."""
        assert self.cmp_kv is not None
        assert self.block_table is not None
        size = self.cmp_kv.shape[1]
        return _gather(self.cmp_kv, self.block_table[s], numbers, size, self.kv_format)


def _gather(
    pool: torch.Tensor, table: torch.Tensor, numbers: torch.Tensor, size: int, kv_format: str
) -> torch.Tensor:
    # past the table lie rows that nobody sees yet
    last = table.shape[0] * size - 1
    if numbers.shape[0] and int(numbers[-1]) > last:
        numbers = numbers.clamp(max=last)
    return read_rows(pool, table[numbers // size], numbers % size, kv_format)


def check_queries(
    op: str, q: torch.Tensor, text: str, sink: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, softmax_scale: float,
) -> None:  # fmt: skip
    check.tensor(op, "q", q, check.FLOATS, (None, None, None), text)
    if sink is not None:
        check.tensor(op, "sink", sink, (torch.float32,), (q.shape[1],), "[H]", q)
    check.number(op, "softmax_scale", softmax_scale)
    check.rope(op, cos, sin, q.shape[2], q)


def softmax_mix(
    scores: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mix ``rows`` by softmax, the sink in the denominator only.

    Args:
        scores: ``[B, H, n]`` fp32, ``-inf`` where a row is not visible; one of each ``n`` is.
        rows: ``[n, D]`` for all of ``B``, or ``[B, n, D]``, fp32 and finite.
        sink: ``[H]``.

    Returns:
        ``[B, H, D]`` and the log-sum over the keys ``[B, H]``.
    """
    batch, heads, count = scores.shape
    if sink is None:
        p = torch.softmax(scores, dim=-1)
    else:
        # a logit without a value: one column more, which no row answers
        column = sink[None, :, None].expand(batch, -1, 1)
        p = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :count]
    if rows.ndim == 3:
        mixed = torch.bmm(p, rows)
    else:
        mixed = matmul_rows(p.flatten(0, 1), rows.t()).view(batch, heads, -1)
    return mixed, torch.logsumexp(scores, dim=-1) if return_lse else None
