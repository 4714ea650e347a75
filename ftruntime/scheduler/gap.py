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

import logging
from dataclasses import dataclass

from ftruntime.scheduler.cost import StepCost, Work
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


class GapPolicy:
    """Clock of the gap, costs of the steps, and the size of the next piece."""

    def __init__(self, bound_s: float, *, num_layers: int, smallest_slice: int) -> None:
        """
        Args:
            bound_s: seconds between the ends of two decode steps.
            num_layers: layers of the model.
            smallest_slice: layers that are never cut.
        """
        self._bound_s = bound_s
        self._num_layers = num_layers
        self._smallest = smallest_slice
        self._prefill_cost, self._decode_cost = StepCost(), StepCost()
        self._start_s: float | None = None
        self._warned = False

    def observe(self, kind: StepKind, work: Work, seconds: float) -> None:
        """A step ran."""
        if kind == "prefill":
            self._prefill_cost.observe(work, seconds)
        else:
            self._decode_cost.observe(Work(1.0, work.tokens), seconds)

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
        """The smallest slice of a chunk of `tokens` tokens that begins with this prompt."""
        own = min(tokens, head.num_tokens)
        return Work(self._smallest / self._num_layers, tokens, own * head.start / tokens)

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
        for tokens in range(most, PAGE_TOKENS, -PAGE_TOKENS):
            if self._prefill_cost.predict(self.piece(head, tokens)) <= allowance:
                return tokens
        return PAGE_TOKENS

    def left(self, allowance: float, now: float) -> float:
        """What the gap under way leaves of the allowance."""
        return allowance if self._start_s is None else allowance - (now - self._start_s)

    def num_slices(self, smallest: Work, room: float) -> int:
        """How many of the smallest slice fit into `room` seconds; 1 where nothing like it was seen
        and a guess says that it fits."""
        seconds = self._prefill_cost.predict(smallest)
        if seconds > room:
            return 0
        if not self._prefill_cost.covers(smallest):
            return 1
        return int(room / seconds)

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
            "gap bound cannot hold max_decode_gap_ms=%.0f smallest_ms=%.1f: one page through %d of "
            "%d layers and a decode step are predicted to take longer",
            self._bound_s * 1e3, smallest_s * 1e3, self._smallest, self._num_layers,
        )  # fmt: skip
