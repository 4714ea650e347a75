"""Compressed rows against sections 7 and 13 of the specification in fp64, under any cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.attention.compressor import compress_kv, compressor_state_shape
from ftkernels.attention.pools import empty_pool, read_index_rows, read_rows
from ftkernels.testing import assert_close, randn
from tests.support.attention_cases import unrotate

WIDTH, ROPE, EPS = 64, 16, 1e-6


def formula(kv, gate, ape, norm, angles, ratio):
    """Every row of one sequence in fp64, before the store's round trip."""
    kv, gate, ape = kv.double(), gate.double(), ape.double()
    rows = []
    for j in range(len(kv) // ratio):
        if ratio == 128:
            tokens = slice(128 * j, 128 * j + 128)
            z, v = gate[tokens] + ape, kv[tokens]
        else:
            now, before = slice(4 * j, 4 * j + 4), slice(4 * j - 4, 4 * j)
            z, v = gate[now, WIDTH:] + ape[:, WIDTH:], kv[now, WIDTH:]
            if j:
                z = torch.cat((gate[before, :WIDTH] + ape[:, :WIDTH], z))
                v = torch.cat((kv[before, :WIDTH], v))
        row = (torch.softmax(z, dim=0) * v).sum(0)
        row = norm.double() * row * torch.rsqrt(row.square().mean() + EPS)
        rows.append(unrotate(row, -angles[ratio * j]))
    return torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)


class Stream:
    """Feeds sequences to the op in pieces, over pages in disorder."""

    def __init__(self, lengths, ratio, *, seed=0, dtype=torch.float32, store="raw", per_page=None):
        wide = WIDTH * (2 if ratio == 4 else 1)
        self.ratio, self.store, self.lengths = ratio, store, lengths
        self.kv = [randn(n, wide, seed=seed + 10 * i, scale=2.0) for i, n in enumerate(lengths)]
        self.gate = [
            randn(n, wide, seed=seed + 10 * i + 1, scale=2.0) for i, n in enumerate(lengths)
        ]
        self.ape, self.norm = randn(ratio, wide, seed=seed + 2), randn(WIDTH, seed=seed + 3)
        self.angles = randn(max(lengths) + 1, ROPE // 2, seed=seed + 4, scale=3.0)
        self.per_page = per_page or 128 // ratio
        pages = max(lengths) // ratio // self.per_page + 1
        order = torch.randperm(len(lengths) * pages).to(torch.int32)
        self.table = order.view(len(lengths), pages)
        self.pool = empty_pool(order.numel(), self.per_page, WIDTH, dtype=dtype)
        self.pool.fill_(float("nan"))
        shape = compressor_state_shape(ratio, WIDTH)
        self.state = torch.full((len(lengths) + 1, *shape), float("nan"))
        self.index = torch.arange(len(lengths), dtype=torch.int32).flip(0)
        self.done = [0] * len(lengths)

    def feed(self, counts):
        parts = [(self.done[s], self.done[s] + n) for s, n in enumerate(counts)]
        kv = torch.cat([self.kv[s][a:b] for s, (a, b) in enumerate(parts)])
        gate = torch.cat([self.gate[s][a:b] for s, (a, b) in enumerate(parts)])
        bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor([b for _, b in parts], dtype=torch.int32)
        compress_kv(
            kv, gate, self.ape, self.norm, self.state, self.index, self.pool, self.table, bounds,
            lens, compress_ratio=self.ratio, cos=self.angles.cos(), sin=self.angles.sin(),
            eps=EPS, store=self.store,
        )  # fmt: skip
        self.done = [b for _, b in parts]

    def rows(self, s):
        numbers = torch.arange(self.done[s] // self.ratio)
        pages = self.table[s][numbers // self.per_page].long()
        return read_rows(self.pool, pages, numbers % self.per_page, "bf16")

    def expected(self, s):
        n = self.done[s]
        return formula(
            self.kv[s][:n], self.gate[s][:n], self.ape, self.norm, self.angles, self.ratio
        )


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 700])
def test_k02_whole_prompt_matches_formula(ratio, length):
    stream = Stream([length], ratio)
    stream.feed([length])
    assert_close(stream.rows(0).double(), stream.expected(0), row_tol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_bits(data):
    ratio = data.draw(st.sampled_from([4, 128]))
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 99))
    whole, cut = Stream(lengths, ratio, seed=seed), Stream(lengths, ratio, seed=seed, per_page=3)
    whole.feed(lengths)
    while cut.done != lengths:
        left = [n - d for n, d in zip(lengths, cut.done, strict=True)]
        cut.feed([data.draw(st.integers(0, min(n, 150))) for n in left] if sum(left) > 3 else left)
    for s in range(len(lengths)):
        assert torch.equal(cut.rows(s), whole.rows(s))
        assert_close(cut.rows(s).double(), cut.expected(s), row_tol=1e-5)


@pytest.mark.parametrize("ratio", [4, 128])
def test_token_by_token_and_a_step_run_again(ratio):
    stream = Stream([270], ratio)
    for position in range(270):
        stream.feed([1])
        stream.done = [position]
        stream.feed([1])  # a decode step that is run again gives the same
    assert_close(stream.rows(0).double(), stream.expected(0), row_tol=1e-5)


@pytest.mark.parametrize("ratio", [4, 128])
def test_skipped_sequences_are_left_alone(ratio):
    stream = Stream([140, 140], ratio)
    stream.index[1] = -1
    state = stream.state.clone()
    stream.feed([140, 140])
    assert_close(stream.rows(0).double(), stream.expected(0), row_tol=1e-5)
    assert stream.rows(1).isnan().all()
    assert torch.equal(stream.state[0].isnan(), state[0].isnan())


def test_store_rounds_rows():
    """Official numerics: FP8 round trip of the channels before the rotated ones, groups of 64."""
    stream = Stream([64], 4, dtype=torch.bfloat16, store="kv")
    stream.feed([64])
    raw = Stream([64], 4, dtype=torch.bfloat16, store="raw")
    raw.feed([64])
    x = raw.rows(0)[:, : WIDTH - ROPE].double()
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax(1, keepdim=True).clamp_min(1e-4) / 448))
    q = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(stream.rows(0)[:, : WIDTH - ROPE].double(), q)
    assert torch.equal(stream.rows(0)[:, WIDTH - ROPE :], raw.rows(0)[:, WIDTH - ROPE :])


def test_index_store_is_hadamard_then_fp4():
    stream = Stream([64], 4, store="index")
    stream.feed([64])
    raw = stream.expected(0)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < WIDTH:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned = raw @ matrix * WIDTH**-0.5
    numbers = torch.arange(16)
    rows = read_index_rows(
        stream.pool, stream.table[0][numbers // 32].long(), numbers % 32, "bf16"
    ).double()
    groups = turned.view(16, -1, 32)
    scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True) / 6))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    on_grid = (rows.view(16, -1, 32).abs() / scale)[..., None].sub(grid).abs().amin(-1)
    assert on_grid.max() < 1e-6
    assert ((rows.view(16, -1, 32) - groups).abs() <= scale * 1.0001).all()


@pytest.mark.parametrize(
    "mutant", ["series swapped", "ape of the other window", "rope of the first"]
)
def test_mutants_fail(mutant):
    stream = Stream([300], 4)
    if mutant == "series swapped":
        stream.kv[0] = stream.kv[0].roll(WIDTH, 1)
        stream.feed([300])
        stream.kv[0] = stream.kv[0].roll(-WIDTH, 1)
    elif mutant == "ape of the other window":
        stream.ape = stream.ape.roll(1, 0)
        stream.feed([300])
        stream.ape = stream.ape.roll(-1, 0)
    else:
        stream.angles = stream.angles.roll(4, 0)
        stream.feed([300])
        stream.angles = stream.angles.roll(-4, 0)
    with pytest.raises(AssertionError, match="differ by more"):
        assert_close(stream.rows(0).double(), stream.expected(0), row_tol=1e-5)


def test_refusals():
    stream = Stream([8], 4)
    for name, value, text in (
        ("ratio", 8, "compress_ratio is 8, expected 4 or 128"),
        ("store", "fp8", "store is 'fp8', expected 'kv', 'index' or 'raw'"),
    ):
        before = getattr(stream, name)
        setattr(stream, name, value)
        with pytest.raises(ValueError, match=text):
            stream.feed([8])
        setattr(stream, name, before)
        stream.done = [0]
    with pytest.raises(ValueError, match="compressor_state_shape: compress_ratio is 2"):
        compressor_state_shape(2, 64)
