"""Experts of one layer, and how the tensors of an expert lie together in one row of bytes.

A row holds w13, its scale, w2 and its scale, those that there are, each from a multiple of 256
bytes on, so that one copy moves an expert.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftkernels import check
from ftkernels.quant.pack import foldable, pack_fp4

ROW_ALIGNMENT = 256


@dataclass(frozen=True)
class RowPart:
    """One tensor of an expert.

    Args:
        shape: its shape, without the dimension of the experts.
        dtype: its dtype.
        strides: in elements, of a tensor without gaps; None is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without the gap behind it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(stacked: torch.Tensor) -> RowPart:
        """The part of which ``stacked [E, ...]`` holds one for each expert, in its order of
        dimensions, or contiguous if it has gaps."""
        shape, strides = tuple(stacked.shape[1:]), tuple(stacked.stride()[1:])
        return RowPart(shape, stacked.dtype, strides if _dense(shape, strides) else None)


def row_offsets(parts: Sequence[RowPart]) -> list[int]:
    """First byte of each part in a row, and behind them the bytes of a row."""
    offsets = [0]
    for part in parts:
        end = offsets[-1] + part.num_bytes
        offsets.append(end + -end % ROW_ALIGNMENT)
    return offsets


def expert_rows(rows: torch.Tensor, parts: Sequence[RowPart]) -> list[torch.Tensor]:
    """The tensors ``[E, *part.shape]`` that lie in ``rows``, as views.

    Args:
        rows: ``[E, row_offsets(parts)[-1]]`` uint8, contiguous, on any device.

    Raises:
        TypeError: ``rows`` is not uint8, or ``parts`` no list of parts.
        ValueError: ``rows`` is of another shape, not contiguous or not aligned, or a part is
            impossible.
    """
    op = "expert_rows"
    _check_parts(op, parts)
    *offsets, num_bytes = row_offsets(parts)
    check.tensor(op, "rows", rows, (torch.uint8,), (None, num_bytes), "[E, bytes of a row]")
    check.require(
        rows.is_contiguous(),
        lambda: f"{op}: rows has strides {rows.stride()}, expected contiguous rows",
    )
    largest = max((part.dtype.itemsize for part in parts), default=1)
    check.require(
        rows.storage_offset() % largest == 0,
        lambda: (
            f"{op}: rows is at byte {rows.storage_offset()} of its memory, "
            f"expected a multiple of {largest}"
        ),
    )
    views = []
    for part, offset in zip(parts, offsets, strict=True):
        typed, size = rows.view(part.dtype), part.dtype.itemsize
        strides = part.strides or _contiguous(part.shape)
        views.append(typed.as_strided(
            (len(rows), *part.shape), (num_bytes // size, *strides),
            typed.storage_offset() + offset // size,
        ))  # fmt: skip
    return views


def _check_parts(op: str, parts: object) -> None:
    """Refuse what is no list of parts that can lie in a row."""
    if not isinstance(parts, Sequence) or not all(isinstance(part, RowPart) for part in parts):
        raise TypeError(f"{op}: parts is {reprlib.repr(parts)}, expected a list of RowPart")
    for place, part in enumerate(parts):
        shape, strides = part.shape, part.strides
        strides = _contiguous(shape) if strides is None else strides
        fits = len(strides) == len(shape) and min(shape, default=0) >= 0
        if not fits or not (0 in shape or _dense(shape, strides)):
            raise ValueError(
                f"{op}: parts[{place}] is {shape} with strides {part.strides}, "
                "expected sizes >= 0 and strides without gaps"
            )


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements lie without gaps, in any order of the dimensions."""
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


@dataclass(frozen=True, repr=False)
class ExpertBank:
    """Weights of all routed experts of a layer; scales are None when the weights are dequantized.

    Args:
        w13: `[E, 2I, C/2]` uint8, or `[E, 2I, C]` bf16/fp32; w1 rows, then w3 rows.
        w13_scale: `[E, 2I, C/32]` uint8 UE8M0 codes.
        w2: `[E, C, I/2]` uint8, or `[E, C, I]`.
        w2_scale: `[E, C, I/32]` uint8.
        packed: weights and scales are `pack_fp4`'s, those of `w13` with `gated`.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    packed: bool = False

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
        forms = [f"{name}={_form(x)}" for name, x in given.items()]
        return f"ExpertBank({', '.join(forms)}, packed={self.packed})"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """w13, w13_scale, w2, w2_scale, those that are not None."""
        return [x for x in (self.w13, self.w13_scale, self.w2, self.w2_scale) if x is not None]

    @property
    def parts(self) -> list[RowPart]:
        """What one expert consists of."""
        return [RowPart.of(x) for x in self.tensors]

    def rows(self) -> torch.Tensor | None:
        """The bytes ``[E, bytes of a row]`` in which the tensors lie as `expert_rows` puts them;
        None when they lie otherwise."""
        tensors, (*offsets, num_bytes) = self.tensors, row_offsets(self.parts)
        storage, first = self.w13.untyped_storage(), self.w13.storage_offset()
        first *= self.w13.itemsize
        for x, offset in zip(tensors, offsets, strict=True):
            if (
                x.untyped_storage().data_ptr() != storage.data_ptr()
                or x.storage_offset() * x.itemsize != first + offset
                or x.stride(0) * x.itemsize != num_bytes
                or RowPart.of(x).strides is None
            ):
                return None
        experts = len(self.w13)
        if first + experts * num_bytes > storage.nbytes():
            return None
        empty = torch.empty(0, dtype=torch.uint8, device=self.w13.device)
        return empty.set_(storage, first, (experts, num_bytes), (num_bytes, 1))

    def pack(self) -> ExpertBank:
        """The same experts in the order of the kernels; scales that do not fold stay bytes.

        Raises:
            TypeError: a tensor is none, or not uint8.
            ValueError: the experts are packed already, or dequantized; or shapes that do not fit.
        """
        op, w13_scale, w2_scale = "ExpertBank.pack", self.w13_scale, self.w2_scale
        if self.packed or (w13_scale is None and w2_scale is None):
            form = "packed" if self.packed else "dequantized"
            raise ValueError(f"{op}: the bank is {form}, expected checkpoint codes")
        codes = (torch.uint8,)
        check.tensor(op, "w13", self.w13, codes, (None, None, None), "[E, 2I, C/2]")
        experts, rows, half = self.w13.shape
        check.require(
            rows % 64 == 0 and half % 16 == 0,
            f"{op}: w13 is {tuple(self.w13.shape)}, expected [E, 2I, C/2] with I and C multiples "
            "of 32",
        )
        first, last = (experts, rows), (experts, 2 * half)
        for name, x, size, text in (
            ("w13_scale", w13_scale, (*first, half // 16), "[E, 2I, C/32]"),
            ("w2", self.w2, (*last, rows // 4), "[E, C, I/2]"),
            ("w2_scale", w2_scale, (*last, rows // 64), "[E, C, I/32]"),
        ):
            check.tensor(op, name, x, codes, size, text, self.w13)
        assert w13_scale is not None
        assert w2_scale is not None
        w13 = pack_fp4(self.w13, w13_scale, gated=True, fold=foldable(w13_scale))
        w2 = pack_fp4(self.w2, w2_scale, fold=foldable(w2_scale))
        return ExpertBank(*w13, *w2, packed=True)


def _form(x: object) -> str:
    """Dtype and shape of a tensor, what else there is as it is."""
    if not isinstance(x, torch.Tensor):
        return reprlib.repr(x)
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
