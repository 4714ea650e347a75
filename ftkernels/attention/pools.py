"""Pool formats: how KV rows and index rows lie in pages, and how the references read and write
them.

KV ``fp8`` page: ``rows`` x 576 data bytes (448 e4m3, then 64 bf16), then ``rows`` x 8 scale bytes
(7 UE8M0, one 0). Index ``fp4`` page: ``rows`` x 64 bytes of nibbles, then ``rows`` x 4 UE8M0.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.linear.linear import wide
from ftkernels.quant.act_quant import quantize_fp8_reference as quantize_fp8
from ftkernels.quant.weight_quant import (
    dequantize_fp4_reference as dequantize_fp4,
)
from ftkernels.quant.weight_quant import (
    dequantize_fp8_reference as dequantize_fp8,
)
from ftkernels.quant.weight_quant import (
    quantize_fp4_reference as quantize_fp4,
)

PACKED_HEAD_DIM, PACKED_ROPE_DIM = 512, 64
_VALUES, _DATA, _SCALES = 448, 576, 8
ROW_BYTES = _DATA + _SCALES
KV_GROUP = 64
INDEX_HEAD_DIM, _NIBBLES, _INDEX_SCALES = 128, 64, 4
INDEX_ROW_BYTES = _NIBBLES + _INDEX_SCALES
INDEX_GROUP = 32
_ALIGNMENT = 16
_DENSE = (torch.bfloat16, torch.float16, torch.float32)


def empty_pool(
    pages: int, rows: int, head_dim: int, *, kv_format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """An uninitialized pool whose page stride keeps 16-byte alignment.

    Args:
        pages, rows: pages, and rows of a page.
        head_dim: channels of a row.
        kv_format: "bf16" (rows of ``dtype``), "fp8" (packed KV) or "fp4" (packed index rows).

    Returns:
        ``[pages, rows, head_dim]`` of ``dtype``, ``[pages, rows, 584]`` or ``[pages, rows, 68]``
        uint8.

    Raises:
        ValueError: an unknown format, or sizes the packed format does not have.
    """
    for name, value in (("pages", pages), ("rows", rows)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"empty_pool: {name} is {value!r}, expected an integer >= 0")
    check.require(
        kv_format in ("bf16", "fp8", "fp4"),
        lambda: f"empty_pool: kv_format is {kv_format!r}, expected 'bf16', 'fp8' or 'fp4'",
    )
    if kv_format == "bf16":
        return torch.empty(pages, rows, head_dim, dtype=dtype, device=device)
    wanted = PACKED_HEAD_DIM if kv_format == "fp8" else INDEX_HEAD_DIM
    check.require(
        head_dim == wanted,
        lambda: f"empty_pool: head_dim is {head_dim}, expected {wanted} for {kv_format}",
    )
    row_bytes = ROW_BYTES if kv_format == "fp8" else INDEX_ROW_BYTES
    stride = -(-rows * row_bytes // _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(pages * stride, dtype=torch.uint8, device=device)
    return flat.as_strided((pages, rows, row_bytes), (stride, row_bytes, 1))


def check_pool(
    op: str, name: str, pool: torch.Tensor, kv_format: str, head_dim: int, rope_dim: int,
    like: torch.Tensor,
) -> None:  # fmt: skip
    """Refuse a KV pool that does not have the form its format promises."""
    check.require(
        kv_format in ("bf16", "fp8"),
        lambda: f"{op}: kv_format is {kv_format!r}, expected 'bf16' or 'fp8'",
    )
    _check_rows(op, name, pool)
    if kv_format == "bf16":
        check.tensor(op, name, pool, _DENSE, (None, None, head_dim), "[pages, rows, D]", like)
        return
    check.require(
        head_dim == PACKED_HEAD_DIM and rope_dim == PACKED_ROPE_DIM,
        lambda: (
            f"{op}: kv_format is 'fp8' with D {head_dim} and rope_dim {rope_dim}, "
            f"expected D {PACKED_HEAD_DIM} and rope_dim {PACKED_ROPE_DIM}"
        ),
    )
    _check_packed(op, name, pool, ROW_BYTES, like)


def check_index_pool(
    op: str, name: str, pool: torch.Tensor, index_format: str, head_dim: int, like: torch.Tensor,
    argument: str = "index_format",
) -> None:  # fmt: skip
    """Refuse an index pool that does not have the form its format promises."""
    check.require(
        index_format in ("bf16", "fp4"),
        lambda: f"{op}: {argument} is {index_format!r}, expected 'bf16' or 'fp4'",
    )
    _check_rows(op, name, pool)
    if index_format == "bf16":
        check.tensor(op, name, pool, _DENSE, (None, None, head_dim), "[pages, rows, Di]", like)
        return
    check.require(
        head_dim == INDEX_HEAD_DIM,
        lambda: f"{op}: {argument} is 'fp4' with Di {head_dim}, expected {INDEX_HEAD_DIM}",
    )
    _check_packed(op, name, pool, INDEX_ROW_BYTES, like)


def _check_rows(op: str, name: str, pool: torch.Tensor) -> None:
    if isinstance(pool, torch.Tensor) and pool.ndim == 3 and pool.shape[1] == 0:
        raise ValueError(f"{op}: {name} is {tuple(pool.shape)}, expected pages of at least one row")


def _check_packed(
    op: str, name: str, pool: torch.Tensor, row_bytes: int, like: torch.Tensor
) -> None:
    check.tensor(op, name, pool, (torch.uint8,), (None, None, row_bytes), "packed pages", like)
    check.require(
        pool.stride(0) % _ALIGNMENT == 0 and (pool.shape[1] == 1 or pool.stride(1) == row_bytes),
        lambda: (
            f"{op}: {name} has strides {pool.stride()}, expected rows of {row_bytes} bytes "
            f"and a page stride that is a multiple of {_ALIGNMENT}"
        ),
    )
    check.require(
        pool.is_meta or pool.data_ptr() % _ALIGNMENT == 0,
        lambda: f"{op}: {name} is not {_ALIGNMENT}-byte aligned, expected pages that are",
    )


def read_rows(
    pool: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, kv_format: str
) -> torch.Tensor:
    """KV rows in fp32, ``[N, D]``; every page must be live."""
    if kv_format == "bf16":
        return wide(pool[pages, rows])
    data = _part(pool, 0, _DATA)[pages, rows]
    scales = _part(pool, pool.shape[1] * _DATA, _SCALES)[pages, rows]
    values = data[:, :_VALUES].contiguous().view(torch.float8_e4m3fn)
    scales = scales[:, : _VALUES // KV_GROUP].contiguous()
    unrotated = dequantize_fp8(values, scales, group=KV_GROUP, dtype=torch.float32)
    rotated = data[:, _VALUES:].contiguous().view(torch.bfloat16).float()
    return torch.cat((unrotated, rotated), dim=1)


def write_rows(
    pool: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, kv: torch.Tensor, kv_format: str
) -> None:
    """Store ``kv [N, D]``; the packed format quantizes."""
    if kv_format == "bf16":
        pool[pages, rows] = kv if kv.dtype == pool.dtype else kv.to(pool.dtype)
        return
    values, scales = quantize_fp8(kv[:, :_VALUES].contiguous(), group=KV_GROUP)
    rotated = kv[:, _VALUES:].to(torch.bfloat16).contiguous().view(torch.uint8)
    _part(pool, 0, _DATA)[pages, rows] = torch.cat((values.view(torch.uint8), rotated), dim=1)
    padded = torch.nn.functional.pad(scales, (0, _SCALES - scales.shape[1]))
    _part(pool, pool.shape[1] * _DATA, _SCALES)[pages, rows] = padded


def read_index_rows(
    pool: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, index_format: str
) -> torch.Tensor:
    """Index rows in fp32, ``[N, Di]``."""
    if index_format == "bf16":
        return pool[pages, rows].float()
    nibbles = _part(pool, 0, _NIBBLES)[pages, rows]
    scales = _part(pool, pool.shape[1] * _NIBBLES, _INDEX_SCALES)[pages, rows]
    return dequantize_fp4(nibbles, scales, group=INDEX_GROUP, dtype=torch.float32)


def write_index_rows(
    pool: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, index_k: torch.Tensor,
    index_format: str,
) -> None:  # fmt: skip
    """Store ``index_k [N, Di]``; the packed format quantizes."""
    if index_format == "bf16":
        pool[pages, rows] = index_k.to(pool.dtype)
        return
    nibbles, scales = quantize_fp4(index_k, group=INDEX_GROUP)
    _part(pool, 0, _NIBBLES)[pages, rows] = nibbles
    _part(pool, pool.shape[1] * _NIBBLES, _INDEX_SCALES)[pages, rows] = scales


def _part(pool: torch.Tensor, offset: int, row_bytes: int) -> torch.Tensor:
    """View ``[pages, rows, row_bytes]`` of the section of each page that starts at ``offset``."""
    size = (pool.shape[0], pool.shape[1], row_bytes)
    start = pool.storage_offset() + offset
    return pool.as_strided(size, (pool.stride(0), row_bytes, 1), start)
