"""Which experts the coming layers will likely need, as hints to the expert cache.

Hash-routed layers are known from the token ids. For the others the router of a coming layer is run
on the present layer's input: the streams change little from layer to layer, so most of its choice
stands. A chunk of a prompt touches every expert. Hints never change a result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

import ftkernels
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.router import Router

_ACCOUNT_HINTS: Final = 512
_CHECK_STEPS: Final = 64

_logger = logging.getLogger(__name__)

# layers, and what their routers said; None where the host knows without them
Coming = list[tuple[int, torch.Tensor | None]]


@dataclass
class HintAccount:
    """Whether hinted copies pay: one that is used hides a miss, one that is not delays another
    copy.

    ``active`` turns false for good at the first ``least`` of them of which fewer than half are
    used.
    """

    least: int = _ACCOUNT_HINTS
    active: bool = True
    _settled: tuple[int, int] = field(default=(0, 0), init=False)

    def update(self, used: int, wasted: int) -> bool:
        """Take in the counts since the start; true when this turned the hints off."""
        if not self.active:
            return False
        recent_used, recent_wasted = used - self._settled[0], wasted - self._settled[1]
        if recent_used + recent_wasted < self.least:
            return False
        self._settled = (used, wasted)
        self.active = recent_used >= recent_wasted
        return not self.active


class Lookahead:
    """Hints of one model.

    Args:
        cache: takes the hints.
        routers: of all layers.
        depth: layers ahead; 0 gives no hint.
    """

    def __init__(
        self, cache: ftkernels.ExpertCache, routers: Sequence[Router], depth: int
    ) -> None:
        self._cache, self._routers, self._depth = cache, routers, depth
        self._tables = [
            None if router.tid2eid is None else router.tid2eid.cpu() for router in routers
        ]
        self._accounts = {"decode": HintAccount(), "prefill": HintAccount()}
        self._steps = 0

    def begin(self, batch: ForwardBatch) -> None:
        """A step begins at the first layer: hint what its token ids tell."""
        self._steps += 1
        if self._depth and self._steps % _CHECK_STEPS == 0:
            self._settle()
        if not self._gives(batch.phase):
            return
        hashed = [layer for layer, table in enumerate(self._tables) if table is not None]
        # the experts of a whole layer would only push each other out
        for layer in hashed if batch.is_decode else hashed[:1]:
            self._cache.prefetch(layer, self._of_tokens(layer, batch))

    def coming(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> Coming:
        """Experts of the layers after ``layer``, whose normed input is ``x [T, C]``."""
        if not self._gives(batch.phase):
            return []
        # a chunk of a prompt fills the bus with one layer
        depth = self._depth if batch.is_decode else 1
        return [
            (number, self._of_layer(number, x, batch))
            for number in range(layer + 1, min(layer + 1 + depth, len(self._routers)))
        ]

    def hint(self, coming: Coming, batch: ForwardBatch) -> None:
        """Tell the cache; waits for the routers that ``coming`` launched."""
        if not self._gives(batch.phase):
            return
        for layer, experts in coming:
            if experts is not None:
                self._cache.prefetch(layer, experts.flatten().cpu())
            elif self._fills(layer, batch):
                self._cache.prefetch(layer, range(self._cache.num_experts))
            else:
                self._cache.prefetch(layer, self._of_tokens(layer, batch))

    def _gives(self, phase: str) -> bool:
        return self._depth > 0 and self._accounts[phase].active

    def _of_layer(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        if self._fills(layer, batch) or self._tables[layer] is not None:
            return None
        return self._routers[layer](x, batch)[1]

    def _fills(self, layer: int, batch: ForwardBatch) -> bool:
        """Whether the tokens are so many that they use about all experts of a layer."""
        topk = self._routers[layer].config.num_experts_per_tok
        return len(batch.host_token_ids) * topk >= 2 * self._cache.num_experts

    def _of_tokens(self, layer: int, batch: ForwardBatch) -> torch.Tensor:
        table = self._tables[layer]
        assert table is not None
        return table[batch.host_token_ids].flatten()

    def _settle(self) -> None:
        stats = self._cache.stats()
        for phase, account in self._accounts.items():
            counts = stats[phase]
            used, wasted = counts["prefetch_used"], counts["prefetch_wasted"]
            if account.update(used, wasted):
                _logger.info(
                    "expert prefetch turned off until the next start phase=%s used=%d wasted=%d: "
                    "copies nobody used are more than those that hid a miss", phase, used, wasted,
                )  # fmt: skip
