"""Entries checked by value, through the lookup of serving; what is wrong is named.

Mutants tried: the lookup not heard, its source not compared, any bucket taken for the entry's,
values not compared, the config not pinned for fewer rows, sizes left as they are, any config let
through, entries behind measured ones run, an op that ends in an error ending the command.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from autotune import entries, search, verify
from ftkernels import config, registry
from tests.autotune.toy import ENTRY, HOST, TOY, Tile, default_tile

GPU = "nvidia_geforce_rtx_4090"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Writes entries of `toy` where lookups read them and verifies them."""
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()

    def run(*given: dict[str, object], spec=TOY, most_work=1e9) -> list[verify.Checked]:
        for module in (search, verify):
            monkeypatch.setattr(module, "registry", lambda: (spec, HOST))
        path = tmp_path / GPU / "toy.json"
        path.parent.mkdir(exist_ok=True)
        head = {"op": "toy", "gpu": GPU, "schema": config.SCHEMA}
        path.write_text(json.dumps({**head, "entries": given}))
        config.forget()
        found = entries.read(tmp_path, GPU, [spec, HOST])
        assert found.wrong == []
        told: list[str] = []
        checked = verify.verify(
            found, verify.cases(89), arch=89, device="cpu", most_work=most_work,
            advance=told.append,
        )  # fmt: skip
        assert told == ["toy"] * len(given)
        return checked

    yield run
    config.forget()


def test_a_good_entry_runs_through_its_lookup(check):
    assert check(ENTRY) == [verify.Checked("toy", ENTRY["key"], "", True)]


def test_an_entry_that_only_another_op_looks_up_is_run_there(check):
    (checked,) = check({**ENTRY, "key": {"I": 7, "T": 16}})
    assert (checked.error, checked.ran) == ("", True)


def test_a_config_that_nothing_proposes_is_wrong(check):
    (checked,) = check({**ENTRY, "config": {"block": 32, "num_warps": 2}})
    assert checked.error == "its config is neither the default nor a candidate"
    assert not checked.ran
    default = vars(default_tile({"T": 300}))
    (checked,) = check({**ENTRY, "config": default})
    assert (checked.error, checked.ran) == ("", True)


def test_an_entry_behind_a_measured_one_is_looked_at_but_not_run(check):
    measured = {**ENTRY, "source": "measured", "config": {"block": 64, "num_warps": 8}}
    first, second = check(ENTRY, measured, spec=_wrong_with(32))
    assert [(x.error, x.ran) for x in (first, second)] == [("", True), ("", False)]
    (_, second) = check(measured, {**ENTRY, "config": {"block": 1, "num_warps": 8}})
    assert second.error == "its config is neither the default nor a candidate"


def test_a_lookup_that_gives_something_else_is_wrong():
    """The source counts: the config alone would not show that an entry is ignored."""
    given = config.Found("toy", {"T": 300, "I": 128}, Tile(32, 8), "default")
    told = "the lookup gives Tile(block=32, num_warps=8) (default)"
    assert verify.wrong_lookup([given], "toy", ENTRY, "T") == told
    given = config.Found("toy", {"T": 300, "I": 128}, Tile(64, 8), "modelled")
    told = "the lookup gives Tile(block=64, num_warps=8) (modelled)"
    assert verify.wrong_lookup([given], "toy", ENTRY, "T") == told


@pytest.mark.parametrize("most_work", [1e9, 11000.0], ids=["whole", "fewer rows"])
def test_an_entry_that_is_not_what_serving_finds_is_wrong(most_work, check):
    with config.pin("toy", Tile(16, 4)):
        (checked,) = check(ENTRY, most_work=most_work)
    assert checked.error == "the lookup gives Tile(block=16, num_warps=4) (pinned)"
    assert checked.ran == (most_work == 1e9)


@pytest.mark.parametrize("most_work", [1e9, 11000.0], ids=["whole", "fewer rows"])
def test_an_op_that_does_not_run_is_wrong(most_work, check):
    def toy(x: torch.Tensor) -> torch.Tensor:
        if config.lookup("toy", _sizes(x), default_tile, grows="T").block == 32 and not x.is_meta:
            raise OutOfResources(2, 1, "shared memory")
        return 2 * x

    (checked,) = check(ENTRY, spec=replace(TOY, op=toy), most_work=most_work)
    assert checked.error.startswith("it does not run, OutOfResources: out of resource: shared mem")


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


def _sizes(x: torch.Tensor) -> dict[str, int]:
    return {"T": x.shape[0], "I": x.shape[1]}


def _wrong_with(block: int):
    """An op that is wrong with one config only."""

    def toy(x: torch.Tensor) -> torch.Tensor:
        record = config.lookup("toy", _sizes(x), default_tile, grows="T")
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


def test_too_large_a_case_is_looked_up_all_the_same(check, monkeypatch):
    monkeypatch.setattr(verify, "lookups", lambda *_: [])
    (checked,) = check(ENTRY, most_work=1.0)
    assert (checked.error, checked.ran) == ("the op does not look it up", False)


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


@pytest.mark.parametrize(
    ("op", "name", "context"),
    [("mla_decode", "flash-tp8-csa", "length"), ("mla_prefill", "flash-tp8-csa", "T")],
)
def test_a_context_does_not_shrink_below_what_is_picked(op, name, context):
    """Each query picks 512 of the rows that stand for four tokens."""
    spec = next(x for x in registry() if x.name == op)
    case = next(x for x in spec.cases if x["name"] == name)
    found = {config.entry_key(x.key) for x in search.lookups(spec, case, 89) if x.op == op}
    (key,) = found
    shrunk = verify.smallest(spec, case, op, key, spec.grows, 89)
    tokens = shrunk.get("length") or shrunk["pos0"] + shrunk["T"]
    assert 2048 <= tokens < 2300
    _, kwargs = spec.inputs(shrunk, device="cpu", seed=0)
    assert int(kwargs["index_topk"].max()) < kwargs["cmp_kv"].shape[0] * kwargs["cmp_kv"].shape[1]


def test_the_smallest_keys_of_each_op_are_quick():
    found = [("a", {"key": {"T": t, "I": 3}}) for t in (8, 1, 4)] + [("b", {"key": {"T": 9}})]
    kept = verify.smallest_keys(found, 2)
    assert [(op, entry["key"]["T"]) for op, entry in kept] == [("a", 1), ("a", 4), ("b", 9)]
