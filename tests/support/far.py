"""Tensors whose elements lie more than 2^31 apart, in memory that takes no room until touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

FAR = 2**31 + 1024


def far_tensor(
    size: Sequence[int], dtype: torch.dtype, folder: Path, device: str
) -> torch.Tensor:
    """``size`` with a first stride of FAR elements, the others contiguous; zeros.

    On the CPU a sparse file is mapped, of which only touched pages are ever stored.
    """
    strides = [1]
    for n in reversed(size[2:]):
        strides.insert(0, strides[0] * n)
    inner = strides[0] * size[1] if len(size) > 1 else 1
    numel = (size[0] - 1) * FAR + inner
    if device == "cpu":
        flat = torch.from_file(
            str(folder / f"far-{dtype}-{numel}"), shared=True, size=numel, dtype=dtype
        )
    else:
        flat = torch.zeros(numel, dtype=dtype, device=device)
    return flat.as_strided(tuple(size), (FAR, *strides))
