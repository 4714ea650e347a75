"""Leading dimensions of strided tensors, folded into the two-level row index that kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Row `r` of tensor `i` is at `(r // inner) * strides[i][0] + (r % inner) * strides[i][1]`."""

    tensors: tuple[torch.Tensor, ...]
    num_rows: int
    inner: int
    strides: tuple[tuple[int, int], ...]


def fold_rows(*tensors: torch.Tensor) -> Iterator[Rows]:
    """Views of tensors of one shape `[..., D]` that a two-level row index reaches.

    One item, unless more than two leading dimensions are left after merging those that lie evenly
    in memory in every tensor; then one item for each index of the first of them.
    """
    dims = _merged(tensors)
    if len(dims) > 2:
        axis = next(i for i, size in enumerate(tensors[0].shape) if size != 1)
        for index in range(tensors[0].shape[axis]):
            yield from fold_rows(*(x.select(axis, index) for x in tensors))
        return
    (outer, outer_strides), (inner, inner_strides) = [(1, (0,) * len(tensors))] * (
        2 - len(dims)
    ) + dims
    if outer == 1:
        # an inner size of 1 is a compile-time constant, so the division disappears
        outer, inner, outer_strides = inner, 1, inner_strides
    yield Rows(tensors, outer * inner, inner, tuple(zip(outer_strides, inner_strides, strict=True)))


def _merged(tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, tuple[int, ...]]]:
    dims: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(tensors[0].shape[:-1]):
        strides = tuple(x.stride(axis) for x in tensors)
        if size == 1:
            continue
        if dims and all(
            before == size * after for before, after in zip(dims[-1][1], strides, strict=True)
        ):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims
