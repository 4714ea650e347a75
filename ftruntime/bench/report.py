"""The fields of one experiment, and their text table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final, TextIO

_DIGITS: Final = 4
_WIDTH: Final = 120
_LEGEND: Final = {
    "policy": "policy flags of the server, and its chunk",
    "prefill_chunks": "prefill chunks of the long prompt",
    "attacker_wall_s": "long prompt: from its request to the end of its answer",
    "victim_wall_s": "victim beside it: from its first piece to its last",
    "victim_tokens": "tokens the victim received, by the server's count",
    "victim_alone_wall_s": "victim without the long prompt",
    "max_gap_s": "longest wait between two pieces of a victim",
    "gaps_over_5s": "waits over 5 s",
    "gaps_over_20s": "waits over 20 s",
    "interleaved_decode_steps": "decode steps run while the long prompt was unfinished",
    "victim_tokens_during_prefill": "tokens of the victim meanwhile",
}


@dataclass(frozen=True)
class StallReport:
    """What one experiment measured; None is what a client cannot see on this server.

    With several victims, walls and the longest gap are the worst of any victim, counts are sums.
    """

    policy: Mapping[str, object] | None
    prefill_chunks: int | None
    attacker_wall_s: float
    victim_wall_s: float
    victim_tokens: int | None
    victim_alone_wall_s: float
    max_gap_s: float
    gaps_over_5s: int
    gaps_over_20s: int
    interleaved_decode_steps: int | None
    victim_tokens_during_prefill: int | None

    def to_dict(self) -> dict[str, object]:
        """The JSON value of ``--json``; seconds are rounded to 0.1 ms."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        rounded = {k: round(v, _DIGITS) if isinstance(v, float) else v for k, v in values.items()}
        return {**rounded, "source": "measured"}


def gaps(times: Sequence[float]) -> list[float]:
    """Seconds between consecutive pieces."""
    return [later - earlier for earlier, later in pairwise(times)]


def wall(times: Sequence[float]) -> float:
    """Seconds from the first piece to the last."""
    return times[-1] - times[0] if times else 0.0


def total(counts: Iterable[int | None]) -> int | None:
    """The sum, None when one of them is unknown."""
    sum_ = 0
    for count in counts:
        if count is None:
            return None
        sum_ += count
    return sum_


def print_table(report: StallReport, caption: str, stream: TextIO) -> None:
    """One row a field, with what it means."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measured", "value", "meaning", box=None, pad_edge=False)
    values = report.to_dict()
    for name, meaning in _LEGEND.items():
        table.add_row(name, _shown(values[name]), meaning)
    table.caption, table.caption_justify, table.caption_style = caption, "left", ""
    Console(
        file=stream, highlight=False, markup=False, width=None if stream.isatty() else _WIDTH
    ).print(table)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items() if item is not None)
    return "-" if value is None else str(value)
