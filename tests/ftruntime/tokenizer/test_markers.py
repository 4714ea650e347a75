from __future__ import annotations

import pytest

from ftruntime.tokenizer.markers import held_length


@pytest.mark.parametrize(
    ("text", "markers", "held"),
    [
        ("", ("ab",), 0),
        ("xa", ("ab",), 1),
        ("ab", ("ab",), 0),  # complete, not held
        ("aa", ("aab",), 2),
        ("ab", ("ab", "xyz"), 0),  # nor when a longer marker is looked for too
        ("xab", ("b-", "ab-"), 2),  # the longest counts
        ("ab", (), 0),
    ],
)
def test_held_length(text: str, markers: tuple[str, ...], held: int) -> None:
    assert held_length(text, markers) == held
