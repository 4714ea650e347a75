from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels.quant.pack import (
    pack_fp4,
    pack_fp4_reference,
    unfold,
    unpack_fp4,
    unpack_fp4_reference,
)

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weights(*lead: int, N: int, K: int, low: int = 100, high: int = 112, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*lead, N, K // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (*lead, N, K // 32), dtype=torch.uint8, generator=generator)
    return packed, scale


@settings(max_examples=60, deadline=None)
@given(
    lead=st.sampled_from([(), (2,), (2, 3), (0,)]),
    rows=st.sampled_from([0, 1, 2, 6, 64, 70, 128, 130]),
    blocks=st.integers(0, 9),
    gated=st.booleans(),
    fold=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_unpack_is_the_exact_inverse(lead, rows, blocks, gated, fold, seed):
    gated = gated and rows % 2 == 0
    span = (100, 112) if fold else (0, 256)
    packed, scale = weights(*lead, N=rows, K=32 * blocks, low=span[0], high=span[1], seed=seed)
    weight, meta = pack_fp4(packed, scale, gated=gated, fold=fold)
    assert weight.shape == packed.shape
    assert meta.dtype == (torch.int32 if fold else torch.uint8)
    groups = -(-blocks // 4) if fold else blocks
    assert meta.shape == (*lead, groups, rows)
    again = unpack_fp4(weight, meta, gated=gated)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)
    assert torch.equal(packed.flatten().bincount(minlength=256).sum(), torch.tensor(weight.numel()))


@pytest.mark.parametrize("gated", [False, True])
def test_packing_permutes_nibble_parts(gated):
    """No bit is lost: as many set bits of each kind before and after."""
    packed, scale = weights(N=130, K=160)
    weight, _ = pack_fp4(packed, scale, gated=gated)

    def signs(x):
        return sum((x >> bit & 1).sum().item() for bit in (3, 7))

    def bits(x):
        return sum((x >> bit & 1).sum().item() for bit in range(8))

    assert signs(weight) == signs(packed)
    assert bits(weight) == bits(packed)
    assert not torch.equal(weight, packed)


def prmt(table: list[int], selector: int) -> list[int]:
    """The byte permute of the machine: four low nibbles choose among eight bytes."""
    return [table[(selector >> (4 * i)) & 7] for i in range(4)]


def e4m3(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


@pytest.mark.parametrize(
    ("rows", "width", "gated"), [(70, 96, False), (128, 256, True), (3, 32, False)]
)
def test_kernels_decode_gives_the_weights(rows, width, gated):
    """Walks the layout as a kernel does: word, byte permute to E4M3, table code, base exponent."""
    packed, scale = weights(N=rows, K=width)
    weight, meta = pack_fp4(packed, scale, gated=gated)
    flat = weight.flatten().tolist()
    for n in range(0, rows, 7):
        source = (n // 2 + (n % 2) * (rows // 2)) if gated else n
        tile, tile_rows = n // 64, min(64, rows - n // 64 * 64)
        for step in range(-(-width // 64)):
            columns = min(64, width - 64 * step)
            base = tile * 64 * (width // 2) + step * tile_rows * 32 + (n % 64) * (columns // 2)
            for j in range(columns // 8):
                word = int.from_bytes(bytes(flat[base + 4 * j : base + 4 * j + 4]), "little")
                for part in range(2):
                    first = 64 * step + part * columns // 2 + 4 * j
                    m = meta[first // 128, n].item()
                    c = (m >> (4 * (first // 32 % 4))) & 15
                    table = [0] + [t + 8 * c for t in (0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24)]
                    selector = (word & 0x77777777) >> (16 * part)
                    sign = ((word << (4 * part)) & 0x80808080).to_bytes(4, "little")
                    base_scale = (
                        torch.tensor(m & 0x7F800000, dtype=torch.int32).view(torch.float32).item()
                    )
                    for i, byte in enumerate(prmt(table, selector)):
                        k = first + i
                        code = packed[source, k // 2].item() >> (4 * (k % 2)) & 15
                        value = math.ldexp(
                            MAGNITUDES[code & 7], scale[source, k // 32].item() - 127
                        )
                        assert e4m3(byte | sign[i]) * base_scale == (-value if code & 8 else value)


def test_unfolded_metadata_is_the_scale_bytes_by_column():
    packed, scale = weights(2, N=6, K=96, low=0, high=256)
    _, meta = pack_fp4(packed, scale, fold=False)
    assert torch.equal(meta, scale.transpose(1, 2))
    _, meta = pack_fp4(packed, scale, fold=False, gated=True)
    assert torch.equal(meta[:, :, 0::2], scale.transpose(1, 2)[:, :, :3])
    assert torch.equal(meta[:, :, 1::2], scale.transpose(1, 2)[:, :, 3:])


@pytest.mark.parametrize(
    "codes", [[7, 0, 0, 0], [18, 7, 9, 18], [255, 244, 250, 255], [11, 0, 3, 5]]
)
def test_fold_holds_its_whole_range(codes):
    packed, _ = weights(N=2, K=128)
    scale = torch.tensor([codes, codes[::-1]], dtype=torch.uint8)
    if codes[0] == 7:
        scale[:, scale[0].argmin()] = 0  # seven octaves below the largest
    weight, meta = pack_fp4(packed, scale)
    assert torch.equal(unpack_fp4(weight, meta)[1], scale)


@pytest.mark.parametrize("codes", [[12, 0, 5, 5], [6, 6, 6, 6], [0, 0, 0, 0], [255, 243, 255, 255]])
@pytest.mark.parametrize("gated", [False, True])
def test_fold_refuses_and_names_the_rows(codes, gated):
    packed, scale = weights(N=8, K=256)
    scale[5, 4:] = torch.tensor(codes, dtype=torch.uint8)
    text = (
        r"pack_fp4: scale is out of the fold's range in 1 rows \(5\), expected .* fold=False keeps"
    )
    with pytest.raises(ValueError, match=text):
        pack_fp4(packed, scale, gated=gated)
    weight, meta = pack_fp4(packed, scale, gated=gated, fold=False)
    assert torch.equal(unpack_fp4(weight, meta, gated=gated)[1], scale)


def test_fold_names_rows_of_stacked_experts():
    packed, scale = weights(3, N=20, K=128)
    scale[2, 1, 0], scale[0, 4:, 3] = 0, 0
    with pytest.raises(ValueError, match=r"in 17 rows \(\(0, 4\), \(0, 5\), .*, \.\.\.\)"):
        pack_fp4(packed, scale)


def test_short_last_fold_ignores_what_is_not_there():
    packed, scale = weights(N=4, K=160)
    weight, meta = pack_fp4(packed, scale)
    assert ((meta[1] & 0xFFFF) == 0xBBBB).all()
    assert torch.equal(unpack_fp4(weight, meta)[1], scale)


def test_out_and_strided_input():
    packed, scale = weights(2, N=8, K=128)
    wide = torch.zeros(2, 8, 100, dtype=torch.uint8)
    wide[..., 10:74] = packed
    out = (torch.empty(2, 8, 64, dtype=torch.uint8), torch.empty(2, 1, 8, dtype=torch.int32))
    got = pack_fp4(wide[..., 10:74], scale, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    back = (torch.empty_like(packed), torch.empty_like(scale))
    again = unpack_fp4(*got, fold=True, out=back)
    assert again[0] is back[0]
    assert again[1] is back[1]
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scale)


P, S = torch.zeros(4, 64, dtype=torch.uint8), torch.full((4, 4), 100, dtype=torch.uint8)
W, M = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        ((P.int(), S), {}, TypeError, "pack_fp4: packed is int32, expected uint8"),
        ((P[:, :60], S), {}, ValueError, "with K a multiple of 32"),
        ((P[0], S), {}, ValueError, r"packed is \(64,\)"),
        ((P, S[:, :3]), {}, ValueError, r"scale is \(4, 3\), expected .* = \[4, 4\]"),
        ((P.t()[:, :4].t(), S), {}, None, ""),
        ((P[:3], S[:3]), {"gated": True}, ValueError, "expected an even number of rows when gated"),
        ((P, S), {"out": W}, TypeError, "out is Tensor, expected a pair"),
        ((P, S), {"out": (W, M.byte())}, TypeError, r"out\[1\] is uint8, expected int32"),
        ((P, S), {"out": (P, M)}, ValueError, r"out\[0\] is overlapping"),
        (
            (P, S),
            {"out": (torch.zeros(4, 80, dtype=torch.uint8)[:, :64], M)},
            ValueError,
            "expected contiguous",
        ),
    ],
)
def test_pack_refusals(args, kwargs, kind, text):
    for op in (pack_fp4, pack_fp4_reference):
        if kind is None:
            op(*args, **kwargs)
            continue
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        ((W.int(), M), {}, TypeError, "unpack_fp4: weight is int32"),
        ((W, M.long()), {}, TypeError, "meta is int64, expected int32, uint8"),
        ((W, M.byte()), {}, ValueError, r"meta is \(1, 4\), expected .* = \[4, 4\]"),
        (
            (W, M),
            {"fold": False},
            ValueError,
            "fold is False, expected True for torch.int32 metadata",
        ),
        (
            (torch.zeros(4, 80, dtype=torch.uint8)[:, :64], M),
            {},
            ValueError,
            "expected a contiguous",
        ),
        ((W[:3], M[:, :3]), {"gated": True}, ValueError, "even number of rows"),
    ],
)
def test_unpack_refusals(args, kwargs, kind, text):
    for op in (unpack_fp4, unpack_fp4_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_view_at_an_odd_byte_packs_to_the_same(rows):
    packed, scale = weights(N=rows, K=64)
    room = torch.empty(packed.numel() + 1, dtype=torch.uint8)
    odd = room[1:].view(packed.shape).copy_(packed)
    for mine, expected in zip(pack_fp4(odd, scale), pack_fp4(packed, scale), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("gated", [False, True])
def test_more_than_one_block(gated):
    packed, scale = weights(2, N=64 * 19 + 6, K=2080)
    assert packed[0].nbytes > 2 * (1 << 19)
    again = unpack_fp4(*pack_fp4(packed, scale, gated=gated), gated=gated)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


def test_unfolded_metadata_is_the_scale_bytes_of_the_other_form():
    packed, scale = weights(2, N=70, K=224)
    for gated in (False, True):
        folded = pack_fp4(packed, scale, gated=gated)[1]
        plain = pack_fp4(packed, scale, gated=gated, fold=False)[1]
        assert torch.equal(unfold(folded, 7), plain)
