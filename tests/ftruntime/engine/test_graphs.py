"""Captured decode steps give what the same steps give when they are launched one by one.

On the CPU a graph is what `tests.support.recording` writes down; with a card, CUDA's own.

Mutants run, each noticed: rows that fill a step up count as sequences of their own (slots or carry
rows written, another token); block tables, lengths, slots or tokens not refilled; the smallest
captured step taken; experts brought in after their products, or those of the capture; hints of the
capture's tokens; groups never released; a missed batch replayed, or warned of every time; sizes
beyond the expert slots; layers run outside a step of the cache; a graph ended twice, or its end
told in place of what failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging

import pytest
import torch

from ftkernels import ExpertCache, backend
from ftruntime import LLM, SamplingParams
from ftruntime.demo import make_demo
from ftruntime.engine import build
from ftruntime.engine.graphs import GraphPool, Pieces
from ftruntime.engine.runner import BatchBuilder
from ftruntime.sizing import Sizer
from ftruntime.types import SeqPlan, StepPlan
from tests.support.recording import CaptureError, RecordedGraph, RecordedGraphs

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="launches on meta tensors need a process without TRITON_INTERPRET"
)
NUM_LAYERS = 6
SIZES = (1, 2, 4, 6)
FLAGS = {"num_tokens": 8192, "max_running_requests": 8, "max_prefill_length": 128}
ENGINES = {
    "resident": {},
    "slices": {"decode_interleave_every": 1, "prefill_layer_groups": 3, "cache_type": "naive"},
    "hints": {"moe_backend": "offload", "moe_cache_size": 30, "moe_prefetch_layers": 2},
    "few slots": {"moe_backend": "offload", "moe_cache_size": 13},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "tiny"
    make_demo(path, preset="tiny")
    return path


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of the CPU in every engine, with experts in the form that kernels read."""
    recorded = RecordedGraphs()
    monkeypatch.setattr(build, "_runs_kernels", lambda plan: True)
    monkeypatch.setattr(Sizer, "graph_sizes", lambda self: SIZES)
    monkeypatch.setattr(build, "GraphPool", functools.partial(GraphPool, graphs=recorded))
    return recorded


def answers(demo, flags):
    """Tokens, log-probabilities and counts of requests that come and go, up to seven at once."""
    prompts = [[7, 3, 9, 4] * 33, [5], [6, 7, 8], [2, 9] * 64, [11] * 9, [12, 13], [14] * 5]
    lengths = [9, 4, 14, 5, 7, 5, 3]
    params = [
        SamplingParams(
            temperature=n % 2, seed=n, max_tokens=length, ignore_eos=True, logprobs=2,
        )
        for n, length in enumerate(lengths)
    ]  # fmt: skip
    with LLM(model=demo, **FLAGS, **flags) as llm:
        outputs = [out.outputs[0] for out in llm.generate(prompts, params)]
        stats = llm.stats()
    return [(out.token_ids, out.logprobs) for out in outputs], stats


@pytest.mark.parametrize("flags", ENGINES.values(), ids=ENGINES)
def test_a_replay_gives_the_bits_of_single_launches(flags, demo, graphs, monkeypatch):
    got, stats = answers(demo, flags)
    captured = [1, 2, 3] if flags == ENGINES["few slots"] else list(SIZES)
    assert stats["graphs"]["rows"] == captured
    assert stats["graphs"]["replayed"] > 5
    assert stats["graphs"]["missed"] > 0 or flags == ENGINES["slices"]
    assert stats["graphs"]["replayed"] + stats["graphs"]["missed"] == stats["decode_steps"]
    pieces = NUM_LAYERS + 1 if "moe_backend" in flags else 1
    assert len(graphs.graphs) == pieces * len(captured)
    assert all(graph.num_replays for graph in graphs.graphs), "no step fills more up than it has to"
    monkeypatch.setattr(Sizer, "graph_sizes", lambda self: ())
    expected, single = answers(demo, flags)
    assert single["graphs"] == {"rows": [], "replayed": 0, "missed": 0}
    assert got == expected
    assert stats["integrity"] == single["integrity"] == "ok"


def test_experts_are_looked_up_as_if_launched_one_by_one(demo, graphs, monkeypatch):
    """Hits, misses and copies too, where no row fills a step up."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    counts = []
    for replayed in (11, 0):
        with LLM(model=demo, **FLAGS, moe_backend="offload", moe_cache_size=20) as llm:
            llm.generate([[5, 6, 7]], params)
            stats = llm.stats()
        assert stats["graphs"]["replayed"] == replayed
        counts.append(stats["experts"]["decode"])
        monkeypatch.setattr(GraphPool, "holds", lambda self, plan: False)
    assert counts[0]["hits"] + counts[0]["misses"] == 11 * NUM_LAYERS * 4
    assert counts[0]["prefetch_used"] > 0
    assert counts[0] == counts[1]


def test_slots_are_held_until_their_products_are_launched(demo, graphs, monkeypatch):
    log = []
    groups, replay = ExpertCache.groups, RecordedGraph.replay

    def noted(self, layer, ids, **kwargs):
        for slots in groups(self, layer, ids, **kwargs):
            log.append("held")
            yield slots
            log.append("free")

    monkeypatch.setattr(RecordedGraph, "replay", lambda self: (log.append("run"), replay(self)))
    with LLM(model=demo, **FLAGS, moe_backend="offload", moe_cache_size=20) as llm:
        monkeypatch.setattr(ExpertCache, "groups", noted)
        llm.generate([[5]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    prefill = ["held", "free"] * NUM_LAYERS
    assert log == [*prefill, *(["run", *["held", "run", "free"] * NUM_LAYERS] * 2)]


def test_a_captured_step_reads_nothing_on_the_host(demo, graphs, monkeypatch):
    """The check can fail."""
    embed = build.Transformer.embed

    def peeking(self, batch):
        if batch.tape is not None:
            batch.seq_lens.tolist()
        return embed(self, batch)

    monkeypatch.setattr(build.Transformer, "embed", peeking)
    with pytest.raises(CaptureError, match="tolist reads a device value on the host"):
        LLM(model=demo, **FLAGS)


def test_a_device_that_refuses_is_named(demo, graphs, monkeypatch):
    def refuse(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedGraphs, "graph", refuse)
    message = (
        r"^a decode step of 6 rows cannot be captured \(operation not permitted when stream is "
        r"capturing\); --cuda-graph-max-bs 0 serves without CUDA graphs$"
    )
    with pytest.raises(RuntimeError, match=message):
        LLM(model=demo, **FLAGS)


def test_one_warning_when_a_batch_is_too_large(demo, graphs, caplog):
    with caplog.at_level(logging.WARNING):
        answers(demo, {})
    found = [r.getMessage() for r in caplog.records if "without a CUDA graph" in r.getMessage()]
    assert found == [
        "decode of 7 rows runs without a CUDA graph, expected at most 6: --cuda-graph-max-bs "
        "captures no larger one"
    ]


def plan_of(*seqs):
    return StepPlan(0, "decode", tuple(seqs), (0, NUM_LAYERS))


def part(row, start, *pages):
    return SeqPlan(row, f"r{row}", start, (100 + row,), pages)


def test_rows_that_fill_a_step_up_repeat_the_shortest_and_store_nothing():
    builder = BatchBuilder(num_rows=3, max_pages=4, device=torch.device("cpu"))
    plan = plan_of(part(2, 130, (0, 5, 6), (1, 7, 8)), part(0, 9, (0, 3, 4)))
    batch = builder.build(plan, num_rows=4)
    assert batch.token_ids.tolist() == batch.host_token_ids.tolist() == [102, 100, 100, 100]
    assert batch.positions.tolist() == [130, 9, 9, 9]
    assert batch.seq_lens.tolist() == [131, 10, 10, 10]
    assert batch.slot_mapping.tolist() == [7 * 128 + 2, 3 * 128 + 9, -1, -1]
    assert batch.state_index.tolist() == [2, 0, -1, -1]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert batch.window_block_table.tolist() == [[5, 7], [3, -1], [3, -1], [3, -1]]
    assert batch.block_table.tolist() == [[6, 8], [4, -1], [4, -1], [4, -1]]


def test_inputs_keep_their_addresses():
    builder = BatchBuilder(num_rows=3, max_pages=4, device=torch.device("cpu"))
    fixed = builder.fixed(3)
    tensors = {
        field.name: value for field in dataclasses.fields(fixed)
        if isinstance(value := getattr(fixed, field.name), torch.Tensor)
    }  # fmt: skip
    places = {name: x.data_ptr() for name, x in tensors.items()}
    for plan in (
        plan_of(part(2, 130, (0, 5, 6), (1, 7, 8)), part(0, 9, (0, 3, 4))),
        plan_of(part(0, 10), part(1, 3, (0, 9, 9)), part(2, 131)),
        plan_of(part(1, 4)),
    ):
        builder.refill(fixed, plan)
        expected = builder.build(plan, num_rows=3)
        for name, x in tensors.items():
            assert x.data_ptr() == places[name]
            wanted = getattr(expected, name)
            seen = x[:, : wanted.shape[1]] if name.endswith("table") else x
            assert torch.equal(seen, wanted), name


class Notes:
    """Graphs that say what is done with them."""

    def __init__(self):
        self.log = []

    def graph(self):
        number = sum(entry.startswith("begin") for entry in self.log)
        return type("Graph", (), {
            name: lambda graph, text=f"{name} {number}": self.log.append(text)
            for name in ("begin", "end", "replay")
        })()  # fmt: skip

    @contextlib.contextmanager
    def around(self, name):
        self.log.append(f"enter {name}")
        try:
            yield
        finally:
            self.log.append(f"leave {name}")


def test_pieces_run_between_calls_of_the_host():
    notes = Notes()
    pieces = Pieces(notes)
    with pieces.captured():
        pieces.around(lambda: notes.around("a"))
        pieces.around(lambda: notes.around("b"))
    assert notes.log == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    for _ in range(2):
        notes.log.clear()
        pieces.replay()
        assert notes.log == [
            "replay 0", "enter a", "replay 1", "leave a", "enter b", "replay 2", "leave b"
        ]  # fmt: skip


def test_a_call_that_fails_ends_the_replay():
    notes = Notes()

    @contextlib.contextmanager
    def failing():
        raise ValueError("no slot")
        yield

    pieces = Pieces(notes)
    with pieces.captured():
        pieces.around(lambda: notes.around("a"))
        pieces.around(failing)
    notes.log.clear()
    with pytest.raises(ValueError, match="no slot"):
        pieces.replay()
    assert notes.log == ["replay 0", "enter a", "replay 1", "leave a"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("name", ["resident", "slices", "hints"])
def test_a_card_replays_the_bits_of_single_launches(name, demo):
    flags = {**ENGINES[name], "device": "cuda"}
    expected, single = answers(demo, {**flags, "cuda_graph_max_bs": 0})
    got, stats = answers(demo, flags)
    assert single["graphs"]["rows"] == []
    assert stats["graphs"]["replayed"] == stats["decode_steps"]
    assert got == expected


class _Refusing:
    """A graph of which some calls fail; `ends` counts those of a graph that has begun as 1, and of
    another as 100."""

    def __init__(self, refused: str | None, ends: list[int]) -> None:
        self._refused, self._ends, self._is_open = refused, ends, False

    def begin(self) -> None:
        if self._refused == "begin":
            raise RuntimeError("begin refused")
        self._is_open = True

    def end(self) -> None:
        self._ends.append(1 if self._is_open else 100)
        self._is_open = False
        if self._refused == "end":
            raise RuntimeError("end refused")

    def replay(self) -> None:
        raise AssertionError("not captured")


class _Refusals:
    """Graphs of which those in `refused` fail at a call."""

    def __init__(self, refused: list[str | None]) -> None:
        self._refused = refused
        self.ends: list[int] = []

    def capturing(self):
        return contextlib.nullcontext()

    def graph(self) -> _Refusing:
        return _Refusing(self._refused.pop(0), self.ends)


@pytest.mark.parametrize(
    ("refused", "error", "ends"),
    [
        (["begin"], "begin refused", 0), (["end", None], "end refused", 1),
        ([None, "begin"], "begin refused", 1), ([None, "end"], "the body failed", 2),
        ([None, None], "the body failed", 2),
    ],
)  # fmt: skip
def test_what_went_wrong_first_is_told(refused: list[str | None], error: str, ends: int) -> None:
    graphs = _Refusals(refused)

    def capture() -> None:
        pieces = Pieces(graphs)
        with pieces.captured():
            pieces.around(contextlib.nullcontext)
            raise ValueError("the body failed")

    with pytest.raises((RuntimeError, ValueError), match=f"^{error}$"):
        capture()
    assert sum(graphs.ends) == ends
