"""Which pages each sequence holds: admit, extend, trim, release.

Row pages carry compressed and index rows and are reserved for a whole request at admission; all
layers share their numbers. Window pages carry the newest 128 KV rows and go back to the pool as the
window moves on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftruntime.kvcache.layout import pages_for
from ftruntime.kvcache.pages import OutOfPagesError, PageAllocator
from ftruntime.types import PAGE_TOKENS

PageTriple = tuple[int, int, int]
"""(logical page, window page, row page)"""


@dataclass(slots=True)
class _Sequence:
    reserved_pages: int
    row_pages: list[int] = field(default_factory=list)  # by logical page
    window_pages: dict[int, int] = field(default_factory=dict)  # logical page -> live page


class KVManager:
    """Bookkeeping of both pools. Sequences are named by request id."""

    def __init__(self, num_pages: int, window_pages: int) -> None:
        """
        Args:
            num_pages: usable row pages, the padding page 0 not counted.
            window_pages: all window pages, the padding page 0 included.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected >= 1")
        if window_pages < 2:
            raise ValueError(f"window_pages is {window_pages}, expected >= 2 (page 0 is padding)")
        self._rows = PageAllocator(num_pages + 1)
        self._window = PageAllocator(window_pages)
        self._sequences: dict[str, _Sequence] = {}
        self._num_reserved = 0

    @property
    def total_pages(self) -> int:
        return self._rows.num_usable

    @property
    def used_pages(self) -> int:
        """Row pages that hold rows; reserved ones that are not assigned yet do not count."""
        return self._rows.num_used

    @property
    def reserved_pages(self) -> int:
        """Row pages promised to admitted sequences, assigned or not."""
        return self._num_reserved

    @property
    def total_window_pages(self) -> int:
        return self._window.num_usable

    @property
    def used_window_pages(self) -> int:
        return self._window.num_used

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def can_admit(self, num_tokens: int) -> bool:
        """Whether pages for `num_tokens` tokens (prompt and output) can be promised now."""
        return self._num_reserved + pages_for(num_tokens) <= self.total_pages

    def admit(self, seq_id: str, num_tokens: int) -> None:
        """Promise row pages for `num_tokens` tokens; none is assigned yet.

        Raises:
            ValueError: the sequence is admitted already.
            OutOfPagesError: the promise could not be kept; ask `can_admit` first.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id is {seq_id!r}, expected a sequence that holds no pages")
        if not self.can_admit(num_tokens):
            raise OutOfPagesError(
                f"{pages_for(num_tokens)} pages asked for, "
                f"{self.total_pages - self._num_reserved} of {self.total_pages} are not promised"
            )
        self._sequences[seq_id] = _Sequence(reserved_pages=pages_for(num_tokens))
        self._num_reserved += pages_for(num_tokens)

    def extend(self, seq_id: str, end: int) -> tuple[PageTriple, ...]:
        """Assign pages so that positions below `end` have a place; returns what was assigned now.

        Raises:
            KeyError: the sequence is not admitted.
            OutOfPagesError: `end` lies beyond the reservation, or the window pool is empty; nothing
                changes.
        """
        seq = self._sequences[seq_id]
        first, stop = len(seq.row_pages), pages_for(end)
        if stop <= first:
            return ()
        if stop > seq.reserved_pages:
            raise OutOfPagesError(
                f"{seq_id!r} grows to {end} tokens, {seq.reserved_pages} pages are reserved for it"
            )
        window_pages = self._window.allocate(stop - first)
        row_pages = self._rows.allocate(stop - first)
        logical = range(first, stop)
        seq.row_pages.extend(row_pages)
        seq.window_pages.update(zip(logical, window_pages, strict=True))
        return tuple(zip(logical, window_pages, row_pages, strict=True))

    def trim(self, seq_id: str, end: int) -> None:
        """Give back the window pages that no token from position `end` on can see.

        The token at `end` sees positions `end - 127 .. end`, later ones see later positions only.
        """
        seq = self._sequences[seq_id]
        oldest_visible = end - (PAGE_TOKENS - 1)
        stale = [
            page
            for page in seq.window_pages
            if page * PAGE_TOKENS + PAGE_TOKENS - 1 < oldest_visible
        ]
        self._window.release([seq.window_pages.pop(page) for page in stale])

    def release(self, seq_id: str) -> bool:
        """Give back everything a sequence holds; False when it holds nothing, or no longer."""
        seq = self._sequences.pop(seq_id, None)
        if seq is None:
            return False
        self._num_reserved -= seq.reserved_pages
        self._rows.release(seq.row_pages)
        self._window.release(list(seq.window_pages.values()))
        return True

    def row_pages_of(self, seq_id: str) -> Sequence[int]:
        """Row page of each logical page; a copy."""
        return tuple(self._sequences[seq_id].row_pages)

    def window_pages_of(self, seq_id: str) -> Mapping[int, int]:
        """Live window pages by logical page; a copy."""
        return dict(self._sequences[seq_id].window_pages)

    def check(self) -> None:
        """Free and held pages make up both pools, and every held page belongs to one sequence.

        Raises:
            AssertionError: a page leaked, or is held twice.
        """
        self._rows.check()
        self._window.check()
        sequences = self._sequences.values()
        row_pages = [page for seq in sequences for page in seq.row_pages]
        window_pages = [page for seq in sequences for page in seq.window_pages.values()]
        _check_owned("row", row_pages, self._rows.num_used)
        _check_owned("window", window_pages, self._window.num_used)
        reserved = sum(seq.reserved_pages for seq in sequences)
        if reserved != self._num_reserved or reserved > self.total_pages:
            raise AssertionError(
                f"{self._num_reserved} row pages promised, sequences were promised {reserved} "
                f"of {self.total_pages}"
            )


def _check_owned(pool: str, pages: list[int], num_used: int) -> None:
    if len(set(pages)) != len(pages):
        raise AssertionError(f"a {pool} page belongs to two sequences")
    if len(pages) != num_used:
        raise AssertionError(f"{num_used} {pool} pages are held, sequences own {len(pages)}")
