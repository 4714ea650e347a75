"""Rows of experts: where each tensor lies, and when a bank's tensors lie in rows.

Mutants tried: parts not aligned; strides ignored; the row's bytes in place of its elements as a
stride; rows found for tensors of two allocations, for scales of another order, and for tensors with
gaps; the offset of the first tensor left out; rows that are not aligned, and parts with gaps, let
through.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftkernels
from ftkernels.moe.bank import RowPart, expert_rows, row_offsets

PARTS = [
    RowPart((6, 5), torch.uint8),
    RowPart((3, 6), torch.int32),
    RowPart((4, 7), torch.float32, (1, 4)),
    RowPart((9,), torch.bfloat16),
]


def _bank(experts: int, rows: int, half: int, *, dense: torch.dtype | None = None, first: int = 0):
    """A bank that lies in rows, filled with random bytes."""
    if dense is None:
        parts = [
            RowPart((rows, half), torch.uint8), RowPart((rows, half // 16), torch.uint8),
            RowPart((2 * half, rows // 4), torch.uint8),
            RowPart((2 * half, rows // 64), torch.uint8),
        ]  # fmt: skip
    else:
        w13, w2 = (rows, 2 * half), (2 * half, rows // 2)
        parts = [RowPart(w13, dense, (1, rows)), RowPart(w2, dense, (1, 2 * half))]
    room = torch.randint(115, 126, (experts + first, row_offsets(parts)[-1]), dtype=torch.uint8)
    room = room[first:]
    views = expert_rows(room, parts)
    if dense is not None:
        return ftkernels.ExpertBank(views[0], None, views[1], None), room
    return ftkernels.ExpertBank(*views), room


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=5))
def test_offsets_are_multiples_of_256_and_leave_room(sizes):
    offsets = row_offsets([RowPart((size,), torch.uint8) for size in sizes])
    assert offsets[0] == 0
    for size, start, end in zip(sizes, offsets[:-1], offsets[1:], strict=True):
        assert start % 256 == end % 256 == 0
        assert 0 <= end - start - size < 256


@pytest.mark.parametrize("experts", [0, 1, 3])
def test_views_share_nothing_and_keep_their_order(experts):
    *offsets, num_bytes = row_offsets(PARTS)
    rows = torch.zeros(experts, num_bytes, dtype=torch.uint8)
    views = expert_rows(rows, PARTS)
    for part, view in zip(PARTS, views, strict=True):
        assert tuple(view.shape) == (experts, *part.shape)
        assert view.dtype == part.dtype
        if part.strides is not None:
            assert tuple(view.stride()[1:]) == part.strides
    # each byte of a row belongs to at most one part, and to the one that starts before it
    for number, (part, view, offset) in enumerate(zip(PARTS, views, offsets, strict=True)):
        view.fill_(number + 1)
        end = offset + part.num_bytes
        assert part.num_bytes == math.prod(part.shape) * part.dtype.itemsize
        for row in rows:
            assert not row[end : offsets[number + 1] if number + 1 < len(offsets) else None].any()
            assert row[offset:end].any()
    for number, view in enumerate(views):
        assert bool((view == number + 1).all())


def test_columns_of_a_strided_part_lie_together():
    part = RowPart((4, 7), torch.float32, (1, 4))
    rows = torch.zeros(2, row_offsets([part])[-1], dtype=torch.uint8)
    (view,) = expert_rows(rows, [part])
    view[1, :, 3] = torch.arange(4.0)
    assert torch.equal(rows[1, 3 * 16 : 4 * 16].view(torch.float32), torch.arange(4.0))
    assert int(rows.count_nonzero()) == int(rows[1, 3 * 16 : 4 * 16].count_nonzero())


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (torch.zeros(2, 1024), TypeError, "rows"),
        (torch.zeros(2, 1023, dtype=torch.uint8), ValueError, r"\(2, 1023\)"),
        (torch.zeros(4, 1024, dtype=torch.uint8)[::2], ValueError, r"strides \(2048, 1\)"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_bad_rows(rows, error, text):
    with pytest.raises(error, match=f"expert_rows: rows.*{text}|expert_rows: rows.*expected"):
        expert_rows(rows, PARTS)


@pytest.mark.parametrize(
    ("parts", "kind", "text"),
    [
        (None, TypeError, "parts is None, expected a list of RowPart"),
        ([1, 2], TypeError, r"parts is \[1, 2\], expected a list of RowPart"),
        ((part for part in PARTS), TypeError, "parts is <generator"),
        ([RowPart((-4, 2), torch.uint8)], ValueError, r"parts\[0\] is \(-4, 2\) with"),
        ([PARTS[0], RowPart((4, 2), torch.uint8, (1,))], ValueError, r"parts\[1\] .*\(1,\),"),
        ([RowPart((4, 2), torch.uint8, (9, 1))], ValueError, r"parts\[0\] .* without gaps"),
    ],
    ids=["none", "integers", "generator", "negative", "few strides", "gaps"],
)
def test_bad_parts(parts, kind, text):
    with pytest.raises(kind, match=f"^expert_rows: {text}"):
        expert_rows(torch.zeros(2, 256, dtype=torch.uint8), parts)


@pytest.mark.parametrize("start", [1, 2, 4])
def test_rows_start_where_their_widest_element_may(start):
    room = torch.zeros(4 + 2 * 1024, dtype=torch.uint8)
    rows = room[start : start + 2 * 1024].view(2, 1024)
    if start == 4:
        assert len(expert_rows(rows, PARTS)) == len(PARTS)
        return
    text = f"^expert_rows: rows is at byte {start} of its memory, expected a multiple of 4"
    with pytest.raises(ValueError, match=text):
        expert_rows(rows, PARTS)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"w13": None}, TypeError, "w13 is NoneType, expected a tensor"),
        ({"w13": "x"}, TypeError, "w13 is str, expected a tensor"),
        ({"w13": torch.zeros(128, 32).byte()}, ValueError, r"w13 is \(128, 32\), expected \[E, 2I"),
        ({"w13": torch.zeros(1, 3, 128, 32).byte()}, ValueError, r"w13 is \(1, 3, 128, 32\), exp"),
        ({"w13": torch.zeros(3, 96, 32).byte()}, ValueError, r"w13 is .* I and C multiples of 32"),
        ({"w13": torch.zeros(3, 128, 24).byte()}, ValueError, r"w13 is .* I and C multiples of 32"),
        ({"w13": torch.zeros(3, 128, 32)}, TypeError, "w13 is float32, expected uint8"),
        ({"w13_scale": None}, TypeError, "w13_scale is NoneType, expected a tensor"),
        ({"w2_scale": None}, TypeError, "w2_scale is NoneType, expected a tensor"),
        ({"w2_scale": torch.zeros(3, 64, 2).int()}, TypeError, "w2_scale is int32, expected uint8"),
        ({"w2_scale": torch.zeros(3, 64, 1).byte()}, ValueError, r"w2_scale is \(3, 64, 1\), exp"),
        ({"w2": torch.zeros(3, 64, 16).byte()}, ValueError, r"w2 is \(3, 64, 16\), expected \[E,"),
        ({"packed": True}, ValueError, "the bank is packed, expected checkpoint codes"),
        ({"w13_scale": None, "w2_scale": None}, ValueError, "the bank is dequantized, expected"),
    ],
)
def test_what_cannot_be_packed(change, kind, text):
    bank, _ = _bank(3, 128, 32)
    with pytest.raises(kind, match=f"^ExpertBank.pack: {text}"):
        dataclasses.replace(bank, **change).pack()


def test_a_bank_shows_forms_and_no_weights():
    bank, _ = _bank(3, 128, 32)
    assert repr(dataclasses.replace(bank, w2_scale=None)) == (
        "ExpertBank(w13=uint8 (3, 128, 32), w13_scale=uint8 (3, 128, 2), w2=uint8 (3, 64, 32), "
        "w2_scale=None, packed=False)"
    )


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("dense", [None, torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_bank_are_the_bytes_it_views(dense, first):
    bank, room = _bank(3, 128, 32, dense=dense, first=first)
    rows = bank.rows()
    assert rows is not None
    assert rows.data_ptr() == room.data_ptr()
    assert torch.equal(rows, room)
    # a copy of a row into another room moves the whole expert, in the same form
    other = torch.zeros(5, rows.shape[1], dtype=torch.uint8)
    pool = expert_rows(other, bank.parts)
    other[4] = rows[1]
    for mine, theirs in zip(pool, bank.tensors, strict=True):
        assert torch.equal(mine[4], theirs[1])
        assert mine.stride()[1:] == theirs.stride()[1:]


def _without_rows():
    bank, _ = _bank(3, 128, 32)
    w13, s13, w2, s2 = bank.tensors
    yield "another allocation", ftkernels.ExpertBank(w13, s13.clone(), w2, s2)
    yield "another's rows", ftkernels.ExpertBank(w13, _bank(3, 128, 32)[0].w13_scale, w2, s2)
    yield "another order", ftkernels.ExpertBank(w2, s2, w13, s13)
    yield "not all experts", ftkernels.ExpertBank(w13[:2], s13[1:], w2[:2], s2[:2])
    yield "every other expert", ftkernels.ExpertBank(w13[::2], s13[::2], w2[::2], s2[::2])
    yield "gaps", ftkernels.ExpertBank(w13[..., :16], s13, w2, s2)
    yield "gaps at the end", ftkernels.ExpertBank(w13, s13, w2, s2[..., :1])
    separate = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in bank.tensors]
    yield "each its own", ftkernels.ExpertBank(*separate)


@pytest.mark.parametrize(("name", "bank"), list(_without_rows()), ids=lambda x: str(x)[:20])
def test_no_rows(name, bank):
    assert bank.rows() is None


def test_packing_a_bank_of_rows_equals_packing_it_apart():
    bank, _ = _bank(2, 128, 32)
    apart = ftkernels.ExpertBank(*(x.contiguous() for x in bank.tensors))
    for mine, expected in zip(bank.pack().tensors, apart.pack().tensors, strict=True):
        assert torch.equal(mine, expected)


def test_a_part_with_gaps_becomes_contiguous():
    assert RowPart.of(torch.zeros(2, 4, 6)[..., :3]).strides is None
    assert RowPart.of(torch.zeros(2, 4, 6).mT).strides == (1, 6)
    assert RowPart.of(torch.zeros(2, 1, 6)).strides == (6, 1)
