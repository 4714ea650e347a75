"""The tensors behind the pages: window rows, compressed rows, index rows and carry, by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.model.config import ModelConfig
from ftruntime.types import PAGE_TOKENS


@dataclass(frozen=True)
class CompressedPool:
    """Rows of one compressor ``[pages, rows, c]`` and its carry, one row per request-table row.

    ``carry_snapshots`` ``[window pages, 2, 4, c]``: its carry at the end of each window page, where
    a prefix cache may start a row and the carry is not empty there (ratio 4); else None.
    """

    rows: torch.Tensor
    state: torch.Tensor
    kv_format: str
    carry_snapshots: torch.Tensor | None

    def snapshots(self, window_block_table: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keywords of the compressor's op; snapshots lie by window page."""
        if self.carry_snapshots is None:
            return {}
        return {"carry_snapshots": self.carry_snapshots, "snapshot_table": window_block_table}


@dataclass(frozen=True)
class LayerKV:
    window: torch.Tensor
    compressed: CompressedPool | None
    index: CompressedPool | None
    kv_format: str


class KVStorage:
    """Every layer's pools; all layers share page numbers, page 0 is padding.

    Args:
        num_pages: pages of compressed rows, the padding page included.
        window_pages: pages of the window pools, likewise.
        num_rows: rows of the request table.
        dtype: of unpacked rows.
        kv_format: "bf16" (rows of ``dtype``) or "fp8" (packed window and compressed rows).
        index_format: "bf16" or "fp4".
        prefix_cache: whether rows may start behind pages of other requests.
    """

    def __init__(
        self, config: ModelConfig, *, num_pages: int, window_pages: int, num_rows: int,
        dtype: torch.dtype, kv_format: str = "bf16", index_format: str = "bf16",
        prefix_cache: bool = False, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        def pool(pages: int, rows: int, width: int, fmt: str) -> torch.Tensor:
            made = ftkernels.empty_pool(
                pages, rows, width, kv_format=fmt, dtype=dtype, device=device
            )
            return made.zero_()

        def compressed(ratio: int, width: int, fmt: str) -> CompressedPool:
            shape = ftkernels.compressor_state_shape(ratio, width)
            state = torch.zeros(num_rows, *shape, dtype=torch.float32, device=device)
            kept = None
            if prefix_cache and ratio == 4:
                kept = torch.zeros(window_pages, 2, 4, width, dtype=torch.float32, device=device)
            rows = pool(num_pages, PAGE_TOKENS // ratio, width, fmt)
            return CompressedPool(rows, state, fmt, kept)

        self.layers = tuple(
            LayerKV(
                window=pool(window_pages, PAGE_TOKENS, config.head_dim, kv_format),
                compressed=compressed(ratio, config.head_dim, kv_format) if ratio else None,
                index=(
                    compressed(ratio, config.index_head_dim, index_format) if ratio == 4 else None
                ),
                kv_format=kv_format,
            )
            for ratio in config.compress_ratios
        )

    def restore(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Let rows of the request table start behind window pages: their carry is that page's.

        Args:
            pages, rows: ``[S]`` int32.
        """
        for pool in self._pools():
            if pool.carry_snapshots is not None:
                ftkernels.load_carry(pool.carry_snapshots, pages, pool.state, rows)

    def num_bytes(self) -> int:
        """Bytes of all pools, carry rows and carry snapshots."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.window
        for pool in self._pools():
            yield from (pool.rows, pool.state)
            if pool.carry_snapshots is not None:
                yield pool.carry_snapshots

    def _pools(self) -> Iterator[CompressedPool]:
        for layer in self.layers:
            yield from (pool for pool in (layer.compressed, layer.index) if pool is not None)
