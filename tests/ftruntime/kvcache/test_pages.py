"""The free list, against a plain set."""

from __future__ import annotations

import random

import pytest

from ftruntime.kvcache.pages import OutOfPagesError, PageAllocator


def test_hands_out_every_page_once_and_never_page_0() -> None:
    pages = PageAllocator(9)
    assert (pages.num_usable, pages.num_free, pages.num_used) == (8, 8, 0)
    assert sorted(pages.allocate(8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (pages.num_free, pages.num_used) == (0, 8)


def test_takes_all_or_nothing() -> None:
    pages = PageAllocator(5)
    pages.allocate(2)
    with pytest.raises(OutOfPagesError, match="3 pages asked for, 2 of 4 are free"):
        pages.allocate(3)
    assert pages.num_free == 2
    assert pages.allocate(0) == []
    with pytest.raises(ValueError, match="count is -1"):
        pages.allocate(-1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([1, 1], "expected every page once"),
        ([1, 2, 4], r"pages \[4\] are not held"),
        ([0], r"pages \[0\] are not held"),
        ([-1], "are not held"),
        ([99], "are not held"),
    ],
)
def test_p06_wrong_release_changes_nothing(given: list[int], sentence: str) -> None:
    pages = PageAllocator(6)
    assert sorted(pages.allocate(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match=sentence):
        pages.release(given)
    assert (pages.num_free, pages.num_used) == (2, 3)
    pages.check()


def test_p06_double_release_is_an_error() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(2)
    pages.release(held)
    with pytest.raises(ValueError, match="are not held"):
        pages.release(held)
    assert pages.num_free == 3


def test_random_runs_match_a_set() -> None:
    rng = random.Random(1)
    pages, held = PageAllocator(40), set()
    for _ in range(2000):
        if rng.random() < 0.5 and pages.num_free:
            taken = pages.allocate(rng.randint(0, pages.num_free))
            assert held.isdisjoint(taken)
            assert all(1 <= page < 40 for page in taken)
            held |= set(taken)
        elif held:
            given = rng.sample(sorted(held), rng.randint(1, len(held)))
            pages.release(given)
            held -= set(given)
        assert (pages.num_used, pages.num_free) == (len(held), 39 - len(held))
        pages.check()


def test_check_sees_a_lost_page() -> None:
    pages = PageAllocator(4)
    pages._held.add(pages._free[-1])
    with pytest.raises(AssertionError):
        pages.check()


def test_a_pool_needs_its_padding_page() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PageAllocator(0)
