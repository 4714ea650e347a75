"""The tree by itself: what is found, who goes first, what is dropped at once.

Mutants run, each noticed: window pages by age alone; the newest first; a hit that leaves no mark;
a parting that leaves no mark; leaves by the time they came; a parent left among the leaves of the
dropped; keys of 32 bits.
"""

from __future__ import annotations

from ftruntime.kvcache.pages import PageAllocator
from ftruntime.kvcache.prefix import NO_PAGE, Node, PrefixCache, page_key

TOKENS = [token for page in range(9) for token in [page] * 128]
OTHER = [50] * 128


class Tree:
    """A cache over its pools, filled by sequences that come and go."""

    def __init__(self) -> None:
        self.rows, self.window = PageAllocator(100), PageAllocator(100)
        self.cache = PrefixCache(self.rows, self.window)

    def compute(self, tokens: list[int]) -> list[Node]:
        """A sequence computes whole pages, sees all their windows no more, and holds them."""
        path: list[Node] = []
        for logical in range(len(tokens) // 128):
            key, parent = page_key(tokens, logical), path[-1] if path else None
            node = self.cache.find(parent, key)
            if node is None:
                node = self.cache.add(parent, key, self.rows.allocate(1)[0])
            else:
                self.cache.hold(node)
            path.append(node)
            if node.window_page == NO_PAGE:
                self.cache.give_window(node, self.window.allocate(1)[0])
                self.cache.leave_window(node)
        return path

    def run(self, tokens: list[int]) -> list[Node]:
        path = self.compute(tokens)
        self.cache.leave(path)
        self.cache.check()
        return path

    def known(self, tokens: list[int]) -> int:
        return len(self.cache.match(tokens, len(tokens) // 128))


def test_the_longest_prefix_is_found_by_its_tokens() -> None:
    tree = Tree()
    path = tree.run(TOKENS[:640])
    assert tree.cache.match(TOKENS, 9) == path
    assert tree.cache.match(TOKENS, 3) == path[:3]
    assert tree.known(TOKENS[:256] + OTHER + TOKENS[384:]) == 2
    assert tree.known(OTHER + TOKENS[128:]) == 0
    assert tree.known([]) == 0
    # tokens that differ in one position of one page
    assert tree.known([*TOKENS[:255], 7, *TOKENS[256:]]) == 1


def test_large_token_ids_are_told_apart() -> None:
    assert page_key([1 << 40] * 128, 0) != page_key([0] * 128, 0)


def test_a_prefix_ends_where_its_window_page_is_left() -> None:
    tree = Tree()
    path = tree.compute(TOKENS[:640])
    tree.cache.free_windows(2)  # the first two, which were seen no more for the longest
    assert [node.window_page == NO_PAGE for node in path] == [True, True, False, False, False]
    assert tree.known(TOKENS[:256]) == 0
    assert tree.known(TOKENS[:384]) == 3
    tree.cache.check()


def test_marked_window_pages_outlive_those_in_passing() -> None:
    tree = Tree()
    path = tree.compute(TOKENS[:640])
    tree.cache.mark(path[1])
    tree.cache.hold_window(path[2])  # a request starts behind the third page
    tree.cache.leave_window(path[2])
    tree.cache.free_windows(3)
    assert [node.window_page == NO_PAGE for node in path] == [True, False, False, True, True]
    tree.cache.free_windows(1)
    assert [node.window_page == NO_PAGE for node in path[1:3]] == [True, False]
    tree.cache.check()


def test_where_prompts_part_is_marked() -> None:
    tree = Tree()
    first = tree.compute(TOKENS[:640])
    second = tree.compute(TOKENS[:384] + OTHER + OTHER)
    assert first[2] is second[2]
    assert [node.lasting for node in first] == [False, False, True, False, False]
    tree.cache.check()


def test_rows_go_by_leaves_the_least_recently_used_first() -> None:
    tree = Tree()
    tree.run(TOKENS[:384])
    tree.run(TOKENS[:128] + OTHER)
    tree.run(OTHER)
    tree.cache.leave(tree.compute(TOKENS[:256]))  # the first branch up to its second page
    tree.cache.free_rows(1)
    assert tree.known(TOKENS[:384]) == 2, "its third page was used first"
    tree.cache.free_rows(1)
    assert tree.known(TOKENS[:128] + OTHER) == 1
    assert tree.known(OTHER) == 1
    tree.cache.free_rows(1)
    assert (tree.known(OTHER), tree.known(TOKENS[:256])) == (0, 2)
    tree.cache.free_rows(9)
    assert tree.cache.num_idle == tree.rows.num_used == tree.window.num_used == 0
    tree.cache.check()


def test_held_pages_stay() -> None:
    tree = Tree()
    path = tree.compute(TOKENS[:256])
    tree.run(TOKENS[:512])
    tree.cache.free_rows(99)
    assert tree.known(TOKENS) == 2
    assert (tree.cache.num_held, tree.cache.num_idle) == (2, 0)
    tree.cache.free_windows(99)  # nobody sees them, so they may go
    assert tree.known(TOKENS) == 0
    tree.cache.leave(path)
    assert tree.cache.num_idle == 0, "nobody can start behind them"
    tree.cache.check()


def test_a_long_branch_is_dropped_at_once() -> None:
    tree = Tree()
    tree.rows, tree.window = PageAllocator(5000), PageAllocator(5000)
    tree.cache = PrefixCache(tree.rows, tree.window)
    path = tree.compute([number // 128 for number in range(4000 * 128)])
    tree.cache.mark(path[-1])
    tree.cache.free_windows(3999)
    tree.cache.leave(path)
    assert tree.cache.num_idle == 4000
    tree.cache.free_windows(1)
    assert tree.cache.num_idle == tree.rows.num_used == 0
    tree.cache.check()
