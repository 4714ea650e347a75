"""The routed experts of a layer: all of them where the layer runs, or the cached ones of a bank in
host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

import ftkernels
from ftruntime.model.batch import ForwardBatch, Tape
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import Input
from ftruntime.model.lookahead import Lookahead
from ftruntime.model.numerics import Numerics

Routes = tuple[torch.Tensor, torch.Tensor]
Matrices = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


class Experts(Protocol):
    def __call__(
        self, x: Input, routes: Routes, shared: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """The sum of each token's routed experts and of ``shared``, ``[T, C]``.

        ``routes``: weights fp32 and expert ids int32, ``[T, topk]`` each.
        """
        ...


@dataclass(frozen=True)
class _Products:
    """``moe_fp4`` as one layer calls it."""

    packed: bool
    config: ModelConfig
    numerics: Numerics

    def __call__(
        self, matrices: Matrices, x: Input, routes: Routes, batch: ForwardBatch, *,
        slot_of_expert: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        routed_out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        codes, scale = (x.dense, None) if x.fp8 is None else x.fp8
        return ftkernels.moe_fp4(
            codes, *matrices, *routes, swiglu_limit=self.config.swiglu_limit, x_scale=scale,
            slot_of_expert=slot_of_expert, shared=shared, routed_out=routed_out,
            activation=self.numerics.activation, packed=self.packed, path=batch.path,
            out_dtype=self.numerics.dtype, scratch=batch.scratch,
        )  # fmt: skip


class ResidentExperts:
    """Every expert of a layer on the device."""

    def __init__(
        self, bank: ftkernels.ExpertBank, config: ModelConfig, numerics: Numerics
    ) -> None:
        self._matrices = (bank.w13, bank.w13_scale, bank.w2, bank.w2_scale)
        self._products = _Products(bank.packed, config, numerics)

    def __call__(
        self, x: Input, routes: Routes, shared: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._products(self._matrices, x, routes, batch, shared=shared)


def resident(bank: ftkernels.ExpertBank, device: torch.device) -> ftkernels.ExpertBank:
    """All experts of a layer where it runs, codes in the order of the kernels that read them."""
    if bank.w13.device != device:
        w13_scale, w2_scale = (
            None if scale is None else scale.to(device) for scale in (bank.w13_scale, bank.w2_scale)
        )
        bank = ftkernels.ExpertBank(
            bank.w13.to(device), w13_scale, bank.w2.to(device), w2_scale, packed=bank.packed
        )
    if bank.packed or bank.w13_scale is None or ftkernels.backend.use_reference(bank.w13):
        return bank
    return bank.pack()


class CachedExperts:
    """One layer's part of an expert cache, within a step of the cache.

    Experts that are missing are copied in; when a step may need more of them than there are slots,
    it runs in groups, with the same result bit for bit.
    """

    def __init__(
        self, cache: ftkernels.ExpertCache, lookahead: Lookahead, layer: int, *, packed: bool,
        config: ModelConfig, numerics: Numerics,
    ) -> None:  # fmt: skip
        self._cache, self._lookahead, self._layer = cache, lookahead, layer
        self._products = _Products(packed, config, numerics)

    def __call__(
        self, x: Input, routes: Routes, shared: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        cache, layer, topk_ids = self._cache, self._layer, routes[1]
        matrices = cache.slots(layer)
        if batch.tape is not None:
            slots = self._taped(batch.tape, x, topk_ids, batch)
            return self._products(matrices, x, routes, batch, slot_of_expert=slots, shared=shared)
        coming = self._lookahead.coming(layer, x.dense, batch)
        groups = cache.groups(layer, topk_ids)
        if min(topk_ids.numel(), cache.num_experts) > cache.num_slots:
            routed = x.dense.new_empty((*topk_ids.shape, x.dense.shape[1]))
            for slots in groups:
                self._products(matrices, x, routes, batch, slot_of_expert=slots, routed_out=routed)
            self._lookahead.hint(coming, batch)
            return ftkernels.moe_combine(routed, shared=shared)
        out = shared
        for slots in groups:  # a single one
            # hints are read on the host before products keep the device busy
            self._lookahead.hint(coming, batch)
            out = self._products(
                matrices, x, routes, batch, slot_of_expert=slots, shared=shared
            )
        return out

    def _taped(
        self, tape: Tape, x: Input, topk_ids: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Where the products that follow find their experts, which the host brings in first."""
        coming = self._lookahead.coming(self._layer, x.dense, batch)
        slots = topk_ids.new_empty(self._cache.num_experts)

        @contextlib.contextmanager
        def present() -> Iterator[None]:
            # a single one, in use until the products are launched
            for _ in self._cache.groups(self._layer, topk_ids, out=slots):
                self._lookahead.hint(coming, batch)
                yield

        tape.around(present)
        return slots
