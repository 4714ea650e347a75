"""Checks that prefill and decode share, and their softmax over gathered rows in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ftkernels import check
from ftkernels.attention.pools import PACKED_HEAD_DIM, check_pool, read_rows
from ftkernels.linear.linear import matmul_rows, wide

_WIDEST = 512
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
        check.integer(op, "window", self.window, 1)
        check.integer(op, "compress_ratio", self.compress_ratio, 0)
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

    @property
    def rows_per_page(self) -> int:
        """Rows of a compressed page; 1 when there are none."""
        return 1 if self.cmp_kv is None else self.cmp_kv.shape[1]

    @property
    def most_rows(self) -> int:
        """Compressed rows that the block table has room for."""
        return 0 if self.block_table is None else self.block_table.shape[1] * self.rows_per_page

    def operand(self, q: torch.Tensor) -> tl.dtype:
        """What the products are computed in: the 16-bit type that all rows share, else fp32."""
        if self.kv_format != "bf16":
            return tl.bfloat16
        compressed = self.window_kv if self.cmp_kv is None else self.cmp_kv
        types = {q.dtype, self.window_kv.dtype, compressed.dtype}
        return _OPERANDS.get(types.pop(), tl.float32) if len(types) == 1 else tl.float32

    def constants(self, q: torch.Tensor) -> dict[str, Any]:
        """What both kernels are compiled for, beside their own flags and tiles."""
        operand = self.operand(q)
        return {
            "WINDOW": self.window, "PER_WINDOW": self.window_kv.shape[1],
            "PER_PAGE": self.rows_per_page, "RATIO": self.compress_ratio,
            "D": q.shape[2], "D_P2": max(64, triton.next_power_of_2(q.shape[2])),
            "PACKED": self.kv_format == "fp8", "DTYPE": operand,
            "PRECISION": "ieee" if operand == tl.float32 else "tf32",
        }  # fmt: skip

    def window_arguments(self) -> tuple[Any, ...]:
        """Pool and table of the window as a kernel takes them."""
        return *_pool_arguments(self.window_kv, self.kv_format), *_table(self.window_block_table)

    def compressed_arguments(self) -> tuple[Any, ...]:
        """Pool and table of the compressed rows as a kernel takes them."""
        if self.cmp_kv is None or self.block_table is None:
            return (None, None, None, 0, 0, None, 0)
        return *_pool_arguments(self.cmp_kv, self.kv_format), *_table(self.block_table)

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


def _pool_arguments(pool: torch.Tensor, kv_format: str) -> tuple[Any, ...]:
    """Rows, and of packed ones the rotated channels and the scales, then two strides."""
    if kv_format == "bf16":
        return pool, None, None, pool.stride(0), pool.stride(1)
    if pool.shape[1] == 1:
        pool = pool[:, 0].unsqueeze(1)  # the stride of a single row may be anything
    views = (pool.view(dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.int64))
    return *views, pool.stride(0), pool.stride(1)


def _table(table: torch.Tensor) -> tuple[torch.Tensor, int]:
    return table, table.stride(0)


def config_key(q: torch.Tensor, pools: Pools, topk: int) -> dict[str, int]:
    """Sizes that choose a config: none that batch mates change, so that bits do not either.

    ``bytes`` is that of an operand, 1 for packed rows.
    """
    size = 4 if pools.operand(q) == tl.float32 else pools.window_kv.element_size()
    return {
        "H": q.shape[1], "D": q.shape[2], "ratio": pools.compress_ratio, "topk": topk,
        "bytes": size,
    }  # fmt: skip


def _gather(
    pool: torch.Tensor, table: torch.Tensor, numbers: torch.Tensor, size: int, kv_format: str
) -> torch.Tensor:
    # past the table lie rows that nobody sees yet
    last = table.shape[0] * size - 1
    if last < 0 or pool.shape[0] == 0:
        # no row exists: what is asked for lies under masks
        width = PACKED_HEAD_DIM if kv_format == "fp8" else pool.shape[2]
        return torch.zeros(*numbers.shape, width, device=pool.device)
    if numbers.shape[0] and int(numbers[-1]) > last:
        numbers = numbers.clamp(max=last)
    return read_rows(pool, table[numbers // size], numbers % size, kv_format)


def check_queries(
    op: str, q: torch.Tensor, text: str, sink: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, softmax_scale: float,
) -> None:  # fmt: skip
    check.tensor(op, "q", q, check.FLOATS, (None, None, None), text)
    if not 1 <= q.shape[2] <= _WIDEST:
        raise ValueError(f"{op}: q is {tuple(q.shape)}, expected {text} with D up to {_WIDEST}")
    if cos is not None and q.shape[2] % 2:
        raise ValueError(f"{op}: q is {tuple(q.shape)}, expected an even D to rotate back")
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
