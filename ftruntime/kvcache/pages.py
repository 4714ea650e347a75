"""Free list of one page pool. Page 0 is the padding page: allocated, and never handed out."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free: admission promised what the pool does not hold."""


class PageAllocator:
    """Hands out page numbers `1 .. num_pages - 1`, each to one holder at a time."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts all pages of the pool, the padding page included."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected at least 1 (the padding page)")
        self._num_pages = num_pages
        # a stack: the page given back last is the one most likely still cached
        self._free = list(range(num_pages - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out: all but the padding page."""
        return self._num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none.

        Raises:
            ValueError: `count` is negative.
            OutOfPagesError: fewer than `count` pages are free.
        """
        if count < 0:
            raise ValueError(f"count is {count}, expected >= 0")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages asked for, {len(self._free)} of {self.num_usable} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back, all or none.

        Raises:
            ValueError: a page is not held: never handed out, given back before, or named twice.
        """
        given = set(pages)
        if len(given) != len(pages):
            raise ValueError(f"pages is {list(pages)}, expected every page once")
        foreign = given - self._held
        if foreign:
            raise ValueError(
                f"pages {sorted(foreign)} are not held, expected pages handed out before"
            )
        self._held -= given
        self._free.extend(pages)

    def check(self) -> None:
        """Every page is free or held, never both.

        Raises:
            AssertionError: free and held pages do not make up the pool.
        """
        if len(self._free) + len(self._held) != self.num_usable:
            raise AssertionError(
                f"{len(self._free)} free and {len(self._held)} held pages, "
                f"expected {self.num_usable} together"
            )
        if set(self._free) | self._held != set(range(1, self._num_pages)):
            raise AssertionError("free and held pages overlap, expected every page in one of them")
