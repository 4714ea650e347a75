"""Where a demo checkpoint may be written, and that nothing else is ever removed.

Mutants run, each noticed: the installation's folder taken, the current directory replaced, another
model's config or a large file or a folder passed for a demo's, links not followed, a signal that
leaves the half folder, a full disk told as the library tells it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from ftruntime.demo import make_demo, write
from ftruntime.demo.presets import demo_config
from ftruntime.distribution import DEMO_DIRECTORY
from ftruntime.tokenizer.fixed_texts import FIXED_TEXTS_FILE


def fill(directory, force=True):
    with write.new_directory(directory, force=force) as partial:
        (partial / "config.json").write_text(json.dumps(demo_config("tiny")))


@pytest.fixture
def demo(tmp_path):
    fill(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.parametrize("part", [".", "sub", "sub/sub", ".."])
def test_the_folder_of_the_installation_is_refused(part):
    before = sorted(DEMO_DIRECTORY.iterdir())
    with pytest.raises(FileExistsError, match="is where this installation keeps its demo"):
        fill(DEMO_DIRECTORY / part)
    assert sorted(DEMO_DIRECTORY.iterdir()) == before


@pytest.mark.parametrize("name", [".", "", "sub/.."])
def test_the_current_directory_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match="is or holds the current directory"):
        fill(name)
    assert os.getcwd() == str(tmp_path)


def other_model(demo):
    (demo / "config.json").write_text('{"model_type": "llama"}')


def large(demo):
    os.truncate(demo / "config.json", 0)
    (demo / "config.json").write_text(json.dumps(demo_config("tiny")))
    with (demo / "model-00001-of-00046.safetensors").open("wb") as file:
        file.truncate(64_000_001)


def folder(demo):
    (demo / "tokenizer.json").mkdir()
    (demo / "tokenizer.json" / "mine").write_text("mine")


def beside_the_texts(demo):
    (demo / "encoding").mkdir(exist_ok=True)
    (demo / "encoding" / "mine.py").write_text("mine")


def a_folder_for_the_texts(demo):
    (demo / FIXED_TEXTS_FILE).unlink(missing_ok=True)
    (demo / FIXED_TEXTS_FILE).mkdir(parents=True)
    (demo / FIXED_TEXTS_FILE / "thesis.txt").write_text("mine")


def large_texts(demo):
    (demo / "encoding").mkdir(exist_ok=True)
    with (demo / FIXED_TEXTS_FILE).open("wb") as file:
        file.truncate(64_000_001)


def texts_alone(demo):
    for path in demo.iterdir():
        if path.is_file():
            path.unlink()
    (demo / "encoding").mkdir(exist_ok=True)
    (demo / FIXED_TEXTS_FILE).write_text("mine")


def no_config(demo):
    (demo / "config.json").unlink()
    (demo / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "held"),
    [(other_model, "a config.json of another model"), (large, "more than 64 MB"),
     (folder, "tokenizer.json"), (beside_the_texts, "encoding/mine.py"),
     (a_folder_for_the_texts, FIXED_TEXTS_FILE), (large_texts, "more than 64 MB"),
     (texts_alone, FIXED_TEXTS_FILE),
     (no_config, "tokenizer.json")],
)  # fmt: skip
def test_what_is_not_a_demo_is_not_replaced(change, held, demo):
    change(demo)
    before = sorted(demo.rglob("*"))
    with pytest.raises(FileExistsError, match=f"holds {held}, expected nothing but a demo"):
        fill(demo)
    assert sorted(demo.rglob("*")) == before


def test_links_are_followed(demo, tmp_path):
    (tmp_path / "link").symlink_to(demo)
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    old = (demo / "config.json").stat().st_ino
    fill(tmp_path / "link")
    assert (demo / "config.json").stat().st_ino != old
    fill(tmp_path / "dangling", force=False)
    assert (tmp_path / "later" / "config.json").is_file()
    links = [entry.name for entry in tmp_path.iterdir() if entry.is_symlink()]
    assert sorted(links) == ["dangling", "link"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number, tmp_path):
    program = f"""
import os
from ftruntime import cli
from ftruntime.demo import write
write._write_tensors = lambda *args: os.kill(os.getpid(), {int(number)})
cli.main(["make-demo", "demo", "--random", "--preset", "tiny"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 128 + number, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(OSError, match=r"safetensors cannot be written \(.*No space left"):
        make_demo(tmp_path / "demo", preset="tiny")
    assert list(tmp_path.iterdir()) == []
