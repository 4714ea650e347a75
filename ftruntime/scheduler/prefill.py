"""The waiting queue and the prompt that is partly prefilled.

Order is strictly first come, first served. The head of the queue is admitted as soon as a row is
free and pages for its prompt and its whole output can be promised; until then nobody passes it.
Under optimistic admission pages for the tokens it has are enough, if one more for each request that
holds a row is left. That wait is bounded: while the head is blocked nothing new is admitted, so
once the prompt under way is prefilled every step is a decode of all running requests; each has
ended after at most its remaining `max_tokens` steps, and on an empty server every accepted request
fits.

A request that gave its pages up goes to the front of the queue, and everything it has, output
included, is computed like a prompt.

A chunk is filled in that order, so several prompts share a step and at most one prompt is partly
prefilled. Every part of a prompt but its last ends on a page edge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.sampling import sample_spec
from ftruntime.scheduler.table import RequestRow, RequestTable
from ftruntime.types import PAGE_TOKENS, SeqPlan


class PrefillManager:
    """Queue, admission and chunk progress."""

    def __init__(
        self,
        table: RequestTable,
        kv: KVManager,
        *,
        chunk_tokens: int,
        optimistic: bool = False,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._table = table
        self._kv = kv
        self._chunk_tokens = chunk_tokens
        self._optimistic = optimistic
        self._eos_token_ids = eos_token_ids
        self._queue: OrderedDict[str, RequestRow] = OrderedDict()
        self._waiting_tokens = 0
        self._partial: RequestRow | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that requests without a row wait to have computed."""
        return self._waiting_tokens

    @property
    def partial(self) -> RequestRow | None:
        """The admitted prompt that has parts left to plan."""
        return self._partial

    def enqueue(self, row: RequestRow) -> None:
        self._queue[row.request_id] = row
        self._waiting_tokens += row.num_tokens

    def requeue(self, row: RequestRow) -> None:
        """A request starts over, ahead of all that wait."""
        row.num_computed, row.planned = 0, False
        if not row.num_generated:
            row.prompt_logprobs.clear()  # none was told yet
        self.enqueue(row)
        self._queue.move_to_end(row.request_id, last=False)

    def discard(self, row: RequestRow) -> None:
        """Forget a request that ends; without effect when it is neither queued nor partial."""
        if self._queue.get(row.request_id) is row:
            self._dequeue(row)
        if self._partial is row:
            self._partial = None

    def can_run(self) -> bool:
        """Whether `build` would return a batch."""
        return self._next() is not None

    def next_row(self) -> RequestRow | None:
        """The prompt that goes on, or is admitted next; None when none can."""
        return self._next()

    def build(self, max_tokens: int | None = None) -> list[tuple[RequestRow, SeqPlan]]:
        """Fill one chunk: admit, assign pages, plan. Empty when no prompt can go on.

        Args:
            max_tokens: a smaller chunk, whole pages.
        """
        budget = self._chunk_tokens if max_tokens is None else max_tokens
        batch: list[tuple[RequestRow, SeqPlan]] = []
        while (row := self._next()) is not None:
            count = _part_tokens(row, budget)
            if count == 0:
                break
            if row.status == "waiting":
                self._admit(row)
            batch.append((row, self._plan(row, count)))
            budget -= count
            finished = row.num_computed + count == row.num_tokens
            self._partial = None if finished else row
            if not finished:
                break
        return batch

    def _next(self) -> RequestRow | None:
        if self._partial is not None:
            return self._partial
        if not self._queue or self._table.num_free_rows == 0:
            return None
        head = next(iter(self._queue.values()))
        head.num_computed = self._kv.cached_tokens(_reusable(head))
        spare_pages = self._table.num_running if self._optimistic else 0
        fits = self._kv.can_admit(
            self._promised_tokens(head), _reusable(head), spare_pages=spare_pages
        )
        return head if fits else None

    def _admit(self, row: RequestRow) -> None:
        self._dequeue(row)
        row.num_computed = self._kv.admit(
            row.request_id, self._promised_tokens(row), _reusable(row)
        )
        if not row.retracted:  # what it finds of its own does not count
            row.num_cached = row.num_computed
        self._table.seat(row)

    def _promised_tokens(self, row: RequestRow) -> int:
        return row.num_tokens if self._optimistic else row.num_reserved_tokens

    def _dequeue(self, row: RequestRow) -> None:
        del self._queue[row.request_id]
        self._waiting_tokens -= row.num_tokens

    def _plan(self, row: RequestRow, count: int) -> SeqPlan:
        start, end = row.num_computed, row.num_computed + count
        last = end == row.num_tokens
        wanted = None if row.num_generated else row.params.prompt_logprobs
        fresh, row.planned = not row.planned, True
        return SeqPlan(
            row=row.row,
            request_id=row.request_id,
            start=start,
            token_ids=tuple(row.token_ids[start:end]),
            new_pages=self._kv.extend(row.request_id, end),
            fresh=fresh,
            sample=sample_spec(row, eos_token_ids=self._eos_token_ids) if last else None,
            # the slice ends with the prompt: the last token's target is the one that is drawn
            prompt_targets=None if wanted is None else tuple(row.token_ids[start + 1 : end + 1]),
            num_prompt_logprobs=wanted or 0,
        )


def _reusable(row: RequestRow) -> Sequence[int]:
    """Tokens whose pages may be taken from the prefix cache; the prompt's log-probabilities need
    every position computed, as long as they are not told."""
    wanted = row.params.prompt_logprobs is not None and not row.num_generated
    return () if wanted else row.token_ids


def _part_tokens(row: RequestRow, budget: int) -> int:
    """Tokens of the row's next part; 0 when not even a page fits and the rest does not either."""
    rest = row.num_tokens - row.num_computed
    return rest if rest <= budget else budget // PAGE_TOKENS * PAGE_TOKENS
