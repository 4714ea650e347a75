"""Mutants that these tests catch: distinct experts counted instead of routes, skipped routes
counted, slot 0 taken for none, only the first block of routes counted, a row's stride dropped, ids
past the last expert not counted, or looked up behind the table.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels.moe.count_missing import count_missing, count_missing_reference


def expected(slots, ids):
    return sum(e >= 0 and slots[e] < 0 for row in ids.tolist() for e in row)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts"), [(1, 1, 1), (1, 6, 256), (7, 3, 5), (300, 6, 16), (64, 33, 40)]
)
@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0], ids=str)
def test_counts_routes(tokens, topk, experts, resident, device, run):
    generator = torch.Generator().manual_seed(tokens + experts)
    ids = torch.randint(-1, experts, (tokens, topk), generator=generator, dtype=torch.int32)
    slots = torch.arange(experts, dtype=torch.int32)
    slots[torch.rand(experts, generator=generator) >= resident] = -1
    given = slots.to(device), ids.to(device)
    for result in (run(count_missing, *given), count_missing_reference(*given)):
        assert result.dtype == torch.int32
        assert result.tolist() == [expected(slots.tolist(), ids)]


def test_strided_rows_and_a_row_of_a_table(device, run):
    table = torch.tensor([[0, 0, 0], [3, -1, 0]], dtype=torch.int32, device=device)
    wide = torch.tensor([[1, 1, 1, 1], [2, -1, 1, 1], [0, 1, 0, 0]], device=device).int()
    out = torch.full((3,), 9, dtype=torch.int32, device=device)
    result = run(count_missing, table[1], wide[:, :2], out=out[1:2])
    assert result.data_ptr() == out[1:2].data_ptr()
    assert out.tolist() == [9, 3, 9]


@pytest.mark.parametrize("experts", [0, 1, 3])
def test_ids_past_the_last_expert_are_missing(experts, device, run):
    table = torch.zeros(8, dtype=torch.int32, device=device)  # slots behind the row
    ids = torch.tensor([[-1, 0, 2, 3], [-(2**31), 4, 7, 2**31 - 1]], device=device).int()
    missing = sum(e >= experts for e in ids.flatten().tolist())
    for op in (lambda *args: run(count_missing, *args), count_missing_reference):
        assert op(table[:experts], ids).tolist() == [missing]


@pytest.mark.parametrize("size", [(0, 6), (3, 0)], ids=str)
def test_no_routes(size, device, run):
    ids = torch.zeros(size, dtype=torch.int32, device=device)
    slots = torch.full((2,), -1, dtype=torch.int32, device=device)
    assert run(count_missing, slots, ids, launched=False).tolist() == [0]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"slot_of_expert": torch.zeros(4)}, TypeError, "slot_of_expert is float32"),
        ({"slot_of_expert": torch.zeros(1, 4).int()}, ValueError, r"slot_of_expert is \(1, 4\)"),
        ({"topk_ids": torch.zeros(2, 2).long()}, TypeError, "topk_ids is int64, expected int32"),
        ({"topk_ids": torch.zeros(4).int()}, ValueError, r"topk_ids is \(4,\), expected \[T, topk"),
        ({"out": torch.zeros(2).int()}, ValueError, r"out is \(2,\)"),
        ({"out": torch.zeros(1)}, TypeError, "out is float32"),
    ],
)
def test_refusals(change, kind, text):
    kwargs = {"slot_of_expert": torch.zeros(4).int(), "topk_ids": torch.zeros(2, 2).int(), **change}
    for op in (count_missing, count_missing_reference):
        with pytest.raises(kind, match=f"count_missing: {text}"):
            op(**kwargs)


def test_the_result_is_no_part_of_an_input():
    slots = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="count_missing: out is overlapping an input"):
        count_missing(slots, torch.zeros(2, 2).int(), out=slots[1:2])
