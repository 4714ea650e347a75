"""A prefill chunk on its way through the layers, in one slice or several."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    Its slices run for the whole batch. A request that ends between two of them keeps its pages
    until the last one is planned, since every slice before writes to them.
    """

    batch: list[tuple[RequestRow, SeqPlan]]
    num_layers: int
    bounds: tuple[int, ...] | None = None  # edges of its slices; None: cut as they are planned
    planned: int = 0  # layers of the slices planned so far
    ended: list[RequestRow] = field(default_factory=list)  # rows that ended meanwhile

    @property
    def num_left(self) -> int:
        return self.num_layers - self.planned

    @property
    def live(self) -> bool:
        return any(row.live for row, _ in self.batch)

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


def prefill_work(seqs: tuple[SeqPlan, ...]) -> Work:
    """What all layers have to compute for these parts."""
    tokens = sum(len(seq.token_ids) for seq in seqs)
    before = sum(len(seq.token_ids) * seq.start for seq in seqs)
    return Work(1.0, tokens, before / tokens)
