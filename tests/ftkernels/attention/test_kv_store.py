"""Stores and loads of both pool formats, against norm, RoPE and round trip in fp64.

Mutants tried: no norm, mean over the padded width, no eps, norm or rotation unrounded, rotation
turned round, the sign of odd-width pairs, position of another token, round trip of every channel,
groups of 32, rotated channels that raise a scale, slots of -1 written, row of another page, scales
between the data rows, last scale byte left, page offsets in 32 bits, dead rows read.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend
from ftkernels.attention.kv_store import load_kv, store_kv, store_kv_reference
from ftkernels.attention.pools import empty_pool
from ftkernels.testing import aot, assert_close, count_launches, randn
from tests.support.attention_cases import unrotate
from tests.support.far import FAR, far_tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def round_trip(x: torch.Tensor, group: int) -> torch.Tensor:
    """Section 11 in fp64: power-of-two scales, e4m3."""
    if not x.shape[1]:
        return x.double()
    parts = []
    for part in x.double().split(group, dim=1):
        amax = part.abs().amax(1, keepdim=True).clamp_min(1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(amax / 448))
        codes = (part / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        parts.append(codes.double() * scale)
    return torch.cat(parts, dim=1)


class Call:
    """Arguments of one store, and by fp64 what the rows are before and after their round trip."""

    def __init__(self, tokens, width, rope, *, dtype, norm, rotated, device, seed=0):
        self.width, self.rope, self.dtype = width, rope, dtype
        self.kv = randn(tokens, width, dtype=dtype, device=device, scale=2.0, seed=seed)
        self.kwargs = {"rope_dim": rope}
        x = self.kv.cpu().double()
        if norm:
            weight = randn(width, seed=seed + 1, dtype=dtype)
            self.kwargs["norm_weight"] = weight.to(device)
            x = weight.double() * x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
            x = x.to(dtype).double()
        if rotated:
            angles = randn(9, rope // 2, seed=seed + 2, scale=3.0)
            generator = torch.Generator().manual_seed(seed)
            positions = torch.randint(0, 9, (tokens,), generator=generator)
            tables = {"cos": angles.cos().to(device), "sin": angles.sin().to(device)}
            self.kwargs |= {"positions": positions.to(device)} | tables
            if rope:
                x = [unrotate(row, -angles[p]) for row, p in zip(x, positions, strict=True)]
                x = torch.stack(x).to(dtype).double()
        self.rows = x
        kept = round_trip(x[:, : width - rope], 64).to(dtype).double()
        self.rounded = torch.cat((kept, x[:, width - rope :]), dim=1)


def check_rows(
    got: torch.Tensor, call: Call, *, tripped: bool, stored: torch.dtype | None = None
) -> None:
    """The rotated channels are near; the others too, but for values at the edge of a rounding."""
    expected, kept = call.rounded if tripped else call.rows, call.width - call.rope
    tolerance = TOLERANCE[stored or call.dtype]
    if not tripped:
        assert_close(got, expected, row_tol=tolerance)
        return
    top = call.rows.abs().amax(1, keepdim=True)
    error = (got - expected).abs() / top
    assert (error[:, kept:] <= tolerance).all()
    assert (error[:, :kept] <= 0.07).all(), "one step of e4m3"
    if kept:
        assert (error[:, :kept] <= tolerance).double().mean() > 0.95, "rounding flips aside"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("width", "rope", "rotated"),
    [(512, 64, True), (100, 12, True), (129, 6, True), (33, 5, False), (64, 0, True), (6, 6, True)],
)
def test_matches_formula(width, rope, rotated, norm, dtype, device, run):
    for tripped in (False, True):
        call = Call(4, width, rope, dtype=dtype, norm=norm, rotated=rotated, device=device)
        pool = empty_pool(2, 3, width, dtype=dtype, device=device)
        slots = torch.tensor([5, 0, -1, 2], device=device)
        run(store_kv, call.kv, pool, slots, round_trip=tripped, **call.kwargs)
        live = [0, 1, 3]
        call.rows, call.rounded = call.rows[live], call.rounded[live]
        check_rows(pool.cpu().flatten(0, 1)[[5, 0, 2]].double(), call, tripped=tripped)
        assert pool.flatten(0, 1)[[1, 3, 4]].isnan().all(), "no other row is written"


@pytest.mark.parametrize("step", ["norm", "rope", "round trip"])
def test_every_step_rounds_to_the_dtype_of_kv(step, device, run):
    call = Call(
        3, 96, 32, dtype=torch.bfloat16, norm=step == "norm", rotated=step == "rope", device=device
    )
    pool = empty_pool(1, 3, 96, dtype=torch.float32, device=device)
    slots = torch.arange(3, device=device)
    run(store_kv, call.kv, pool, slots, round_trip=step == "round trip", **call.kwargs)
    assert torch.equal(pool, pool.bfloat16().float())


def test_eps_counts(device, run):
    kv, weight = randn(2, 80, device=device, scale=1e-3), torch.ones(80, device=device)
    pool, slots = empty_pool(1, 2, 80, dtype=torch.float32, device=device), torch.arange(2)
    run(store_kv, kv, pool, slots.to(device), norm_weight=weight, eps=0.25)
    x = kv.cpu().double()
    x *= torch.rsqrt(x.square().mean(1, keepdim=True) + 0.25)
    assert_close(pool[0].cpu().double(), x, row_tol=1e-5)


def test_rotated_channels_raise_no_scale(device, run):
    kv = randn(2, 80, device=device)
    kv[:, 56:] *= 1e7
    pool, slots = empty_pool(1, 2, 80, dtype=torch.float32, device=device), torch.arange(2)
    run(store_kv, kv, pool, slots.to(device), rope_dim=24, round_trip=True)
    assert_close(pool[0, :, :56].cpu().double(), round_trip(kv[:, :56].cpu(), 64))
    assert torch.equal(pool[0, :, 56:], kv[:, 56:])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_stores(data, device):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    kv_format = data.draw(st.sampled_from(["bf16", "bf16", "fp8"]))
    width = 512 if kv_format == "fp8" else data.draw(st.integers(2, 160))
    rotated = data.draw(st.booleans())
    half = data.draw(st.integers(0, width // 2))
    rope = 64 if kv_format == "fp8" else 2 * half if rotated else half
    tokens, page = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    call = Call(
        tokens, width, rope, dtype=dtype, norm=data.draw(st.booleans()), rotated=rotated,
        device=device, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    tripped = kv_format == "fp8" or data.draw(st.booleans())
    pool = empty_pool(4, page, width, kv_format=kv_format, dtype=dtype, device=device)
    order = torch.randperm(4 * page)[:tokens].to(device)
    store_kv(call.kv, pool, order, kv_format=kv_format, round_trip=tripped, **call.kwargs)
    got = load_kv(pool, order, kv_format=kv_format, rope_dim=rope, dtype=torch.float32)
    stored = torch.bfloat16 if kv_format == "fp8" else dtype
    check_rows(got.cpu().double(), call, tripped=tripped, stored=stored)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
def test_rows_come_back_where_they_were_put(kv_format, out_dtype, device, run):
    kv = randn(9, 512, dtype=torch.bfloat16, scale=3.0, device=device)
    pool = empty_pool(4, 5, 512, kv_format=kv_format, device=device)
    slots = torch.tensor([0, 19, 7, -1, 12, 3, 4, 5, 18], device=device)
    run(store_kv, kv, pool, slots, kv_format=kv_format, round_trip=True)
    got = run(load_kv, pool, slots, kv_format=kv_format, dtype=out_dtype)
    rows = kv.cpu()
    expected = torch.cat((round_trip(rows[:, :448], 64), rows[:, 448:].double()), dim=1)
    expected[3] = 0
    assert_close(got.cpu(), expected.to(out_dtype))


@pytest.mark.parametrize("rows", [1, 32])
def test_packed_page_layout(rows, device, run):
    """Data rows of 576 bytes, then scale rows of 8: seven codes and a zero."""
    pool = empty_pool(3, rows, 512, kv_format="fp8", device=device)
    assert pool.stride(0) % 16 == 0
    kv = randn(1, 512, dtype=torch.bfloat16, device=device)
    run(store_kv, kv, pool, torch.tensor([2 * rows - 1], device=device), kv_format="fp8")
    kv, pool = kv.cpu(), pool.cpu() if device == "cuda" else pool
    flat = pool.as_strided((3, rows * 584), (pool.stride(0), 1))
    data, scales = flat[1, (rows - 1) * 576 :][:576], flat[1, rows * 576 + (rows - 1) * 8 :][:8]
    assert scales[7] == 0
    values = data[:448].view(torch.float8_e4m3fn).double().view(7, 64)
    values = values * 2.0 ** (scales[:7].double() - 127)[:, None]
    assert_close(values.view(1, 448), round_trip(kv[:, :448], 64))
    assert torch.equal(data[448:].clone().view(torch.bfloat16), kv[0, 448:])
    assert (flat[[0, 2]] == 0x5A).all(), "no byte of another page is written"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_extreme_rows(kv_format, device, run):
    """Zeros stay zeros, the largest and smallest numbers survive, a NaN spoils its group alone."""
    kv = torch.zeros(4, 512, dtype=torch.bfloat16, device=device)
    kv[1] = 3e38
    kv[2] = 1e-30
    kv[3, 70], kv[3, 5] = float("nan"), 448.0
    pool = empty_pool(1, 4, 512, kv_format=kv_format, device=device)
    slots = torch.arange(4, device=device)
    run(store_kv, kv, pool, slots, kv_format=kv_format, round_trip=True)
    got = run(load_kv, pool, slots, kv_format=kv_format).cpu()
    expected = kv.cpu()
    expected[2, :448] = 0
    expected[3, 64:128] = float("nan")
    assert_close(got, expected, row_tol=0.07)


def test_strided_rows_and_pool_and_int32_slots(device, run):
    wide = torch.zeros(4, 8, 96, dtype=torch.float32, device=device)
    pool = wide[::2, :, :64]
    kv = randn(6, 80, device=device)[::2, 16:]
    run(store_kv, kv, pool, torch.tensor([0, 9, 15], dtype=torch.int32, device=device))
    assert wide[:, :, 64:].abs().sum() == 0
    assert wide[[1, 3]].abs().sum() == 0
    assert torch.equal(wide[[0, 2, 2], [0, 1, 7], :64], kv)
    slots = torch.tensor([-1, 9], dtype=torch.int32, device=device)
    got = run(load_kv, pool, slots, kv_format="bf16", dtype=torch.float32)
    assert torch.equal(got, torch.stack((torch.zeros_like(kv[1]), kv[1])))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_a_row_does_not_know_its_batch(kv_format, device):
    call = Call(5, 512, 64, dtype=torch.bfloat16, norm=True, rotated=True, device=device)
    pools = [empty_pool(2, 5, 512, kv_format=kv_format, device=device).zero_() for _ in range(2)]
    slots = torch.tensor([8, 1, 0, 5, 3], device=device)
    options = {**call.kwargs, "kv_format": kv_format, "round_trip": True}
    store_kv(call.kv, pools[0], slots, **options)
    for t in range(5):
        options["positions"] = call.kwargs["positions"][t : t + 1]
        store_kv(call.kv[t : t + 1], pools[1], slots[t : t + 1], **options)
    assert torch.equal(*pools)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_pools_beyond_two_to_the_31_elements(kv_format, device, tmp_path):
    packed = kv_format == "fp8"
    size = (2, 3, 584 if packed else 512)
    pool = far_tensor(size, torch.uint8 if packed else torch.bfloat16, tmp_path, device)
    kv = randn(2, 512, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([1, 5], device=device)
    store_kv(kv, pool, slots, kv_format=kv_format, round_trip=True)
    got = load_kv(pool, slots, kv_format=kv_format).cpu()
    assert_close(got[:, :448].double(), round_trip(kv.cpu()[:, :448], 64))
    assert torch.equal(got[:, 448:], kv.cpu()[:, 448:])


@pytest.mark.skipif(backend.interpreted(), reason="offline compiles")
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_compiles_with_wide_strides(kv_format):
    packed = kv_format == "fp8"
    size, dtype = (3, 128, 584 if packed else 512), torch.uint8 if packed else torch.bfloat16
    pool = torch.empty_strided(size, (FAR, size[2], 1), dtype=dtype, device="meta")
    kv = torch.empty_strided((4, 512), (FAR, 1), dtype=torch.bfloat16, device="meta")
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    with aot.capture_launches() as got:
        store_kv(kv, pool, slots, kv_format=kv_format)
        load_kv(pool, slots, kv_format=kv_format)
    assert len(got.launches) == 2
    for report in got:
        assert report.check().ld128


@pytest.mark.parametrize("slots", [[2, -1, 0, -1, 3], [-1], [-1, -1]])
def test_nothing_of_a_skipped_token_is_read(slots, device, run):
    count = len(slots)
    kv, angles = randn(count, 64, device=device), randn(9, 8, device=device)
    kv[[s < 0 for s in slots]] = float("nan")
    positions = torch.tensor([10**9 if s < 0 else 4 for s in slots], device=device)
    pool = torch.zeros(1, 4, 64, device=device)
    tables = {"positions": positions, "cos": angles.cos(), "sin": angles.sin(), "rope_dim": 16}
    run(store_kv, kv, pool, torch.tensor(slots, device=device), **tables)
    assert pool.isfinite().all()
    assert [bool(row.any()) for row in pool[0]] == [s in slots for s in range(4)]


def test_empty(device, run):
    kv, pool = torch.zeros(0, 64, device=device), torch.zeros(1, 4, 64, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    run(store_kv, kv, pool, none, launched=False)
    got = run(load_kv, pool, none, kv_format="bf16", launched=False)
    assert got.shape == (0, 64)
    with count_launches() as launches:
        store_kv_reference(kv, pool, none)
    assert not launches


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: empty_pool(1, 1, 64, kv_format="fp8"), "head_dim is 64, expected 512 for fp8"),
        (lambda: empty_pool(1, 1, 64, kv_format="int8"), "kv_format is 'int8'"),
        (
            lambda: store_kv(torch.zeros(2, 64), torch.zeros(1, 4, 32), torch.zeros(2).long()),
            r"pool is \(1, 4, 32\), expected \[pages, rows, D\]",
        ),
        (
            lambda: store_kv(
                torch.zeros(2, 64), torch.zeros(1, 4, 64), torch.zeros(2).long(),
                positions=torch.zeros(2).long(),
            ),
            "positions, cos and sin are partly given",
        ),
        (
            lambda: load_kv(
                torch.zeros(600, dtype=torch.uint8)[8:592].view(1, 1, 584).as_strided(
                    (1, 1, 584), (592, 584, 1)
                ),
                torch.zeros(1).long(), kv_format="fp8",
            ),
            "pool is not 16-byte aligned, expected pages that are",
        ),
        (
            lambda: store_kv(*overlapping(), torch.arange(1, 5), rope_dim=0),
            "pool is overlapping kv in memory, expected memory of its own",
        ),
        (
            lambda: store_kv(
                torch.zeros(2, 64), torch.zeros(1, 4, 64), torch.zeros(2).long(), rope_dim=2.0
            ),
            "rope_dim is 2.0, expected an integer >= 0",
        ),
        (
            lambda: load_kv(
                torch.zeros(1, 4, 64), torch.zeros(1).long(), kv_format="bf16", dtype=torch.int32
            ),
            "load_kv: dtype is torch.int32, expected bfloat16, float16, float32",
        ),
    ],
)  # fmt: skip
def test_refusals(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def overlapping():
    """Rows of a pool as the rows to store in it: whoever writes first changes what is read."""
    pool = torch.zeros(1, 8, 64)
    return pool[0, :4], pool
