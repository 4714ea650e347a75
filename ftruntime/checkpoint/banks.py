"""Places routed experts in host memory: slices, forms, and the row of each expert.

A rank holds rows `[rank * I / ranks, ...)` of w1 and w3 and the same columns of w2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

import ftkernels
from ftkernels import ExpertBank
from ftkernels.moe.bank import RowPart, expert_rows, row_offsets
from ftkernels.moe.host_memory import HostMemory
from ftkernels.quant.pack import foldable, unfold
from ftruntime.checkpoint.files import ShardFiles
from ftruntime.checkpoint.header import TensorEntry
from ftruntime.checkpoint.index import CheckpointIndex
from ftruntime.checkpoint.names import FP4_GROUP, expert_name
from ftruntime.model.config import ModelConfig

_NAN_SCALE: Final = 255
_FOLDED_CODES: Final = 4 * FP4_GROUP  # columns whose scales one int32 of packed metadata holds


@dataclass(frozen=True)
class BankForm:
    """Which slice of the experts stands in memory, and how.

    Args:
        dequantize: None keeps FP4 codes.
        pack: codes are in the kernels' order.
        by_columns: dequantized matrices have contiguous columns, which is what the product of a
            single row prefers on the host.
    """

    config: ModelConfig
    dequantize: torch.dtype | None = None
    pack: bool = False
    by_columns: bool = False
    rank: int = 0
    ranks: int = 1

    @property
    def inter(self) -> int:
        """Intermediate channels of the slice."""
        return self.config.moe_intermediate_size // self.ranks

    @property
    def parts(self) -> list[RowPart]:
        """The tensors of an expert; metadata of packed weights as if all scales fold."""
        hidden, inter = self.config.hidden_size, self.inter
        return [*self._matrix(2 * inter, hidden), *self._matrix(hidden, inter)]

    @property
    def num_bytes(self) -> int:
        """All experts of all layers, gaps between the tensors included."""
        experts = self.config.num_hidden_layers * self.config.n_routed_experts
        return experts * row_offsets(self.parts)[-1]

    def stored(self) -> list[RowPart]:
        """The slice of an expert as the checkpoint holds it."""
        return BankForm(self.config, rank=self.rank, ranks=self.ranks).parts

    @property
    def stored_bytes(self) -> int:
        """Bytes of an expert's slice in the checkpoint."""
        return sum(part.num_bytes for part in self.stored())

    def _matrix(self, rows: int, columns: int) -> list[RowPart]:
        if self.dequantize is not None:
            strides = (1, rows) if self.by_columns else None
            return [RowPart((rows, columns), self.dequantize, strides)]
        weight = RowPart((rows, columns // 2), torch.uint8)
        if self.pack:
            groups = -(-columns // _FOLDED_CODES)
            return [weight, RowPart((groups, rows), torch.int32)]
        return [weight, RowPart((rows, columns // FP4_GROUP), torch.uint8)]


class BankBuilder:
    """The banks of all layers while they fill; threads may place different experts at once."""

    def __init__(
        self, form: BankForm, index: CheckpointIndex, files: ShardFiles, memory: HostMemory
    ) -> None:
        self._form, self._index, self._files = form, index, files
        config = form.config
        row_bytes = row_offsets(form.parts)[-1]
        self.rows = [
            memory.empty(config.n_routed_experts, row_bytes)
            for _ in range(config.num_hidden_layers)
        ]
        self._views = [expert_rows(rows, form.parts) for rows in self.rows]
        # of w13 and of w2; a pool of slots has one dtype, so the scales of all experts fold or none
        self._folds = [True, True]
        self._folded: list[list[torch.Tensor]] = [[], []]

    def place(self, layer: int, expert: int) -> None:
        """Read one expert and put it in its row.

        Raises:
            ValueError: it cannot be read, or a scale is NaN.
        """
        form, room = self._form, [view[expert] for view in self._views[layer]]
        if form.dequantize is None and not form.pack:
            self._read(layer, expert, room)
            return
        stored = [torch.empty(part.shape, dtype=part.dtype) for part in form.stored()]
        self._read(layer, expert, stored)
        for kind in (0, 1):
            codes, scales = stored[2 * kind : 2 * kind + 2]
            if form.dequantize is not None:
                room[kind].copy_(
                    ftkernels.dequantize_fp4_reference(
                        codes, scales, group=FP4_GROUP, dtype=form.dequantize
                    )
                )
            else:
                self._pack(kind, codes, scales, *room[2 * kind : 2 * kind + 2])

    def unfolding(self) -> Iterator[Callable[[], None]]:
        """What is left when every expert is placed: scales that folded go back to bytes where
        others did not."""
        for kind in (0, 1):
            if not self._folds[kind]:
                for meta in self._folded[kind]:
                    yield partial(self._unfold, kind, meta)

    def banks(self) -> list[ExpertBank]:
        """One a layer."""
        if self._form.dequantize is not None:
            return [ExpertBank(w13, None, w2, None) for w13, w2 in self._views]
        scales = [self._scales(kind, [v[2 * kind + 1] for v in self._views]) for kind in (0, 1)]
        return [
            ExpertBank(view[0], w13_scale, view[2], w2_scale, packed=self._form.pack)
            for view, w13_scale, w2_scale in zip(self._views, *scales, strict=True)
        ]

    def _pack(
        self, kind: int, codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor,
        meta: torch.Tensor,
    ) -> None:  # fmt: skip
        fold = self._folds[kind] and foldable(scales)
        if fold:
            self._folded[kind].append(meta)
        else:
            self._folds[kind] = False
            meta = self._scale_bytes(kind, meta)
        ftkernels.pack_fp4(codes, scales, gated=kind == 0, fold=fold, out=(weight, meta))

    def _unfold(self, kind: int, meta: torch.Tensor) -> None:
        # in place: what is unfolded stands apart before it is copied
        self._scale_bytes(kind, meta).copy_(unfold(meta, self._num_groups(kind)))

    def _scales(self, kind: int, rooms: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._folds[kind] or not self._form.pack:
            return rooms
        return [self._scale_bytes(kind, room) for room in rooms]

    def _num_groups(self, kind: int) -> int:
        columns = self._form.config.hidden_size if kind == 0 else self._form.inter
        return columns // FP4_GROUP

    def _scale_bytes(self, kind: int, meta: torch.Tensor) -> torch.Tensor:
        """The room of folded metadata `[..., ceil(K/128), N]` as scale bytes `[..., K/32, N]`."""
        num_groups, num_rows = self._num_groups(kind), meta.shape[-1]
        room = meta.flatten(-2).view(torch.uint8)[..., : num_groups * num_rows]
        return room.view(*room.shape[:-1], num_groups, num_rows)

    def _read(self, layer: int, expert: int, into: list[torch.Tensor]) -> None:
        """The stored slice: w13, its scales, w2, its scales."""
        inter = self._form.inter
        for matrix, rows in (("w1", slice(0, inter)), ("w3", slice(inter, 2 * inter))):
            name = expert_name(f"layers.{layer}", expert, matrix)
            for suffix, room in (("weight", into[0]), ("scale", into[1])):
                self._read_rows(f"{name}.{suffix}", room[rows])
            check_scale(self._index.entries[f"{name}.scale"], into[1][rows])
        name = expert_name(f"layers.{layer}", expert, "w2")
        for suffix, room in (("weight", into[2]), ("scale", into[3])):
            self._read_columns(f"{name}.{suffix}", room)
        check_scale(self._index.entries[f"{name}.scale"], into[3])

    def _read_rows(self, name: str, into: torch.Tensor) -> None:
        self._files.read(self._index.entries[name], into, skip=self._form.rank * into.nbytes)

    def _read_columns(self, name: str, into: torch.Tensor) -> None:
        entry, form = self._index.entries[name], self._form
        if form.ranks == 1:
            self._files.read(entry, into)
            return
        whole = torch.empty(entry.shape, dtype=torch.uint8)
        self._files.read(entry, whole)
        into.copy_(whole.chunk(form.ranks, dim=1)[form.rank])


def check_scale(entry: TensorEntry, codes: torch.Tensor) -> None:
    """Refuse scale codes that stand for NaN.

    Raises:
        ValueError: one does.
    """
    if bool((codes == _NAN_SCALE).any()):
        raise ValueError(
            f"{entry.file}: tensor {entry.name} holds the scale code 255 (NaN), expected 0 to 254"
        )
