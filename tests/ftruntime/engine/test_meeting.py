"""Where ranks meet: torchrun's variables, and the least that any rank has.

Mutants run, each noticed: a missing variable taken as zero; the first rank's memory instead of the
least; each bound of a variable left out; digits of other scripts read; the attempt left out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftruntime.engine.build import agreed
from ftruntime.engine.meeting import Meeting, meeting_for, meeting_of
from ftruntime.plan import DeviceFacts

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


def test_without_torchrun_there_is_no_meeting() -> None:
    assert meeting_of({}) is None
    assert meeting_of({"RANK": "", "WORLD_SIZE": "8"}) is None


def test_as_torchrun_says() -> None:
    assert meeting_of(TORCHRUN) == Meeting(3, 8, "node1", 29500, 1, 2)
    alone = {name: x for name, x in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert meeting_of(alone) == Meeting(3, 8, "node1", 29500, 3, 8)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is not set, expected all of RANK, WORLD_SIZE"):
        meeting_of({**TORCHRUN, name: ""})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 'x', expected a number$"):
        meeting_of({**TORCHRUN, name: "x"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "8", "0 to 7"), ("LOCAL_RANK", "2", "0 to 1"), ("WORLD_SIZE", "0", "1 or more"),
        ("LOCAL_WORLD_SIZE", "0", "1 to 8"), ("LOCAL_WORLD_SIZE", "9", "1 to 8"),
        ("MASTER_PORT", "0", "1 to 65535"), ("MASTER_PORT", "65536", "1 to 65535"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_are_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}, expected {expected}$"):
        meeting_of({**TORCHRUN, name: value})


@pytest.mark.parametrize("value", ["²", "１", "-1", "1.0", " 1", "0x1"])
def test_only_plain_digits_are_a_number(value: str) -> None:
    with pytest.raises(ValueError, match=f"^RANK is '{value}', expected a number$"):
        meeting_of({**TORCHRUN, "RANK": value})


def test_ranks_that_are_started_again_meet_apart() -> None:
    again = meeting_of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again == Meeting(3, 8, "node1", 29500, 1, 2, attempt=2)


def test_torchrun_starts_as_many_ranks_as_are_asked_for() -> None:
    assert meeting_for(8, TORCHRUN) == meeting_of(TORCHRUN)
    assert meeting_for(8, {}) is None
    with pytest.raises(ValueError, match=r"^--tensor-parallel-size is 4, expected 8, the ranks"):
        meeting_for(4, TORCHRUN)


def test_ranks_agree_on_the_least() -> None:
    facts = DeviceFacts(kind="cpu", cards=0, memory_bytes=10, host_bytes=7)
    others = [replace(facts, memory_bytes=8), replace(facts, memory_bytes=9, host_bytes=None)]
    assert agreed([facts, *others]) == replace(facts, memory_bytes=8, host_bytes=7)
    assert agreed([replace(facts, host_bytes=None)]).host_bytes is None
