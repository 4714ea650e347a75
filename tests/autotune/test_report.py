"""Before and after of each key.

Mutants tried: the entry's figures on both sides, keys without entries left out, the most warps in
place of the fewest, modelled microseconds in place of an entry's own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import report, search, trials, tune
from autotune.search import Launch
from autotune.trials import State
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
def rows(monkeypatch):
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
    found = search.problems([TOY], arch=89)
    return report.rows(found, {("toy", KEY): ENTRY}, setup)


def test_a_key_with_an_entry_shows_both_sides(rows):
    row = rows[0]
    assert (row.op, row.key, row.source) == ("toy", dict(KEY), "measured")
    assert row.before == report.Side({"block": 16, "num_warps": 4}, 4.5, 32, 0, 160, 5)
    assert row.after == report.Side({"block": 64, "num_warps": 8}, 3.25, 128, 0, 640, 9)


def test_a_key_without_an_entry_shows_the_default_twice(rows):
    assert len(rows) == 4
    for row in rows[1:]:
        assert row.source == "default"
        assert row.before == row.after
    assert [row.before.us for row in rows[1:]] == [128.0, 64.0, 16.0]  # two cases, one, one


def test_rows_are_plain_for_json(rows):
    data = rows[0].as_dict()
    assert list(data) == ["op", "key", "source", "before", "after"]
    assert data["after"]["config"] == {"block": 64, "num_warps": 8}
