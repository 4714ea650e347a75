"""Which pages each sequence holds: admit, extend, keep, trim, release.

Row pages carry compressed and index rows and are promised to a sequence before it needs them, for
its whole request or as it grows; all layers share their numbers. Window pages carry the newest 128
KV rows and go back to the pool as the window moves on.

With a prefix cache a full page becomes the tree's once its tokens are computed. Sequences share the
tree's pages, which nobody writes again; of a page that two sequences compute at the same time the
tree keeps one, and the other is a copy that its sequence goes on with, and that replaces the tree's
once nobody else reads that. What sequences were promised and what they hold of the tree never
exceeds the pool, so dropping pages that nobody holds always makes room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftruntime.kvcache.layout import pages_for
from ftruntime.kvcache.pages import OutOfPagesError, PageAllocator
from ftruntime.kvcache.prefix import NO_PAGE, Node, PrefixCache, page_key
from ftruntime.types import PAGE_TOKENS

PageTriple = tuple[int, int, int]
"""(logical page, window page or -1, row page)"""


@dataclass(slots=True, eq=False)
class _Sequence:
    num_promised: int  # row pages of its own, assigned or not
    path: list[Node]  # its first pages, as the tree knows them
    row_pages: list[int] = field(default_factory=list)  # by logical page
    own_pages: set[int] = field(default_factory=set)  # row pages that are not the tree's
    # logical page -> live window page, and the node it belongs to unless it is the sequence's own
    window_pages: dict[int, tuple[int, Node | None]] = field(default_factory=dict)
    news: list[PageTriple] = field(default_factory=list)  # assigned and not told yet


class KVManager:
    """Bookkeeping of both pools. Sequences are named by request id."""

    def __init__(self, num_pages: int, window_pages: int, *, prefix_cache: bool = False) -> None:
        """
        Args:
            num_pages: usable row pages, the padding page 0 not counted.
            window_pages: all window pages, the padding page 0 included.
            prefix_cache: whether full pages outlive their sequences.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected >= 1")
        if window_pages < 2:
            raise ValueError(f"window_pages is {window_pages}, expected >= 2 (page 0 is padding)")
        self._rows = PageAllocator(num_pages + 1)
        self._window = PageAllocator(window_pages)
        self._tree = PrefixCache(self._rows, self._window)
        self._keeps = prefix_cache
        self._sequences: dict[str, _Sequence] = {}
        # who reads a copy of its own instead of the page of a node it holds
        self._copies: dict[Node, list[_Sequence]] = {}
        self._num_promised = 0
        # the last answer of `match`, asked for again while the head of a queue is blocked
        self._matched: tuple[Sequence[int], int, int, list[Node]] = ((), 0, -1, [])

    @property
    def total_pages(self) -> int:
        return self._rows.num_usable

    @property
    def used_pages(self) -> int:
        """Row pages that a sequence holds; promised ones that are not assigned do not count."""
        return self._rows.num_used - self._tree.num_idle

    @property
    def cached_pages(self) -> int:
        """Row pages that no sequence holds, kept for prompts that begin alike."""
        return self._tree.num_idle

    @property
    def reserved_pages(self) -> int:
        """Row pages promised to admitted sequences, assigned or not, and what they share."""
        return self._num_promised + self._tree.num_held

    @property
    def total_window_pages(self) -> int:
        return self._window.num_usable

    @property
    def used_window_pages(self) -> int:
        """Window pages that a sequence still sees."""
        return self._window.num_used - self._tree.num_idle_windows

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed, a page multiple; one at least remains."""
        return len(self._match(prompt)) * PAGE_TOKENS

    def can_admit(
        self, num_tokens: int, prompt: Sequence[int] = (), *, spare_pages: int = 0
    ) -> bool:
        """Whether pages for `num_tokens` tokens can be promised now.

        Args:
            prompt: its first tokens, looked up among the kept pages; empty for no look-up.
            spare_pages: pages that must not be promised with them.
        """
        room = self.total_pages - self.reserved_pages - spare_pages
        pages = pages_for(num_tokens)
        if pages <= room or not prompt:
            return pages <= room
        # pages that others hold already cost nothing
        return pages - sum(node.holders > 0 for node in self._match(prompt)) <= room

    def admit(self, seq_id: str, num_tokens: int, prompt: Sequence[int] = ()) -> int:
        """Promise row pages for `num_tokens` tokens; none is assigned yet but those of the tree.

        Returns:
            `cached_tokens(prompt)`: the sequence starts there.

        Raises:
            ValueError: the sequence is admitted already.
            OutOfPagesError: the promise could not be kept; ask `can_admit` first.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id is {seq_id!r}, expected a sequence that holds no pages")
        if not self.can_admit(num_tokens, prompt):
            raise OutOfPagesError(
                f"{pages_for(num_tokens)} pages asked for, "
                f"{self.total_pages - self.reserved_pages} of {self.total_pages} are not promised"
            )
        path = list(self._match(prompt))
        seq = _Sequence(num_promised=pages_for(num_tokens) - len(path), path=path)
        for node in path:
            self._tree.hold(node)
            seq.row_pages.append(node.row_page)
        if path:
            self._tree.hold_window(path[-1])
            last = len(path) - 1
            seq.window_pages[last] = path[-1].window_page, path[-1]
            seq.news = [(i, NO_PAGE, page) for i, page in enumerate(seq.row_pages)]
            seq.news[last] = last, path[-1].window_page, path[-1].row_page
        self._sequences[seq_id] = seq
        self._num_promised += seq.num_promised
        return len(path) * PAGE_TOKENS

    def grow(self, seq_id: str, num_tokens: int) -> bool:
        """Promise pages for `num_tokens` tokens in all; False when they are not there.

        Raises:
            KeyError: the sequence is not admitted.
        """
        seq = self._sequences[seq_id]
        own_pages = len(seq.own_pages) + pages_for(num_tokens) - len(seq.row_pages)
        more = max(0, own_pages - seq.num_promised)
        if more > self.total_pages - self.reserved_pages:
            return False
        seq.num_promised += more
        self._num_promised += more
        return True

    def extend(self, seq_id: str, end: int) -> tuple[PageTriple, ...]:
        """Assign pages so that positions below `end` have a place; returns what was assigned since
        the last call.

        Raises:
            KeyError: the sequence is not admitted.
            OutOfPagesError: `end` lies beyond the reservation, or the window pool is empty; nothing
                changes but the cache.
        """
        seq = self._sequences[seq_id]
        first, stop = len(seq.row_pages), pages_for(end)
        if stop > first:
            if len(seq.own_pages) + stop - first > seq.num_promised:
                reserved = first - len(seq.own_pages) + seq.num_promised
                raise OutOfPagesError(
                    f"{seq_id!r} grows to {end} tokens, {reserved} pages are reserved for it"
                )
            self._assign(seq, range(first, stop))
        news, seq.news = tuple(seq.news), []
        return news

    def _assign(self, seq: _Sequence, logical: range) -> None:
        count = len(logical)
        if self._rows.num_free < count:
            self._tree.free_rows(count - self._rows.num_free)
        if self._window.num_free < count:
            self._tree.free_windows(count - self._window.num_free)
        window_pages = self._window.allocate(count)
        row_pages = self._rows.allocate(count)
        seq.row_pages.extend(row_pages)
        seq.own_pages.update(row_pages)
        for number, window, row in zip(logical, window_pages, row_pages, strict=True):
            seq.window_pages[number] = window, None
            seq.news.append((number, window, row))

    def keep(
        self, seq_id: str, token_ids: Sequence[int], end: int, *, prompt_ends: bool = False
    ) -> None:
        """Hand full pages below `end` to the tree: their tokens are computed in every layer.

        To be called before `trim`, so that their window pages are kept as well.

        Args:
            token_ids: of the sequence, at least `end`.
            prompt_ends: the prompt is computed with this step; others may begin with all of it.
        """
        if not self._keeps:
            return
        seq = self._sequences[seq_id]
        for logical in range(len(seq.path), end // PAGE_TOKENS):
            self._share(seq, logical, page_key(token_ids, logical))
        last = (end - 1) // PAGE_TOKENS  # a prompt's last token is computed again
        if prompt_ends and last > 0:
            self._tree.mark(seq.path[last - 1])

    def _share(self, seq: _Sequence, logical: int, key: bytes) -> None:
        tree, row_page = self._tree, seq.row_pages[logical]
        parent = seq.path[-1] if seq.path else None
        node = tree.find(parent, key)
        if node is None:
            node = tree.add(parent, key, row_page)
            self._hand_over(seq, row_page)
        else:
            if node.holders:
                self._copies.setdefault(node, []).append(seq)
            else:
                tree.replace_rows(node, row_page)
                self._hand_over(seq, row_page)
            tree.hold(node)
        seq.path.append(node)
        window_page, _ = seq.window_pages[logical]
        if node.window_page == NO_PAGE:
            tree.give_window(node, window_page)
            seq.window_pages[logical] = window_page, node

    def _hand_over(self, seq: _Sequence, row_page: int) -> None:
        seq.own_pages.remove(row_page)
        seq.num_promised -= 1
        self._num_promised -= 1

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
        for page in stale:
            self._leave_window(*seq.window_pages.pop(page))

    def _leave_window(self, page: int, node: Node | None) -> None:
        if node is None:
            self._window.release([page])
        else:
            self._tree.leave_window(node)

    def release(self, seq_id: str) -> bool:
        """Give back everything a sequence holds; False when it holds nothing, or no longer."""
        seq = self._sequences.pop(seq_id, None)
        if seq is None:
            return False
        self._num_promised -= seq.num_promised
        self._rows.release(list(seq.own_pages))
        self._drop_copies(seq)
        if seq.path:
            self._tree.mark(seq.path[-1])
        for page, node in seq.window_pages.values():
            self._leave_window(page, node)
        self._tree.leave(seq.path)
        for logical, node in enumerate(seq.path):
            self._adopt_copy(logical, node)
        return True

    def _drop_copies(self, seq: _Sequence) -> None:
        for logical, node in enumerate(seq.path):
            if seq.row_pages[logical] in seq.own_pages:
                self._copies[node].remove(seq)
                if not self._copies[node]:
                    del self._copies[node]

    def _adopt_copy(self, logical: int, node: Node) -> None:
        """Keep a copy instead of the tree's page, when all who hold the page read copies."""
        readers = self._copies.get(node, [])
        if not readers or node.holders > len(readers):
            return
        seq = readers.pop()
        if not readers:
            del self._copies[node]
        self._tree.replace_rows(node, seq.row_pages[logical])
        self._hand_over(seq, seq.row_pages[logical])

    def row_pages_of(self, seq_id: str) -> Sequence[int]:
        """Row page of each logical page; a copy."""
        return tuple(self._sequences[seq_id].row_pages)

    def window_pages_of(self, seq_id: str) -> Mapping[int, int]:
        """Live window pages by logical page; a copy."""
        return {i: page for i, (page, _) in self._sequences[seq_id].window_pages.items()}

    def _match(self, prompt: Sequence[int]) -> list[Node]:
        if not self._keeps or not prompt:
            return []
        known, length, version, path = self._matched
        if known is not prompt or length != len(prompt) or version != self._tree.version:
            path = self._tree.match(prompt, (len(prompt) - 1) // PAGE_TOKENS)
            self._matched = prompt, len(prompt), self._tree.version, path
        return path

    def check(self) -> None:
        """Free, held and kept pages make up both pools, and each has the owner it should have.

        Raises:
            AssertionError: a page leaked, or is held twice.
        """
        self._rows.check()
        self._window.check()
        self._tree.check()
        nodes, sequences = self._tree.nodes(), self._sequences.values()
        row_pages = [page for seq in sequences for page in seq.own_pages]
        row_pages += [node.row_page for node in nodes]
        windows = [entry for seq in sequences for entry in seq.window_pages.values()]
        window_pages = [page for page, node in windows if node is None]
        window_pages += [node.window_page for node in nodes if node.window_page != NO_PAGE]
        _check_owned("row", row_pages, self._rows.num_used)
        _check_owned("window", window_pages, self._window.num_used)
        for seq in sequences:
            shared = {
                n.row_page
                for n, page in zip(seq.path, seq.row_pages, strict=False)
                if n.row_page == page
            }
            if seq.own_pages | shared != set(seq.row_pages):
                raise AssertionError("a sequence's table names a page that is not its own")
        copies = [
            (node, seq) for seq in sequences
            for node, page in zip(seq.path, seq.row_pages, strict=False) if page in seq.own_pages
        ]  # fmt: skip
        known = [(node, seq) for node, readers in self._copies.items() for seq in readers]
        if len(copies) != len(known) or any(entry not in known for entry in copies):
            raise AssertionError(f"{len(known)} copies of pages are known, sequences have others")
        held = [node for seq in sequences for node in seq.path]
        seen = [node for _, node in windows if node is not None]
        for what, counted, found in (
            ("holders", sum(node.holders for node in nodes), len(held)),
            ("holders of window pages", sum(node.window_holders for node in nodes), len(seen)),
            ("promised pages", self._num_promised, sum(seq.num_promised for seq in sequences)),
        ):
            if counted != found:
                raise AssertionError(f"{what} are {counted}, sequences have {found}")
        if self.reserved_pages > self.total_pages:
            raise AssertionError(
                f"{self.reserved_pages} row pages promised or held of {self.total_pages}"
            )


def _check_owned(pool: str, pages: list[int], num_used: int) -> None:
    if len(set(pages)) != len(pages):
        raise AssertionError(f"a {pool} page belongs to two sequences")
    if len(pages) != num_used:
        raise AssertionError(f"{num_used} {pool} pages are held, sequences own {len(pages)}")
