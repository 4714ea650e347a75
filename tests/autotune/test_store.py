"""Files of entries: what is merged, what is written, what serving reads back.

Mutants tried: entries in the order they came, stale ones kept, measured ones overwritten by
modelled ones, a file written in place.
"""

from __future__ import annotations

import json
import os

import pytest
import triton

from autotune import store
from ftkernels import config, target
from tests.autotune.toy import Tile, default_tile

GPU = "nvidia_geforce_rtx_4090"
HASH = config.source_hash(default_tile)


def _entry(t: int, block: int, **changes: object) -> dict[str, object]:
    entry = {
        "key": {"T": t, "I": 8}, "config": {"block": block, "num_warps": 2}, "us": 1.5,
        "source": "modelled", "triton": f"3.1 {triton.__version__}", "source_hash": HASH,
    }  # fmt: skip
    return {**entry, **changes}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()
    yield tmp_path
    config.forget()


def _blocks(root) -> list[tuple[int, int]]:
    data = json.loads((root / GPU / "toy.json").read_text())
    return [(x["key"]["T"], x["config"]["block"]) for x in data["entries"]]


def test_what_is_written_is_what_serving_finds(root):
    with target.offline(89):
        assert config.lookup("toy", {"T": 3, "I": 8}, default_tile, grows="T") == Tile(16, 4)
        store.write(root, GPU, "toy", [_entry(4, 32)], default_tile)
        assert config.lookup("toy", {"T": 3, "I": 8}, default_tile, grows="T") == Tile(32, 2)
        assert config.lookup("toy", {"T": 5, "I": 8}, default_tile, grows="T") == Tile(16, 4)


def test_the_same_entries_give_the_same_bytes_in_any_order(root):
    entries = [_entry(t, 16) for t in (512, 4, 64)]
    path = store.write(root / "a", GPU, "toy", entries, default_tile)
    again = store.write(root / "b", GPU, "toy", entries[::-1], default_tile)
    assert path.read_bytes() == again.read_bytes()
    assert [x["key"]["T"] for x in json.loads(path.read_text())["entries"]] == [4, 64, 512]
    assert store.read(path, "toy", GPU) == sorted(entries, key=lambda x: x["key"]["T"])


def test_new_entries_replace_those_of_their_key_only(root):
    store.write(root, GPU, "toy", [_entry(4, 16), _entry(8, 16)], default_tile)
    store.write(root, GPU, "toy", [_entry(8, 64), _entry(16, 64)], default_tile)
    assert _blocks(root) == [(4, 16), (8, 64), (16, 64)]


def test_stale_entries_are_left_out(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source_hash="0" * 16)], default_tile)
    store.write(root, GPU, "toy", [_entry(8, 64)], default_tile)
    assert _blocks(root) == [(8, 64)]


def test_measured_entries_give_way_to_measured_ones_only(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source="measured")], default_tile)
    store.write(root, GPU, "toy", [_entry(4, 32)], default_tile)
    assert _blocks(root) == [(4, 16)]
    store.write(root, GPU, "toy", [_entry(4, 64, source="measured")], default_tile)
    assert _blocks(root) == [(4, 64)]


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"op": "toy"}', b'{"op": "other", "entries": []}'], ids=str
)
def test_a_damaged_or_foreign_file_is_written_anew(content, root):
    path = root / GPU / "toy.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert store.read(path, "toy", GPU) == []
    store.write(root, GPU, "toy", [_entry(4, 16)], default_tile)
    assert _blocks(root) == [(4, 16)]


REFUSED = {
    "empty": (b"", "is damaged (Expecting value: line 1 column 1 (char 0))"),
    "no text": (b"\xff", "is damaged ('utf-8' codec can't decode byte 0xff in position 0: "
                "invalid start byte)"),
    "a list": (b"[]", "is damaged (it holds list, expected an object)"),
    "other op": (b'{"schema": 1, "op": "other"}', "is damaged (op is 'other', expected 'toy')"),
    "other schema": (b'{"schema": 2}', "is damaged (schema is 2, expected 1)"),
    "a true schema": (b'{"schema": true}', "is damaged (schema is True, expected 1)"),
    "deep": (b"[" * 10**5, "is damaged (it is nested too deeply)"),
    "half an entry": (
        json.dumps({"op": "toy", "gpu": GPU, "schema": 1, "entries": [{"key": {"T": 1}}]}).encode(),
        ": entry 1 is refused for a damaged entry",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_tuners_is_refused(content, told, root):
    path = root / GPU / "toy.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="config file") as refused:
        store.check(root, GPU, ["fine", "toy"])
    space = "" if told.startswith(":") else " "
    assert str(refused.value) == (
        f"config file {path}{space}{told}, expected entries of toy for {GPU}, or no file"
    )
    store.check(root, GPU, ["fine"])


def test_stale_entries_are_the_tuners_all_the_same(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source_hash="0", triton="9.9")], default_tile)
    store.check(root, GPU, ["toy"])


def test_a_failed_write_leaves_the_file_as_it_was(root, monkeypatch):
    path = store.write(root, GPU, "toy", [_entry(4, 16)], default_tile)
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        store.write(root, GPU, "toy", [_entry(8, 16)], default_tile)
    assert path.read_bytes() == before
