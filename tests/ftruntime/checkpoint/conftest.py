"""Demo checkpoints, made once a run, and copies of them to damage."""

from __future__ import annotations

import json
import shutil

import pytest

from ftruntime.demo import make_demo


@pytest.fixture(scope="session", params=["small", "tiny"])
def demo(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / request.param
    make_demo(directory, preset=request.param, seed=3)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "tiny"
    make_demo(directory, preset="tiny", seed=4)
    return directory


@pytest.fixture
def damaged(tiny, tmp_path):
    """A private copy of the tiny checkpoint."""
    return shutil.copytree(tiny, tmp_path / "damaged")


@pytest.fixture
def shard_of():
    """Path of the shard that holds a tensor."""

    def find(directory, name):
        index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
        return directory / index["weight_map"][name]

    return find


@pytest.fixture
def edit_header():
    """Rewrite the JSON header of a safetensors file in place; the data stays."""

    def edit(file, change):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return edit
