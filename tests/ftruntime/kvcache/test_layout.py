"""The chunk formula: worked numbers, then its properties."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftruntime.kvcache.layout import ChunkBudget, chunk_budget, min_window_pages, pages_for


def budget(
    *,
    max_prefill_length: int = 4096,
    num_tokens: int = 327680,
    max_running: int = 50,
    swa_ratio: float = 0.12,
    max_model_len: int = 327680,
    radix: bool = True,
) -> ChunkBudget:
    return chunk_budget(
        max_prefill_length=max_prefill_length,
        num_tokens=num_tokens,
        max_running=max_running,
        swa_ratio=swa_ratio,
        max_model_len=max_model_len,
        radix=radix,
    )


def test_s10_worked_numbers() -> None:
    assert budget() == ChunkBudget(308, 253, 3456, "window_pages")
    assert budget(swa_ratio=0.02) == ChunkBudget(261, 253, 384, "window_pages")


def test_naive_cache_reserves_less() -> None:
    # 2 * 51 + 1 = 103 reserved; (308 - 1 - 103) // 2 = 102 pages, so the flag binds
    assert budget(radix=False) == ChunkBudget(308, 103, 4096, "max_prefill_length")


def test_the_ratio_counts_the_padding_page() -> None:
    # 100 pages and page 0; 2 * 2 + 1 = 5 reserved; (101 - 1 - 5) // 2 = 47 pages
    result = budget(
        num_tokens=12800, max_running=1, swa_ratio=1.0, radix=False, max_prefill_length=8192
    )
    assert result == ChunkBudget(101, 5, 47 * 128, "window_pages")


@pytest.mark.parametrize(
    ("flag", "chunk", "limiting"),
    [
        (128, 128, "max_prefill_length"),
        (255, 128, "max_prefill_length"),
        (1024, 1024, "max_prefill_length"),
        (1151, 1024, "max_prefill_length"),
        (3456, 3456, "max_prefill_length"),
        (3584, 3456, "window_pages"),
    ],
)
def test_k07_explicit_prefill_length_is_honoured(flag: int, chunk: int, limiting: str) -> None:
    result = budget(max_prefill_length=flag)
    assert (result.chunk_tokens, result.limiting) == (chunk, limiting)


def test_one_page_remains_when_the_pool_has_no_spare() -> None:
    # reserved 2 * 2 + 3 + 1 = 8, pool 8 + 1: nothing is spare
    result = budget(num_tokens=128, max_running=1, swa_ratio=0.01, max_model_len=128)
    assert result == ChunkBudget(9, 8, 128, "one_page")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_prefill_length", 127),
        ("num_tokens", 1000),
        ("num_tokens", 0),
        ("max_running", 0),
        ("swa_ratio", 0.0),
        ("swa_ratio", 1.5),
        ("max_model_len", 0),
    ],
)
def test_wrong_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        budget(**{name: value})  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    max_prefill_length=st.integers(128, 20000),
    pages=st.integers(1, 4096),
    max_running=st.integers(1, 300),
    swa_ratio=st.floats(0.001, 1.0),
    max_model_len=st.integers(1, 1 << 20),
    radix=st.booleans(),
)
def test_s10_chunk_and_window_pool_always_fit(
    max_prefill_length: int,
    pages: int,
    max_running: int,
    swa_ratio: float,
    max_model_len: int,
    radix: bool,
) -> None:
    result = budget(
        max_prefill_length=max_prefill_length,
        num_tokens=pages * 128,
        max_running=max_running,
        swa_ratio=swa_ratio,
        max_model_len=max_model_len,
        radix=radix,
    )
    assert 128 <= result.chunk_tokens <= max_prefill_length
    assert result.chunk_tokens % 128 == 0
    # one prompt takes the whole chunk while its predecessor page and all other rows' pairs live
    most_alive = 2 * (max_running - 1) + 1 + result.chunk_tokens // 128
    assert most_alive <= result.window_pages - 1
    assert result.window_pages >= min_window_pages(
        max_running=max_running, chunk_tokens=result.chunk_tokens
    )


def test_pages_round_up() -> None:
    assert [pages_for(n) for n in (0, 1, 127, 128, 129, 256)] == [0, 1, 1, 1, 2, 2]
