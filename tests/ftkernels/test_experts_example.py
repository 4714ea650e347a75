"""Experts in host memory, the example: layers are the formula in fp64, slots change no bit.

The example reads codes by its own table, which is held against the library's.

Mutants tried: the up half unclamped and the gate clamped from below; halves swapped; nibbles
swapped; codes without sign; route weights left out; slots of another layer; the first group alone;
groups written over one another; the last group's routes alone combined; no hints given.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ftkernels
from ftkernels import backend

PATH = Path(__file__).parents[2] / "examples" / "experts_in_host_memory.py"
SMALL = {"num_layers": 2, "num_experts": 6, "topk": 2, "hidden": 128, "inter": 64}
SIZES = SMALL if backend.interpreted() else {}
TOKENS = 5 if backend.interpreted() else 40
# fp8: two roundings to three bits of mantissa; bf16: of the hidden state and the routes
BOUNDS = {"fp8": 0.12, "bf16": 8e-3}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("experts_in_host_memory", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("num_slots", "activation"), [(1, "fp8"), (5, "bf16"), (12, "fp8")], ids=str
)
def test_prefill(example, num_slots, activation, device):
    engine = example.ToyEngine(num_slots=num_slots, activation=activation, device=device, **SIZES)
    for _ in range(1 if backend.interpreted() else 2):
        assert 0 < engine.step("prefill", TOKENS) < BOUNDS[activation]
    engine.cache.check()


@pytest.mark.parametrize("activation", BOUNDS)
def test_decode(example, activation, device):
    num_slots = 5 if backend.interpreted() else 12  # one for each route of a step, and few more
    engine = example.ToyEngine(num_slots=num_slots, activation=activation, device=device, **SIZES)
    engine.step("prefill", TOKENS)
    for _ in range(4 if backend.interpreted() else 10):
        assert 0 < engine.step("decode", 1) < BOUNDS[activation]
        engine.cache.check()
    counts = engine.cache.stats()["decode"]
    assert counts["hits"] > 0
    assert counts["prefetch_used"] > 0
    engine.cache.check()


def test_slots_change_no_bit(example, device):
    """One slot, or one for every expert; a route without an expert is left out by both."""
    outs = []
    for num_slots in (1, 12):
        engine = example.ToyEngine(num_slots=num_slots, device=device, **SMALL)
        x = engine.random(7, 128)
        weights, ids = engine.route(1, x)
        ids[2, 1] = ids[4, 0] = -1
        with engine.cache.step("prefill"):
            outs.append(engine.experts[1].prefill(x, weights, ids))
    assert torch.equal(*outs)
    expected = engine.formula(1, x, weights * (ids >= 0), ids.clamp(min=0))
    assert example.difference(outs[0], expected) < BOUNDS["fp8"]


def test_codes_are_the_libraries(example):
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (1, 3, 32), generator=generator).to(torch.uint8)
    scale = torch.randint(100, 140, (1, 3, 2), generator=generator).to(torch.uint8)
    expected = ftkernels.dequantize_fp4_reference(packed[0], scale[0], dtype=torch.float32)
    assert torch.equal(example.weights_of(packed, scale)[0], expected.double())


@pytest.mark.skipif(backend.interpreted(), reason="the other tests run its parts interpreted")
def test_it_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, str(PATH), "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [line[0] for line in lines] == ["fp8", "fp8", "bf16", "bf16"]
    assert all(0 < float(line[-1]) < BOUNDS[line[0]] for line in lines)
    assert "decode: hits" in done.stdout
