"""Files of entries: what is merged, what is written, what serving reads back.

Mutants tried: entries in the order they came, stale ones kept, measured ones overwritten by
modelled ones and the reverse, modelled ones taken first, versions not taken from old entries, old
entries gone with their first version, a file written in place, no lock, read before the lock, the
half file left behind, damaged files written anew, half entries merged, a true schema taken for 1,
what killed writers left let be, that of running ones gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Thread

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
    assert config.read(path, "toy", GPU) == sorted(entries, key=lambda x: x["key"]["T"])


def test_new_entries_replace_those_of_their_key_only(root):
    store.write(root, GPU, "toy", [_entry(4, 16), _entry(8, 16)], default_tile)
    store.write(root, GPU, "toy", [_entry(8, 64), _entry(16, 64)], default_tile)
    assert _blocks(root) == [(4, 16), (8, 64), (16, 64)]


def test_stale_entries_are_left_out(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source_hash="0" * 16)], default_tile)
    store.write(root, GPU, "toy", [_entry(8, 64)], default_tile)
    assert _blocks(root) == [(8, 64)]


def test_measured_and_modelled_entries_stand_side_by_side(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source="measured", triton="3.1")], default_tile)
    store.write(root, GPU, "toy", [_entry(4, 32)], default_tile)
    assert _blocks(root) == [(4, 16), (4, 32)]
    store.write(root, GPU, "toy", [_entry(4, 64, source="measured")], default_tile)
    assert _blocks(root) == [(4, 64), (4, 32)]
    with target.offline(89):
        assert config.lookup("toy", {"T": 3, "I": 8}, default_tile, grows="T") == Tile(64, 2)


@pytest.mark.filterwarnings("ignore:config file")
@pytest.mark.parametrize("seed", range(5))
def test_no_process_loses_what_it_would_use(seed, root, monkeypatch):
    """Against a table of what each version of Triton last got, by key and source."""
    random, table = Random(seed), {}
    versions = ["3.6", "3.7", "3.8", "3.9"]
    for block in range(1, 13):
        t, source = random.choice([1, 4]), random.choice(["measured", "modelled"])
        good_for = random.sample(versions, random.randint(1, 3))
        written = " ".join(f"{x}.{random.randint(0, 9)}" for x in good_for)
        entry = _entry(t, block, source=source, triton=written)
        store.write(root, GPU, "toy", [entry], default_tile)
        table |= {(t, source, version): block for version in good_for}
        for version in versions:
            monkeypatch.setattr(triton, "__version__", f"{version}.1")
            for t in (1, 4):
                expected = table.get((t, "modelled", version), 16)  # the default's
                expected = table.get((t, "measured", version), expected)
                config.forget()
                with target.offline(89):
                    found = config.lookup("toy", {"T": t, "I": 8}, default_tile, grows="T")
                assert found.block == expected


@pytest.mark.parametrize("half", [7, {"key": {"T": [4]}}, _entry(4, 16, config=None)], ids=str)
def test_half_entries_are_not_merged(half):
    with pytest.raises(ValueError, match=r"^entry 2 is ignored for "):
        store.merged([_entry(4, 16), half], [], HASH)
    with pytest.raises(ValueError, match=r"^entry 3 is ignored for "):
        store.merged([_entry(4, 16), _entry(8, 16)], [half], HASH)


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
        "is damaged (entry 1 is ignored for a damaged entry)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_tuners_is_refused(content, told, root):
    path = root / GPU / "toy.json"
    path.parent.mkdir()
    path.write_bytes(content)
    sentence = f"config file {path} {told}, expected entries of toy for {GPU}, or no file"
    for refuse in (
        lambda: store.check(root, GPU, ["fine", "toy"]),
        lambda: store.write(root, GPU, "toy", [_entry(4, 16)], default_tile),
    ):
        with pytest.raises(ValueError, match="config file") as refused:
            refuse()
        assert str(refused.value) == sentence
    store.check(root, GPU, ["fine"])
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["toy.json"]


def test_stale_entries_are_the_tuners_all_the_same(root):
    store.write(root, GPU, "toy", [_entry(4, 16, source_hash="0", triton="9.9")], default_tile)
    store.check(root, GPU, ["toy"])


@pytest.mark.parametrize("culprit", ["replace", "write_text"])
def test_a_failed_write_leaves_the_file_as_it_was(culprit, root, monkeypatch):
    path = store.write(root, GPU, "toy", [_entry(4, 16)], default_tile)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        if culprit == "write_text":
            (path.parent / f".toy.json.{os.getpid()}").touch()
        raise OSError("full")

    monkeypatch.setattr(os if culprit == "replace" else Path, culprit, fail)
    with pytest.raises(OSError, match="full"):
        store.write(root, GPU, "toy", [_entry(8, 16)], default_tile)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["toy.json"]


def test_what_killed_writers_left_goes(root):
    """By the process in its name: the first one runs, nobody has the others' numbers."""
    folder = root / GPU
    folder.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = {".toy.json.1", ".toy.json.x", "toy.json.9999999", ".toy.txt.9999999", ".toy.json.0"}
    for name in (*kept, f".toy.json.{gone.pid}", ".other.json.9999999", ".toy.json." + "9" * 30):
        (folder / name).touch()
    store.write(root, GPU, "toy", [_entry(4, 16)], default_tile)
    assert set(os.listdir(folder)) == {*kept, "toy.json"}


def test_writers_at_the_same_time_lose_nothing_of_each_other(root, monkeypatch):
    """Processes and threads alike hold the folder; each reads slowly what it will replace."""
    read = config.read

    def slowly(*args: object) -> list[object]:
        found = read(*args)  # type: ignore[arg-type]
        time.sleep(0.01)
        return found

    monkeypatch.setattr(config, "read", slowly)
    store.write(root, GPU, "toy", [], default_tile)
    sizes = [1 << n for n in range(10)]
    with ThreadPoolExecutor(5) as pool:
        list(
            pool.map(lambda t: store.write(root, GPU, "toy", [_entry(t, 16)], default_tile), sizes)
        )
    assert _blocks(root) == [(t, 16) for t in sizes]


def test_a_writer_waits_for_another_process(root):
    store.write(root, GPU, "toy", [_entry(4, 16)], default_tile)
    descriptor = os.open(root / GPU, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = Thread(
        target=store.write, args=(root, GPU, "toy", [_entry(8, 16)], default_tile), daemon=True
    )
    waiting.start()
    waiting.join(0.1)
    assert _blocks(root) == [(4, 16)]
    os.close(descriptor)
    waiting.join(5)
    assert _blocks(root) == [(4, 16), (8, 16)]
