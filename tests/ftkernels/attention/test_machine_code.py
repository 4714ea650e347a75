"""What the compiled attention kernels are made of, and what a launch needs besides them.

Mutants run, each noticed: fp32 operands, rows off their alignment by one element, a result cleared
before the launch, runs of a decode by the batch.
"""

from __future__ import annotations

import re

import pytest
import torch

from ftkernels import backend, scratch_bytes
from ftkernels.attention.decode import SPEC as DECODE
from ftkernels.attention.prefill import SPEC as PREFILL
from ftkernels.testing import aot
from ftkernels.testing.sass import mma_kind, opcodes

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


def cases(spec, *tps):
    return [
        pytest.param(spec, case, id=f"{spec.name}-{case['name']}")
        for case in spec.cases
        if case["name"].startswith(tuple(f"flash-tp{tp}-" for tp in tps))
    ]


def capture(spec, case):
    """One call with ``out`` and ``scratch`` given, on meta."""
    args, kwargs = spec.inputs(case, device="meta")
    kwargs["out"] = torch.empty_like(args[0])
    sizes = {}
    if spec is DECODE:
        sizes = {"S": case["S"], "H": case["H"], "D": case["D"], "topk": case.get("topk", 0)}
        sizes["rows"] = 8192
    size = scratch_bytes(spec.name, **sizes)
    kwargs["scratch"] = torch.empty(size, dtype=torch.uint8, device="meta")
    with aot.capture_launches(arch=89) as got:
        spec.op(*args, **kwargs)
    return got


@pytest.mark.parametrize(("spec", "case"), [*cases(PREFILL, 8, 1), *cases(DECODE, 8, 1)])
def test_tensor_cores_fed_by_wide_asynchronous_copies(spec, case):
    (report,) = capture(spec, case)
    assert mma_kind(report.sass) == "HMMA.16816.F32.BF16"
    assert report.spill_loads == report.spill_stores == 0
    copies = [op for op in opcodes(report.sass) if op.startswith("LDGSTS")]
    assert any(op.endswith(".128") for op in copies), copies
    assert not any(re.match(r"LDG\.E\.[SU](8|16)\b", op) for op in opcodes(report.sass))


@pytest.mark.parametrize(("spec", "case"), [*cases(PREFILL, 8), *cases(DECODE, 8)])
def test_one_node_and_nothing_else(spec, case):
    """With ``out`` and ``scratch`` given a call is one launch: a CUDA graph can hold it."""
    got = capture(spec, case)
    assert len(got.launches) == 1
    assert got.torch_ops == []


@pytest.mark.parametrize(
    ("name", "length", "blocks"),
    [
        ("flash-tp8-swa", 4096, 8), ("flash-tp8-csa", 4096, 40), ("flash-tp1-csa", 4096, 160),
        ("flash-tp8-hca", 4096, 10), ("flash-tp8-hca", 131072, 72),
        ("flash-tp8-hca", 1048576, 256), ("flash-tp1-hca", 1048576, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sequences", [1, 7])
def test_blocks_of_a_decode_step(name, length, blocks, sequences):
    """One a tile of 16 rows and block of heads, up to 256 a sequence, whatever the batch is."""
    (case,) = (case for case in DECODE.cases if case["name"] == name)
    got = capture(DECODE, {**case, "length": length, "S": sequences})
    x, y, z = got.launches[0].grid
    assert x == sequences
    assert y * z == blocks
