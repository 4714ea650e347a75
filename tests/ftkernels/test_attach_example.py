"""The example for other engines: both adapters give what the formula in fp64 gives.

The example's own formula is held against the attention reference, so that neither checks itself.

Mutants tried: a window short of one row, row numbers where slots belong, the sink left out, a block
freed too early, a window list one row short, positions within the list instead of the true ones,
new tokens not written.
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

PATH = Path(__file__).parents[2] / "examples" / "attach_to_your_engine.py"
SMALL = {"heads": 2, "dim": 128, "topk": 8, "new_tokens": (7, 5, 1)}
SIZES = SMALL if backend.interpreted() else {}
BOUNDS = {torch.bfloat16: 5e-3, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("attach_to_your_engine", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("blocks", [(64, 16, True), (256, 8, False), (3, 1, False)], ids=str)
def test_block_tables(example, blocks, phase, dtype, device):
    engine = _engine(example, blocks, dtype, device)
    assert example.run(engine, "block tables", phase) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("blocks", "phase"),
    [
        ((64, 16, True), "prefill"), ((256, 8, False), "prefill"), ((256, 8, False), "decode"),
        ((3, 1, False), "decode"),
    ],
    ids=str,
)  # fmt: skip
def test_slot_lists(example, blocks, phase, dtype, device):
    engine = _engine(example, blocks, dtype, device)
    assert example.run(engine, "slot lists", phase) < BOUNDS[dtype]


def _engine(example, blocks, dtype, device):
    window_block, rows_block, shared = blocks
    return example.ToyEngine(
        window_block=window_block, rows_block=rows_block, shared=shared, dtype=dtype,
        device=device, **SIZES,
    )  # fmt: skip


def test_padded_rows_of_slot_lists_are_zero(example, device):
    """A decode step padded for a graph: a list of no rows gives zeros."""
    engine = _engine(example, (64, 16, False), torch.float32, device)
    engine.fill((0, 0, 0))
    queries = engine.queries((1, 1, 1))
    slots = engine.slots_of(queries, engine.select(queries))
    blocks = engine.compressed_cache.shape[0]
    identity = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    adapter = example.SlotLists(
        engine.layer, engine.window_cache, engine.compressed_cache, identity
    )
    window_slots, window_lens = engine.window_slots(queries)
    window_slots[1], window_lens[1], slots[1] = -1, 0, -1
    positions = torch.zeros(3, dtype=torch.int64, device=device)
    out = adapter.decode(
        engine.random(3, *engine.sizes[:2]), positions, slots, window_slots, window_lens
    )
    assert bool((out[1] == 0).all())
    assert bool((out[[0, 2]] != 0).any(dim=-1).all())


def test_the_formula_is_the_reference(example):
    engine = example.ToyEngine(
        window_block=64, rows_block=16, shared=False, dtype=torch.float32, heads=3, dim=128
    )
    engine.fill((0, 0, 0))
    queries, step = engine.queries(engine.new_tokens), engine.step(engine.new_tokens)
    picks, q = engine.select(queries), engine.random(len(queries), 3, 128)
    expected = ftkernels.mla_prefill_reference(
        q, engine.window_cache, step.window_block_table, step.query_start_loc, step.seq_lens,
        softmax_scale=engine.layer.softmax_scale, sink=engine.layer.sink,
        cmp_kv=engine.compressed_cache, block_table=step.block_table, compress_ratio=4,
        index_topk=picks, cos=engine.layer.cos, sin=engine.layer.sin,
    )  # fmt: skip
    assert example.difference(expected, engine.formula(q, queries, picks)) < 1e-5


@pytest.mark.skipif(backend.interpreted(), reason="the other tests run its parts interpreted")
def test_it_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, str(PATH), "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    figures = [float(line.split()[-1]) for line in lines]
    assert len([x for x in figures if 0 < x < 5e-3]) == 7, done.stdout
