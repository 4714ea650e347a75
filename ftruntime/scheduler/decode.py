"""The running set: requests whose prompt is done and whose next token needs one decode step."""

from __future__ import annotations

from collections.abc import Collection

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.sampling import sample_spec
from ftruntime.scheduler.table import RequestRow
from ftruntime.types import SeqPlan


class DecodeManager:
    """Rows that decode together, in the order in which they joined.

    A row that ends between two decodes stays listed until the next one is planned, which drops it.
    """

    def __init__(self, kv: KVManager, *, eos_token_ids: Collection[int] = ()) -> None:
        self._kv = kv
        self._eos_token_ids = eos_token_ids
        self._running: list[RequestRow] = []

    @property
    def rows(self) -> tuple[RequestRow, ...]:
        """The live rows."""
        return tuple(row for row in self._running if row.live)

    @property
    def can_run(self) -> bool:
        """Whether rows are listed; the decode may still turn out to hold no live one."""
        return bool(self._running)

    def join(self, row: RequestRow) -> None:
        """A request has its first token and goes on."""
        row.status = "running"
        # while no decode is planned nobody else drops the rows that ended
        self._running = [*self.rows, row]

    def leave(self, row: RequestRow) -> None:
        """A request no longer decodes; without effect when it did not."""
        self._running = [own for own in self._running if own is not row]

    def build(self) -> list[tuple[RequestRow, SeqPlan]]:
        """One token for every live row; empty when none is left."""
        self._running = list(self.rows)
        return [(row, self._plan(row)) for row in self._running]

    def _plan(self, row: RequestRow) -> SeqPlan:
        start = len(row.token_ids) - 1
        return SeqPlan(
            row=row.row,
            request_id=row.request_id,
            start=start,
            token_ids=(row.token_ids[start],),
            new_pages=self._kv.extend(row.request_id, start + 1),
            sample=sample_spec(row, eos_token_ids=self._eos_token_ids),
        )
