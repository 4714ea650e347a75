"""A prefill batch in halves gives what the whole gives, while sums of one hide behind the other.

Mutants run, each noticed: the second half ahead of the first; a half's lengths those of the whole;
a half's tables those of the first rows; one sum waited for where it began; sums of the halves
exchanged; decode steps in halves; a half that is no multiple of a page.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ftkernels import backend
from ftruntime.demo import make_demo
from ftruntime.engine import runner
from ftruntime.engine.runner import BatchBuilder
from ftruntime.model.numerics import Numerics
from ftruntime.model.parallel import Alone, in_turn
from ftruntime.types import SeqPlan, StepPlan
from tests.support.direct import Direct

pytestmark = pytest.mark.skipif(backend.interpreted(), reason="a whole model, run by references")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "tiny"
    make_demo(path, preset="tiny")
    return path


def halving(builder):
    builder._halves = True
    return builder


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


def rows(storage):
    """All pages; of a carry, entries may hold what nobody reads again."""
    pools = [layer.window for layer in storage.layers]
    pools += [pool.rows for pool in storage._pools()]
    return [x.clone() for x in pools]


@pytest.mark.parametrize("lengths", [(300,), (256,), (131, 200), (40, 300), (300, 7)], ids=str)
def test_halves_give_what_the_whole_gives(lengths, demo, monkeypatch):
    """Behind a first chunk, so that carries and windows come from before."""
    monkeypatch.setattr(runner, "LEAST_HALF", 100)
    direct = Direct(demo, Numerics.of("exact"))
    prompts = [tokens(128 + length, n) for n, length in enumerate(lengths)]
    layers = (0, direct.config.num_hidden_layers)
    outcomes = []
    for halves in (False, True):
        direct.reset()
        direct.builder._halves = halves
        for kind in ("first", "rest"):
            parts = tuple(
                direct.part(ids, 0, 128, row) if kind == "first"
                else direct.part(ids, 128, len(ids), row)
                for row, ids in enumerate(prompts)
            )  # fmt: skip
            batch = direct.builder.build(StepPlan(0, "prefill", parts, layers))
            with torch.inference_mode():
                streams = direct.model.embed(batch)
                for a, b in ((0, 2), (2, layers[1])):
                    streams = direct.model.forward(streams, batch, direct.storage, (a, b))
                logits = direct.model.logits(streams, batch)
        assert (batch.halves is not None) is halves
        after = (direct.part([7] * 600, 128 + n, 129 + n, row) for row, n in enumerate(lengths))
        outcomes.append([logits, *rows(direct.storage), direct.step(*after, kind="decode")])
    for whole, halved in zip(*outcomes, strict=True):
        torch.testing.assert_close(halved, whole, rtol=1e-4, atol=1e-4)


def test_halves_are_the_tokens_of_the_whole_in_order(monkeypatch):
    """By a plain reading of the plan: each token's sequence, position and window row."""
    monkeypatch.setattr(runner, "LEAST_HALF", 64)
    builder = halving(BatchBuilder(num_rows=4, max_pages=8, device=torch.device("cpu")))
    seqs = [
        SeqPlan(2, "a", 0, tuple(range(100)), ((0, 5, 6),)),
        SeqPlan(0, "b", 130, tuple(range(200, 290)), ((0, 1, 1), (1, 7, 8))),
        SeqPlan(3, "c", 0, tuple(range(300, 310)), ((0, 9, 9),)),
    ]
    batch = builder.build(StepPlan(0, "prefill", tuple(seqs), (0, 6)))
    wanted = [
        (token, seq.start + n, seq.row) for seq in seqs for n, token in enumerate(seq.token_ids)
    ]
    found = []
    for half in batch.halves:
        assert half.halves is None
        bounds, lens = half.cu_seqlens.tolist(), half.seq_lens.tolist()
        rows, ids = half.state_index.tolist(), half.token_ids.tolist()
        assert ids == half.host_token_ids.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(ids)
        pages = {row: table for row, table in zip(rows, half.window_block_table, strict=True)}
        for begin, end, length, row in zip(bounds, bounds[1:], lens, rows, strict=False):
            for t in range(begin, end):
                position = length - (end - t)
                found.append((ids[t], position, row))
                assert half.positions[t] == position
                slot = pages[row][position // 128] * 128 + position % 128
                assert half.slot_mapping[t] == slot
    assert found == wanted
    assert batch.halves[0].token_ids.shape[0] == 128


def test_few_tokens_and_decode_stay_whole():
    def built(halves, kind, *seqs):
        builder = BatchBuilder(num_rows=512, max_pages=4, device=torch.device("cpu"))
        builder._halves = halves
        return builder.build(StepPlan(0, kind, seqs, (0, 6))).halves

    pages = tuple((n, n, n) for n in range(4))
    few, many = (SeqPlan(0, "a", 0, tuple(range(count)), pages) for count in (511, 512))
    assert built(True, "prefill", few) is None
    assert built(True, "prefill", many) is not None
    assert built(False, "prefill", many) is None
    rows = (SeqPlan(row, str(row), 1, (7,), ((0, 1, 1),)) for row in range(512))
    assert built(True, "decode", *rows) is None


@dataclasses.dataclass
class Noted(Alone):
    """Sums that say when they begin and when they are waited for."""

    log: list[str]

    def begin_sum(self, x):
        self.log.append(f"begin {x}")

        def wait():
            self.log.append(f"wait {x}")
            return x

        return wait


def test_one_computes_while_the_other_is_added_up():
    log = []

    def part(name):
        for n in range(3):
            log.append(f"compute {name}{n}")
            got = yield f"{name}{n}"
            assert got == f"{name}{n}"
        return name

    assert in_turn([part("a"), part("b")], Noted(log)) == ["a", "b"]
    expected = ["compute a0", "begin a0", "compute b0", "begin b0"]
    for n in range(2):
        for name in "ab":
            expected += [
                f"wait {name}{n}", f"compute {name}{n + 1}", f"begin {name}{n + 1}"
            ]  # fmt: skip
    assert log == [*expected, "wait a2", "wait b2"]
