"""Optimistic admission: the pool may hold no page for a row's next token.

The newest request that holds a row then gives its pages up and waits, until the row has its page.
Requests are admitted in order of arrival, so the oldest keeps its pages as long as another one has
any; alone it fits, as every accepted request does. Each request therefore ends.
"""

from __future__ import annotations

import logging

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.chunk import ChunkRun
from ftruntime.scheduler.decode import DecodeManager
from ftruntime.scheduler.prefill import PrefillManager
from ftruntime.scheduler.table import RequestRow, RequestTable

_logger = logging.getLogger(__name__)


class Pressure:
    """Puts requests back into the queue when pages run out."""

    def __init__(
        self, table: RequestTable, kv: KVManager, prefill: PrefillManager, decode: DecodeManager,
        chunks: ChunkRun,
    ) -> None:  # fmt: skip
        self._table = table
        self._kv = kv
        self._prefill = prefill
        self._decode = decode
        self._chunks = chunks
        self.num_retractions = 0

    def make_room(self) -> None:
        """Every row that decodes has a page for its next token, or waits."""
        for row in self._decode.rows:
            while row.status == "running" and not self._kv.grow(row.request_id, row.num_tokens):
                self.retract(self._newest())

    def retract(self, row: RequestRow) -> None:
        """Put a request back into the queue; its pages are free, or kept for its return."""
        _logger.info(
            "retracted request=%s tokens=%d computed=%d running=%d: no page is left for the next "
            "token of a running request", row.request_id, row.num_tokens, row.num_computed,
            self._table.num_running,
        )  # fmt: skip
        self.num_retractions += 1
        row.retracted = True
        self._prefill.discard(row)
        self._decode.leave(row)
        self._table.unseat(row)
        self._chunks.give_back(row)
        self._prefill.requeue(row)

    def _newest(self) -> RequestRow:
        """The last request to be admitted of those that hold a row."""
        if self._prefill.partial is not None:
            return self._prefill.partial
        chunk = self._chunks.current
        in_chunk = [] if chunk is None else chunk.live_rows
        return (in_chunk or self._decode.rows)[-1]
