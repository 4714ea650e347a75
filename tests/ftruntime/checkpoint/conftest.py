"""Demo checkpoints, made once a run, and copies of them to damage."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

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


def _stored(directory):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 not a dict
    return tensors


@pytest.fixture
def stored():
    """Every tensor of a checkpoint by name, read by the safetensors library."""
    return _stored


@pytest.fixture(scope="session")
def scattered(tiny, tmp_path_factory):
    """The tiny checkpoint in nine shards, its tensors dealt out at random."""
    directory = shutil.copytree(
        tiny, tmp_path_factory.mktemp("demo") / "scattered",
        ignore=shutil.ignore_patterns("*.safetensors"),
    )  # fmt: skip
    tensors = _stored(tiny)
    names = sorted(tensors)
    random.Random(1).shuffle(names)
    weight_map = {}
    for number in range(9):
        file = f"part-{(number * 5) % 9}.safetensors"
        save_file({name: tensors[name] for name in names[number::9]}, directory / file)
        weight_map |= dict.fromkeys(names[number::9], file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return directory


@pytest.fixture
def shard_of():
    """Path of the shard that holds a tensor."""

    def find(directory, name):
        index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
        return directory / index["weight_map"][name]

    return find


@pytest.fixture
def set_bytes(shard_of):
    """Overwrite the first bytes of a stored tensor in place."""

    def change(directory, name, data):
        file = shard_of(directory, name)
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        start = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
        raw[start : start + len(data)] = data
        file.write_bytes(raw)

    return change


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
