"""A whole search on stand-ins, and one of a real op that is repeated byte for byte.

Mutants tried: hosts not asked, the next best not tried after a host's refusal, the default not
written where nothing beats it, keys without a choice written, a default that cannot be compared
with counted as one that was kept, candidates in the order of a set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from autotune import cli, search, trials, tune
from autotune.search import Launch, Trial
from autotune.state import State
from ftkernels import backend, config
from tests.autotune.toy import HOST, TOY, Tile

ROOT = Path(__file__).parents[2]
GPU = "nvidia_geforce_rtx_4090"
LAUNCH = Launch("k", 64, 0, 0, 16, True, None, 0, 0)
INSIDE = (("I", 128), ("T", 512))


def score(spec, case, launches) -> float:
    """Larger blocks and fewer warps are faster, by much."""
    return 1000.0 / launches[0].block + launches[0].num_warps


@pytest.fixture
def setup(monkeypatch):
    """The compiler is a stand-in: 64 does not fit inside `host`, 8 warps of 16 spill."""

    def compile_launches(spec, case, *, arch):
        heard: list[config.Found] = []
        with config.watch(heard.append):
            spec.op(*spec.inputs(case, device="meta", seed=0)[0])
        return [replace_in(heard[0].config, spec.name)]

    def replace_in(record, op):
        record = Tile(record.block, record.num_warps)
        object.__setattr__(record, "op", op)
        return record

    def launch(record):
        fits = not (record.op == "host" and record.block == 64)
        spills = 8 * (record.block == 16 and record.num_warps == 8)
        return replace(LAUNCH, fits=fits, spill_bytes=spills)

    for module in (search, tune):
        monkeypatch.setattr(module, "registry", lambda: (TOY, HOST))
    monkeypatch.setattr(trials, "_spec", {"toy": TOY, "host": HOST}.__getitem__)
    monkeypatch.setattr(trials, "compile_launches", compile_launches)
    monkeypatch.setattr(trials, "_is_described", lambda spec, case, x: True)
    monkeypatch.setattr(trials, "_launch", launch)
    return tune.Setup(89, score, "", State(None, print), 1)


def test_the_best_that_its_hosts_can_take_is_chosen(setup):
    found = search.problems([TOY], arch=89)
    choices = tune.search(found, setup)
    by_key = {choice.problem.key: choice for choice in choices if choice is not None}
    # inside the host 64 does not fit, whatever the warps: 32 is next, and the default is 64
    assert by_key[INSIDE].config == Tile(64, 4)
    assert by_key[(("I", 128), ("T", 1))].config == Tile(64, 4)
    assert by_key[(("I", 128), ("T", 1))].problem.default == Tile(16, 4)
    assert dict(by_key[(("I", 128), ("T", 1))].dropped) == {"spills": 1}


def test_after_a_hosts_refusal_the_next_best_is_tried(setup, monkeypatch):
    small = replace(TOY, default=lambda key: Tile(16, 4))
    for module in (search, tune):
        monkeypatch.setattr(module, "registry", lambda: (small, HOST))
    monkeypatch.setattr(trials, "_spec", {"toy": small, "host": HOST}.__getitem__)
    choices = tune.search(search.problems([small], arch=89), setup)
    choice = next(x for x in choices if x is not None and x.problem.key == INSIDE)
    assert choice.config == Tile(32, 4)
    assert dict(choice.dropped) == {"spills": 1, "does not fit inside host": 2}


def test_what_no_figure_could_choose_is_not_compiled(setup, monkeypatch):
    monkeypatch.setattr(trials, "_is_described", lambda spec, case, x: False)
    for prune, tried in ((True, 1), (False, 6)):
        expected: list[int] = []
        asked = replace(setup, prune=prune, expect=expected.append)
        choices = tune.search(search.problems([TOY], arch=89), asked)
        assert expected == [4 * tried]
        assert [x.tried for x in choices if x is not None] == [tried] * 4
        assert all(x.config == x.problem.default for x in choices if x is not None)


def test_every_key_with_candidates_has_an_entry(setup, tmp_path):
    found = search.problems([TOY], arch=89)
    choices = tune.search(found, setup)
    (path,) = tune.write(choices, tmp_path, GPU)
    entries = json.loads(path.read_text())["entries"]
    assert [tuple(x["key"].items()) for x in entries] == sorted(x.key for x in found)
    for entry in entries:
        assert entry["source"] == "modelled"
        assert entry["triton"] == tune.VERSIONS
        assert set(entry["config"]) == {"block", "num_warps"}
        assert entry["us"] <= entry["default_us"]
    unsound = [None if x is choices[0] else x for x in choices]
    (path,) = tune.write(unsound, tmp_path / "b", GPU)
    assert len(json.loads(path.read_text())["entries"]) == len(found) - 1


def test_one_config_needs_no_entry(setup, tmp_path):
    bare = [replace(x, candidates=(x.default,)) for x in search.problems([TOY], arch=89)]
    assert tune.write(tune.search(bare, setup), tmp_path, GPU) == []


def test_a_summary_counts_keys_configs_rules_and_gains(setup):
    found = search.problems([TOY], arch=89)
    (summary,) = tune.summaries(found, [*tune.search(found, setup)[:-1], None])
    assert (summary.op, summary.keys, summary.candidates, summary.unsound) == ("toy", 4, 24, 1)
    assert summary.tried == 18
    assert dict(summary.dropped) == {"spills": 3}
    # of 1000/16 + 4 us 1000/64 + 4 are left
    assert summary.gains == pytest.approx((1 - 19.625 / 66.5,))
    assert (summary.kept, summary.replaced) == (2, 0)


def test_a_key_whose_default_is_unsound_gains_nothing_that_counts(setup):
    choices = tune.search(search.problems([TOY], arch=89), setup)
    choices[0] = replace(choices[0], default_us=None)
    (summary,) = tune.summaries([x.problem for x in choices], choices)
    assert (len(summary.gains), summary.kept, summary.replaced) == (1, 2, 1)
    assert tune.entry_of(choices[0], None)["default_us"] is None


def test_the_versions_are_those_that_the_library_supports():
    oldest, newest = backend._OLDEST_TRITON, backend._NEWEST_TRITON
    assert tune.VERSIONS.split() == [f"3.{n}" for n in range(oldest[1], newest[1] + 1)]


@dataclass(frozen=True)
class Named:
    """A config whose hash is another in every process."""

    name: str


def choices_of_names() -> str:
    """All that a search follows from and ends in, where every config is as good as the others."""
    names = [Named(f"{x}-{y}") for x in "abcd" for y in "efg"]
    spec = replace(TOY, default=lambda key: Named("z"), candidates=lambda *_: names)
    with mock.patch.object(search, "registry", return_value=(HOST, spec)):
        found = search.problems([spec], arch=89)
    lines = []
    for problem in found:
        trials = dict.fromkeys(problem.candidates, Trial((1.0,) * len(problem.users), (LAUNCH,)))
        trials[problem.default] = Trial(error="does not compile")
        lines.append(f"{problem} {search.choose(problem, trials, margin=0.1)}")
    return "\n".join(lines)


def test_ranks_whose_hashes_differ_choose_the_same():
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", "from tests.autotune import test_tune as t\n"
         "print(t.choices_of_names())"], cwd=ROOT, text=True, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
    )  # fmt: skip
    here = choices_of_names()
    assert here == done.stdout.strip()
    assert here.count("config=Named(name='a-e')") == 4


@pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
def test_every_process_and_run_chooses_the_same(tmp_path):
    """What TP ranks rely on: files of two runs, one of them in worker processes, byte for byte."""
    arguments = ["adjust_logits", "--state", os.devnull, "--out"]
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", *arguments, str(tmp_path / "a"), "--jobs", "1"])
    assert not end.value.code
    subprocess.run(
        [sys.executable, "-m", "autotune", "tune", *arguments, str(tmp_path / "b"), "--jobs", "2"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    one, two = (tmp_path / name / GPU / "adjust_logits.json" for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    assert len(json.loads(one.read_text())["entries"]) == 1
