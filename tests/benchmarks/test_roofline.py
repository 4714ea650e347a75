"""The calls of a step, their terms, and the command that prints them.

The calls are held against the model's own layers: the kernels that a decode layer launches on meta
tensors. The terms are held against `ftruntime.step_model`, which counts weights and rows of the
whole model where this counts calls, so that neither has the other's formulas: bytes of a decode
step, the link and the all-reduces are the same; the products of a chunk are within a tenth; what
lies between two launches of a chunk is in this one alone.

Mutants tried: a layer kind left out or counted twice, the experts whole on every card, all experts
read by every step, hits taken for misses, the ring's factor dropped, one all-reduce a layer,
all-reduces or the collectives at the ends on one card, index rows of one sequence for all rows, the
head for every token of a chunk, the highest ceiling of a call, a decode launch scaled by its FLOPs,
no launch scaled by its bytes, memory and compute of a call added up in `overlapped`, all-reduces or
those at the ends left out of the nodes, `--plot` on any file name, on a folder or after the work,
shares of rows that nobody reported, the static model below memory, below compute.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter

import pytest

from bench_kernels import committed, flash, roofline
from bench_kernels.committed import Committed
from bench_kernels.flash import LAYERS, NUM_LAYERS, Step, committed_name
from bench_kernels.terms import TERMS, Assumed, Timed, steps, terms
from ftkernels import backend
from ftkernels.testing import aot
from ftruntime.config import RuntimeConfig
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.attention import Attention
from ftruntime.model.config import builtin
from ftruntime.model.numerics import Numerics
from ftruntime.plan import DeviceFacts, resolve
from ftruntime.sim.cost import SEED_COST
from ftruntime.sim.settings import SEED_FLAGS
from ftruntime.step_model import RTX_4090, StepModel
from tests.ftruntime.model import test_nodes as nodes

FLASH = builtin("flash")
KINDS = {"csa": 4, "hca": 128, "swa": 0}


@pytest.fixture(scope="module")
def figures() -> Committed:
    return committed.read()


def test_sizes_are_the_models():
    assert {kind: FLASH.num_layers_of(ratio) for kind, ratio in KINDS.items()} == LAYERS
    assert sum(LAYERS.values()) == NUM_LAYERS == FLASH.num_hidden_layers
    sizes = (flash.HIDDEN, flash.HEADS, flash.EXPERTS, flash.TOPK, flash.INTER, flash.VOCAB)
    assert sizes == (
        FLASH.hidden_size, FLASH.num_attention_heads, FLASH.n_routed_experts,
        FLASH.num_experts_per_tok, FLASH.moe_intermediate_size, FLASH.vocab_size,
    )  # fmt: skip


def test_defaults_are_the_report():
    config = RuntimeConfig.from_dict(dict(SEED_FLAGS))
    plan = resolve(
        config, FLASH, DeviceFacts(kind="cuda", cards=8, memory_bytes=24 << 30), strict=False
    )
    model, assumed = StepModel(config, FLASH, plan, RTX_4090), Assumed()
    assert (assumed.cards, assumed.rows, assumed.chunk) == (8, plan.max_running, plan.chunk_tokens)
    assert assumed.hit_rate == pytest.approx(model.hit_rate(1), abs=5e-4)
    assert assumed.rows_hit_rate == pytest.approx(model.hit_rate(50), abs=5e-4)
    assert assumed.chunk_hit_rate == pytest.approx(plan.expert_slots / plan.num_experts, abs=5e-4)
    assert assumed.chunk_context == round(200_019 / 2)
    assert assumed.decode_ms == pytest.approx(1e3 * SEED_COST.decode_s)


@pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_layer_launches_these_kernels(kind, figures):
    config, numerics = nodes._config(KINDS[kind]), Numerics.of("official")
    storage = KVStorage(
        config, num_pages=nodes.PAGES, window_pages=nodes.PAGES, num_rows=nodes.SEQUENCES,
        dtype=numerics.dtype, device="meta",
    )  # fmt: skip
    weights = nodes._weights(config)
    batch = nodes._batch(config, nodes.SEQUENCES, "decode")
    attention = Attention.of(weights, 0, config, numerics)
    experts = nodes._expert_half(config, weights, numerics)
    tables = (nodes._empty(1024, 32, dtype=nodes.torch.float32),) * 2
    with aot.capture_launches(arch=89) as got:
        for half, run in (("attn", attention), ("ffn", experts)):
            x = nodes._between(config, weights, half, batch, numerics.dtype)
            run(x, batch, storage.layers[0], tables) if half == "attn" else run(x, batch)
    step = Step(nodes.SEQUENCES, 4096, 8, True)
    calls = [call for call in step.calls() if call.part != "ends"]
    # the look-up is the captured step's, and the streams have ends of their own
    calls = [call for call in calls if call.op not in ("count_missing", "hc_pre", "hc_post")]
    mine = [call for call in calls if call.times in (LAYERS[kind], NUM_LAYERS, NUM_LAYERS - 1)]
    assert len(set(LAYERS.values())) == 3  # so that the number tells the kind
    expected = Counter[str]()
    for call in mine:
        launches = figures.of(call.op, call.committed)
        expected.update(x["kernel"] for x in launches[len(launches) - call.launches :])
    assert Counter(launch.name for launch in got.launches) == expected
    assert got.num_nodes == sum(call.launches for call in mine)


def test_a_captured_step_has_as_many_nodes_as_its_layers():
    step = Step(1, 4096, 8, True)
    launches = sum(call.times * call.launches for call in step.calls())
    layers = 21 * (10 + 6) + 20 * (7 + 6) + 2 * (7 + 6)  # the published counts
    assert launches == layers + NUM_LAYERS + 5  # look-ups; the last streams, and both ends


def test_nodes_of_a_step_are_those_that_are_captured(figures):
    """tests/ftruntime/engine/test_captured_nodes.py counts them on the whole model: 758, of them 88
    collectives."""
    for step in steps(Assumed(), figures)[:2]:
        assert step.nodes == 758
        assert step.nodes - sum(x.call.times * x.call.launches for x in step.calls) == 88


@pytest.mark.parametrize(("cards", "gib"), [(8, 24), (4, 24), (2, 80), (1, 160)], ids=str)
def test_terms_agree_with_the_runtimes_model(cards, gib, figures):
    config = RuntimeConfig.from_flags(tp=cards, **_kept(SEED_FLAGS))
    facts = DeviceFacts(kind="cuda", cards=cards, memory_bytes=gib << 30)
    plan = resolve(config, FLASH, facts, strict=False)
    model = StepModel(config, FLASH, plan, RTX_4090)
    share = plan.expert_slots / plan.num_experts
    assumed = Assumed(
        cards=cards, hit_rate=model.hit_rate(1), rows_hit_rate=model.hit_rate(50),
        chunk_hit_rate=share,
    )  # fmt: skip
    theirs = (model.decode(1, 4096), model.decode(50, 4096), model.prefill(3456, 100_010))
    for mine, other in zip(steps(assumed, figures), theirs, strict=True):
        assert mine.bus_s == pytest.approx(other.bus_s, rel=1e-3)
        assert mine.all_reduce_s == pytest.approx(other.all_reduce_s, rel=1e-3)
        if mine.tokens <= 50:
            assert mine.memory_s == pytest.approx(other.memory_s, rel=0.03)
            assert mine.compute_s > other.compute_s  # products of few rows are padded
        else:
            assert mine.compute_s == pytest.approx(other.compute_s, rel=0.1)
            assert 1.2 < mine.memory_s / other.memory_s < 2.2  # queries, routes, results


def _kept(flags):
    names = ("num_tokens", "swa_full_tokens_ratio", "max_running_requests", "max_prefill_length")
    return {name: flags[name] for name in names}


def test_a_chunk_in_halves_launches_and_reads_weights_twice(figures):
    """Not on one card, nor where it is short."""
    (chunk,) = [step for step in steps(Assumed(), figures) if step.tokens == 3456]
    whole = terms("chunk", Step(3456, 100_010, 8, False), 0.855, None, Assumed(), figures)
    assert whole == dataclasses.replace(chunk, name="chunk", reported_s=None)
    calls = Step(3456, 100_010, 8, False).calls()
    alone = [Timed.of(x, figures, 1008e9, decode=False) for x in calls]
    assert sum(x.compute_s for x in alone) == pytest.approx(chunk.compute_s, rel=0.01)
    # each call reads its matrices again; experts and dense weights of one card
    more = chunk.memory_s - sum(x.memory_s for x in alone)
    assert more == pytest.approx((6.709e9 / 8 + 147.17e9 / 8) / 1008e9, rel=0.15)
    layers = sum(x.times * x.launches for x in calls if x.part != "ends")
    ends = sum(x.times * x.launches for x in calls if x.part == "ends")
    assert chunk.nodes == 2 * layers + ends + 4 * NUM_LAYERS + 2
    assert chunk.all_reduce_s == pytest.approx(0.355 + 172 * 30e-6, rel=2e-3)
    for short in (Assumed(chunk=511), Assumed(cards=1)):
        assert not any(step.halves for step in steps(short, figures))


def test_every_decode_row_reads_index_rows_of_its_own():
    calls = Step(50, 4096, 8, True).calls()
    (scores,) = (call for call in calls if call.op == "index_select")
    row = 1024 * 128 * 2  # a bf16 row of 128 for 4 of the tokens seen
    query = 64 * 128 * 2 + 512 * 4  # read, and the picks written
    assert scores.num_bytes == 21 * 50 * (row + query)
    assert scores.flops == 21 * 50 * 2 * 64 * 128 * 1024


def test_a_chunk_has_logits_of_its_last_token():
    heads = {
        step.tokens: [call.flops for call in step.calls() if call.part == "ends" and call.flops]
        for step in (Step(3456, 100_010, 8, False), Step(50, 4096, 8, True))
    }
    (_, one), (_, rows) = heads[3456], heads[50]  # behind the last hyper-connection
    assert (one, rows) == (2 * 4096 * 16160, 50 * 2 * 4096 * 16160)


def test_sum_and_overlap(figures):
    for step in steps(Assumed(), figures):
        parts = [getattr(step, f"{name}_s") for name in TERMS]
        assert step.sum_s == pytest.approx(math.fsum(parts))
        assert step.launches_s == pytest.approx(1.5e-6 * step.nodes)
        assert max(step.memory_s, step.compute_s) <= step.calls_s
        assert step.calls_s <= step.memory_s + step.compute_s
        assert step.halves == (step.tokens == 3456)
        link = step.bus_s + (step.all_reduce_s if step.halves else 0)
        hidden = min(link, step.calls_s) * (1 - 1 / 43)
        apart = step.bus_s + step.calls_s + step.all_reduce_s + step.launches_s
        assert step.overlapped_s == pytest.approx(apart - hidden)


@pytest.mark.parametrize(
    ("change", "term", "factor"),
    [({"link_gb_per_s": 50.0}, "bus", 0.5), ({"memory_gb_per_s": 504.0}, "memory", 2.0),
     ({"node_us": 3.0}, "launches", 2.0), ({"hit_rate": 1.0}, "bus", 0.0),
     ({"reduce_us": 60.0, "reduce_gb_per_s": 6.0}, "all_reduce", 2.0)],
    ids=str,
)  # fmt: skip
def test_an_assumption_moves_its_term(change, term, factor, figures):
    before, after = (steps(a, figures)[0] for a in (Assumed(), Assumed(**change)))
    for name in TERMS:
        ratio = factor if name == term else 1.0
        assert getattr(after, f"{name}_s") == pytest.approx(ratio * getattr(before, f"{name}_s"))


def test_one_card_has_no_all_reduce(figures):
    for step in steps(Assumed(cards=1), figures):
        assert step.all_reduce_s == 0
        assert step.nodes == sum(x.call.times * x.call.launches for x in step.calls)


def test_the_static_model_stands_beside_the_terms():
    """Every launch 2 us: a decode step takes that for each; products of a chunk in proportion."""
    real = committed.read()
    launches = {
        key: [{**x, "us": 2.0, "ceiling_tflops": None} for x in part]
        for key, part in real.launches.items()
    }
    one, _, chunk = steps(Assumed(memory_gb_per_s=1e6), Committed(real.triton, launches))
    # with the quantizing launches of the expert ops, which a step has not
    launches_us = 2 * (one.nodes - 88 + 2 * NUM_LAYERS)
    # an eighth of the head; index queries behind those of 8 heads
    head = next(x for x in one.calls if x.call.committed == "flash-head-t1")
    assert head.static_s == pytest.approx(2e-6 / 8, rel=0.01)
    queries = [x for x in one.calls if x.call.committed == "flash-tp8-wq_b-t1"]
    assert [x.static_s for x in queries] == pytest.approx([3 * 42e-6, 40e-6, 4e-6], rel=0.01)
    assert one.static_s == pytest.approx(1e-6 * (launches_us + 2 * 42 - 2 * 7 / 8), rel=1e-3)
    scores = next(x for x in chunk.calls if x.call.op == "index_select")
    assert scores.static_s == pytest.approx(2e-6 * scores.call.flops / 240.5e9, rel=0.01)
    launches["embed", "flash-t1"] = [{**launches["embed", "flash-t1"][0], "us": None}]
    assert steps(Assumed(), Committed(real.triton, launches))[0].static_s is None


@pytest.mark.parametrize("cards", [1, 8])
def test_no_call_of_the_static_model_is_below_its_terms(cards, figures):
    assumed = Assumed(cards=cards)
    # 1 us a launch is below what many calls move, 1 s above what any does
    for us, below in ((1.0, True), (1e6, False)):
        launches = {k: [{**x, "us": us} for x in part] for k, part in figures.launches.items()}
        for step in steps(assumed, Committed(figures.triton, launches)):
            least = [max(x.memory_s, x.compute_s) for x in step.calls]
            static = [x.static_s for x in step.calls]
            assert all(x >= y for x, y in zip(static, least, strict=True))
            assert any(x == y for x, y in zip(static, least, strict=True)) == below
    for step in steps(assumed, figures):
        assert step.static_s == pytest.approx(math.fsum(x.static_s for x in step.calls))
        assert step.static_s >= step.calls_s


def test_the_lowest_ceiling_of_a_call_counts():
    figures = Committed("3.7.1", {("op", "case"): [
        {"ceiling_tflops": 330.0, "us": 1.0, "mma": {}}, {"ceiling_tflops": None, "us": 2.0},
        {"ceiling_tflops": 161.0, "us": 4.0},
    ]})  # fmt: skip
    assert figures.ceiling_tflops("op", "case") == 161
    assert figures.us("op", "case") == 7
    assert figures.ceiling_tflops("op", "other") is None
    assert figures.us("op", "other") is None


def test_the_nearest_case_stands_for_a_call():
    assert committed_name("hc_post_pre", "flash", 50) == "flash-t8"
    assert committed_name("hc_post_pre", "flash", 1000) == "flash-t3456"
    assert committed_name("mixed_linear", "flash-csa", 3) in ("flash-csa-t1", "flash-csa-t8")
    assert committed_name("mla_decode", "flash-tp8-csa", 50) == "flash-tp8-csa"
    with pytest.raises(ValueError, match=r"^committed_name: stem is 'none', expected"):
        committed_name("hc_post_pre", "none", 1)


def test_every_call_has_committed_figures(figures):
    for cards in (1, 2, 4, 8):
        for step in (Step(50, 4096, cards, True), Step(3456, 100_010, cards, False)):
            for call in step.calls():
                assert figures.of(call.op, call.committed), (call.op, call.committed)


def test_a_damaged_file_is_one_sentence(tmp_path):
    path = tmp_path / "contract.json"
    path.write_text('{"triton": "3.7.1"}')
    with pytest.raises(ValueError, match=r"^contract: arch of the file is missing, expected 89$"):
        committed.read(path)


def test_the_command_prints_terms_and_says_modelled(capsys):
    assert roofline.main(["--top", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("modelled, no times") == 3
    one, rows, chunk = told.split(": reported ")[1:]
    assert rows.startswith("nothing; ")
    assert ("%" in one, "%" in rows, "%" in chunk) == (True, False, True)
    assert "reported 16.8 ms" in told
    assert "reported 1350 ms" in told
    assert "modelled, nothing was timed; assumed: 8 cards" in told
    assert told.count("\nall_reduce ") == 3


def test_rows_are_held_against_what_is_reported_of_one(figures):
    one, rows, chunk = [step.reported_s for step in steps(Assumed(rows=50), figures)]
    assert (one, chunk) == (pytest.approx(0.0168), pytest.approx(1.35))
    assert rows is None
    assert steps(Assumed(rows=1), figures)[1].reported_s == one


def test_the_command_as_json(capsys):
    assert roofline.main(["--json", "--cards", "2", "--rows", "9"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "modelled"
    assert told["assumed"] == dataclasses.asdict(Assumed(cards=2, rows=9))
    assert [step["tokens"] for step in told["steps"]] == [1, 9, 3456]
    for step in told["steps"]:
        assert step["ms"]["sum"] == pytest.approx(sum(step["ms"][x] for x in TERMS), abs=1e-3)
        costs = [max(x["memory_ms"], x["compute_ms"]) for x in step["calls"]]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--cards 3", "--cards is 3, expected 1, 2, 4 or 8"),
     ("--hit-rate 1.5", "--hit-rate is 1.5, expected a number from 0 to 1"),
     ("--link-gb-per-s nan", "--link-gb-per-s is nan, expected a number from 0.001 to 1e+06"),
     ("--chunk 0", "--chunk is 0, expected a whole number from 1 to 1048576"),
     ("--rows 2.5", "--rows is 2.5, expected a whole number from 1 to 4096"),
     ("--chunk 200000", "--chunk is 200000, expected at most --chunk-context (100010)"),
     ("--plot x.txt", "--plot is x.txt, expected a file name that ends in .png, .svg, .pdf"),
     ("--plot /none/x.png",
      "--plot is /none/x.png, expected a file to write in a directory that exists")],
)  # fmt: skip
def test_a_bad_flag_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        roofline.main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", sentence + "\n")


def test_a_plot_that_cannot_be_drawn_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roofline, "steps", None)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit):
        roofline.main(["--plot", str(tmp_path / "folder.png")])
    assert "expected a file to write" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        roofline.main(["--plot", str(tmp_path / "x.png")])
    told = capsys.readouterr()
    assert told.out == ""
    assert "expected matplotlib" in told.err
    assert told.err.count("\n") == 1


def test_a_plot_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "terms.svg"
    assert roofline.main(["--plot", str(path), "--top", "0"]) == 0
    assert b"<svg" in path.read_bytes()
