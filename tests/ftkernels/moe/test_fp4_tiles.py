"""The words of packed FP4 weights: one meaning to PTX, to its interpreted twin and on paper.

The PTX is read from the kernels' own text by a small emulator of the instructions in it.

Mutants run, each noticed: B's selector four bits off, signs not shifted, selectors not masked, A's
table for B, another truth table; either half of the tables an octave off; in the twin B's codes or
signs in A's place, and its table cut elsewhere.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ftkernels.moe import fp4_tiles
from ftkernels.moe.fp4_tiles import decode_words, table
from ftkernels.quant.pack import pack_fp4
from tests.support.expert_cases import E2M1, fp4

CODES = 12
COLUMNS = np.arange(4)


def words_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Words from four 4-bit codes of each half, column ``i`` in bits ``4i..4i+3``: see pack.py."""
    word = np.zeros(np.broadcast(a, b).shape, np.uint32)
    for i in range(4):
        for half, place, sign in ((a, 4 * i, 8 * i + 7), (b, 16 + 4 * i, 8 * i + 3)):
            code = (half >> np.uint32(4 * i)) & 15
            word |= ((code & 7) << place | (code >> 3) << sign).astype(np.uint32)
    return word


def bytes_of(half: np.ndarray, code: np.ndarray) -> np.ndarray:
    """E4M3 bytes of ``e2m1 * 2^(code - 5)`` for the four columns of a half, ``[..., 4]``."""
    values = torch.arange(16)[:, None], 2.0 ** (torch.arange(CODES) - 5.0)
    expected = (E2M1[values[0]] * values[1]).float()
    grid = expected.to(torch.float8_e4m3fn)
    assert torch.equal(grid.float(), expected), "every weight is an E4M3 number"
    columns = (half[..., None] >> (4 * COLUMNS)) & 15
    return grid.view(torch.uint8).numpy()[columns, code[..., None]]


def number(text: str) -> np.uint32:
    return np.uint32(int(text, 0))


def prmt(a, b, selector):
    """Byte ``i`` of the result is that of ``b:a`` which nibble ``i`` of the selector names."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(selector)
    for i in range(4):
        index = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (8 * (index & 7)).astype(np.uint64)) & np.uint64(255)
        byte = np.where(index & 8, np.where(byte & np.uint64(128), 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def lop3(a, b, c, lut):
    result = np.zeros_like(a)
    for row in range(8):
        if int(lut) >> row & 1:
            terms = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            result |= terms[0] & terms[1] & terms[2]
    return result


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def emulated(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The two results of the kernels' assembly for its input registers ``$2``, ``$3``, ..."""
    registers = {f"${2 + i}": x for i, x in enumerate(inputs)}
    shape = inputs[0].shape
    lines = [line.strip() for line in fp4_tiles._DECODE.value.strip("{} \n").split(";")]
    declared = lines.pop(0).removeprefix(".reg .b32 ").split(", ")
    for line in filter(None, lines):
        name, *operands = re.split(r",?\s+", line)
        target, *sources = operands
        assert target in ("$0", "$1", *declared)
        values = [
            registers[s] if s in registers else np.broadcast_to(number(s), shape) for s in sources
        ]
        if name == "lop3.b32":
            values[3] = number(sources[3])
        registers[target] = OPERATIONS[name](*values).astype(np.uint32)
    return [registers["$0"], registers["$1"]]


def tables(code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high half of a code's table, by the kernels' own `table`."""
    low, high = table.fn(Column(code))
    return low.data, high.data


class Column:
    """As much of a tensor as `table` asks for."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.astype(np.int64)

    def __mul__(self, factor: int) -> Column:
        return Column(self.data * factor)

    def __add__(self, term: int) -> Column:
        return Column(self.data + term)

    def __getitem__(self, _: object) -> Column:
        return self


def by_ptx(word, code_a, code_b):
    """Bytes of both halves, ``[..., 4]``, by the assembly."""
    registers = [word]
    for code in (code_a, code_b):
        for half in tables(np.broadcast_to(code, word.shape)):
            assert half.min() >= 0, "in int32"
            assert half.max() < 2**31, "in int32 without wrapping"
            registers += [half.astype(np.uint32)] * 4
    assert fp4_tiles._OPERANDS.value == "=&r,=&r," + ",".join("r" * len(registers))
    return [x[..., None] >> (8 * COLUMNS).astype(np.uint32) & 255 for x in emulated(registers)]


@triton.jit
def _decode_kernel(
    packed_ptr, codes_ptr, out_ptr, ROWS: tl.constexpr,  # [ROWS, 32], [2, ROWS], [2, ROWS, 32]
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    offs = rows[:, None] * 32 + tl.arange(0, 32)[None, :]
    low_a, high_a = table(tl.load(codes_ptr + rows))
    low_b, high_b = table(tl.load(codes_ptr + ROWS + rows))
    a, b = decode_words(tl.load(packed_ptr + offs), low_a, high_a, low_b, high_b)
    tl.store(out_ptr + offs, a.to(tl.uint8, bitcast=True))
    tl.store(out_ptr + ROWS * 32 + offs, b.to(tl.uint8, bitcast=True))


def by_kernel(word, code_a, code_b, device):
    rows = word.size // 8
    codes = torch.from_numpy(np.stack([np.full(rows, c, np.int32) for c in (code_a, code_b)]))
    packed = torch.from_numpy(word.astype("<u4").view(np.uint8).copy()).view(rows, 32)
    out = torch.empty(2, rows, 32, dtype=torch.uint8, device=device)
    _decode_kernel[(1,)](packed.to(device), codes.to(device), out, rows)
    return out.cpu().numpy().reshape(2, -1, 4)


def every_half():
    """Columns and codes of A and of B: each half word under each code, beside a random one."""
    every = np.arange(1 << 16, dtype=np.uint32)
    for code in range(CODES):
        shuffled = np.random.default_rng(code).permutation(every)
        yield every, shuffled, code, (5 * code + 3) % CODES


def test_assembly_over_every_half_word():
    for a, b, code_a, code_b in every_half():
        # the other half at its extremes too
        for first, second in ((a, b), (a, a * 0), (a, a | 0xFFFF), (b * 0, b), (b | 0xFFFF, b)):
            got = by_ptx(words_of(first, second), np.int64(code_a), np.int64(code_b))
            assert (got[0] == bytes_of(first, np.int64(code_a))).all()
            assert (got[1] == bytes_of(second, np.int64(code_b))).all()


def test_kernel_over_every_half_word(device, lane):
    if lane == "reference":
        pytest.skip("a kernel without a reference")
    for a, b, code_a, code_b in every_half():
        got = by_kernel(words_of(a, b), code_a, code_b, device)
        assert (got[0] == bytes_of(a, np.int64(code_a))).all()
        assert (got[1] == bytes_of(b, np.int64(code_b))).all()


def test_assembly_over_every_word_of_a_byte_repeated():
    """Words that no packing makes decode like any other: their bits mean what pack.py says."""
    word = np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    word = np.concatenate([word, np.random.default_rng(1).integers(0, 2**32, 4096, np.uint32)])
    half = [np.zeros_like(word), np.zeros_like(word)]
    for i in range(4):
        for which, (place, sign) in enumerate(((4 * i, 8 * i + 7), (16 + 4 * i, 8 * i + 3))):
            code = ((word >> place) & 7) | (((word >> sign) & 1) << 3)
            half[which] |= (code << (4 * i)).astype(np.uint32)
    assert (words_of(*half) == word).all(), "every bit of a word has a meaning"
    got = by_ptx(word, np.int64(0), np.int64(11))
    assert (got[0] == bytes_of(half[0], np.int64(0))).all()
    assert (got[1] == bytes_of(half[1], np.int64(11))).all()


@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 160), (3, 32), (130, 224)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_packed_weights_decode_to_the_checkpoints(n, k, gated):
    """Tiles, steps, words and metadata as pack.py lays them out, for random bytes."""
    if gated and n % 2:
        n += 1
    weights = fp4(1, n, k, seed=n, low=116, high=128)
    weight, meta = pack_fp4(weights.codes, weights.scale, gated=gated)
    flat, meta = weight.flatten().numpy(), meta[0].numpy()
    got = np.zeros((n, k))
    begin = 0
    for tile in range(0, n, 64):
        rows = min(64, n - tile)
        for step in range(0, k, 64):
            half = min(64, k - step) // 2
            part = flat[begin : begin + rows * half].view("<u4").reshape(rows, half // 4)
            begin += rows * half
            of_rows = meta[step // 128, tile : tile + rows, None]
            codes = [(of_rows >> (4 * (c % 128 // 32))) & 15 for c in (step, step + half)]
            base = (of_rows & 0x7F800000).astype(np.int32).view(np.float32)
            pair = by_ptx(part.copy(), *(c.astype(np.int64) for c in codes))
            for place, x in zip((step, step + half), pair, strict=True):
                grid = torch.from_numpy(x.astype(np.uint8)).view(torch.float8_e4m3fn).double()
                numbers = grid.flatten(1).numpy() * base.astype(np.float64)
                got[tile : tile + rows, place : place + half] = numbers
    expected = weights.matrix[0]
    if gated:
        expected = torch.stack(expected.chunk(2), 1).flatten(0, 1)
    assert (got == expected.numpy()).all()
