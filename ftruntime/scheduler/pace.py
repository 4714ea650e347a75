"""Which kind of step comes next, and how large a piece of prefill is.

Three settings, each alone or together: N of `policy` counts whole chunks, G layer groups put one
decode after every slice, and the bound of `gap` does so by time. Without any, prefill goes first
and every chunk is one step.

Decode can never starve prefill: only a prefill step makes a decode due, so between two decodes that
go before a waiting prompt at least one slice runs.
"""

from __future__ import annotations

from ftruntime.scheduler.chunk import Chunk, even_bounds, prefill_work
from ftruntime.scheduler.gap import GapPolicy, Head, whole_chunk
from ftruntime.scheduler.policy import InterleavePolicy
from ftruntime.scheduler.prefill import PrefillManager
from ftruntime.types import PAGE_TOKENS, SchedulerLimits, StepKind, StepPlan


class Pace:
    """The policies of one scheduler, and the step they were asked about last."""

    def __init__(
        self, limits: SchedulerLimits, prefill: PrefillManager, interleave: InterleavePolicy
    ) -> None:
        self._limits = limits
        self._prefill = prefill
        self._interleave = interleave
        groups, bound_s = limits.prefill_layer_groups, limits.max_decode_gap_s
        self._bounds: tuple[int, ...] | None = None
        if groups is not None or bound_s is None:
            self._bounds = even_bounds(limits.num_layers, groups or 1)
        self._every_slice = groups is not None and groups > 1
        self._gap: GapPolicy | None = None
        if bound_s is not None:
            self._gap = GapPolicy(
                bound_s, edges=self._bounds or tuple(range(limits.num_layers + 1))
            )
        self._last: StepKind | None = None
        self._planned_s = 0.0

    @property
    def timed(self) -> bool:
        """Whether rows that can decode are to be counted for every step."""
        return self._every_slice or self._gap is not None

    def decode_first(self, now: float, chunk: Chunk | None, num_rows: int) -> bool:
        """Whether a decode is tried before prefill goes on.

        Args:
            now: seconds on the engine's clock.
            chunk: the one that is partly through the layers.
            num_rows: rows that can decode; 0 where `timed` is False.
        """
        self._planned_s = now
        if num_rows == 0 and self._gap is not None:
            self._gap.nobody_decodes()
        if chunk is None and self._interleave.decode_is_due():
            return True
        if num_rows == 0 or self._last != "prefill":
            return False
        return self._every_slice or not self._fits(now, chunk, num_rows)

    def new_chunk_tokens(self, num_rows: int) -> int:
        """Tokens of the chunk that is built now."""
        head = self._head(None)
        if self._gap is None or num_rows == 0 or head is None:
            return self._limits.chunk_tokens
        allowance = self._gap.allowance(head, self._planned_s, num_rows=num_rows)
        return self._gap.chunk_tokens(head, allowance, self._most_tokens())

    @property
    def bounds(self) -> tuple[int, ...] | None:
        """Edges of the slices of a chunk; None: as `slice_layers` says."""
        return self._bounds

    def slice_layers(self, chunk: Chunk, num_rows: int) -> int:
        """Layers of the chunk's next slice, at least one."""
        head = self._head(chunk)
        if self._gap is None or self._bounds is not None or num_rows == 0 or head is None:
            return chunk.num_left
        num_rows += chunk.num_drawing
        allowance = self._gap.allowance(head, self._planned_s, num_rows=num_rows)
        room = self._gap.left(allowance, self._planned_s)
        end = self._gap.last_layer(prefill_work(chunk.seqs), chunk.planned, room)
        return max(1, end - chunk.planned)

    def planned(self, plan: StepPlan) -> None:
        """A step goes out. A chunk counts with its last slice, so a decode within it clears."""
        self._last = plan.kind
        if plan.kind == "prefill" and plan.layers[1] == self._limits.num_layers:
            self._interleave.prefill_scheduled()

    def ran(self, plan: StepPlan, now: float) -> None:
        """The step took the time since it was planned."""
        if self._gap is not None:
            work = prefill_work(plan.seqs)
            self._gap.observe(plan.kind, work, plan.layers, now - self._planned_s)

    def ended(self, kind: StepKind, now: float, num_rows: int) -> None:
        """A step ran or failed; `num_rows` can decode now."""
        if self._gap is not None:
            self._gap.step_ended(kind, now, num_rows)

    def _fits(self, now: float, chunk: Chunk | None, num_rows: int) -> bool:
        """Whether the smallest next piece of prefill leaves the gap within its bound."""
        head = self._head(chunk)
        if self._gap is None or head is None:
            return True
        num_rows += 0 if chunk is None else chunk.num_drawing
        allowance = self._gap.allowance(head, now, num_rows=num_rows)
        room, first = self._gap.left(allowance, now), 0
        if chunk is not None:
            whole, first = prefill_work(chunk.seqs), chunk.planned
        else:
            tokens = self._gap.chunk_tokens(head, allowance, self._most_tokens())
            whole = whole_chunk(head, tokens)
        return self._gap.last_layer(whole, first, room) > first

    def _head(self, chunk: Chunk | None) -> Head | None:
        """What goes on: the chunk as one prompt, else the next prompt."""
        if chunk is not None:
            work = prefill_work(chunk.seqs)
            return Head(int(work.context), work.tokens, chunk.batch[0][0].request.arrival_s)
        row = self._prefill.next_row()
        if row is None:
            return None
        left = row.num_tokens - row.num_computed
        return Head(row.num_computed, left, row.request.arrival_s)

    def _most_tokens(self) -> int:
        """Tokens that a chunk could take, up to a page edge."""
        row = self._prefill.partial
        rest = 0 if row is None else row.num_tokens - row.num_computed
        pages = -(-(rest + self._prefill.waiting_tokens) // PAGE_TOKENS)
        return min(self._limits.chunk_tokens, pages * PAGE_TOKENS)
