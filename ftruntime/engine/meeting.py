"""Where tensor-parallel ranks find each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_KEYS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# without these all ranks are on one machine
_LOCAL: Final = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other, and how many of them are on this machine; as
    torchrun's environment names it."""

    rank: int
    size: int
    host: str
    port: int
    local_rank: int
    local_size: int


def meeting_of(env: Mapping[str, str]) -> Meeting | None:
    """Where torchrun says that the ranks meet; None without it.

    Raises:
        ValueError: only some of its variables are set, or one is no number.
    """
    known = [key for key in _KEYS if env.get(key)]
    if "RANK" not in known:
        return None
    missing = [key for key in _KEYS if key not in known]
    if missing:
        raise ValueError(f"{missing[0]} is not set, expected all of {', '.join(_KEYS)}")
    numbers = {}
    for key in ("RANK", "WORLD_SIZE", "MASTER_PORT", *_LOCAL):
        value = env.get(key) or env[_LOCAL[key]]
        if not value.isdigit():
            raise ValueError(f"{key} is {value!r}, expected a number")
        numbers[key] = int(value)
    return Meeting(
        numbers["RANK"], numbers["WORLD_SIZE"], env["MASTER_ADDR"], numbers["MASTER_PORT"],
        numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"],
    )  # fmt: skip
