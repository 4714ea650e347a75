"""Small expert banks in which every byte tells whose it is."""

from __future__ import annotations

import torch

from ftkernels import ExpertBank
from ftkernels.moe.bank import RowPart, expert_rows, row_offsets

L, E = 3, 6
_U8 = torch.uint8
_PARTS = (RowPart((4, 2), _U8), RowPart((4, 1), _U8), RowPart((2, 2), _U8), RowPart((2, 1), _U8))
SLOT_BYTES = row_offsets(_PARTS)[-1]


def numbered_banks(*, in_rows: bool = True) -> list[ExpertBank]:
    """A bank for each of ``L`` layers; every byte of an expert is its key plus one."""
    banks = []
    for layer in range(L):
        tensors = expert_rows(torch.zeros(E, SLOT_BYTES, dtype=_U8), _PARTS)
        for x in tensors:
            x += torch.arange(layer * E + 1, layer * E + E + 1, dtype=_U8)[:, None, None]
        banks.append(ExpertBank(*(tensors if in_rows else [x.clone() for x in tensors])))
    return banks
