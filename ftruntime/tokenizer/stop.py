"""Stop strings over streamed text: nothing that may still become one is shown.

The match that is complete first wins, as if the text came character by character; of two that end
together, the one that starts first, so that no part of a stop string is shown. The result does not
depend on how the text is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftruntime.tokenizer.markers import held_length


class StopMatcher:
    """Matcher of one completion.

    Raises:
        ValueError: `stops` holds something else than non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for i, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop[{i}] is {stop!r}, expected a non-empty string")
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what is safe to show, and the matched stop string or None.

        After a match the shown text ends before it, and all later text is swallowed.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            _, start, self._matched = min(ends)
            self._held = ""
            return text[:start], self._matched
        keep = len(text) - held_length(text, self._stops)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """Text held back when generation ended without a match."""
        held, self._held = self._held, ""
        return held
