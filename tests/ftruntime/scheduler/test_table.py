"""Rows are given, taken back and given again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftruntime.scheduler.table import NO_ROW, RequestTable
from ftruntime.types import SamplingParams
from tests.ftruntime.scheduler.support import make_request


def test_row_numbers_are_reused_lowest_first() -> None:
    table = RequestTable(3)
    rows = [table.add(make_request(name, 5)) for name in "abcd"]
    assert [row.row for row in rows] == [NO_ROW] * 4
    for row in rows[:3]:
        table.seat(row)
    assert [row.row for row in rows[:3]] == [0, 1, 2]
    assert (table.num_free_rows, table.num_running, len(table)) == (0, 3, 4)
    table.end(rows[2])
    table.end(rows[0])
    table.seat(rows[3])
    assert rows[3].row == 0
    assert rows[0].row == 0, "an ended request remembers its row"
    assert not rows[0].live
    assert table.num_free_rows == 1
    table.check()


def test_an_id_can_be_used_again_after_its_request_ended() -> None:
    table = RequestTable(1)
    row = table.add(make_request("a", 5))
    with pytest.raises(ValueError, match="request_id is 'a', which is already being served"):
        table.add(make_request("a", 5))
    table.end(row)
    again = table.add(make_request("a", 5))
    assert again is not row
    assert "a" in table
    assert table.get("a") is again
    assert table.get("b") is None


@pytest.mark.parametrize(
    "params", [{"max_tokens": None}, {"seed": None}, {"n": 2}], ids=lambda p: next(iter(p))
)
def test_unresolved_parameters_are_refused(params: dict[str, int | None]) -> None:
    sampling = SamplingParams(**{"max_tokens": 4, "seed": 1, **params})  # type: ignore[arg-type]
    request = replace(make_request("a", 5), params=sampling)
    with pytest.raises(ValueError, match="expected numbers and n=1"):
        RequestTable(1).add(request)


def test_counts_of_generated_tokens() -> None:
    row = RequestTable(1).add(make_request("a", 5, max_tokens=9))
    for token in (7, 8, 7):
        row.append(token)
    assert (row.num_prompt_tokens, row.num_generated, row.num_reserved_tokens) == (5, 3, 14)
    assert row.output_counts == {7: 2, 8: 1}


def test_check_sees_a_row_held_twice() -> None:
    table = RequestTable(2)
    first, second = table.add(make_request("a", 5)), table.add(make_request("b", 5))
    table.seat(first)
    table.seat(second)
    second.row = first.row
    with pytest.raises(AssertionError, match="expected each of 2 once"):
        table.check()
