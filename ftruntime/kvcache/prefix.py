"""Pages that outlive their request: a tree of full pages, keyed by the tokens they hold.

A node is one page behind all pages of its ancestors. Its row page stays as long as the node does;
its window page, which also keeps the carry at the page's end, may go earlier, and then no request
can start behind it until another one has computed the page again. Nodes that a sequence holds stay;
the others give their pages back when a pool runs short: row pages by leaves, the least recently
used first, window pages in the order below. A leaf that nobody holds and nobody can start behind is
dropped at once.

Window pages that a prompt merely passed go before those where requests are likely to start: where
one has started before, where prompts part, and where a prompt or a request ended.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftruntime.kvcache.pages import PageAllocator
from ftruntime.types import PAGE_TOKENS

NO_PAGE = -1


def page_key(token_ids: Sequence[int], logical: int) -> bytes:
    """The tokens of a logical page, compared exactly: two prompts never meet by a collision."""
    return array("q", token_ids[logical * PAGE_TOKENS : (logical + 1) * PAGE_TOKENS]).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """One full page. Compared by identity."""

    key: bytes
    parent: Node | None
    row_page: int
    serial: int
    window_page: int = NO_PAGE
    holders: int = 0  # sequences that start with this page
    window_holders: int = 0  # sequences whose tokens still see its window page
    last_used: int = 0
    lasting: bool = False  # requests are likely to start behind this page
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixCache:
    """The tree, who holds what of it, and the order in which pages go back to their pools."""

    def __init__(self, rows: PageAllocator, window: PageAllocator) -> None:
        self._rows = rows
        self._window = window
        self._root = Node(b"", None, NO_PAGE, 0, holders=1)
        self._leaves: set[Node] = set()  # without children and holders
        self._passing: OrderedDict[Node, None] = OrderedDict()  # window pages nobody sees, by age
        self._lasting: OrderedDict[Node, None] = OrderedDict()
        self._num_nodes = 0
        self._num_held = 0
        self._clock = 0
        self.version = 0  # changes whenever `match` may

    @property
    def num_held(self) -> int:
        """Row pages that some sequence holds."""
        return self._num_held

    @property
    def num_idle(self) -> int:
        """Row pages that no sequence holds."""
        return self._num_nodes - self._num_held

    @property
    def num_idle_windows(self) -> int:
        """Window pages that no sequence sees."""
        return len(self._passing) + len(self._lasting)

    def match(self, token_ids: Sequence[int], max_pages: int) -> list[Node]:
        """The longest known prefix of at most `max_pages` pages that a request can start behind."""
        path: list[Node] = []
        node, usable = self._root, 0
        for logical in range(max_pages):
            found = node.children.get(page_key(token_ids, logical))
            if found is None:
                break
            node = found
            path.append(node)
            if node.window_page != NO_PAGE:
                usable = len(path)
        return path[:usable]

    def find(self, parent: Node | None, key: bytes) -> Node | None:
        """The page with these tokens behind `parent` (None: the first page)."""
        return (parent or self._root).children.get(key)

    def add(self, parent: Node | None, key: bytes, row_page: int) -> Node:
        """A page whose rows are complete, held by the sequence that computed it and holds `parent`.

        `row_page` is the tree's from now on.
        """
        above = parent or self._root
        self._clock += 1
        node = Node(key, above, row_page, self._clock, holders=1)
        above.children[key] = node
        self._num_nodes += 1
        self._num_held += 1
        self.version += 1
        if len(above.children) == 2:
            self.mark(above)
        return node

    def replace_rows(self, node: Node, row_page: int) -> None:
        """Keep `row_page`, which holds the same rows, for a page that nobody reads any more."""
        self._rows.release([node.row_page])
        node.row_page = row_page

    def hold(self, node: Node) -> None:
        """A sequence that holds the parent starts with this page."""
        if not node.holders:
            self._num_held += 1
            self._leaves.discard(node)
        node.holders += 1

    def leave(self, path: Sequence[Node]) -> None:
        """A sequence that held this path, the first page first, is over."""
        self._clock += 1
        for node in reversed(path):
            node.holders -= 1
            node.last_used = self._clock
            if not node.holders:
                self._num_held -= 1
                self._settle(node)

    def give_window(self, node: Node, window_page: int) -> None:
        """`window_page` is the tree's from now on; the giver still sees it."""
        assert node.window_page == NO_PAGE
        node.window_page = window_page
        node.window_holders = 1
        self.version += 1

    def hold_window(self, node: Node) -> None:
        """A sequence starts behind this page, and sees its window page."""
        assert node.window_page != NO_PAGE
        if not node.window_holders:
            self._queue_of(node).pop(node)
        node.window_holders += 1
        node.lasting = True

    def leave_window(self, node: Node) -> None:
        """A sequence's tokens no longer see the window page."""
        node.window_holders -= 1
        if not node.window_holders:
            self._queue_of(node)[node] = None

    def mark(self, node: Node) -> None:
        """Requests are likely to start behind this page."""
        waits = node.window_page != NO_PAGE and not node.window_holders
        if waits:
            self._queue_of(node).pop(node)
        node.lasting = True
        if waits:
            self._queue_of(node)[node] = None

    def free_rows(self, count: int) -> None:
        """Give `count` row pages back, or all that nobody holds."""
        heap = [(node.last_used, node.serial, node) for node in self._leaves]
        heapq.heapify(heap)
        wanted = self._rows.num_free + count
        while heap and self._rows.num_free < wanted:
            _, _, node = heapq.heappop(heap)
            leaf = self._settle(self._detach(node))
            if leaf is not None:
                heapq.heappush(heap, (leaf.last_used, leaf.serial, leaf))

    def free_windows(self, count: int) -> None:
        """Give `count` window pages back, or all that nobody sees."""
        wanted = self._window.num_free + count
        while self._window.num_free < wanted and self.num_idle_windows:
            queue = self._passing or self._lasting
            node, _ = queue.popitem(last=False)
            self._window.release([node.window_page])
            node.window_page = NO_PAGE
            self.version += 1
            self._settle(node)

    def _settle(self, node: Node) -> Node | None:
        """Drop a leaf that nobody holds and nobody can start behind, and what becomes one by that.

        Returns:
            The leaf that is left at the end of this branch, None when its end is held.
        """
        while node is not self._root and not node.holders and not node.children:
            if node.window_page != NO_PAGE:
                self._leaves.add(node)
                return node
            node = self._detach(node)
        return None

    def _detach(self, leaf: Node) -> Node:
        """Give a leaf's pages back; returns its parent."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[leaf.key]
        self._leaves.discard(leaf)
        self._num_nodes -= 1
        self.version += 1
        self._rows.release([leaf.row_page])
        if leaf.window_page != NO_PAGE:
            self._queue_of(leaf).pop(leaf)
            self._window.release([leaf.window_page])
        return parent

    def _queue_of(self, node: Node) -> OrderedDict[Node, None]:
        return self._lasting if node.lasting else self._passing

    def nodes(self) -> list[Node]:
        """Every node, parents first; for checks."""
        found, stack = [], [self._root]
        while stack:
            children = list(stack.pop().children.values())
            found += children
            stack += children
        return found

    def check(self) -> None:
        """Counts, leaves and queues are those of the tree.

        Raises:
            AssertionError: one is not.
        """
        nodes = self.nodes()
        held = [node for node in nodes if node.holders]
        leaves = {node for node in nodes if not node.holders and not node.children}
        idle = {n for n in nodes if n.window_page != NO_PAGE and not n.window_holders}
        for what, counted, found in (
            ("nodes", self._num_nodes, len(nodes)),
            ("held nodes", self._num_held, len(held)),
            ("leaves", self._leaves, leaves),
            ("idle window pages", {*self._passing, *self._lasting}, idle),
            ("lasting window pages", set(self._lasting), {n for n in idle if n.lasting}),
        ):
            if counted != found:
                raise AssertionError(f"prefix tree: {what} are {counted}, expected {found}")
        for node in nodes:
            if sum(child.holders for child in node.children.values()) > node.holders:
                raise AssertionError("prefix tree: a page is held without the page before it")
            if node.window_holders > node.holders:
                raise AssertionError("prefix tree: a window page is seen without its page held")
        if any(leaf.window_page == NO_PAGE for leaf in leaves):
            raise AssertionError("prefix tree: a leaf that nobody can start behind was kept")
