"""How much prefill fits between two decode steps: the gap bound, in seconds.

A gap runs from the end of one decode step to the end of the next while a row can decode. The rules,
with `S` the bound:

- While no row can decode, whole chunks run.
- A piece of prefill runs if the gap so far, the predicted piece and the predicted decode stay
  within S; otherwise the decode runs first.
- A piece is the largest number of layers that fits. A chunk is cut in its tokens only when its
  smallest slice would not fit between two decodes.
- After a decode a piece runs before the next decode, whatever it takes. If not even one page
  through the fewest layers fits, the bound cannot hold: pieces then take up to 1/64 of the time
  that the oldest prompt has waited, so prefill speeds up until it is done.
- Nothing is known at first: one page, one slice. The same slice probes a context far beyond what
  was seen.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace

from ftruntime.scheduler.cost import LayerShares, StepCost, Work
from ftruntime.types import PAGE_TOKENS, StepKind

_WAIT_SHARE = 1 / 64
_UNKNOWN_DECODE_SHARE = 0.5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """The prompt that goes on or is admitted next."""

    start: int  # tokens before its next part
    num_tokens: int  # from there on
    arrival_s: float


def whole_chunk(head: Head, tokens: int) -> Work:
    """All layers of a chunk of `tokens` tokens that begins with this prompt."""
    own = min(tokens, head.num_tokens)
    return Work(1.0, tokens, own * head.start / tokens)


class GapPolicy:
    """Clock of the gap, costs of the steps, and the size of the next piece."""

    def __init__(self, bound_s: float, *, edges: tuple[int, ...]) -> None:
        """
        Args:
            bound_s: seconds between the ends of two decode steps.
            edges: layers between which chunks may be cut, from 0 to all.
        """
        self._bound_s = bound_s
        self._edges = edges
        self._shares = LayerShares(edges[-1])
        self._prefill_cost, self._decode_cost = StepCost(), StepCost()
        self._start_s: float | None = None
        self._warned = False

    def observe(self, kind: StepKind, whole: Work, layers: tuple[int, int], seconds: float) -> None:
        """These layers of a step ran."""
        if kind == "decode":
            self._decode_cost.observe(Work(1.0, whole.tokens), seconds)
            return
        work = replace(whole, share=self._shares.of(*layers))
        self._prefill_cost.observe(work, seconds)
        self._shares.observe(*layers, seconds)

    def step_ended(self, kind: StepKind, now: float, num_rows: int) -> None:
        """The gap begins anew with a decode, and with the first row that can decode."""
        if num_rows == 0:
            self._start_s = None
        elif kind == "decode" or self._start_s is None:
            self._start_s = now

    def nobody_decodes(self) -> None:
        """No row can decode any more: a gap under way is no gap."""
        self._start_s = None

    def piece(self, head: Head, tokens: int) -> Work:
        """The longest of the smallest slices of a chunk of `tokens` tokens that begins with this
        prompt."""
        share = max(self._shares.of(*edges) for edges in itertools.pairwise(self._edges))
        return replace(whole_chunk(head, tokens), share=share)

    def allowance(self, head: Head, now: float, *, num_rows: int) -> float:
        """Seconds of prefill between two decodes of `num_rows` rows."""
        decode_s = self._decode_s(num_rows)
        room = self._bound_s - decode_s
        least_s = self._prefill_cost.least(self.piece(head, PAGE_TOKENS))
        if least_s <= room:
            return room
        self._warn(least_s + decode_s)
        return max(room, (now - head.arrival_s) * _WAIT_SHARE)

    def chunk_tokens(self, head: Head, allowance: float, most: int) -> int:
        """Tokens of the next chunk, whole pages, so that its smallest slice fits."""
        if not self._prefill_cost.known:
            return PAGE_TOKENS
        share = self.piece(head, most).share  # of any chunk
        for tokens in range(most, PAGE_TOKENS, -PAGE_TOKENS):
            piece = replace(whole_chunk(head, tokens), share=share)
            if self._prefill_cost.predict(piece) <= allowance:
                return tokens
        return PAGE_TOKENS

    def left(self, allowance: float, now: float) -> float:
        """What the gap under way leaves of the allowance."""
        return allowance if self._start_s is None else allowance - (now - self._start_s)

    def last_layer(self, whole: Work, first: int, room: float) -> int:
        """Where the largest slice from layer `first` on ends that fits into `room` seconds; `first`
        if none does. One edge on where nothing like the chunk was seen.

        Args:
            whole: all layers of the chunk.
        """
        whole_s, end = self._prefill_cost.predict(whole), first
        for edge in self._edges:
            if edge > first and self._shares.of(first, edge) * whole_s <= room:
                end = edge
                if not self._prefill_cost.covers(whole):
                    break
        return end

    def _decode_s(self, num_rows: int) -> float:
        if not self._decode_cost.known:
            return self._bound_s * _UNKNOWN_DECODE_SHARE
        return self._decode_cost.predict(Work(1.0, num_rows))

    def _warn(self, smallest_s: float) -> None:
        """Once, when both costs come from steps that ran."""
        if self._warned or not self._decode_cost.known:
            return
        self._warned = True
        _logger.warning(
            "gap bound cannot hold max_decode_gap_ms=%.0f smallest_ms=%.1f: one page through the "
            "longest of %d slices and a decode step are predicted to take longer",
            self._bound_s * 1e3, smallest_s * 1e3, len(self._edges) - 1,
        )  # fmt: skip
