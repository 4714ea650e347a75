"""Admission, growth, the sliding window, release."""

from __future__ import annotations

import pytest

from ftruntime.kvcache.manager import KVManager
from ftruntime.kvcache.pages import OutOfPagesError


def test_pages_are_assigned_once_per_logical_page() -> None:
    kv = KVManager(num_pages=10, window_pages=11)
    kv.admit("a", 300)
    assert (kv.used_pages, kv.reserved_pages) == (0, 3)
    assert [logical for logical, _, _ in kv.extend("a", 1)] == [0]
    assert kv.extend("a", 128) == ()
    assert [logical for logical, _, _ in kv.extend("a", 300)] == [1, 2]
    assert (kv.used_pages, kv.used_window_pages) == (3, 3)
    assert sorted(kv.window_pages_of("a")) == [0, 1, 2]
    assert len(set(kv.row_pages_of("a"))) == 3
    assert 0 not in kv.row_pages_of("a")
    kv.check()


def test_extend_reports_what_it_assigned() -> None:
    kv = KVManager(num_pages=4, window_pages=9)
    kv.admit("a", 256)
    kv.admit("b", 256)
    triples = kv.extend("a", 100) + kv.extend("b", 100) + kv.extend("a", 200)
    assert triples[0][1:] == (kv.window_pages_of("a")[0], kv.row_pages_of("a")[0])
    assert triples[1][1:] == (kv.window_pages_of("b")[0], kv.row_pages_of("b")[0])
    assert triples[2][1:] == (kv.window_pages_of("a")[1], kv.row_pages_of("a")[1])


def test_extend_beyond_the_reservation_is_an_error() -> None:
    kv = KVManager(num_pages=10, window_pages=11)
    kv.admit("a", 128)
    with pytest.raises(OutOfPagesError, match="'a' grows to 129 tokens, 1 pages are reserved"):
        kv.extend("a", 129)
    assert kv.used_pages == 0


def test_extend_without_window_pages_changes_nothing() -> None:
    kv = KVManager(num_pages=10, window_pages=3)
    kv.admit("a", 1280)
    with pytest.raises(OutOfPagesError):
        kv.extend("a", 3 * 128)
    assert (kv.used_pages, kv.used_window_pages) == (0, 0)
    kv.check()


@pytest.mark.parametrize("end", [1, 127, 128, 129, 254, 255, 256, 257, 383, 384, 385, 640])
def test_trim_keeps_exactly_what_later_tokens_see(end: int) -> None:
    kv = KVManager(num_pages=10, window_pages=11)
    kv.admit("a", 1280)
    kv.extend("a", end)
    kv.trim("a", end)
    # positions the token at `end` sees and that exist already
    visible = {position // 128 for position in range(max(0, end - 127), end)}
    assert set(kv.window_pages_of("a")) == visible
    assert kv.used_window_pages == len(visible) <= 2
    assert kv.used_pages == -(-end // 128)
    kv.check()


def test_decoding_never_holds_more_than_two_window_pages() -> None:
    kv = KVManager(num_pages=10, window_pages=3)  # two usable
    kv.admit("a", 1280)
    for end in range(1, 1281):
        kv.extend("a", end)
        position = end - 1
        visible = {p // 128 for p in range(max(0, position - 127), end)}
        assert visible <= set(kv.window_pages_of("a"))
        kv.trim("a", end)
    assert kv.used_window_pages == 1


def test_admission_promises_whole_requests() -> None:
    kv = KVManager(num_pages=4, window_pages=9)
    kv.admit("a", 129)
    assert kv.can_admit(256)
    assert not kv.can_admit(257)
    kv.admit("b", 256)
    assert not kv.can_admit(1)
    with pytest.raises(OutOfPagesError, match="1 pages asked for, 0 of 4"):
        kv.admit("c", 1)
    with pytest.raises(ValueError, match="seq_id is 'a'"):
        kv.admit("a", 1)
    # promised pages are there when they are asked for
    assert len(kv.extend("a", 129)) == 2
    assert len(kv.extend("b", 256)) == 2


def test_p06_release_gives_back_exactly_once() -> None:
    kv = KVManager(num_pages=4, window_pages=9)
    kv.admit("a", 512)
    kv.extend("a", 400)
    kv.trim("a", 400)
    assert kv.release("a") is True
    assert kv.release("a") is False
    assert kv.release("never seen") is False
    assert (kv.used_pages, kv.used_window_pages, kv.reserved_pages) == (0, 0, 0)
    assert kv.can_admit(512)
    kv.check()


def test_check_sees_a_page_with_two_owners() -> None:
    kv = KVManager(num_pages=4, window_pages=9)
    kv.admit("a", 128)
    kv.admit("b", 128)
    kv.extend("a", 1)
    kv.extend("b", 1)
    kv._sequences["b"].own_pages = set(kv._sequences["a"].own_pages)
    with pytest.raises(AssertionError, match="a row page belongs to two sequences"):
        kv.check()


def test_check_sees_a_leaked_page() -> None:
    kv = KVManager(num_pages=4, window_pages=9)
    kv.admit("a", 128)
    kv.extend("a", 1)
    kv._sequences["a"].window_pages.clear()
    with pytest.raises(AssertionError, match="1 window pages are held, sequences own 0"):
        kv.check()


@pytest.mark.parametrize(
    ("num_pages", "window_pages", "name"), [(0, 9, "num_pages"), (4, 1, "window_pages")]
)
def test_empty_pools_are_refused(num_pages: int, window_pages: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVManager(num_pages, window_pages)
