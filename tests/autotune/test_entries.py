"""What a folder's files hold: what lookups take, what is spare, what is wrong and why.

Mutants tried: entries behind a measured one taken for ignored, the figures unchecked, an endless
time let through, the first wrong entry ending the file, the number counted from 0, times of any
length, keys of damaged entries, files without entries asked for each key.
"""

from __future__ import annotations

import json

import pytest

from autotune import entries
from ftkernels import config
from tests.autotune.toy import ENTRY, HOST, TOY

GPU = "nvidia_geforce_rtx_4090"


@pytest.fixture
def read(tmp_path):
    """What is found when `toy` has a file of the given entries."""

    def read(*found: object) -> entries.Found:
        head = {"op": "toy", "gpu": GPU, "schema": config.SCHEMA}
        path = tmp_path / GPU / "toy.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**head, "entries": found}))
        return entries.read(tmp_path, GPU, [TOY, HOST])

    return read


US = "expected 0.1 to 1000000 microseconds"
WRONG = {
    "no object": (7, "entry 1: ignored for not being an object"),
    "nothing": ({}, "entry 1: ignored for a damaged key"),
    "a list for a key": ({**ENTRY, "key": [1]}, "entry 1: ignored for a damaged key"),
    "a list in a key": ({**ENTRY, "key": {"T": [1]}}, "T=[1]: ignored for a damaged key"),
    "no config": ({**ENTRY, "config": None}, "I=128 T=512: ignored for a damaged entry"),
    "a config of text": ({**ENTRY, "config": "b"}, "I=128 T=512: ignored for a damaged entry"),
    "no hash": ({**ENTRY, "source_hash": None}, "I=128 T=512: ignored for a damaged entry"),
    "an unknown field": (
        {**ENTRY, "config": {"blocks": 1}}, "I=128 T=512: ignored for an unknown field",
    ),
    "stale": ({**ENTRY, "source_hash": "0"}, "I=128 T=512: ignored for another source hash"),
    "no time": ({**ENTRY, "us": None}, f"I=128 T=512: us is None, {US}"),
    "no number": ({**ENTRY, "us": True}, f"I=128 T=512: us is True, {US}"),
    "an endless time": ({**ENTRY, "us": 10**999}, None),
    "less than a launch": (
        {**ENTRY, "us": 0.09}, f"I=128 T=512: us is 0.09, {US}"
    ),
    "more than a second": (
        {**ENTRY, "default_us": 1000001},
        f"I=128 T=512: default_us is 1000001, {US}",
    ),
    "a text for a time": (
        {**ENTRY, "default_us": "2"},
        f"I=128 T=512: default_us is '2', {US}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_and_spoils_no_other(wrong, told, read):
    good = {**ENTRY, "key": {"I": 7, "T": 16}, "default_us": None}
    found = read(wrong, good)
    assert found.taken == [("toy", good)]
    assert found.spare == []
    (sentence,) = found.wrong
    if told is not None:
        assert sentence == f"toy.json: {told}"
    else:
        assert sentence.endswith(US)
    # lookups read no times
    assert found.ignored == ({"toy": 1} if ": ignored for" in sentence else {})


def test_a_second_entry_of_a_key_is_ignored(read):
    found = read(ENTRY, {**ENTRY, "us": 2.0})
    assert [entry["us"] for _, entry in found.taken] == [1.0]
    assert found.wrong == ["toy.json: I=128 T=512: ignored for a key that an entry before it has"]


def test_what_stands_behind_a_measured_entry_is_spare(read):
    measured = {**ENTRY, "source": "measured"}
    found = read(ENTRY, measured)
    assert (found.taken, found.spare) == ([("toy", measured)], [("toy", ENTRY)])
    assert found.wrong == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"[" * 10**5], ids=["", "list", "ff", "deep"]
)
def test_damaged_files_are_one_sentence(content, read, tmp_path):
    read()
    (tmp_path / GPU / "toy.json").write_bytes(content)
    found = entries.read(tmp_path, GPU, [TOY])
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith("toy.json: ignored, ")
    assert found.ignored == {"toy": 1}


def test_keys_are_those_of_all_entries(read):
    """An entry that is ignored is wrong for a reason of its own, and no key is without one."""
    stale = {**ENTRY, "key": {"T": 1, "I": 7}, "source_hash": "0"}
    found = read(ENTRY, stale, 7, {**ENTRY, "key": {"T": [1]}})
    first, second, third = ((("I", 128), ("T", 512)), (("I", 7), ("T", 1)), (("I", 9), ("T", 1)))
    assert found.keys == {"toy": {first, second}}
    needed = [("toy", first), ("toy", third), ("toy", second), ("host", third)]
    assert entries.unserved(found, needed) == [
        "toy.json: I=9 T=1: no entry, expected what `ft-autotune tune toy` writes"
    ]
    assert entries.unserved(read(), needed) == []
