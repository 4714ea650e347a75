"""A prefill chunk on its way through the layers, in one slice or several."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.cost import Work
from ftruntime.scheduler.table import RequestRow
from ftruntime.types import SeqPlan


def even_bounds(num_layers: int, groups: int) -> tuple[int, ...]:
    """Edges of `groups` layer slices that differ by at most one layer; never more than layers."""
    groups = min(groups, num_layers)
    return tuple(number * num_layers // groups for number in range(groups + 1))


@dataclass
class Chunk:
    """Rows and parts of one chunk, and the layers that are planned.

    Its slices run for the whole batch. A request that leaves between two of them keeps its pages
    until the last one is planned, since every slice before writes to them.
    """

    batch: list[tuple[RequestRow, SeqPlan]]
    num_layers: int
    bounds: tuple[int, ...] | None = None  # edges of its slices; None: cut as they are planned
    planned: int = 0  # layers of the slices planned so far
    left: list[RequestRow] = field(default_factory=list)  # requests that have left it

    @property
    def num_left(self) -> int:
        return self.num_layers - self.planned

    @property
    def live(self) -> bool:
        return bool(self.live_rows)

    @property
    def live_rows(self) -> list[RequestRow]:
        """Its requests that have neither ended nor given their pages up."""
        return [row for row, seq in self.batch if row.stands_in(seq)]

    @property
    def num_drawing(self) -> int:
        """Rows that decode once it is done."""
        return sum(seq.sample is not None for seq in self.seqs)

    @property
    def seqs(self) -> tuple[SeqPlan, ...]:
        return tuple(seq for _, seq in self.batch)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(seq.row for _, seq in self.batch)

    def holds(self, row: RequestRow) -> bool:
        return any(own is row for own, _ in self.batch)

    def take(self, count: int) -> tuple[int, int]:
        """The next slice, `count` layers or what is left; fixed edges go before."""
        first = self.planned
        end = min(first + count, self.num_layers)
        if self.bounds is not None:
            end = next(edge for edge in self.bounds if edge > first)
        self.planned = end
        return first, end


class ChunkRun:
    """The chunk that has layer slices to come, and the pages that wait for its end."""

    def __init__(self, kv: KVManager, num_layers: int) -> None:
        self._kv = kv
        self._num_layers = num_layers
        self._chunk: Chunk | None = None
        self._drop: tuple[int, ...] = ()  # rows of chunks that were given up

    @property
    def current(self) -> Chunk | None:
        return self._chunk

    def begin(
        self, batch: list[tuple[RequestRow, SeqPlan]], bounds: tuple[int, ...] | None
    ) -> Chunk:
        """A chunk whose slices have the edges `bounds`; None: cut as they are planned."""
        self._chunk = Chunk(batch, self._num_layers, bounds)
        return self._chunk

    def take(self, chunk: Chunk, count: int) -> tuple[int, int]:
        """The next slice of `count` layers is planned; pages come back with the last."""
        layers = chunk.take(count)
        if not chunk.num_left:
            self._chunk = None
            self._release(chunk.left)
        return layers

    def give_back(self, row: RequestRow) -> None:
        """Pages of a request that no longer holds its row: now, or with its chunk."""
        chunk = self._chunk
        if chunk is None or not chunk.holds(row):
            self._release([row])
            return
        chunk.left.append(row)
        if not chunk.live:
            self._chunk = None
            self.drop(chunk.rows)
            self._release(chunk.left)

    def drop(self, rows: tuple[int, ...]) -> None:
        """Streams kept for these rows are not needed any more."""
        self._drop += rows

    def take_drop(self) -> tuple[int, ...]:
        """Rows for the next plan to drop."""
        rows, self._drop = self._drop, ()
        return rows

    def _release(self, rows: list[RequestRow]) -> None:
        for row in rows:
            self._kv.release(row.request_id)


def prefill_work(seqs: tuple[SeqPlan, ...]) -> Work:
    """What all layers have to compute for these parts."""
    tokens = sum(len(seq.token_ids) for seq in seqs)
    before = sum(len(seq.token_ids) * seq.start for seq in seqs)
    return Work(1.0, tokens, before / tokens)
