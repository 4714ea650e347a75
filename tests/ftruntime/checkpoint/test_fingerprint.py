"""Copies of a checkpoint are alike, others are not.

Mutants tried and seen red: only names or none, only the first bytes or the first file, files in the
order of the folder, other files of the folder counted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftruntime.checkpoint.fingerprint import fingerprint


def write(folder, seed: int, rows: int = 3000):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    for number in (2, 1):
        weight = torch.randn(rows, 64, generator=generator)
        save_file({"weight": weight}, folder / f"model-{number}.safetensors")
    return folder


def test_a_copy_is_the_same(tmp_path, monkeypatch):
    first = write(tmp_path / "a", 1)
    again = write(tmp_path / "b", 1)
    assert fingerprint(first) == fingerprint(again)
    (again / "README.md").write_text("a copy")
    assert fingerprint(first) == fingerprint(again)
    assert len(fingerprint(first)) == 12
    kept, glob = fingerprint(first), Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, text: reversed(sorted(glob(path, text))))
    assert fingerprint(first) == kept


def renamed(folder):
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")


def longer(folder):
    with (folder / "model-1.safetensors").open("ab") as stream:
        stream.write(b"0")


def exchanged(folder):
    (folder / "model-1.safetensors").rename(folder / "x")
    (folder / "model-2.safetensors").rename(folder / "model-1.safetensors")
    (folder / "x").rename(folder / "model-2.safetensors")


def one_is_missing(folder):
    (folder / "model-2.safetensors").unlink()


@pytest.mark.parametrize("change", [renamed, longer, exchanged, one_is_missing])
def test_a_changed_copy_differs(tmp_path, change):
    first = write(tmp_path / "a", 1)
    shutil.copytree(first, tmp_path / "b")
    change(tmp_path / "b")
    assert fingerprint(first) != fingerprint(tmp_path / "b")


@pytest.mark.parametrize("number", [1, 2])
def test_other_weights_of_the_same_shapes_differ(tmp_path, number):
    first, other = write(tmp_path / "a", 1), write(tmp_path / "b", 2)
    name = f"model-{number}.safetensors"
    mixed = shutil.copytree(first, tmp_path / "c")
    shutil.copy(other / name, mixed / name)
    # the files begin alike: the same header
    assert (first / name).read_bytes()[:64] == (mixed / name).read_bytes()[:64]
    assert fingerprint(first) != fingerprint(mixed)


def test_the_end_of_a_file_counts(tmp_path):
    first = write(tmp_path / "a", 1)
    second = shutil.copytree(first, tmp_path / "b")
    raw = bytearray((second / "model-1.safetensors").read_bytes())
    raw[len(raw) // 2 :] = bytes(len(raw) - len(raw) // 2)
    (second / "model-1.safetensors").write_bytes(raw)
    assert fingerprint(first) != fingerprint(second)


def test_no_weights(tmp_path):
    assert fingerprint(tmp_path) == fingerprint(tmp_path)
