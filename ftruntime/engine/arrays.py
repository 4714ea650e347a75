"""Lists of numbers to tensors of a device, several in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 16  # bytes; a kernel is compiled again for an argument that is aligned otherwise


def together(
    lists: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """A tensor for each list, in one transfer; each begins at a multiple of 16 bytes."""
    step, flat, places = _ALIGNMENT // dtype.itemsize, list[float](), []
    for numbers in lists:
        places.append((len(flat), len(flat) + len(numbers)))
        flat.extend(numbers)
        flat.extend([0] * (-len(flat) % step))
    made = torch.tensor(flat, dtype=dtype).to(device)
    return tuple(made[begin:end] for begin, end in places)
