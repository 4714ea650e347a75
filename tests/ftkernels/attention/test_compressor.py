"""Compressed rows against sections 7 and 13 of the specification in fp64, under any cut.

Mutants tried: series swapped, no bias or that of the next token, RoPE of the next row, slots ahead
of the first token, second row without the ring, ring of four, one ring for both, ring written
first, state buffers never joined, of the wrong parity or one, state read at a window's start, no
decay, a window closed a token early, skips of index -1 and of length 0 dropped, search off by one
or over sequences without tokens, too few programs, pooled row not rounded, row of another page,
Hadamard unscaled or a round short, index scales of 64, nibbles swapped, raw rows round-tripped,
round trip of every channel, state and page offsets in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend
from ftkernels.attention.compressor import compress_kv, compressor_state_shape
from ftkernels.attention.pools import empty_pool, read_index_rows, read_rows
from ftkernels.testing import aot, assert_close, count_launches, randn
from tests.support.attention_cases import unrotate
from tests.support.far import FAR, far_tensor

WIDTH, ROPE, EPS = 64, 16, 1e-6
both_ratios = pytest.mark.parametrize("ratio", [4, 128])


def formula(kv, gate, ape, norm, angles, ratio, dtype=torch.float64):
    """Every row of one sequence in fp64, before the store's round trip; steps round to dtype."""
    kv, gate, ape = kv.double(), gate.double(), ape.double()
    width = len(norm)
    rows = []
    for j in range(len(kv) // ratio):
        if ratio == 128:
            tokens = slice(128 * j, 128 * j + 128)
            z, v = gate[tokens] + ape, kv[tokens]
        else:
            now, before = slice(4 * j, 4 * j + 4), slice(4 * j - 4, 4 * j)
            z, v = gate[now, width:] + ape[:, width:], kv[now, width:]
            if j:
                z = torch.cat((gate[before, :width] + ape[:, :width], z))
                v = torch.cat((kv[before, :width], v))
        row = (torch.softmax(z, dim=0) * v).sum(0).to(dtype).double()
        row = norm.double() * row * torch.rsqrt(row.square().mean() + EPS)
        row = row.to(dtype).double()
        rows.append(unrotate(row, -angles[ratio * j]) if angles.shape[1] else row)
    return torch.stack(rows) if rows else torch.zeros(0, width, dtype=torch.float64)


class Stream:
    """Feeds sequences to the op in pieces, over pages in disorder; all memory starts as NaN."""

    def __init__(
        self, lengths, ratio, *, device="cpu", width=WIDTH, rope=ROPE, seed=0,
        dtype=torch.float32, store="raw", kv_format="bf16", per_page=None,
    ):  # fmt: skip
        wide = width * (2 if ratio == 4 else 1)
        self.ratio, self.store, self.lengths, self.device = ratio, store, lengths, device
        self.kv = [randn(n, wide, seed=seed + 10 * i, scale=2.0) for i, n in enumerate(lengths)]
        self.gate = [
            randn(n, wide, seed=seed + 10 * i + 1, scale=2.0) for i, n in enumerate(lengths)
        ]
        self.ape, self.norm = randn(ratio, wide, seed=seed + 2), randn(width, seed=seed + 3)
        self.angles = randn(max(lengths) + 1, rope // 2, seed=seed + 4, scale=3.0)
        self.kv_format, self.per_page = kv_format, per_page or 128 // ratio
        pages = max(lengths) // ratio // self.per_page + 1
        order = torch.randperm(len(lengths) * pages).to(torch.int32)
        self.table = order.view(len(lengths), pages)
        self.pool = empty_pool(
            order.numel(), self.per_page, width, dtype=dtype, kv_format=kv_format, device=device
        )
        shape = compressor_state_shape(ratio, width)
        self.state = torch.full((len(lengths) + 1, *shape), float("nan"), device=device)
        self.index = torch.arange(len(lengths), dtype=torch.int32).flip(0)
        self.done = [0] * len(lengths)

    def args(self, counts, padded=0):
        """Arguments for the next ``counts[s]`` tokens of each sequence, then NaN rows."""
        parts = [(self.done[s], self.done[s] + n) for s, n in enumerate(counts)]
        blank = torch.full((padded, self.ape.shape[1]), float("nan"))
        kv = torch.cat([*(self.kv[s][a:b] for s, (a, b) in enumerate(parts)), blank])
        gate = torch.cat([*(self.gate[s][a:b] for s, (a, b) in enumerate(parts)), blank])
        bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor([b for _, b in parts], dtype=torch.int32)
        to = self.device
        args = (
            kv.to(to), gate.to(to), self.ape.to(to), self.norm.to(to), self.state,
            self.index.to(to), self.pool, self.table.to(to), bounds.to(to), lens.to(to),
        )  # fmt: skip
        tables = {"cos": self.angles.cos().to(to), "sin": self.angles.sin().to(to)}
        options = {"eps": EPS, "store": self.store, "kv_format": self.kv_format}
        return args, {"compress_ratio": self.ratio, **tables, **options}

    def feed(self, counts, padded=0):
        args, kwargs = self.args(counts, padded)
        compress_kv(*args, **kwargs)
        self.done = [d + n for d, n in zip(self.done, counts, strict=True)]

    def rows(self, s):
        numbers = torch.arange(self.done[s] // self.ratio)
        pages = self.table[s][numbers // self.per_page].long()
        read = read_index_rows if self.store == "index" else read_rows
        return read(self.pool, pages, numbers % self.per_page, self.kv_format).cpu()

    def expected(self, s):
        n = self.done[s]
        return formula(
            self.kv[s][:n], self.gate[s][:n], self.ape, self.norm, self.angles, self.ratio,
            torch.float64 if self.pool.dtype == torch.float32 else torch.bfloat16,
        )  # fmt: skip

    def check(self, row_tol=1e-5):
        """Every closed row is right, and no other row of the pool is written."""
        rest = torch.ones(self.pool.shape[:2], dtype=torch.bool)
        for s in range(len(self.lengths)):
            assert_close(self.rows(s).double(), self.expected(s), row_tol=row_tol)
            numbers = torch.arange(self.done[s] // self.ratio)
            pages = self.table[s][numbers // self.per_page].long()
            rest[pages, numbers % self.per_page] = False
        assert self.pool.cpu()[rest].isnan().all()


@both_ratios
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 127, 128, 129, 255, 256])
def test_k02_whole_prompt_matches_formula(ratio, length, device, run):
    stream = Stream([length], ratio, device=device)
    args, kwargs = stream.args([length])
    run(compress_kv, *args, **kwargs)
    stream.done = [length]
    stream.check()


@pytest.mark.parametrize(("ratio", "length"), [(4, 60), (128, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits_are_near(ratio, length, dtype, device):
    stream = Stream([length, length // 2], ratio, dtype=dtype, device=device)
    stream.feed(stream.lengths)
    stream.check(5e-3)


@both_ratios
@pytest.mark.parametrize("width", [30, 33, 96, 128, 384, 640])
def test_k11_every_width_to_its_last_channel(ratio, width, device, lane):
    """Also widths that are no power of two, odd multiples of 128 among them."""
    length, cut = (11, 6) if ratio == 4 else (130, 50)
    rows = []
    for counts in ([length], [cut, length - cut]):
        stream = Stream([length], ratio, width=width, rope=10, device=device)
        for count in counts:
            stream.feed([count])
        stream.check()
        rows.append(stream.rows(0))
    if lane != "reference" or width % 2 == 0:  # torch sums the ends of odd rows in another way
        assert torch.equal(*rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_bits(data, device):
    ratio = data.draw(st.sampled_from([4, 128]))
    longest = 40 if ratio == 4 else 260
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=2))
    seed, total = data.draw(st.integers(0, 99)), sum(lengths)
    alone = [Stream([n], ratio, device=device) for n in lengths]
    cut = Stream(lengths, ratio, seed=seed, per_page=3, device=device)
    while cut.done != lengths:
        left = [n - d for n, d in zip(lengths, cut.done, strict=True)]
        counts = [data.draw(st.integers(0, min(n, total // 2))) for n in left]
        cut.feed(counts if any(counts) else left)
    for s, stream in enumerate(alone):
        stream.kv, stream.gate = [cut.kv[s]], [cut.gate[s]]
        stream.ape, stream.norm, stream.angles = cut.ape, cut.norm, cut.angles
        stream.feed(stream.lengths)
        assert torch.equal(cut.rows(s), stream.rows(0))
    cut.check()


@pytest.mark.parametrize(("ratio", "start", "length"), [(4, 0, 21), (128, 122, 134)])
def test_token_by_token_and_a_step_run_again(ratio, start, length, device):
    whole, stream = (Stream([length, 3], ratio, device=device) for _ in range(2))
    whole.feed([length, 0])
    stream.feed([start, 0])
    for position in range(start, length):
        stream.feed([1, 0])
        stream.done[0] = position
        stream.feed([1, 0])  # a decode step that is run again gives the same
    assert torch.equal(stream.rows(0), whole.rows(0))
    owner = int(stream.index[0])
    buffers = [(length - 1) % 2] if ratio == 128 else slice(None)
    assert torch.equal(stream.state[owner][buffers], whole.state[owner][buffers])


@both_ratios
def test_decode_batch(ratio, device):
    """One token of each of five sequences: a first one, inside a window, its last, the next."""
    lengths = [0, ratio - 2, ratio - 1, ratio, 1]
    stream = Stream([n + 1 for n in lengths], ratio, device=device)
    stream.feed(lengths)
    stream.feed([1] * 5)
    stream.check()


@both_ratios
def test_skipped_and_padded(ratio, device):
    """A skipped sequence, one of length 0, one without new tokens; NaN rows past the last."""
    n = ratio + 9
    stream = Stream([n, n, n, n], ratio, device=device)
    stream.feed([3, 0, 3, 0])
    stream.index[2] = -1
    stream.table[2] = -1
    before = stream.state.clone()
    stream.feed([n - 3, 0, 5, n], padded=7)
    assert_close(stream.rows(0).double(), stream.expected(0), row_tol=1e-5)
    assert_close(stream.rows(3).double(), stream.expected(3), row_tol=1e-5)
    kept = [4, 2, 1]  # no one's, that of the sequence without tokens, the skipped one's
    assert_close(stream.state[kept], before[kept])
    assert stream.pool[stream.table[1].long()].isnan().all()
    zero = Stream([n], ratio, device=device)
    args, kwargs = zero.args([n])
    compress_kv(*args[:9], torch.zeros_like(args[9]), **kwargs)
    assert zero.pool.isnan().all()
    assert zero.state.isnan().all()


def test_sequence_at_a_window_edge_without_tokens(device):
    stream = Stream([128, 256, 128], 128, device=device)
    stream.feed([128, 0, 128])
    stream.feed([0, 256, 0])
    stream.check()


def test_state_of_ratio_4_is_the_newest_eight_tokens(device):
    stream = Stream([21], 4, device=device)
    stream.feed([19])
    stream.feed([2])
    newest = torch.arange(13, 21)
    state = stream.state[0].cpu()
    assert torch.equal(state[0, newest % 8], stream.kv[0][newest])
    assert torch.equal(state[1, newest % 8], stream.gate[0][newest])


@pytest.mark.parametrize("length", [129, 140])
def test_state_of_ratio_128_is_the_running_softmax(length, device):
    stream = Stream([length], 128, device=device)
    stream.feed([length - 1])
    stream.feed([1])
    top, total, mixed = stream.state[0, (length - 1) % 2].cpu().double()
    z = stream.gate[0][128:].double() + stream.ape[: length - 128].double()
    p = torch.exp(z - z.amax(0))
    assert_close(top, z.amax(0), row_tol=1e-6)
    assert_close(total, p.sum(0), row_tol=1e-6)
    assert_close(mixed, (p * stream.kv[0][128:].double()).sum(0), row_tol=1e-6)


@pytest.mark.parametrize(("ratio", "start"), [(4, 8), (4, 10), (128, 128)])
def test_state_that_cannot_matter_is_not_read(ratio, start, device):
    stream = Stream([start + ratio], ratio, device=device)
    stream.feed([start])
    if ratio == 128:
        stream.state.fill_(float("nan"))
    else:
        dead = [p % 8 for p in range(start - 8, start // 4 * 4 - 4)]
        stream.state[:, :, dead] = float("nan")
    stream.feed([ratio])
    stream.check()


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Programs of the interpreter run from the last to the first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(builder.grid_dim[0] - 1 - x, y, z)

    with mock.patch.object(builder, "set_grid_idx", backwards):
        yield


@pytest.mark.skipif(not backend.interpreted(), reason="orders the programs of the interpreter")
@pytest.mark.parametrize(
    ("ratio", "cuts"),
    [(4, [6, 17, 28]), (4, [12, 24]), (128, [5, 135]), (128, [6, 271]), (128, [128, 258])],
)
def test_order_of_programs_does_not_matter(ratio, cuts, device):
    """Windows that share a state buffer, and such that do not; two sequences at once."""
    streams = [Stream([cuts[-1] + 2, 3], ratio, device=device) for _ in range(2)]
    for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
        streams[0].feed([end - begin, 1])
        with programs_backwards():
            streams[1].feed([end - begin, 1])
    for forwards, backwards in zip(streams, reversed(streams), strict=True):
        forwards.check()
        assert torch.equal(forwards.rows(0), backwards.rows(0))
    assert_close(streams[1].state, streams[0].state)


@pytest.mark.gpu
@both_ratios
def test_programs_at_once_give_the_same_bits(ratio, device):
    """What the interpreter cannot show: programs of one launch that run beside one another."""
    rows = []
    for _ in range(20):
        stream = Stream([701, 300], ratio, device=device)
        for counts in ([301, 149], [400, 0], [0, 151]):
            stream.feed(counts)
        rows.append(torch.cat((stream.rows(0), stream.rows(1))))
        assert torch.equal(rows[0], rows[-1])
    stream.check()


@pytest.mark.parametrize(("ratio", "length"), [(4, 12), (128, 130)])
@pytest.mark.parametrize(
    ("store", "width", "packed"), [("kv", 512, "fp8"), ("index", 128, "fp4")], ids=["kv", "index"]
)
def test_packed_rows_hold_what_round_trips_leave(ratio, length, store, width, packed, device):
    rows = []
    for kv_format in ("bf16", packed):
        stream = Stream(
            [length], ratio, width=width, rope=64, dtype=torch.bfloat16, store=store,
            kv_format=kv_format, device=device,
        )  # fmt: skip
        stream.feed([length])
        rows.append(stream.rows(0).float())
    assert torch.equal(*rows)
    assert rows[0].isfinite().all()
    assert len(rows[0]) == length // ratio


@pytest.mark.parametrize("width", [64, 80])
def test_store_rounds_rows(width, device):
    """Official numerics: FP8 round trip of the channels before the rotated ones, groups of 64."""
    rows = []
    for store in ("kv", "raw"):
        stream = Stream([24], 4, width=width, dtype=torch.bfloat16, store=store, device=device)
        stream.feed([24])
        rows.append(stream.rows(0).double())
    kept = width - ROPE
    x = rows[1][:, :kept]
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax(1, keepdim=True).clamp_min(1e-4) / 448))
    q = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(rows[0][:, :kept], q)
    assert torch.equal(rows[0][:, kept:], rows[1][:, kept:])


def test_index_store_is_hadamard_then_fp4(device):
    stream = Stream([64], 4, store="index", device=device)
    stream.feed([64])
    raw = stream.expected(0)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < WIDTH:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    groups = (raw @ matrix * WIDTH**-0.5).view(16, -1, 32)
    scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True) / 6))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    rows = stream.rows(0).double().view(16, -1, 32)
    on_grid = (rows.abs() / scale)[..., None].sub(grid).abs().amin(-1)
    assert on_grid.max() < 1e-6
    nearest = (groups.abs() / scale)[..., None].sub(grid).abs().amin(-1) * scale
    assert ((rows - groups).abs() <= nearest + 1e-5 * scale).all()


@both_ratios
def test_strided_arguments(ratio, device):
    plain, stream = (Stream([ratio + 5], ratio, device=device) for _ in range(2))
    plain.feed([7])
    plain.feed([ratio - 2])
    pages, rows, width = stream.pool.shape
    wide = torch.full((pages, 2 * rows, width + 8), float("nan"), device=device)
    stream.pool = wide[:, ::2, 4:-4]
    stream.state = torch.full((4, *stream.state.shape[1:-1], 200), float("nan"), device=device)[
        ::2, ..., : stream.state.shape[-1]
    ]
    stream.kv = [torch.cat((x, x), 1)[:, : x.shape[1]] for x in stream.kv]
    for count in (7, ratio - 2):
        (kv, gate, ape, *rest), kwargs = stream.args([count])
        kv, gate, ape = (torch.cat((x, x[:, :3]), 1)[:, : x.shape[1]] for x in (kv, gate, ape))
        compress_kv(kv, gate, ape, *rest, **kwargs)
        stream.done[0] += count
    assert_close(stream.rows(0), plain.rows(0), row_tol=1e-6)
    assert wide[:, 1::2].isnan().all()
    assert wide[:, :, :4].isnan().all()
    assert wide[:, :, -4:].isnan().all()


@both_ratios
def test_memory_beyond_two_to_the_31_elements(ratio, device, tmp_path):
    """The last state, the last page and the last new tokens lie far from the first."""
    stream = Stream([4, ratio + 2], ratio, device=device)
    stream.feed([4, 2])
    shape, (_, rows, width) = tuple(stream.state.shape[1:]), stream.pool.shape
    state = far_tensor((3, *shape), torch.float32, tmp_path, device)
    pool = far_tensor((2, rows, width), torch.float32, tmp_path, device)
    state[2], stream.index = stream.state[0], torch.tensor([1, 2], dtype=torch.int32)
    stream.state, stream.pool = state, pool
    stream.table = torch.tensor([[0], [1]], dtype=torch.int32)
    (kv, gate, *rest), kwargs = stream.args([0, ratio])
    compress_kv(kv, gate, *rest, **kwargs)
    stream.done[1] += ratio
    assert_close(stream.rows(1).double(), stream.expected(1), row_tol=1e-5)


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles")
@pytest.mark.parametrize(
    ("ratio", "store", "width", "kv_format"),
    [(4, "kv", 512, "fp8"), (4, "index", 128, "bf16"), (128, "kv", 512, "bf16")],
)
def test_compiles_with_wide_strides(ratio, store, width, kv_format):
    def far(*size, dtype=torch.float32):
        return torch.empty_strided(size, (FAR, *torch.empty(size[1:]).stride()), dtype=dtype,
                                   device="meta")  # fmt: skip

    def near(*size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device="meta")

    wide = width * (2 if ratio == 4 else 1)
    pool = far(4, 32, 584, dtype=torch.uint8)
    if kv_format == "bf16":
        pool = far(4, 32, width, dtype=torch.bfloat16)
    with aot.capture_launches() as got:
        compress_kv(
            far(256, wide), far(256, wide), far(ratio, wide), near(width, dtype=torch.float32),
            far(3, *compressor_state_shape(ratio, width)), near(2), pool, far(2, 4).int(),
            near(3), near(2), compress_ratio=ratio, cos=far(512, 32), sin=far(512, 32),
            store=store, kv_format=kv_format,
        )  # fmt: skip
    assert len(got.launches) == 1
    assert got[0].check().ld128


def test_empty_batches_launch_nothing(device, run):
    stream = Stream([4], 4, device=device)
    args, kwargs = stream.args([0])
    run(compress_kv, *args, launched=False, **kwargs)
    none = [x[:0] for x in args]
    run(compress_kv, *args[:4], stream.state, none[5], stream.pool, none[7], args[8][:1], none[9],
        launched=False, **kwargs)  # fmt: skip
    assert stream.pool.isnan().all()


def test_one_launch_with_scratch(device, lane):
    stream = Stream([9], 4, device=device)
    args, kwargs = stream.args([9])
    scratch = torch.zeros(16, dtype=torch.uint8, device=device)
    with count_launches() as launches:
        compress_kv(*args, **kwargs, scratch=scratch)
    assert launches == ([] if lane == "reference" else ["csa_kernel"])
    with pytest.raises(TypeError, match="compress_kv: scratch is float32, expected uint8"):
        compress_kv(*args, **kwargs, scratch=scratch.float())


@pytest.mark.parametrize(
    "mutant", ["series swapped", "ape of the other window", "rope of the first"]
)
def test_mutants_fail(mutant, device):
    stream = Stream([20], 4, device=device)
    if mutant == "series swapped":
        stream.kv[0] = stream.kv[0].roll(WIDTH, 1)
        stream.feed([20])
        stream.kv[0] = stream.kv[0].roll(-WIDTH, 1)
    elif mutant == "ape of the other window":
        stream.ape = stream.ape.roll(1, 0)
        stream.feed([20])
        stream.ape = stream.ape.roll(-1, 0)
    else:
        stream.angles = stream.angles.roll(4, 0)
        stream.feed([20])
        stream.angles = stream.angles.roll(-4, 0)
    with pytest.raises(AssertionError, match="differ by more"):
        stream.check()


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
    with pytest.raises(ValueError, match="compressor_state_shape: compress_ratio is 2"):
        compressor_state_shape(2, 64)
    stream = Stream([8], 4, width=48, store="index")
    with pytest.raises(ValueError, match=r"kv is \(8, 96\), expected rows of a power of two"):
        stream.feed([8])
    assert stream.state.isnan().all()
    args, kwargs = Stream([8], 4).args([8])
    with pytest.raises(ValueError, match=r"kv is \(8, 127\), expected two series"):
        compress_kv(*(x[:, :-1] for x in args[:3]), *args[3:], **kwargs)
    with pytest.raises(ValueError, match="kv_format is 'fp8' with store 'raw', expected 'bf16'"):
        compress_kv(*args, **{**kwargs, "store": "raw", "kv_format": "fp8"})
    with pytest.raises(ValueError, match="kv_format is 'fp8', expected 'bf16' or 'fp4'"):
        compress_kv(*args, **{**kwargs, "store": "index", "kv_format": "fp8"})
    shared = list(args)
    shared[4] = args[4][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"state has strides .* expected memory of its own"):
        compress_kv(*shared, **kwargs)
