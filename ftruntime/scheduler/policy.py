"""How prefill and decode share the steps: prefill first, one decode after every N chunks.

The rules, with `every = N`:

- The streak counts prefill chunks that were scheduled. Once it has reached N a decode is tried
  first.
- A decode that was planned clears the streak, also one that turned out to hold no live row: an
  allowance that an empty decode did not spend would be tried again for ever.
- A decode that is due while no row can decode leaves the streak alone: prefill goes on, and the
  first row that can decode is served at once, one step for the whole debt.
- A decode taken because no prefill could run clears the streak like any other.
- Unset, a decode is never due: it runs only when no prefill batch exists.
"""

from __future__ import annotations


class InterleavePolicy:
    """The streak and the question asked of it."""

    def __init__(self, every: int | None = None) -> None:
        """
        Raises:
            ValueError: `every` is neither None nor an integer >= 1.
        """
        valid = every is None or (
            isinstance(every, int) and not isinstance(every, bool) and every >= 1
        )
        if not valid:
            raise ValueError(
                f"decode_interleave_every is {every!r}, expected an integer >= 1, or unset"
            )
        self._every = every
        self._streak = 0

    @property
    def every(self) -> int | None:
        return self._every

    @property
    def streak(self) -> int:
        """Prefill chunks scheduled since the last planned decode."""
        return self._streak

    def decode_is_due(self) -> bool:
        """Whether a decode is tried before the next prefill chunk."""
        return self._every is not None and self._streak >= self._every

    def prefill_scheduled(self) -> None:
        """A prefill chunk goes into this step."""
        self._streak += 1

    def decode_planned(self) -> None:
        """Rows were taken for a decode, live or not."""
        self._streak = 0


def interleave_notice(every: int, *, chunk_tokens: int, max_model_len: int) -> str | None:
    """One sentence when no single prompt can be long enough for N to act, else None.

    A prompt is interrupted when it has more than N chunks, so from `N * chunk_tokens + 1` tokens
    on.
    """
    shortest = every * chunk_tokens + 1
    longest = max_model_len - 1  # one position is left for the output
    if shortest <= longest:
        return None
    return (
        f"decode_interleave_every is {every}, which no single prompt reaches: a prompt of up to "
        f"{longest} tokens has at most {-(-longest // chunk_tokens)} chunks of {chunk_tokens} "
        f"tokens and is interrupted from {shortest} tokens on"
    )
