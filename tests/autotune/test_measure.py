"""Timing through a stand-in for the card: what is recorded, how often, and what is made of it.

Mutants tried: one set of inputs for all calls, the mean in place of the median, milliseconds of all
sets taken for one call's, warm-up replays counted, values not checked, the config not pinned, an
unsound default run, errors of a card let through, a lost card gone on with, what was measured
before it not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from triton.runtime.errors import OutOfResources

from autotune import commands_tune, measure, progress, search, tune
from autotune.cli import cli
from autotune.measure import measured, median_us
from autotune.search import Choice, Problem, Trial
from ftkernels import backend, config
from ftkernels.testing.timer import REPLAYS
from tests.autotune.toy import HOST, TOY, Tile, default_tile

DEFAULT, FAST, SLOW, EQUAL = Tile(16, 4), Tile(64, 4), Tile(32, 8), Tile(32, 4)
US = {DEFAULT: 10.0, FAST: 6.0, SLOW: 20.0, EQUAL: 9.9}
GPU = "nvidia_geforce_rtx_4090"
CASE = {"name": "flash-t1", "T": 1, "I": 128}


class FakeCard:
    """A card on which a replay takes what the pinned config is said to take, and some are slow."""

    device = "cpu"
    l2_bytes = 1024

    def __init__(self, us: Callable[[object], float]) -> None:
        self.us = us
        self.inputs: list[list[float]] = []
        self.replays = 0

    def graph(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        heard: list[config.Found] = []
        with config.watch(heard.append):
            results = [call() for call in calls]
        assert len({found.config for found in heard}) == 1
        each_us = self.us(heard[0].config)
        self.inputs.append([float(x[0, 0]) for x in results if isinstance(x, torch.Tensor)])
        count = 0

        def replay() -> float:
            nonlocal count
            count += 1
            self.replays += 1
            slow = 50 if count <= 3 or count % 4 == 0 else 1
            return each_us * len(calls) * slow / 1000

        return replay


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(measure, "registry", lambda: (TOY, HOST))


@pytest.fixture
def card():
    return FakeCard(US.__getitem__)


def _problem(*others: Tile) -> Problem:
    users = (("toy", CASE), ("host", CASE))
    return Problem("toy", config.entry_key({"T": 1, "I": 128}), users, (), (DEFAULT, *others))


def test_a_call_takes_the_median_of_its_replays(card):
    with config.pin("toy", FAST):
        assert median_us(TOY, CASE, card) == pytest.approx(6.0)
    assert card.replays == REPLAYS + 3


def test_inputs_are_in_rotation(card):
    with config.pin("toy", FAST):
        median_us(TOY, CASE, card)
    (seen,) = card.inputs
    assert seen == [2.0, 4.0, 6.0, 8.0]  # 512 bytes a set, 1024 of cache; the op doubles its input


def test_every_case_is_timed_under_the_config(card):
    assert measured(_problem(), FAST, card) == Trial((6.0, 6.0))


def test_values_come_before_times(card, monkeypatch):
    wrong = replace(TOY, reference=lambda x: x + x + (x > 0))
    monkeypatch.setattr(measure, "registry", lambda: (wrong, HOST))
    assert measured(_problem(), FAST, card) == Trial(error="gives wrong values")
    assert card.inputs == []


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    OutOfResources(200000, 101376, "shared memory"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda x: type(x).__name__)
def test_what_does_not_run_on_a_card_is_dropped(error):
    """And the rest goes on, without the default too."""
    for broken, best in ((FAST, SLOW), (DEFAULT, FAST)):

        def us(record, broken=broken):
            if record == broken:
                raise error
            return {**US, SLOW: 8.0}[record]

        card = FakeCard(us)
        assert measured(_problem(), broken, card) == Trial(error="does not run")
        choice = tune.measure(_choice(SLOW, FAST), _card(card, 2))
        assert choice is not None
        assert (choice.config, dict(choice.dropped)) == (best, {"does not run": 1})


def _lost(monkeypatch) -> FakeCard:
    """A card on which nothing works once `SLOW` has run."""

    def fails(*_: object, **__: object) -> float:
        raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might")

    def us(record):
        if record != SLOW:
            return US[record]
        monkeypatch.setattr(torch, "ones", fails)
        return fails()

    return FakeCard(us)


def test_a_lost_card_ends_the_measuring_and_what_was_measured_stays(card, monkeypatch):
    fake = _lost(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", pytest.fail)  # of a card alone
    done, lost = progress.measuring([_choice(FAST), None, _choice(SLOW)], _card(fake, 5))
    assert [x and x.config for x in done] == [FAST, None]
    assert lost == (
        "the card is lost at toy with Tile(block=32, num_warps=8): RuntimeError: CUDA error: an "
        "illegal memory access"
    )
    assert progress.measuring([_choice(FAST)], _card(card, 5))[1] == ""


@pytest.mark.skipif(backend.interpreted(), reason="compiles")
def test_a_lost_card_is_one_sentence_and_files(tmp_path, monkeypatch):
    """The command, with stand-ins for all that compiles."""
    first, second = _choice(FAST), _choice(SLOW)
    monkeypatch.setattr(search, "problems", lambda *_, **__: [first.problem, second.problem])
    monkeypatch.setattr(tune, "search", lambda found, setup: [first, second])
    monkeypatch.setattr(tune, "default_of", lambda op: default_tile)
    monkeypatch.setattr(commands_tune, "_card", lambda top, arch: (_card(lost, top), 89))
    lost = _lost(monkeypatch)
    arguments = ["tune", "count_missing", "--out", str(tmp_path), "--state", "/dev/null"]
    ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1] == (
        "Error: the card is lost at toy with Tile(block=32, num_warps=8): RuntimeError: CUDA "
        "error: an illegal memory access; what it measured before is written, 1 of 2 keys"
    )
    (entry,) = config.read(tmp_path / GPU / "toy.json", "toy", GPU)
    assert (entry["source"], entry["config"]) == ("measured", {"block": 64, "num_warps": 4})


def _choice(*ranking: Tile) -> Choice:
    return Choice(_problem(*ranking), ranking[0], 1.0, 2.0, ranking)


def _card(fake: FakeCard, top: int) -> tune.Card:
    return tune.Card(fake, "NVIDIA GeForce RTX 4090", "555.1", top)


def test_the_fastest_of_the_best_few_is_chosen(card):
    choice = tune.measure(_choice(SLOW, FAST, EQUAL), _card(card, 2))
    assert choice is not None
    assert (choice.config, choice.us, choice.default_us) == (FAST, 12.0, 20.0)
    assert len(card.inputs) == 6  # the default and two, in two cases


def test_what_the_ranking_leaves_out_is_not_measured(card):
    choice = tune.measure(_choice(SLOW, FAST), _card(card, 1))
    assert choice is not None
    assert choice.config == DEFAULT


def test_a_card_cannot_tell_a_hundredth_apart(card):
    choice = tune.measure(_choice(EQUAL), _card(card, 5))
    assert choice is not None
    assert choice.config == DEFAULT


def test_an_unsound_default_is_not_run(card, monkeypatch):
    monkeypatch.setattr(tune, "default_of", lambda op: default_tile)
    choice = tune.measure(replace(_choice(SLOW, FAST), default_us=None), _card(card, 2))
    assert choice is not None
    assert (choice.config, choice.us, choice.default_us) == (FAST, 12.0, None)
    assert len(card.inputs) == 4  # two configs in two cases
    assert tune.entry_of(choice, None)["default_us"] is None


def test_an_entry_says_where_it_was_measured(card, monkeypatch):
    monkeypatch.setattr(tune, "default_of", lambda op: default_tile)
    choice = tune.measure(_choice(FAST), _card(card, 1))
    assert choice is not None
    entry = tune.entry_of(choice, _card(card, 1))
    assert (entry["source"], entry["device"], entry["driver"]) == (
        "measured", "NVIDIA GeForce RTX 4090", "555.1",
    )  # fmt: skip
    assert entry["triton"].count(".") == 2  # the one version that it was measured on
    modelled = tune.entry_of(choice, None)
    assert (modelled["source"], "device" in modelled) == ("modelled", False)
