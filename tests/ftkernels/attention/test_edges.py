"""Carry at page edges: copies against plain loops, and rows that go on from them.

Mutants run, each noticed: the first four tokens of a page kept, series B kept, gate and kv
exchanged, loaded into places 0 to 3, slots of -1 written, the page of the first row for all, rows
of -1 written, `page_tokens` taken as 128.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels.attention.compressor import compress_kv_reference
from ftkernels.attention.edges import load_carry, load_carry_reference, save_carry
from ftkernels.testing import randn


@pytest.mark.parametrize(
    ("tokens", "start", "width", "page"),
    [(1, 127, 12, 128), (1, 123, 12, 128), (5, 122, 100, 128), (40, 250, 128, 128), (19, 3, 8, 8)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_last_four_tokens_of_a_page_are_kept(tokens, start, width, page, dtype, device, run):
    wide = randn(tokens, 4 * width + 4, device=device)
    kv, gate = wide[:, : 2 * width], wide[:, 2 * width + 4 :]  # rows are strided
    edges = torch.full((12, 2, 4, width), -1.0, device=device)
    wanted, slots = edges.clone(), []
    for t in range(tokens):
        position = start + t
        number = 2 * (position // page) + 1  # pages lie apart
        slots.append(number * page + position % page if t % 7 != 6 else -1)
        if slots[-1] >= 0 and position % page >= page - 4:
            wanted[number, 0, position % page - page + 4] = kv[t, :width]
            wanted[number, 1, position % page - page + 4] = gate[t, :width]
    where = torch.tensor(slots, dtype=dtype, device=device)
    run(save_carry, kv, gate, edges, where, page_tokens=page)
    assert torch.equal(edges, wanted)


@pytest.mark.parametrize("width", [12, 128])
def test_loaded_rows_change_where_they_must_and_nowhere_else(width, device, run):
    edges = randn(5, 2, 4, width, device=device)
    state = randn(4, 2, 8, 2 * width, device=device, seed=1)
    wanted = state.clone()
    pages, rows = [3, -1, 0, 4], [2, 1, -1, 0]
    for page, row in zip(pages, rows, strict=True):
        if page >= 0 and row >= 0:
            wanted[row, :, 4:8, :width] = edges[page]
    numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (pages, rows)]
    run(load_carry, edges, numbers[0], state, numbers[1])
    assert torch.equal(state, wanted)


@pytest.mark.parametrize("length", [129, 131, 200, 256])
def test_a_row_that_starts_at_an_edge_goes_on_with_the_same_bits(length, device, run):
    """Compressed rows behind a page do not depend on whether another row computed the page."""
    width, total = 16, length
    kv, gate = (randn(total, 2 * width, device=device, seed=s) for s in (1, 2))
    ape, norm = randn(4, 2 * width, device=device, seed=3), torch.ones(width, device=device)
    cos, sin = torch.ones(total, 4, device=device), torch.zeros(total, 4, device=device)
    int32 = {"dtype": torch.int32, "device": device}

    def compress(state, row, pool, start):
        compress_kv_reference(
            kv[start:], gate[start:], ape, norm, state, torch.tensor([row], **int32), pool,
            torch.arange(9, **int32)[None], torch.tensor([0, total - start], **int32),
            torch.tensor([total], **int32), compress_ratio=4, cos=cos, sin=sin, store="raw",
        )  # fmt: skip

    state = torch.zeros(2, 2, 8, 2 * width, device=device)
    cold, warm = (torch.zeros(9, 32, width, device=device) for _ in range(2))
    compress(state, 0, cold, 0)
    edges = torch.full((4, 2, 4, width), float("nan"), device=device)
    slots = torch.arange(128, 128 + total, device=device)
    run(save_carry, kv, gate, edges, slots)
    state[1] = float("nan")
    index = [torch.tensor([x], **int32) for x in (1, 1)]
    run(load_carry, edges, index[0], state, index[1])
    compress(state, 1, warm, 128)
    assert torch.equal(warm[1:], cold[1:])


def test_what_compress_kv_carries_is_what_is_kept(device, run):
    width = 8
    kv, gate = (randn(128, 2 * width, device=device, seed=s) for s in (1, 2))
    state, edges = (torch.zeros(1, 2, n, m, device=device) for n, m in ((8, 16), (4, 8)))
    int32 = {"dtype": torch.int32, "device": device}
    compress_kv_reference(
        kv, gate, torch.zeros(4, 16, device=device), torch.ones(8, device=device), state,
        torch.zeros(1, **int32), torch.zeros(1, 32, 8, device=device), torch.zeros(1, 1, **int32),
        torch.tensor([0, 128], **int32), torch.tensor([128], **int32), compress_ratio=4,
        cos=torch.ones(128, 2, device=device), sin=torch.zeros(128, 2, device=device), store="raw",
    )  # fmt: skip
    run(save_carry, kv, gate, edges, torch.arange(128, device=device))
    assert torch.equal(edges[0], state[0, :, 4:8, :width])


def test_nothing_is_launched_without_work(device, run):
    none, edges = torch.zeros(0, 8, device=device), torch.zeros(1, 2, 4, 4, device=device)
    run(save_carry, none, none, edges, torch.zeros(0, dtype=torch.int64, device=device),
        launched=False)  # fmt: skip
    index = torch.zeros(0, dtype=torch.int32, device=device)
    run(load_carry, edges, index, torch.zeros(1, 2, 8, 8, device=device), index, launched=False)


def _save(**changed):
    args = {
        "kv": torch.zeros(3, 8), "gate": torch.zeros(3, 8), "edges": torch.zeros(2, 2, 4, 4),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }  # fmt: skip
    save_carry(**{**args, **changed})


def _load(**changed):
    args = {
        "edges": torch.zeros(2, 2, 4, 4), "pages": torch.zeros(1, dtype=torch.int32),
        "state": torch.zeros(1, 2, 8, 8), "state_index": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    load_carry_reference(**{**args, **changed})


@pytest.mark.parametrize(
    ("call", "changed", "kind", "text"),
    [
        (_save, {"kv": torch.zeros(3, 8).half()}, TypeError, "save_carry: kv is float16"),
        (_save, {"gate": torch.zeros(2, 8)}, ValueError, "save_carry: gate is (2, 8)"),
        (_save, {"edges": torch.zeros(2, 2, 4, 8)}, ValueError,
         "save_carry: edges is (2, 2, 4, 8), expected half of kv's 8 columns"),
        (_save, {"slot_mapping": torch.zeros(3)}, TypeError, "save_carry: slot_mapping is float32"),
        (_save, {"page_tokens": 12}, ValueError,
         "save_carry: page_tokens is 12, expected a multiple of 8"),
        (_save, {"page_tokens": 0}, ValueError, "save_carry: page_tokens is 0"),
        (_load, {"edges": torch.zeros(2, 4, 4)}, ValueError, "load_carry: edges is (2, 4, 4)"),
        (_load, {"pages": torch.zeros(1)}, TypeError, "load_carry: pages is float32"),
        (_load, {"state": torch.zeros(1, 2, 8, 4)}, ValueError, "load_carry: state is"),
        (_load, {"state_index": torch.zeros(2, dtype=torch.int32)}, ValueError,
         "load_carry: state_index is (2,)"),
    ],
)  # fmt: skip
def test_refusals(call, changed, kind, text):
    with pytest.raises(kind) as caught:
        call(**changed)
    assert str(caught.value).startswith(text)
