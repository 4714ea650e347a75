"""Committed figures of launches: a JSON file, every field of it checked as it is read.

The figures are compiled or read off machine code and so a static model: none is a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCH = 89
Launch = Mapping[str, Any]
Launches = Mapping[tuple[str, str], Sequence[Launch]]
"""Launches in order, by op and name of the case."""


def _is_word(x: object) -> bool:
    return isinstance(x, str) and x != ""


def _is_count(x: object) -> bool:
    return type(x) is int and x >= 0


def _is_rate(x: object) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf  # type: ignore[operator]


def _is_share(x: object) -> bool:
    return type(x) in (int, float) and 0 <= x <= 1  # type: ignore[operator]


def _is_tally(x: object) -> bool:
    return isinstance(x, dict) and all(name and _is_count(n) and n for name, n in x.items())


_WORD = (_is_word, "a name")
_COUNT = (_is_count, "a whole number, at least 0")
_RATE = (_is_rate, "a number above 0")
_RATE_OR_NONE = (lambda x: x is None or _is_rate(x), "a number above 0, or null")
FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "op": _WORD, "case": _WORD, "kernel": _WORD, "registers": _COUNT, "spill_bytes": _COUNT,
    "shared_bytes": _COUNT, "warps_per_sm": _COUNT,
    "mma": (_is_tally, "the number of each matrix instruction"), "copies": _COUNT,
    "wide_share": (_is_share, "a share from 0 to 1"), "issue_per_kmac": _RATE_OR_NONE,
    "ceiling_tflops": _RATE_OR_NONE, "ceiling_gb_per_s": _RATE, "us": _RATE, "bound": _WORD,
}  # fmt: skip
"""What each field of a launch has to be."""


def read(path: Path) -> tuple[str, Launches]:
    """The Triton version that compiled them, and the launches.

    Raises:
        ValueError: no file, no JSON, a field that is missing, unknown or out of range, another
            card, or a case that stands in two places.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_twins)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"contract: {path} is unreadable ({error}), expected committed figures"
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"contract: {path} is {_shown(data)}, expected a JSON object")
    _check_head(data)
    found: dict[tuple[str, str], list[Launch]] = {}
    last = None
    for number, launch in enumerate(data["launches"], 1):
        _check_launch(launch, f"launch {number}")
        key = (launch["op"], launch["case"])
        if key != last and key in found:
            raise ValueError(
                f"contract: case {' '.join(key)} stands in two places, expected all its launches "
                "in one"
            )
        found.setdefault(key, []).append(launch)
        last = key
    return data["triton"], found


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise ValueError(f"{twins[0]} is given twice in one object")
    return dict(pairs)


def _check_head(data: Mapping[str, Any]) -> None:
    head: Mapping[str, tuple[Callable[[object], bool], str]] = {
        "triton": (_is_word, "a version of Triton"),
        "arch": (lambda x: type(x) is int and x == ARCH, str(ARCH)),
        "launches": (lambda x: isinstance(x, list), "an array"),
    }
    _check_fields(data, head, "the file")


def _check_launch(launch: object, place: str) -> None:
    if not isinstance(launch, dict):
        raise ValueError(f"contract: {place} is {_shown(launch)}, expected a JSON object")
    named = [launch.get(name) for name in ("op", "case")]
    if all(_is_word(name) for name in named):
        place = " ".join(str(name) for name in named)
    _check_fields(launch, FIELDS, place)


def _check_fields(
    values: Mapping[str, Any], wanted: Mapping[str, tuple[Callable[[object], bool], str]],
    place: str,
) -> None:  # fmt: skip
    for name, (is_right, expected) in wanted.items():
        if name not in values:
            raise ValueError(f"contract: {name} of {place} is missing, expected {expected}")
        if not is_right(values[name]):
            shown = _shown(values[name])
            raise ValueError(f"contract: {name} of {place} is {shown}, expected {expected}")
    for name in values:
        if name not in wanted:
            shown = _shown(values[name])
            raise ValueError(f"contract: {name} of {place} is {shown}, expected no such field")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
