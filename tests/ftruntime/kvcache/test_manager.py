"""Admission, growth, the sliding window, release, shared pages.

Mutants run, each noticed: a look-up remembered though pages came or went; the end of a prompt not
marked; the end of an answer not marked; pages of a part that never ended kept.
"""

from __future__ import annotations

import itertools

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


def computed(kv: KVManager, name: str, tokens: list[int], total: int | None = None) -> int:
    """Admit a sequence and compute its prompt page by page; returns where it started."""
    start = kv.admit(name, total or len(tokens) + 1, tokens)
    for end in [*range(start + 128, len(tokens), 128), len(tokens)]:
        kv.extend(name, end)
        kv.keep(name, tokens, end, prompt_ends=end == len(tokens))
        kv.trim(name, end)
    kv.check()
    return start


TEXT = [page for page in range(9) for _ in range(128)]


@pytest.mark.parametrize("length", [255, 256, 257, 300])
def test_a_prompt_computes_its_last_token_at_least(length: int) -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    computed(kv, "a", TEXT[:600])
    assert kv.cached_tokens(TEXT[:length]) == (length - 1) // 128 * 128
    assert kv.cached_tokens(TEXT[:128]) == kv.cached_tokens([]) == 0


def test_a_hit_tells_its_row_pages_and_the_window_page_before_it() -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    computed(kv, "a", TEXT[:400])
    pages = kv.row_pages_of("a")
    assert kv.admit("b", 600, TEXT[:600]) == 384
    told = kv.extend("b", 500)
    assert [(logical, row) for logical, _, row in told[:3]] == list(enumerate(pages[:3]))
    assert [window for _, window, _ in told[:2]] == [-1, -1]
    assert told[2][1] == kv.window_pages_of("a")[2]
    assert [logical for logical, _, _ in told[3:]] == [3]
    assert kv.extend("b", 500) == ()
    kv.check()


def test_shared_pages_count_once() -> None:
    kv = KVManager(num_pages=10, window_pages=30, prefix_cache=True)
    computed(kv, "a", TEXT[:700], total=768)
    assert (kv.used_pages, kv.reserved_pages) == (6, 6)
    assert not kv.can_admit(1100), "9 pages, 4 are left"
    assert kv.can_admit(1100, TEXT[:650]), "5 of them are shared"
    assert not kv.can_admit(1153, TEXT[:650])
    kv.admit("b", 1100, TEXT[:650])
    assert (kv.used_pages, kv.reserved_pages, kv.cached_pages) == (6, 10, 0)
    kv.release("a")
    assert (kv.used_pages, kv.reserved_pages, kv.cached_pages) == (5, 9, 0)
    assert kv.can_admit(128)
    kv.release("b")
    assert (kv.used_pages, kv.used_window_pages, kv.reserved_pages) == (0, 0, 0)
    assert kv.cached_pages == 5
    kv.check()


def test_what_nobody_holds_counts_as_free() -> None:
    kv = KVManager(num_pages=6, window_pages=30, prefix_cache=True)
    computed(kv, "a", TEXT[:640])
    kv.release("a")
    assert kv.cached_pages == 5
    other = [60] * 640
    computed(kv, "b", other)
    assert kv.cached_tokens(TEXT) == 128, "one page was free, four had to go"
    kv.release("b")
    assert kv.cached_tokens(other) == 512


def test_an_answer_is_there_for_the_next_turn() -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    computed(kv, "a", TEXT[:300], total=600)
    tokens = TEXT[:300]
    for end in range(301, 520):
        tokens.append(77)
        kv.extend("a", end)
        kv.keep("a", tokens, end)
        kv.trim("a", end)
    kv.release("a")
    assert kv.cached_tokens([*tokens, 5, 6]) == 512
    assert kv.cached_tokens(TEXT[:400]) == 256, "another answer: up to the prompt's last page"


@pytest.mark.parametrize("length", [520, 640])
def test_ends_of_prompts_and_answers_outlive_the_pages_of_a_long_one(length: int) -> None:
    kv = KVManager(num_pages=60, window_pages=10, prefix_cache=True)
    prompt = TEXT[:length]
    computed(kv, "a", prompt, total=900)
    tokens = prompt + [77] * (890 - length)
    for end in range(length + 1, 890):
        kv.extend("a", end)
        kv.keep("a", tokens, end)
        kv.trim("a", end)
    kv.release("a")
    computed(kv, "b", [60 + page for page in range(40) for _ in range(128)])
    kv.release("b")
    assert kv.cached_tokens(prompt) == 512
    assert kv.cached_tokens(tokens) == 768
    assert kv.cached_tokens(TEXT[:384]) == 0, "its own window page is gone"


def test_two_that_compute_the_same_page_keep_one() -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    for name in "ab":
        kv.admit(name, 300, TEXT[:257])
    for end in (128, 256, 257):
        for name in "ab":
            kv.extend(name, end)
            kv.keep(name, TEXT, end)
            kv.trim(name, end)
            kv.check()
    assert kv.used_pages == 6
    kv.release("a")
    kv.check()
    assert (kv.used_pages, kv.cached_pages) == (3, 0), "b's copies are the tree's now"
    assert kv.reserved_pages == 3
    kv.release("b")
    assert (kv.used_pages, kv.cached_pages) == (0, 2)
    kv.check()


def test_of_three_that_compute_the_same_page_each_reads_one_that_stays() -> None:
    """Whoever ends first, the others go on with the page numbers they were told."""
    for order in itertools.permutations("abc"):
        kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
        for name in "abc":
            kv.admit(name, 300, TEXT[:257])
        told: dict[str, int] = {}
        for name in "abc":
            told[name] = kv.extend(name, 128)[0][2]
            kv.keep(name, TEXT, 128)
            kv.trim(name, 129)
        for count, name in enumerate(order, start=1):
            kv.release(name)
            kv.check()
            left = order[count:]
            assert all(kv.row_pages_of(other)[0] == told[other] for other in left)
            assert kv.used_pages == len({told[other] for other in left})
        assert kv.cached_pages == 1


def test_a_blocked_prompt_is_looked_up_again_when_pages_come() -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    prompt = TEXT[:600]
    assert kv.cached_tokens(prompt) == 0
    computed(kv, "a", TEXT[:300])
    assert kv.cached_tokens(prompt) == 256
    kv.release("a")
    computed(kv, "b", [60] * 128 * 19)
    assert kv.cached_tokens(prompt) == 0


def test_abort_in_the_middle_leaves_what_was_computed() -> None:
    kv = KVManager(num_pages=20, window_pages=20, prefix_cache=True)
    kv.admit("a", 900, TEXT)
    kv.extend("a", 256)
    kv.keep("a", TEXT, 256)
    kv.trim("a", 256)
    kv.extend("a", 512)  # this part never ended
    kv.release("a")
    assert kv.cached_tokens(TEXT) == 256
    assert kv.used_pages == kv.used_window_pages == 0
    kv.check()
