"""Where tensor-parallel ranks find each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_KEYS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other; as torchrun's environment names it."""

    rank: int
    size: int
    host: str
    port: int
    local_rank: int


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
    for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not env[key].isdigit():
            raise ValueError(f"{key} is {env[key]!r}, expected a number")
        numbers[key] = int(env[key])
    local = env.get("LOCAL_RANK", env["RANK"])
    return Meeting(
        numbers["RANK"], numbers["WORLD_SIZE"], env["MASTER_ADDR"], numbers["MASTER_PORT"],
        int(local),
    )  # fmt: skip
