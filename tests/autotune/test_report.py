"""Before and after of each key.

Mutants tried: the entry's figures on both sides, keys without entries left out, the most warps in
place of the fewest, modelled microseconds in place of a measured entry's own, 0 or a figure for
what is unsound, a default's figures called measured, an entry's own in place of modelled ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import report, search, trials, tune
from autotune.report_tables import print_rows
from autotune.search import Launch, Trial
from autotune.state import State
from ftkernels import config
from tests.autotune.toy import HOST, TOY

KEY = (("I", 128), ("T", 1))
ENTRY = {
    "key": dict(KEY), "config": {"block": 64, "num_warps": 8}, "us": 3.25, "default_us": 4.5,
    "source": "measured",
}  # fmt: skip


def score(spec, case, launches) -> float:
    return float(launches[0].block)


@pytest.fixture
def toy(monkeypatch):
    """The keys of `toy`, and a setup whose figures follow from the configs."""

    def compile_launches(spec, case, *, arch):
        record = config.lookup("toy", {"T": case["T"], "I": case["I"]}, spec.default, grows="T")
        return [record, replace(record, block=1)]

    def launch(record):
        return Launch("k", 2 * record.block, 0, 10 * record.block, record.num_warps + record.block,
                      True, None, 0, 0)  # fmt: skip

    for module in (search, tune):
        monkeypatch.setattr(module, "registry", lambda: (TOY, HOST))
    monkeypatch.setattr(trials, "_spec", {"toy": TOY, "host": HOST}.__getitem__)
    monkeypatch.setattr(trials, "compile_launches", compile_launches)
    monkeypatch.setattr(trials, "_is_described", lambda spec, case, x: True)
    monkeypatch.setattr(trials, "_launch", launch)
    setup = tune.Setup(89, score, "", State(None, print), 1)
    return search.problems([TOY], arch=89), setup


@pytest.fixture
def rows(toy):
    return report.rows(toy[0], {("toy", KEY): ENTRY}, toy[1])


def test_a_key_with_an_entry_shows_both_sides(rows):
    row = rows[0]
    assert (row.op, row.key, row.source) == ("toy", dict(KEY), "measured")
    assert row.before == report.Side({"block": 16, "num_warps": 4}, 4.5, "measured", 32, 0, 160, 5)
    assert row.after == report.Side({"block": 64, "num_warps": 8}, 3.25, "measured", 128, 0, 640, 9)


def test_a_key_without_an_entry_shows_the_default_twice(rows):
    assert len(rows) == 4
    for row in rows[1:]:
        assert row.source == "default"
        assert row.before == row.after
    assert [row.before.us for row in rows[1:]] == [128.0, 64.0, 16.0]  # two cases, one, one


def test_what_is_unsound_has_no_time(toy, monkeypatch):
    broken = Trial((), (), "does not compile")
    monkeypatch.setattr(report, "run", lambda jobs, *_, **__: [broken for _ in jobs])
    with_entry, *others = report.rows(toy[0], {("toy", KEY): {**ENTRY, "default_us": None}}, toy[1])
    assert (with_entry.before.us, with_entry.after.us) == (None, 3.25)
    assert {side.us for row in others for side in (row.before, row.after)} == {None}


def test_modelled_figures_are_those_of_now(toy):
    """Whatever the entry holds; unsound ones have none."""
    modelled = {**ENTRY, "source": "modelled", "us": 0.5, "default_us": None}
    row = report.rows(toy[0], {("toy", KEY): modelled}, toy[1])[0]
    assert (row.before.us, row.after.us) == (16.0, 64.0)
    assert {row.source, row.before.source, row.after.source} == {"modelled"}


def test_what_spills_has_no_time(toy, monkeypatch):
    spills = Trial((2.0,), (Launch("k", 255, 8, 0, 8, True, None, 0, 0),))
    monkeypatch.setattr(report, "run", lambda jobs, *_, **__: [spills for _ in jobs])
    assert {row.before.us for row in report.rows(toy[0], {}, toy[1])} == {None}


def test_figures_say_what_they_are(rows):
    sources = [(row.source, row.before.source, row.after.source) for row in rows]
    assert sources == [("measured",) * 3] + [("default", "modelled", "modelled")] * 3


def test_tables_are_of_100_columns(rows, capsys):
    print_rows(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.split()[:2] == ["I=128", "T=1"])
    assert "4.5 -> 3.25" in row
    assert row.split()[-1] == "measured"
    assert sum(line.split()[-1:] == ["modelled"] for line in lines) == 3


def test_what_is_compiled_is_announced_and_counted(toy):
    """The default of each of four keys, and one entry that is not the default."""
    told, done = [], []
    setup = replace(toy[1], expect=told.append, advance=lambda job, trial: done.append(job))
    report.rows(toy[0], {("toy", KEY): ENTRY}, setup)
    assert (told, len(done)) == ([5], 5)


def test_rows_are_plain_for_json(rows):
    data = rows[0].as_dict()
    assert list(data) == ["op", "key", "source", "before", "after"]
    assert data["after"]["config"] == {"block": 64, "num_warps": 8}
