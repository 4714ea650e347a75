"""The inline assembly of the scores, instruction by instruction, against what it stands for.

No interpreted launch runs it: its text is read here by a few lines of Python.

Mutants that these tests catch: a shift by three, the sign taken from the shifted half, the loss of
a small value unseen, an exponent that overflows unseen, bytes out of order, low and high nibbles
exchanged.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from ftkernels.attention import index_scores
from ftkernels.quant.formats import E2M1_MAGNITUDES

U32 = np.uint32


def from_bf16(bits):
    return (bits.astype(U32) << 16).view(np.float32)


def to_bf16(x):
    """Nearest even with subnormals, from fp64 that is exact; the sign of zero stays."""
    _, exponent = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    return (np.rint(x / unit) * unit).astype(np.float32).view(U32) >> 16


def fma_bf16x2(a, b, c):
    halves = []
    for shift in (0, 16):
        x, y, z = (from_bf16(v >> U32(shift) & U32(0xFFFF)).astype(np.float64) for v in (a, b, c))
        halves.append(to_bf16(x * y + z))
    return halves[0] | halves[1] << 16


def prmt(a, b, selector):
    source = [a >> U32(8 * i) & U32(255) for i in range(4)]
    source += [b >> U32(8 * i) & U32(255) for i in range(4)]
    out = np.zeros_like(a)
    for i in range(4):
        pick = selector >> U32(4 * i) & U32(15)
        assert (pick < 8).all()
        out |= np.choose(pick, source).astype(U32) << U32(8 * i)
    return out


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            terms = [v if row >> bit & 1 else ~v for v, bit in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


OPERATIONS = {
    "mov": lambda a: a,
    "fma": fma_bf16x2,
    "lop3": lop3,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "prmt": prmt,
    "setp": lambda a, b: a != b,
    "selp": lambda a, b, p: np.where(p, a, b),
}


def execute(text, inputs, num_outputs):
    """Run straight-line PTX on arrays of 32-bit registers."""
    registers = {f"${i + num_outputs}": value for i, value in enumerate(inputs)}
    size = len(next(iter(inputs)))
    for line in text.strip("{} \n").split(";"):
        words = re.split(r"[\s,]+", line.strip())
        if words[0] in ("", ".reg"):
            continue
        read = [
            registers[w] if w in registers else np.full(size, int(w, 0), U32) for w in words[2:]
        ]
        registers[words[1]] = OPERATIONS[words[0].split(".")[0]](*read)
    return [registers[f"${i}"] for i in range(num_outputs)]


def e4m3(codes):
    codes = torch.from_numpy(np.ascontiguousarray(codes.astype(np.uint8)))
    return codes.view(torch.float8_e4m3fn).double().numpy()


def unpacked(words):
    return np.stack([words >> U32(8 * i) & U32(255) for i in range(4)], 1).ravel()


@pytest.mark.parametrize("code", [34, 57, 100, 120, 127, 133])
def test_every_bf16_value_is_exact_or_nan(code):
    bits = np.arange(65536, dtype=U32)
    bits = bits[np.isfinite(from_bf16(bits))]
    bits = bits[: len(bits) // 4 * 4]
    # four copies of one value, as neighbours share what is lost
    pair = bits | bits << U32(16)
    scale = np.full_like(pair, (134 - code) << 7)
    inverse = np.full_like(pair, (120 + code) << 7 | 0x8000)
    scale, inverse = (x | x << U32(16) for x in (scale, inverse))
    inputs = [pair, pair, scale, scale, inverse, inverse]
    (words,) = execute(index_scores._TO_E4M3.value, inputs, 1)
    got = e4m3(unpacked(words)).reshape(-1, 4)
    wanted = from_bf16(bits).astype(np.float64) / 2.0 ** (code - 127)
    rounded = torch.from_numpy(wanted.clip(-448, 448)).to(torch.float8_e4m3fn).double().numpy()
    exact = rounded == wanted
    assert exact.sum() > 200
    assert np.array_equal(np.isnan(got), np.repeat(~exact[:, None], 4, 1))
    assert (got[exact] == wanted[exact, None]).all()


def test_one_lost_value_marks_its_neighbours():
    fine, small = 0x3F80, 0x3000  # 1 and 2^-31
    pairs = np.array([[fine | small << 16, fine | fine << 16]], dtype=U32).T
    scale, inverse = (np.full(1, x | x << 16, U32) for x in (7 << 7, 247 << 7 | 0x8000))
    (words,) = execute(
        index_scores._TO_E4M3.value, [pairs[0], pairs[1], scale, scale, inverse, inverse], 1
    )
    assert words[0] == 0x7F7F7F7F


def test_bytes_stand_in_the_order_of_the_values():
    pairs = np.array([0x3F80 | 0xC000 << 16, 0x4040 | 0xC080 << 16], dtype=U32)  # 1, -2, 3, -4
    scale, inverse = (np.full(1, x | x << 16, U32) for x in (7 << 7, 247 << 7 | 0x8000))
    inputs = [pairs[:1], pairs[1:], scale, scale, inverse, inverse]
    (words,) = execute(index_scores._TO_E4M3.value, inputs, 1)
    assert e4m3(unpacked(words)).tolist() == [1.0, -2.0, 3.0, -4.0]


@pytest.mark.parametrize("table", range(12))
def test_every_nibble_under_every_scale(table):
    words = np.random.default_rng(table).integers(0, 2**32, 4000, dtype=U32)
    first = np.full_like(words, 0x14100800 + table * 0x08080800)
    second = np.full_like(words, 0x24201C18 + table * 0x08080808)
    inputs = [words, *[first] * 4, *[second] * 4]
    low, high = execute(index_scores._DECODE.value, inputs, 2)
    magnitudes = np.array((*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)))
    codes = unpacked(words)
    assert np.array_equal(e4m3(unpacked(low)), magnitudes[codes & 15] * 2.0 ** (table - 5))
    assert np.array_equal(e4m3(unpacked(high)), magnitudes[codes >> 4] * 2.0 ** (table - 5))


def test_a_table_of_nan_marks_every_nibble():
    words = np.arange(0, 2**32, 99991, dtype=U32)
    nan = np.full_like(words, 0x7F7F7F7F)
    for part in execute(index_scores._DECODE.value, [words, *[nan] * 8], 2):
        assert np.isnan(e4m3(unpacked(part))).all()
