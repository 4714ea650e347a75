"""Where tensor-parallel ranks find each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ftruntime.flags import refuse

_KEYS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
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
    attempt: int = 0  # how often torchrun has started them again


def meeting_of(env: Mapping[str, str]) -> Meeting | None:
    """Where torchrun says that the ranks meet; None without it.

    Raises:
        ValueError: only some of its variables are set, one is no number, or they contradict each
        other.
    """
    known = [key for key in _KEYS if env.get(key)]
    if "RANK" not in known:
        return None
    missing = [key for key in _KEYS if key not in known]
    if missing:
        raise ValueError(f"{missing[0]} is not set, expected all of {', '.join(_KEYS)}")
    numbers = {
        key: _number(key, env.get(key) or env.get(_LOCAL.get(key, ""), ""))
        for key in ("RANK", "WORLD_SIZE", "MASTER_PORT", *_LOCAL)
    }
    _require(numbers, "MASTER_PORT", 1, 65535)
    _require(numbers, "WORLD_SIZE", 1)
    _require(numbers, "LOCAL_WORLD_SIZE", 1, numbers["WORLD_SIZE"])
    _require(numbers, "RANK", 0, numbers["WORLD_SIZE"] - 1)
    _require(numbers, "LOCAL_RANK", 0, numbers["LOCAL_WORLD_SIZE"] - 1)
    attempt = _number(_ATTEMPT, env.get(_ATTEMPT) or "0")
    return Meeting(
        numbers["RANK"], numbers["WORLD_SIZE"], env["MASTER_ADDR"], numbers["MASTER_PORT"],
        numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"], attempt,
    )  # fmt: skip


def meeting_for(num_ranks: int, env: Mapping[str, str]) -> Meeting | None:
    """As `meeting_of`, of this many ranks.

    Raises:
        ValueError: also where torchrun starts another number of them.
    """
    meeting = meeting_of(env)
    if meeting is not None and meeting.size != num_ranks:
        refuse(
            "tensor_parallel_size", num_ranks, f"{meeting.size}, the ranks that torchrun starts"
        )
    return meeting


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{key} is {text!r}, expected a number")
    return int(text)


def _require(numbers: Mapping[str, int], key: str, low: int, high: int | None = None) -> None:
    number = numbers[key]
    if number < low or (high is not None and number > high):
        expected = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{key} is {number}, expected {expected}")
