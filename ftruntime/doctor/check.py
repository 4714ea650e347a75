"""One finding about a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

State = Literal["ok", "warning", "failed"]
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Check:
    """What one check found.

    Args:
        name: what was looked at.
        found: what is there, in words.
        state: "failed" is broken, "warning" works with a loss.
        remedy: one sentence; empty when all is well.
        facts: the same for programs.
    """

    name: str
    found: str
    state: State = "ok"
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name, "state": self.state, "found": self.found, "remedy": self.remedy,
            "facts": dict(self.facts),
        }  # fmt: skip


def failed(name: str, error: BaseException, remedy: str) -> Check:
    """A check that an error ended."""
    words = str(error).splitlines()
    return Check(name, words[0] if words else type(error).__name__, "failed", remedy)
