"""The one question of streaming over markers: how much of the text's end may become one."""

from __future__ import annotations

from collections.abc import Sequence


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins some marker without completing it."""
    longest = max((len(m) for m in markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(len(m) > n and m.startswith(text[-n:]) for m in markers):
            return n
    return 0
