"""StepPlan to tensors: block tables of all rows, and one `ForwardBatch` a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ftruntime.engine.arrays import together
from ftruntime.model.batch import ForwardBatch
from ftruntime.types import LEAST_HALF, PAGE_TOKENS, SeqPlan, StepKind, StepPlan

_INPUTS = (
    "token_ids", "positions", "seq_lens", "slot_mapping", "state_index", "host_token_ids"
)  # fmt: skip
_TABLES = ("window_block_table", "block_table")


@dataclass(frozen=True)
class _Span:
    """New tokens ``start..end-1`` of a row."""

    row: int
    start: int
    end: int


class BatchBuilder:
    """Keeps the block tables that plans tell of page by page.

    Args:
        num_rows: rows of the request table.
        max_pages: logical pages of the longest sequence.
        device: where batches go; the tables themselves stay on the host.
        scratch: of all ops, handed to every batch.
        halves: whether prefill batches come in halves too, so that what one computes hides the
            sums of the other; for several ranks.
    """

    def __init__(
        self, *, num_rows: int, max_pages: int, device: torch.device,
        scratch: torch.Tensor | None = None, halves: bool = False,
    ) -> None:  # fmt: skip
        self._window = torch.full((num_rows, max_pages), -1, dtype=torch.int32)
        self._rows = torch.full((num_rows, max_pages), -1, dtype=torch.int32)
        self._device = device
        self._scratch = scratch
        self._halves = halves

    def build(self, plan: StepPlan, num_rows: int = 0) -> ForwardBatch:
        """Take in the plan's new pages and lay out its tokens, back to back.

        Args:
            num_rows: rows of a decode step to fill up to. What fills it up computes what the row
                with the fewest tokens does, so it asks for no other expert, and stores nothing.
        """
        for seq in plan.seqs:
            self._assign(seq)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = [_Span(seq.row, seq.start, seq.start + len(seq.token_ids)) for seq in plan.seqs]
        for seq, span in zip(plan.seqs, spans, strict=True):
            token_ids.extend(seq.token_ids)
            positions.extend(range(span.start, span.end))
            slots.extend(self._slots(span.row, span.start, span.end))
        states = [span.row for span in spans]
        if num_rows > len(spans):
            shortest = min(range(len(spans)), key=lambda n: spans[n].end)
            fill = num_rows - len(spans)
            token_ids += [token_ids[shortest]] * fill
            positions += [positions[shortest]] * fill
            slots += [-1] * fill
            spans += [spans[shortest]] * fill
            states += [-1] * fill
        cut = self._cut(plan)
        parts = _split(spans, cut) if cut else ()
        # one transfer for what counts tokens, one for what counts sequences
        by_token = together((token_ids, positions, slots), torch.int64, self._device)
        lists = [*_bounds(spans), states]
        for part in parts:
            lists += [*_bounds(part), [span.row for span in part]]
        by_sequence = together(lists, torch.int32, self._device)
        whole = self._batch(by_token, by_sequence[:3], spans, plan.kind, torch.tensor(token_ids))
        if not cut:
            return whole
        sides = (slice(cut), slice(cut, None))
        halves = (
            self._batch(
                [x[side] for x in by_token], by_sequence[first : first + 3], part, plan.kind,
                whole.host_token_ids[side],
            )
            for side, first, part in zip(sides, (3, 6), parts, strict=True)
        )  # fmt: skip
        return replace(whole, halves=(next(halves), next(halves)))

    def _batch(
        self, by_token: Sequence[torch.Tensor], by_sequence: Sequence[torch.Tensor],
        spans: Sequence[_Span], kind: StepKind, host_token_ids: torch.Tensor,
    ) -> ForwardBatch:  # fmt: skip
        rows = [span.row for span in spans]
        used = -(-max(span.end for span in spans) // PAGE_TOKENS)
        return ForwardBatch(
            token_ids=by_token[0],
            positions=by_token[1],
            cu_seqlens=by_sequence[0],
            seq_lens=by_sequence[1],
            slot_mapping=by_token[2],
            window_block_table=_rows_of(self._window, rows, used).to(self._device),
            block_table=_rows_of(self._rows, rows, used).to(self._device),
            state_index=by_sequence[2],
            is_decode=kind == "decode",
            host_token_ids=host_token_ids,
            scratch=self._scratch,
        )

    def _cut(self, plan: StepPlan) -> int:
        """Tokens of the first half, a multiple of a page; 0 for a step that stays whole."""
        if not self._halves or plan.kind == "decode" or plan.num_tokens < 2 * LEAST_HALF:
            return 0
        return -(-plan.num_tokens // (2 * PAGE_TOKENS)) * PAGE_TOKENS

    def fixed(self, num_rows: int) -> ForwardBatch:
        """The inputs of every decode step of so many rows, at the same addresses; see `refill`."""

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        tables = (num_rows, self._window.shape[1])
        return ForwardBatch(
            token_ids=made(num_rows, dtype=torch.int64),
            positions=made(num_rows, dtype=torch.int64),
            cu_seqlens=torch.arange(num_rows + 1, dtype=torch.int32, device=self._device),
            seq_lens=made(num_rows),
            slot_mapping=made(num_rows, dtype=torch.int64),
            window_block_table=made(*tables), block_table=made(*tables),
            state_index=made(num_rows), is_decode=True,
            host_token_ids=torch.zeros(num_rows, dtype=torch.int64), scratch=self._scratch,
        )  # fmt: skip

    def refill(self, fixed: ForwardBatch, plan: StepPlan) -> None:
        """Give the inputs of `fixed` the values of a decode step of as many rows or fewer."""
        batch = self.build(plan, fixed.token_ids.shape[0])
        for name in _INPUTS:
            getattr(fixed, name).copy_(getattr(batch, name))
        used = batch.block_table.shape[1]
        for name in _TABLES:
            getattr(fixed, name)[:, :used].copy_(getattr(batch, name))

    def resumed(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Window pages and rows of new requests that start behind known pages; after `build`."""
        seqs = [seq for seq in plan.seqs if seq.fresh and seq.start > 0]
        if not seqs:
            return None
        pages = [int(self._window[seq.row, seq.start // PAGE_TOKENS - 1]) for seq in seqs]
        numbers = together((pages, [seq.row for seq in seqs]), torch.int32, self._device)
        return numbers[0], numbers[1]

    def _assign(self, seq: SeqPlan) -> None:
        if seq.fresh:
            self._window[seq.row] = -1
            self._rows[seq.row] = -1
        for logical, window_page, row_page in seq.new_pages:
            self._window[seq.row, logical] = window_page
            self._rows[seq.row, logical] = row_page

    def _slots(self, row: int, start: int, end: int) -> list[int]:
        """Window rows of positions ``start..end-1``."""
        first = start // PAGE_TOKENS
        pages = self._window[row, first : (end - 1) // PAGE_TOKENS + 1].tolist()
        return [
            pages[p // PAGE_TOKENS - first] * PAGE_TOKENS + p % PAGE_TOKENS
            for p in range(start, end)
        ]


def _bounds(spans: Sequence[_Span]) -> tuple[list[int], list[int]]:
    """Prefix sums of the new tokens, and the length of each sequence."""
    sizes = (span.end - span.start for span in spans)
    return list(itertools.accumulate(sizes, initial=0)), [span.end for span in spans]


def _split(spans: Sequence[_Span], cut: int) -> tuple[list[_Span], list[_Span]]:
    """The first ``cut`` tokens, and the others."""
    first: list[_Span] = []
    second: list[_Span] = []
    left = cut
    for span in spans:
        middle = min(span.end, span.start + left)
        left -= middle - span.start
        first += [_Span(span.row, span.start, middle)] if span.start < middle else []
        second += [_Span(span.row, middle, span.end)] if middle < span.end else []
    return first, second


def _rows_of(table: torch.Tensor, rows: list[int], used: int) -> torch.Tensor:
    """The first ``used`` entries of some rows; a single row is a view."""
    if len(rows) == 1:
        return table[rows[0] : rows[0] + 1, :used]
    return table[rows, :used]
