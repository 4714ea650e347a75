"""Sizes of the page pools and of one prefill step: pure functions of the flags.

A sequence that decodes keeps at most two window pages alive (128 visible positions touch at most
two pages). A prefill step needs one window page for each page of new tokens, and the page before
them. The chunk is chosen so that both always fit, whatever the other rows do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ftruntime.types import PAGE_TOKENS

Limiting = Literal["max_prefill_length", "window_pages", "one_page"]

_MAX_SPARE_PAGES = 8
"""Window pages that a small ratio still leaves for chunks."""


@dataclass(frozen=True)
class ChunkBudget:
    """Window pool and chunk that the flags resolve to."""

    window_pages: int  # all window pages, the padding page 0 included
    reserved_window_pages: int  # of those, kept for running rows and the prefix cache
    chunk_tokens: int  # new tokens of one prefill step, a page multiple
    limiting: Limiting  # the bound that set chunk_tokens


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def chunk_budget(
    *,
    max_prefill_length: int,
    num_tokens: int,
    max_running: int,
    swa_ratio: float,
    max_model_len: int,
    radix: bool,
) -> ChunkBudget:
    """Size the window pool and the prefill chunk.

    Args:
        max_prefill_length: upper bound of a chunk in tokens, at least one page; rounded down to
            pages.
        num_tokens: KV capacity in tokens, a page multiple.
        max_running: rows that decode together, at least 1.
        swa_ratio: window pages as a share of all pages, in (0, 1].
        max_model_len: prompt and output of one request, in tokens.
        radix: whether a prefix cache keeps window pages.

    Raises:
        ValueError: an argument is outside its range.
    """
    _require(max_prefill_length >= PAGE_TOKENS, "max_prefill_length", max_prefill_length, ">= 128")
    _require(
        num_tokens >= PAGE_TOKENS and num_tokens % PAGE_TOKENS == 0,
        "num_tokens", num_tokens, "a positive multiple of 128",
    )  # fmt: skip
    _require(max_running >= 1, "max_running", max_running, ">= 1")
    _require(0 < swa_ratio <= 1, "swa_ratio", swa_ratio, "a share in (0, 1]")
    _require(max_model_len >= 1, "max_model_len", max_model_len, ">= 1")

    reserved = 2 * (max_running + 1) + (3 * max_running if radix else 0) + 1
    window_pages = max(
        reserved + min(pages_for(max_model_len), _MAX_SPARE_PAGES),
        math.ceil(swa_ratio * (num_tokens // PAGE_TOKENS + 1)),
    )
    flag_tokens = max_prefill_length // PAGE_TOKENS * PAGE_TOKENS
    # half of the spare pages: a chunk's pages may live on in the prefix cache while the next one
    # runs
    spare_tokens = (window_pages - 1 - reserved) // 2 * PAGE_TOKENS
    limiting: Limiting = "window_pages" if spare_tokens >= PAGE_TOKENS else "one_page"
    chunk_tokens = max(PAGE_TOKENS, spare_tokens)
    if flag_tokens <= chunk_tokens:
        chunk_tokens, limiting = flag_tokens, "max_prefill_length"
    return ChunkBudget(window_pages, reserved, chunk_tokens, limiting)


def min_window_pages(*, max_running: int, chunk_tokens: int) -> int:
    """Window pages, the padding page included, with which no step can run out of them.

    Every row holds at most two between steps. A part of `c` tokens starts on a page edge, where its
    row holds one, and takes `ceil(c / 128)` more: at most `(c - 1) // 128` beyond its two. A row
    that starts behind pages of the prefix cache holds the page before its part like any other,
    perhaps together with others; pages that only the cache keeps go whenever a step needs them.
    """
    return 1 + 2 * max_running + chunk_tokens // PAGE_TOKENS - 1


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, expected {expected}")
