"""The generator against the published known answers of Philox-4x32-10 (Random123, ``kat_vectors``).

Mutants that these tests catch: nine rounds, multipliers swapped, key words swapped, a signed shift.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from ftkernels.sampling import philox
from ftkernels.testing import assert_close

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
WORDS = [0, 1, 2, 12345, 1 << 28, (1 << 31) - 1, 1 << 31, (1 << 32) - (1 << 28), (1 << 32) - 1]


def words(text):
    return [int(word, 16) for word in text.split()]


def model(counter, key):
    """The published algorithm in Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@triton.jit
def _philox_kernel(in_ptr, out_ptr):
    c0, c1 = tl.load(in_ptr).to(tl.uint32), tl.load(in_ptr + 1).to(tl.uint32)
    c2, c3 = tl.load(in_ptr + 2).to(tl.uint32), tl.load(in_ptr + 3).to(tl.uint32)
    k0, k1 = tl.load(in_ptr + 4).to(tl.uint32), tl.load(in_ptr + 5).to(tl.uint32)
    c0, c1, c2, c3 = philox.philox(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr, c0.to(tl.int64))
    tl.store(out_ptr + 1, c1.to(tl.int64))
    tl.store(out_ptr + 2, c2.to(tl.int64))
    tl.store(out_ptr + 3, c3.to(tl.int64))


@triton.jit
def _gumbel_kernel(in_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    word = tl.load(in_ptr + offs, mask=offs < N, other=0).to(tl.uint32)
    tl.store(out_ptr + offs, philox.gumbel(word), mask=offs < N)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer, device, lane):
    counter, key, answer = words(counter), words(key), words(answer)
    assert model(counter, key) == answer
    tensors = [torch.tensor([word]) for word in counter + key]
    got = philox.philox_reference(tuple(tensors[:4]), tuple(tensors[4:]))
    assert [int(word) for word in got] == answer
    if lane != "reference":
        out = torch.zeros(4, dtype=torch.int64, device=device)
        _philox_kernel[(1,)](torch.tensor(counter + key, device=device), out)
        assert out.tolist() == answer


def test_gumbel_of_known_seeds(device):
    seeds = [0, 1, -1, 1 << 40, -(1 << 62)]
    for seed in seeds:
        got = philox.gumbel_reference(
            torch.tensor([seed]), torch.arange(50), torch.tensor([(1 << 20) + 3])
        )
        key = [seed % 2**32, (seed >> 32) % 2**32]
        expected = [
            -math.log(-math.log((model([i, (1 << 20) + 3, 0, 0], key)[0] + 0.5) / 2**32))
            for i in range(50)
        ]
        assert got.tolist() == pytest.approx(expected, rel=1e-12)


def test_gumbel_kernel_is_accurate_at_both_ends(device, lane):
    if lane == "reference":
        return
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(1 << 32, (500,), generator=generator)
    sample = torch.cat((torch.tensor(WORDS), many))
    out = torch.empty(len(sample), device=device)
    _gumbel_kernel[(1,)](sample.to(device), out, len(sample), BLOCK=1024)
    expected = -torch.log(-torch.log((sample.double() + 0.5) / 2**32))
    assert_close(out.cpu(), expected.float(), rtol=2e-6, atol=2e-6)
