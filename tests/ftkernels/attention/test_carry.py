"""Carry at the end of pages: kept under any cut, given back to rows that start there.

Expectations are slices of the tokens themselves; `append_kv` is compared with `compress_kv` in its
own tests.

Mutants run, each noticed: the row after the last of a page, series B kept, gate and kv exchanged, a
page of 32 rows for all, the first sequence's table for all, entries of -1 written, the ring not
read, read at the wrong token, or after it has moved on, kept by a sequence's first program alone,
loaded into places 0 to 3, rows of -1 loaded.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.attention.carry import load_carry, load_carry_reference
from ftkernels.attention.compressor import compress_kv, compress_kv_reference
from ftkernels.testing import randn
from tests.ftkernels.attention.test_compressor import Stream
from tests.support.far import FAR, far_tensor

NAN = float("nan")


class Kept:
    """Sequences fed in pieces to the op, whose pages go to entries in disorder, some to none."""

    def __init__(self, lengths, *, device="cpu", width=16, rope=4, per_page=2, seed=0):
        self.stream = Stream(
            lengths, 4, device=device, width=width, rope=rope, per_page=per_page, seed=seed
        )
        pages = max(lengths) // (4 * per_page) + 1
        order = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(seed))
        self.table = torch.where(order % 5 == 4, -1, order).int().view(len(lengths), pages)
        wide = torch.full((len(order) + 1, 3, 5, width + 4), NAN, device=device)
        self.snapshots = wide[:, 1:, 1:, 2:-2]
        self.wide, self.page = wide, 4 * per_page

    def feed(self, counts, op=compress_kv, run=None):
        args, kwargs = self.stream.args(counts, padded=2)
        kwargs["carry_snapshots"] = self.snapshots
        kwargs["snapshot_table"] = self.table.to(self.snapshots.device)
        run(op, *args, **kwargs) if run else op(*args, **kwargs)
        self.stream.done = [d + n for d, n in zip(self.stream.done, counts, strict=True)]

    def check(self, skipped=()):
        wanted = torch.full(self.wide.shape, NAN)
        width = self.snapshots.shape[3]
        for s, done in enumerate(self.stream.done):
            for page in range(done // self.page if s not in skipped else 0):
                entry, end = int(self.table[s, page]), (page + 1) * self.page
                if entry >= 0:
                    for half, new in enumerate((self.stream.kv[s], self.stream.gate[s])):
                        wanted[entry, 1 + half, 1:, 2:-2] = new[end - 4 : end, :width]
        assert torch.equal(bits(self.wide), bits(wanted))


def bits(x):
    return torch.where(x.isnan(), NAN, x).cpu().contiguous().view(torch.int32)


@pytest.mark.parametrize("op", [compress_kv, compress_kv_reference])
@pytest.mark.parametrize(
    ("pieces", "per_page"),
    [
        ([[128, 3], [1, 1]], 32),
        ([[126, 127], [8, 1]], 32),
        ([[9, 5], [1, 3], [30, 9]], 2),
        ([[15, 3], [1, 0], [1, 12], [22, 1]], 2),
        ([[20, 41]], 4),
    ],
)
def test_the_last_four_tokens_of_a_page_are_kept(op, pieces, per_page, device, run):
    kept = Kept([sum(n) for n in zip(*pieces, strict=True)], per_page=per_page, device=device)
    for counts in pieces:
        kept.feed(counts, op, run if op is compress_kv else None)
        kept.check()
    kept.stream.check()


@pytest.mark.parametrize("width", [12, 100, 128])
def test_token_by_token_and_a_step_run_again(width, device):
    kept = Kept([9], width=width, device=device)
    kept.table.fill_(1)
    for position in range(9):
        kept.feed([1])
        kept.stream.done = [position]
        kept.feed([1])
        kept.check()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_keeps_the_same(data, device):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    kept = Kept(
        lengths, per_page=2 * data.draw(st.integers(1, 3)), seed=data.draw(st.integers(0, 99)),
        device=device,
    )  # fmt: skip
    while kept.stream.done != lengths:
        left = [n - d for n, d in zip(lengths, kept.stream.done, strict=True)]
        counts = [data.draw(st.integers(0, n)) for n in left]
        kept.feed(counts if any(counts) else left)
    kept.check()
    kept.stream.check()


def test_skipped_sequences_keep_nothing(device):
    kept = Kept([16, 16, 16], device=device)
    kept.stream.index[1] = -1
    kept.feed([16, 16, 0])
    kept.check(skipped=(1,))


def test_pools_and_state_are_those_without_snapshots(device):
    plain, kept = (Kept([21, 40], device=device) for _ in range(2))
    for counts in ([13, 2], [1, 30], [7, 8]):
        plain.stream.feed(counts)
        kept.feed(counts)
    for s in range(2):
        assert torch.equal(plain.stream.rows(s), kept.stream.rows(s))
    assert torch.equal(bits(plain.stream.state), bits(kept.stream.state))


@pytest.mark.parametrize("start", [8, 16])
@pytest.mark.parametrize("length", [17, 23, 40])
def test_a_row_that_starts_at_an_edge_goes_on_with_the_same_bits(start, length, device, run):
    """Compressed rows behind a page do not depend on whether another row computed the page."""
    cold, warm = (Kept([length], device=device) for _ in range(2))
    for kept in (cold, warm):
        kept.table.copy_(torch.arange(kept.table.numel()))
        kept.feed([length])
    warm.stream.pool.fill_(NAN)
    warm.stream.state.fill_(NAN)
    entries = torch.tensor([start // 8 - 1], dtype=torch.int32, device=device)
    run(load_carry, cold.snapshots, entries, warm.stream.state, warm.stream.index.to(device))
    warm.stream.done = [start]
    warm.feed([length - start])
    assert torch.equal(warm.stream.rows(0)[start // 4 :], cold.stream.rows(0)[start // 4 :])


@pytest.mark.parametrize("width", [12, 128])
def test_loaded_rows_change_where_they_must_and_nowhere_else(width, device, run):
    snapshots = randn(5, 2, 4, width, device=device)
    state = randn(4, 2, 8, 2 * width, device=device, seed=1)
    wanted = state.clone()
    entries, rows = [3, -1, 0, 4], [2, 1, -1, 0]
    for entry, row in zip(entries, rows, strict=True):
        if entry >= 0 and row >= 0:
            wanted[row, :, 4:8, :width] = snapshots[entry]
    numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (entries, rows)]
    run(load_carry, snapshots, numbers[0], state, numbers[1])
    assert torch.equal(state, wanted)


def test_memory_beyond_two_to_the_31_elements(device, tmp_path):
    """The entry that is kept and loaded lies far from the first, and so does its table's row."""
    kept = Kept([8, 8], device=device)
    table = far_tensor((2, 2), torch.int32, tmp_path, device)
    table.copy_(torch.tensor([[0, 0], [2, 0]]))
    kept.table, kept.snapshots = table, far_tensor((2, 2, 4, 16), torch.float32, tmp_path, device)
    # a stride that 32 bits hold, a place that they do not
    kept.snapshots = kept.snapshots.as_strided((3, 2, 4, 16), (FAR // 2, 64, 16, 1))
    kept.feed([0, 8])
    wanted = torch.stack((kept.stream.kv[1], kept.stream.gate[1]))[:, 4:8, :16]
    assert torch.equal(kept.snapshots[2].cpu(), wanted)
    state = torch.zeros(1, 2, 8, 32, device=device)
    numbers = [torch.tensor([n], dtype=torch.int32, device=device) for n in (2, 0)]
    load_carry(kept.snapshots, numbers[0], state, numbers[1])
    assert torch.equal(state[0, :, 4:8, :16].cpu(), wanted)


def test_nothing_is_launched_without_a_row(device, run):
    snapshots = torch.zeros(1, 2, 4, 4, device=device)
    index = torch.zeros(0, dtype=torch.int32, device=device)
    state = torch.zeros(1, 2, 8, 8, device=device)
    run(load_carry, snapshots, index, state, index, launched=False)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"carry_snapshots": None}, TypeError, "carry_snapshots is None, expected a tensor beside"),
        ({"snapshot_table": None}, TypeError, "snapshot_table is None, expected a tensor beside"),
        ({"carry_snapshots": torch.zeros(2, 2, 4, 8)}, ValueError,
         "carry_snapshots is (2, 2, 4, 8), expected [N, 2, 4, c]"),
        ({"carry_snapshots": torch.zeros(2, 2, 4, 16).half()}, TypeError,
         "carry_snapshots is float16, expected float32"),
        ({"snapshot_table": torch.zeros(2, 2)}, TypeError, "snapshot_table is float32"),
        ({"snapshot_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError,
         "snapshot_table is (3, 2), expected [S, max_pages]"),
    ],
)  # fmt: skip
def test_refusals_of_snapshots(changed, kind, text):
    args, kwargs = Stream([8, 8], 4, width=16, rope=4, per_page=2).args([8, 8])
    kept = {
        "carry_snapshots": torch.zeros(2, 2, 4, 16),
        "snapshot_table": torch.zeros(2, 1, dtype=torch.int32),
    }
    for op in (compress_kv, compress_kv_reference):
        with pytest.raises(kind) as caught:
            op(*args, **kwargs, **{**kept, **changed})
        assert str(caught.value).startswith(f"compress_kv: {text}")


@pytest.mark.parametrize(
    ("ratio", "per_page", "text"),
    [
        (128, 1, "compress_ratio is 128 with carry_snapshots, expected 4"),
        (4, 3, "pool has pages of 3 rows, expected an even number"),
    ],
)
def test_snapshots_are_of_ratio_4_at_multiples_of_8(ratio, per_page, text):
    args, kwargs = Stream([8], ratio, width=16, rope=4, per_page=per_page).args([8])
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"compress_kv: {text}"):
        compress_kv(
            *args, **kwargs, carry_snapshots=torch.zeros(1, 2, 4, 16), snapshot_table=table
        )


@pytest.mark.parametrize("other", [0, 1, 4, 6])
def test_snapshots_have_memory_of_their_own(other):
    args, kwargs = Stream([32], 4, width=16, rope=4, per_page=2).args([32])
    source = args[other].view(-1)
    shared = torch.as_strided(source, (1, 2, 4, 16), (128, 64, 16, 1))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="compress_kv: carry_snapshots is overlapping"):
        compress_kv(*args, **kwargs, carry_snapshots=shared, snapshot_table=table)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"carry_snapshots": torch.zeros(2, 4, 4)}, ValueError, "carry_snapshots is (2, 4, 4)"),
        ({"entries": torch.zeros(1)}, TypeError, "entries is float32"),
        ({"state": torch.zeros(1, 2, 8, 4)}, ValueError, "state is (1, 2, 8, 4)"),
        ({"state_index": torch.zeros(2, dtype=torch.int32)}, ValueError, "state_index is (2,)"),
    ],
)
def test_refusals_of_load_carry(changed, kind, text):
    args = {
        "carry_snapshots": torch.zeros(2, 2, 4, 4), "entries": torch.zeros(1, dtype=torch.int32),
        "state": torch.zeros(1, 2, 8, 8), "state_index": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    for op in (load_carry, load_carry_reference):
        with pytest.raises(kind) as caught:
            op(**{**args, **changed})
        assert str(caught.value).startswith(f"load_carry: {text}")
