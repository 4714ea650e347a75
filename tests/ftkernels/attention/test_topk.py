"""The streaming top-k against a stable sort.

Mutants that these tests catch: the higher row on ties, one tie too many at the cut, ties at the cut
overlooked, rows not numbered when the first chunk is left, the buffer's tail read, scores past the
count taken.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkernels import backend  # noqa: F401  (first: it fixes interpretation)
from ftkernels.attention import topk as best


@triton.jit
def _take(
    scores_ptr, out_ptr, scratch_ptr, num_rows,
    TOPK: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    buffer_ptr = scratch_ptr + best.STATE
    nan = tl.full([], float("nan"), tl.float32)
    start = 0
    best.set_state(scratch_ptr, 0, nan)
    if IN_PLACE:
        start = tl.minimum(CHUNK, num_rows)
        offs = tl.arange(0, CHUNK)
        bits = tl.load(scores_ptr + offs, mask=offs < start, other=0)
        tl.store(buffer_ptr + offs, bits, mask=offs < start)
        best.set_state(scratch_ptr, start, nan)
    for first in range(start, num_rows, CHUNK):
        count = tl.minimum(num_rows - first, CHUNK)
        numbered = first > CHUNK if IN_PLACE else 1
        best.append(
            scratch_ptr, buffer_ptr, buffer_ptr + CAP, scores_ptr + first, first, count,
            numbered, TOPK, CAP, CHUNK,
        )  # fmt: skip
    numbered = num_rows > CHUNK if IN_PLACE else 1
    best.finish(scratch_ptr, buffer_ptr, buffer_ptr + CAP, out_ptr, numbered, TOPK, CHUNK)


def take(scores, topk, chunk, in_place, device):
    cap = best.capacity(topk, chunk)
    padded = torch.full((-(-len(scores) // chunk) * chunk,), math.nan)  # read in whole blocks
    padded[: len(scores)] = scores
    scratch = torch.full((best.STATE.value + 2 * cap,), math.nan, device=device)
    out = torch.zeros(topk, dtype=torch.int32, device=device)
    bits = padded.to(device).view(torch.int32)
    _take[(1,)](
        bits, out, scratch.view(torch.int32), len(scores),
        TOPK=topk, CAP=cap, CHUNK=chunk, IN_PLACE=in_place, num_warps=4,
    )  # fmt: skip
    return out.tolist()


def expected(scores, topk):
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
    return sorted(order[:topk])


@pytest.fixture(autouse=True)
def _kernels_only(lane):
    if lane == "reference":
        pytest.skip("Triton helpers alone: nothing runs them in this lane")


SCORES = {
    "random": lambda n, g: torch.randn(n, generator=g),
    "few values": lambda n, g: torch.randint(-2, 3, (n,), generator=g).float(),
    "all equal": lambda n, g: torch.full((n,), -0.5),
    "both zeros": lambda n, g: torch.randint(0, 2, (n,), generator=g).float() * -0.0
    + torch.where(torch.rand(n, generator=g) < 0.5, 0.0, -0.0),
    "infinities": lambda n, g: torch.randn(n, generator=g).mul(9).round().div(0.0).nan_to_num(
        nan=1.0, posinf=math.inf, neginf=-math.inf
    ),
    "far apart": lambda n, g: torch.randn(n, generator=g) * 10.0 ** torch.randint(
        -38, 38, (n,), generator=g
    ),
    "rising": lambda n, g: torch.arange(n).float() - 100,
    "falling": lambda n, g: 100 - torch.arange(n).float(),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("in_place", [False, True])
def test_matches_a_stable_sort(kind, in_place, device):
    scores = SCORES[kind](500, torch.Generator().manual_seed(5))
    for topk in (1, 13, 100):
        got = take(scores, topk, 64, in_place, device)
        assert got == expected(scores.tolist(), topk), topk


def test_a_row_that_equals_the_floor_comes_too_late(device):
    scores = torch.ones(640)
    scores[300:] = 2.0
    scores[10] = 2.0
    assert take(scores, 4, 64, True, device) == [10, 300, 301, 302]


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(2, 700), topk=st.integers(1, 90), chunk=st.sampled_from([16, 64, 256]),
    levels=st.sampled_from([3, 40, 10**6]), in_place=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_sizes(num_rows, topk, chunk, levels, in_place, seed):
    topk = min(topk, num_rows - 1)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels, (num_rows,), generator=generator).float() / 7
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert take(scores, topk, chunk, in_place, device) == expected(scores.tolist(), topk)


def test_large_topk(device):
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for topk in (3000, 4999, 5000):
        assert take(scores, topk, 2048, True, device) == expected(scores.tolist(), topk)
