"""The memory of the slots, laid out as the banks are, and what is copied where."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftkernels import check
from ftkernels.moe.bank import ExpertBank, expert_rows, row_offsets

# `pack_fp4` folds scales into int32
_SCALES = (torch.uint8, torch.int32)
_WEIGHTS = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)

Matrices = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


class ExpertPool:
    """``num_slots`` rows of bytes on the device, one expert each.

    An expert of a bank that lies in rows as well moves by one copy, otherwise by one for each of
    its tensors.
    """

    def __init__(self, banks: Sequence[ExpertBank], num_slots: int, device: torch.device) -> None:
        parts = banks[0].parts
        self.slot_bytes = row_offsets(parts)[-1]
        rows = torch.empty(num_slots, self.slot_bytes, dtype=torch.uint8, device=device)
        tensors = expert_rows(rows, parts)
        if banks[0].w13_scale is None:
            self.matrices: Matrices = (tensors[0], None, tensors[1], None)
        else:
            self.matrices = (tensors[0], tensors[1], tensors[2], tensors[3])
        self._pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each layer
        self.num_bytes: list[int] = []  # of a copied expert of each layer
        for bank in banks:
            source = bank.rows() if bank.parts == parts else None
            pairs = [(rows, source)] if source is not None else _pairs(tensors, bank.tensors)
            self._pairs.append(pairs)
            self.num_bytes.append(sum(s[0].numel() * s.itemsize for _, s in pairs))

    def copies(
        self, layer: int, moves: Sequence[tuple[int, int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Targets and sources of the copies that bring experts to slots, as (expert, slot)."""
        pairs = self._pairs[layer]
        return (
            [target[slot] for _, slot in moves for target, _ in pairs],
            [source[expert] for expert, _ in moves for _, source in pairs],
        )

    def probe(self, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What `copies` gives for the layer's first expert and slot 0, as bytes; nothing of
        tensors with gaps."""
        both = zip(*self.copies(layer, [(0, 0)]), strict=True)
        dense = [(_bytes(t), _bytes(s)) for t, s in both if s.numel() == _span(s)]
        return [t for t, _ in dense], [s for _, s in dense]

    def close(self) -> None:
        """Let go of the memory and of the banks."""
        empty = torch.empty(0)
        self.matrices = (empty, None, empty, None)
        self._pairs.clear()


def check_banks(op: str, banks: Sequence[ExpertBank], num_layers: int, num_experts: int) -> None:
    """Refuse banks that are not one a layer, in host memory, all of one form."""
    if not isinstance(banks, Sequence) or not all(isinstance(x, ExpertBank) for x in banks):
        raise TypeError(f"{op}: banks is {type(banks).__name__}, expected a list of ExpertBank")
    check.require(
        len(banks) == num_layers, f"{op}: banks is {len(banks)} banks, expected {num_layers}"
    )
    for layer, bank in enumerate(banks):
        _check_bank(op, f"banks[{layer}]", bank, num_experts)
    forms = [(bank.packed, [(x.shape, x.dtype) for x in bank.tensors]) for bank in banks]
    for layer, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"{op}: banks[{layer}] is {_words(form)}, expected {_words(forms[0])} as banks[0]"
            )


def _check_bank(op: str, bank_name: str, bank: ExpertBank, num_experts: int) -> None:
    scales = (bank.w13_scale, bank.w2_scale)
    check.require(
        (scales[0] is None) == (scales[1] is None),
        f"{op}: {bank_name} is with one of its scales, expected both or none",
    )
    for part in ("w13", "w13_scale", "w2", "w2_scale"):
        x, is_scale, name = getattr(bank, part), part.endswith("scale"), f"{bank_name}.{part}"
        if x is None and is_scale:
            continue
        check.dtype(op, name, x, _SCALES if is_scale else _WEIGHTS)
        check.require(x.device.type == "cpu", f"{op}: {name} is on {x.device}, expected cpu")
        layout = str(x.layout).removeprefix("torch.")
        check.require(layout == "strided", f"{op}: {name} is {layout}, expected a dense tensor")
        check.require(
            x.ndim == 3 and 0 not in x.shape[1:],
            f"{op}: {name} is {tuple(x.shape)}, expected [E, rows, columns], none of them 0",
        )
        check.require(
            len(x) == num_experts,
            f"{op}: {name} holds {len(x)} experts, expected num_experts, {num_experts}",
        )
    check.require(
        bank.packed or not any(x is not None and x.dtype == torch.int32 for x in scales),
        f"{op}: {bank_name} has int32 scales and packed=False, expected packed=True",
    )


def _words(form: tuple[bool, list[tuple[torch.Size, torch.dtype]]]) -> str:
    tensors = [f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for shape, dtype in form[1]]
    return f"{', '.join(tensors)}{' packed' if form[0] else ''}"


def _pairs(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(targets, sources, strict=True))


def _span(x: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
