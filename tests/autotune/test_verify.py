"""Entries checked by value, through the lookup of serving; what is wrong is named.

Mutants tried: the lookup not heard, its source not compared, any bucket taken for the entry's,
values not compared, the config not pinned for fewer rows, sizes left as they are.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import triton

from autotune import search, verify
from ftkernels import config
from tests.autotune.toy import HOST, TOY, Tile, default_tile

GPU = "nvidia_geforce_rtx_4090"
ENTRY = {
    "key": {"I": 128, "T": 512}, "config": {"block": 32, "num_warps": 8}, "us": 1.0,
    "source": "modelled", "triton": triton.__version__,
    "source_hash": config.source_hash(default_tile),
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Writes entries of `toy` where lookups read them and verifies them."""
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()

    def run(*entries: dict[str, object], spec=TOY, most_work=1e9) -> list[verify.Checked]:
        for module in (search, verify):
            monkeypatch.setattr(module, "registry", lambda: (spec, HOST))
        path = tmp_path / GPU / "toy.json"
        path.parent.mkdir(exist_ok=True)
        head = {"op": "toy", "gpu": GPU, "schema": config.SCHEMA}
        path.write_text(json.dumps({**head, "entries": list(entries)}))
        config.forget()
        found = verify.entries(tmp_path, GPU, ["toy", "host"])
        told: list[str] = []
        checked = verify.verify(
            found, arch=89, device="cpu", most_work=most_work, advance=told.append
        )
        assert told == ["toy"] * len(entries)
        return checked

    yield run
    config.forget()


def test_a_good_entry_runs_through_its_lookup(check):
    assert check(ENTRY) == [verify.Checked("toy", ENTRY["key"], "", True)]


def test_an_entry_that_only_another_op_looks_up_is_run_there(check):
    (checked,) = check({**ENTRY, "key": {"I": 7, "T": 16}})
    assert (checked.error, checked.ran) == ("", True)


@pytest.mark.filterwarnings("ignore:config file")
@pytest.mark.parametrize(
    "change", [{"source_hash": "0" * 16}, {"triton": "3.1"}, {"config": {"num_warps": 3}}], ids=str
)
def test_an_entry_that_serving_ignores_is_wrong(change, check):
    (checked,) = check({**ENTRY, **change})
    assert checked.error.startswith("the lookup gives Tile(")
    assert "(default)" in checked.error


def test_an_entry_behind_another_of_its_key_is_wrong(check):
    first, second = check(ENTRY, {**ENTRY, "config": {"block": 64, "num_warps": 8}})
    assert first.error == "the lookup gives Tile(block=64, num_warps=8) (modelled)"
    assert second.error == ""


def test_an_entry_that_equals_the_default_is_not_the_default(check):
    """The config alone would not show that the entry is ignored."""
    same = {**ENTRY, "config": vars(default_tile({"T": 300})), "triton": "3.1"}
    with pytest.warns(UserWarning, match="config file"):
        (checked,) = check(same)
    assert checked.error == "the lookup gives Tile(block=64, num_warps=4) (default)"


def test_an_entry_for_no_case_is_wrong(check):
    (checked,) = check({**ENTRY, "key": {"I": 129, "T": 512}})
    assert (checked.error, checked.ran) == ("no case of the registry looks it up", False)


def test_other_keys_of_the_op_are_none_of_the_entrys_business():
    other = config.Found("toy", {"T": 9, "I": 7}, Tile(1, 1), "default")
    mine = config.Found("toy", {"T": 300, "I": 128}, Tile(32, 8), "modelled")
    assert verify.wrong_lookup([other, mine], "toy", ENTRY, "T") == ""
    assert verify.wrong_lookup([other], "toy", ENTRY, "T") == "the op does not look it up"


def test_an_exact_key_is_not_its_bucket(check):
    (checked,) = check({**ENTRY, "key": {"I": 128, "T": 300}})
    assert checked.error == "no case of the registry looks it up"


def _wrong_with(block: int):
    """An op that is wrong with one config only."""

    def toy(x: torch.Tensor) -> torch.Tensor:
        sizes = {"T": x.shape[0], "I": x.shape[1]}
        record = config.lookup("toy", sizes, default_tile, grows="T")
        return 2 * x + (record.block == block)

    return replace(TOY, op=toy)


@pytest.mark.parametrize("most_work", [1e9, 11000.0], ids=["whole", "fewer rows"])
def test_wrong_values_are_found(most_work, check):
    (checked,) = check(ENTRY, spec=_wrong_with(32), most_work=most_work)
    assert "values differ" in checked.error
    (checked,) = check(ENTRY, spec=_wrong_with(64), most_work=most_work)
    assert (checked.error, checked.ran) == ("", True)


def test_too_large_a_case_is_looked_up_only(check):
    (checked,) = check(ENTRY, spec=_wrong_with(32), most_work=1.0)
    assert (checked.error, checked.ran) == ("", False)
    with pytest.warns(UserWarning, match="config file"):
        (checked,) = check({**ENTRY, "triton": "3.1"}, most_work=1.0)
    assert checked.error.startswith("the lookup gives")


def test_sizes_shrink_as_far_as_the_key_allows(monkeypatch):
    case = {"name": "flash-tp1-t400", "T": 400, "I": 128, "S": 7}
    key = config.entry_key({"T": 512, "I": 128})
    small = verify.smallest(TOY, case, "toy", key, "T", 89)
    assert small == {**case, "T": 257, "S": 1}
    fewer = verify.smallest(TOY, case, "toy", key, "T", 89, any_bucket=True)
    assert fewer == {**case, "T": 1, "S": 1}
    for listed, vocab in (({}, 1), ({"N": 50}, 60)):
        small = verify.smallest(TOY, {**case, "V": 60, **listed}, "toy", key, "T", 89)
        assert small["V"] == vocab


def test_the_smallest_keys_of_each_op_are_quick():
    found = [("a", {"key": {"T": t, "I": 3}}) for t in (8, 1, 4)] + [("b", {"key": {"T": 9}})]
    kept = verify.smallest_keys(found, 2)
    assert [(op, entry["key"]["T"]) for op, entry in kept] == [("a", 1), ("a", 4), ("b", 9)]


def test_files_without_entries_are_named(tmp_path):
    path = tmp_path / GPU / "toy.json"
    path.parent.mkdir()
    path.write_text("{")
    assert verify.entries(tmp_path, GPU, ["toy", "host"]) == []
    assert verify.damaged(tmp_path, GPU, ["toy", "host"]) == [path]
