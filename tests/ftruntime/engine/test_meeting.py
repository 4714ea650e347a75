"""Where ranks meet: torchrun's variables, and the least that any rank has.

Mutants run, each noticed: a missing variable taken as zero; the first rank's memory instead of the
least.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftruntime.engine.build import agreed
from ftruntime.engine.meeting import Meeting, meeting_of
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


def test_ranks_agree_on_the_least() -> None:
    facts = DeviceFacts(kind="cpu", cards=0, memory_bytes=10, host_bytes=7)
    others = [replace(facts, memory_bytes=8), replace(facts, memory_bytes=9, host_bytes=None)]
    assert agreed([facts, *others]) == replace(facts, memory_bytes=8, host_bytes=7)
    assert agreed([replace(facts, host_bytes=None)]).host_bytes is None
