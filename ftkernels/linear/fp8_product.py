"""What the FP8 linears launch: one product, by the path that suits the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear.fp8_kernels import (
    BLOCK,
    LinearConfig,
    default_config,
    gemm_kernel,
    gemv_kernel,
    num_slices,
    num_splits,
    prepare_kernel,
)
from ftkernels.spec import COUNTER_BYTES, Case

GEMV_TOKENS = 64  # of one launch; also the most that go there unasked
_NUM_COUNTERS = COUNTER_BYTES // 4
_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.float32: tl.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Activations ``x [T, G, K]``, and what is done to them before the product.

    Args:
        x: with ``limit`` ``[T, G, 2*K]``, gate columns first.
        scale: ``[T, ceil(K/128)]`` codes of an e4m3 ``x``.
        quantize: round to FP8 in groups of 128 channels.
        norm_weight, eps: of an RMS norm.
        limit: clamp bound of SwiGLU, infinite for none; None for no activation.
    """

    x: torch.Tensor
    scale: torch.Tensor | None = None
    quantize: bool = False
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    limit: float | None = None

    @property
    def unprepared(self) -> bool:
        return self.quantize or self.norm_weight is not None or self.limit is not None

    @property
    def operand(self) -> torch.dtype:
        """What the product multiplies."""
        return torch.float8_e4m3fn if self.quantize else self.x.dtype

    def cut(self, begin: int, end: int) -> Rows:
        scale = None if self.scale is None else self.scale[begin:end]
        return replace(self, x=self.x[begin:end], scale=scale)


def takes_gemv(path: str | None, num_tokens: int) -> bool:
    return path == "gemv" or (path is None and num_tokens <= GEMV_TOKENS)


def num_bytes(
    num_tokens: int, groups: int, n: int, k: int, *, item: int, gemv: bool, gemm: bool
) -> int:  # fmt: skip
    """Scratch of the given paths: counters, then sums of the splits or prepared rows.

    Args:
        item: bytes of a prepared channel, 0 where rows are taken as they are.
    """
    sums = prepared = 0
    if gemv and num_splits(k) > 1:
        sums = 4 * num_splits(k) * min(num_tokens, GEMV_TOKENS) * groups * n
    if gemm and item:
        prepared = num_tokens * (_row_bytes(k, item) + _row_bytes(triton.cdiv(k, BLOCK), 1))
    return COUNTER_BYTES + max(sums, prepared)


def _row_bytes(k: int, item: int) -> int:
    return 16 * triton.cdiv(k * item, 16)


def rows_bytes(rows: Rows, weight: torch.Tensor, path: str | None) -> int:
    """Scratch of a product with ``weight [G, R, K]``."""
    count, gemv = rows.x.shape[0], takes_gemv(path, rows.x.shape[0])
    item = rows.operand.itemsize if rows.unprepared else 0
    return num_bytes(count, *weight.shape, item=item, gemv=gemv, gemm=not gemv)


def multiply(
    op: str, rows: Rows, weight: torch.Tensor, scale: torch.Tensor, path: str | None,
    out: torch.Tensor, scratch: torch.Tensor | None,
) -> None:  # fmt: skip
    """``out [T, G, R] = rows @ weight [G, R, K]``; a given ``scratch`` has been checked."""
    count, groups, n = out.shape
    k, gemv = weight.shape[2], takes_gemv(path, count)
    key = {"G": groups, "N": n, "K": k, "bits": 8 * rows.operand.itemsize, "gemv": int(gemv)}
    with backend.on_device(weight):
        if scratch is None and (gemv or rows.unprepared):
            scratch = check.scratch(op, None, rows_bytes(rows, weight, path), weight)
        if gemv:
            assert scratch is not None
            for begin in range(0, count, GEMV_TOKENS):
                end = min(begin + GEMV_TOKENS, count)
                _gemv(op, key, rows.cut(begin, end), weight, scale, out[begin:end], scratch)
            return
        cfg = config.lookup(op, {**key, "T": count}, default_config, grows="T")
        if rows.unprepared:
            assert scratch is not None
            rows = _prepare(rows, k, scratch)
        _gemm(cfg, rows, weight, scale, out)


def _prologue(rows: Rows) -> dict[str, object]:
    """Arguments of the kernels that prepare rows."""
    return {
        "norm_ptr": rows.norm_weight, "eps": rows.eps,
        "limit": 0.0 if rows.limit is None else rows.limit,
        "NORM": rows.norm_weight is not None, "SWIGLU": rows.limit is not None,
        "QUANTIZE": rows.quantize, "DTYPE": _TYPES[rows.operand],
    }  # fmt: skip


def _gemv(
    op: str, key: Case, rows: Rows, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:  # fmt: skip
    cfg = config.lookup(op, {**key, "T": out.shape[0]}, default_config, grows="T")
    grid, arguments, constants = gemv_call(op, cfg, rows, weight, scale, out, scratch)
    gemv_kernel[grid](
        *arguments, **constants, num_warps=num_slices(weight.shape[2]), maxnreg=255
    )


def gemv_call(
    op: str, cfg: LinearConfig, rows: Rows, weight: torch.Tensor, scale: torch.Tensor,
    out: torch.Tensor, scratch: torch.Tensor,
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid ``(row tiles, weight chunks, splits)``, arguments and constexprs of `gemv_block`."""
    count, groups, n = out.shape
    k, splits = weight.shape[2], num_splits(weight.shape[2])
    block_n = cfg.block_n * cfg.tiles
    chunks, tiles_t = triton.cdiv(n, block_n), triton.cdiv(count, cfg.block_t)
    if tiles_t * groups * chunks > _NUM_COUNTERS:
        raise ValueError(
            f"{op}: weight is {tuple(weight.shape)}, expected at most "
            f"{_NUM_COUNTERS * block_n // tiles_t} rows"
        )
    prologue = _prologue(rows)
    arguments = (
        rows.x, rows.x.stride(0), rows.x.stride(1),
        rows.scale, 0 if rows.scale is None else rows.scale.stride(0),
        weight, weight.stride(0), weight.stride(1),
        scale, scale.stride(0),
        out, out.stride(0), out.stride(1),
        scratch[:COUNTER_BYTES].view(torch.int32),
        scratch[COUNTER_BYTES:][: 4 * splits * count * groups * n].view(torch.float32),
        count * groups * n, groups * n,
        count, n, k, chunks,
        prologue.pop("norm_ptr"), prologue.pop("eps"), prologue.pop("limit"),
    )  # fmt: skip
    constants = {
        **prologue, "SCALED": rows.scale is not None,
        "SPLITS": splits, "SLICES": num_slices(k), "TILES": cfg.tiles,
        "EVEN_K": k % (num_slices(k) * BLOCK) == 0,
        "ROW_SCALES": groups > 1 and n % cfg.block_n != 0,
        "BLOCK_T": cfg.block_t, "LIVE_T": min(cfg.block_t, triton.next_power_of_2(count)),
        "BLOCK_N": cfg.block_n, "STAGES": cfg.num_stages,
    }  # fmt: skip
    return (tiles_t, groups * chunks, splits), arguments, constants


def _prepare(rows: Rows, k: int, scratch: torch.Tensor) -> Rows:
    """The rows as the product takes them, in ``scratch``."""
    count, item = rows.x.shape[0], rows.operand.itemsize
    width, codes = _row_bytes(k, item), _row_bytes(triton.cdiv(k, BLOCK), 1)
    memory = scratch[COUNTER_BYTES:]
    x = memory[: count * width].view(count, 1, width).view(rows.operand)
    scale = memory[count * width :][: count * codes].view(count, codes)
    slices = num_slices(k)
    prepare_kernel[(triton.cdiv(count, 8), num_splits(k))](
        rows.x, rows.x.stride(0),
        x, x.stride(0), scale, scale.stride(0),
        count, k, triton.cdiv(k, BLOCK),
        **_prologue(rows), SLICES=slices, BLOCK_T=8, num_warps=slices,
    )  # fmt: skip
    return Rows(x, scale if rows.quantize else None)


def _gemm(
    cfg: LinearConfig, rows: Rows, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    count, groups, n = out.shape
    k, item = weight.shape[2], rows.x.element_size()
    block_k = BLOCK // item
    tiles_t, tiles_n = triton.cdiv(count, cfg.block_t), triton.cdiv(n, cfg.block_n)
    gemm_kernel[(tiles_t * tiles_n, groups)](
        rows.x, rows.x.stride(0), rows.x.stride(1),
        rows.scale, 0 if rows.scale is None else rows.scale.stride(0),
        weight, weight.stride(0), weight.stride(1),
        scale, scale.stride(0),
        out, out.stride(0), out.stride(1),
        count, n, k, tiles_t, tiles_n,
        SCALED=rows.scale is not None, DTYPE=_TYPES[rows.x.dtype], EVEN_K=k % block_k == 0,
        ROW_SCALES=groups > 1 and n % cfg.block_n != 0,
        BLOCK_T=cfg.block_t, BLOCK_N=cfg.block_n, BLOCK_K=block_k, GROUP_T=cfg.tiles,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages, maxnreg=255,
    )  # fmt: skip
