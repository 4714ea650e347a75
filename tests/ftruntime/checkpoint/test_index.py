"""Every kind of damage gets one sentence that names file, tensor, what was found and what is
expected.

Mutants tried: no overlap check; a file one byte short accepted; drafts not filtered; shapes not
compared.
"""

from __future__ import annotations

import json
import logging
import re

import pytest

from ftruntime.checkpoint.index import open_checkpoint, read_index
from ftruntime.model.config import ModelConfig

INDEX = "model.safetensors.index.json"
WQ_A = "layers.0.attn.wq_a.weight"
WKV = "layers.0.attn.wkv.weight"


def _open(directory):
    return open_checkpoint(directory, ModelConfig.from_dir(directory))


def _refused(directory, *parts):
    with pytest.raises(ValueError, match=r".") as caught:
        _open(directory)
    text = str(caught.value)
    for part in parts:
        assert str(part) in text, f"{part!r} not in {text!r}"
    assert "\n" not in text


def _edit_index(directory, change):
    file = directory / INDEX
    data = json.loads(file.read_text("utf-8"))
    change(data)
    file.write_text(json.dumps(data), "utf-8")


def test_a_demo_checkpoint_is_valid_and_drafts_are_left_out(demo):
    index = _open(demo)
    weight_map = json.loads((demo / INDEX).read_text("utf-8"))["weight_map"]
    drafts = {name for name in weight_map if name.startswith("mtp.")}
    assert len(drafts) > 100
    assert set(index.entries) == set(weight_map) - drafts


def test_offsets_equal_the_safetensors_library(tiny):
    safetensors = pytest.importorskip("safetensors")
    for name in ("embed.weight", "layers.5.ffn.gate.bias", "norm.weight"):
        entry = read_index(tiny).entries[name]
        with safetensors.safe_open(entry.file, framework="pt") as file:
            value = file.get_tensor(name)
        raw = entry.file.read_bytes()[entry.start : entry.end]
        assert raw == value.contiguous().view(-1).view(dtype=_uint8()).numpy().tobytes()
        assert entry.shape == tuple(value.shape)


def _uint8():
    import torch

    return torch.uint8


def test_a_single_file_needs_no_index(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = {}
    for shard in sorted(tiny.glob("*.safetensors")):
        tensors.update(load_file(shard))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    assert set(_open(tmp_path).entries) == set(_open(tiny).entries)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds neither model"):
        read_index(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        read_index(tmp_path / "absent")


def test_missing_shard(damaged, shard_of):
    shard = shard_of(damaged, WQ_A)
    shard.unlink()
    _refused(damaged, shard, "does not exist, expected the shard that", INDEX)


def test_a_shard_of_drafts_alone_may_be_absent(damaged):
    def move(data):
        for name in data["weight_map"]:
            if name.startswith("mtp."):
                data["weight_map"][name] = "model-draft.safetensors"

    _edit_index(damaged, move)
    assert WQ_A in _open(damaged).entries


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_truncated_shard(damaged, shard_of, keep):
    shard = shard_of(damaged, WQ_A)
    raw = shard.read_bytes()
    shard.write_bytes(raw[: int(len(raw) * keep)])
    _refused(damaged, shard, "tensor ", "what the file holds (is it truncated?)")


def test_one_byte_short(damaged, shard_of):
    shard = shard_of(damaged, WQ_A)
    shard.write_bytes(shard.read_bytes()[:-1])
    _refused(damaged, shard, "is it truncated?")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01\x02", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\xff" * 64],
    ids=["empty", "short", "lfs-pointer", "huge-header"],
)
def test_not_a_safetensors_file(damaged, shard_of, content):
    shard = shard_of(damaged, WQ_A)
    shard.write_bytes(content)
    _refused(damaged, shard, f"is {len(content)} bytes", "expected a safetensors file")


@pytest.mark.parametrize(
    ("header", "part"), [(b"{not json", "not valid JSON"), (b"[1, 2]", "is a list")], ids=str
)
def test_bad_header(damaged, shard_of, header, part):
    shard = shard_of(damaged, WQ_A)
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    _refused(damaged, shard, part)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not valid JSON"),
        ("[]", "weight_map is null"),
        ('{"weight_map": {}}', "weight_map is {}"),
        ('{"weight_map": {"embed.weight": "../x.safetensors"}}', "the shard of embed.weight is"),
        ('{"weight_map": {"embed.weight": 3}}', "the shard of embed.weight is 3"),
        ("[" * 100000, "is not valid JSON"),
    ],
    ids=["cut", "list", "empty", "outside", "number", "deep"],
)
def test_bad_index(damaged, text, part):
    (damaged / INDEX).write_text(text, "utf-8")
    _refused(damaged, damaged / INDEX, part)


def test_tensor_missing_from_the_index(damaged):
    _edit_index(damaged, lambda data: data["weight_map"].pop(WQ_A))
    _refused(damaged, INDEX, f"tensor {WQ_A} is missing", "expected F8_E4M3 [128, 128]")


def test_tensor_missing_from_its_shard(damaged, shard_of, edit_header):
    edit_header(shard_of(damaged, WQ_A), lambda header: header.pop(WQ_A))
    _refused(damaged, shard_of(damaged, WQ_A), f"tensor {WQ_A} is missing", INDEX)


def test_wrong_shape(damaged, shard_of, edit_header):
    edit_header(shard_of(damaged, WQ_A), lambda h: h[WQ_A].update(shape=[64, 256]))
    _refused(
        damaged, shard_of(damaged, WQ_A), WQ_A, "F8_E4M3 [64, 256]", "expected F8_E4M3 [128, 128]"
    )


def test_wrong_dtype(damaged, shard_of, edit_header):
    edit_header(shard_of(damaged, WQ_A), lambda h: h[WQ_A].update(dtype="F8_E5M2"))
    _refused(damaged, shard_of(damaged, WQ_A), WQ_A, "is F8_E5M2", "expected F8_E4M3 [128, 128]")


def test_config_and_weights_disagree(damaged):
    file = damaged / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "vocab_size": 1024}), "utf-8")
    _refused(damaged, "embed.weight is BF16 [512, 128]", "expected BF16 [1024, 128]")


def test_q04_unknown_dtype_names_the_version(damaged, shard_of, edit_header):
    edit_header(shard_of(damaged, WQ_A), lambda h: h[WQ_A].update(dtype="F8_E9M0"))
    _refused(
        damaged,
        shard_of(damaged, WQ_A),
        f"tensor {WQ_A} has dtype 'F8_E9M0'",
        "needs a reader of a newer safetensors version",
    )


def test_size_and_shape_disagree(damaged, shard_of, edit_header):
    edit_header(shard_of(damaged, WQ_A), lambda h: h[WQ_A].update(shape=[128, 127]))
    _refused(damaged, WQ_A, "expected 16256 bytes for F8_E4M3 [128, 127]")


def test_overlapping_tensors(damaged, shard_of, edit_header):
    def shift(header):
        start, end = header[WQ_A]["data_offsets"]
        header[WQ_A]["data_offsets"] = [start + 64, end + 64]

    edit_header(shard_of(damaged, WQ_A), shift)
    _refused(damaged, shard_of(damaged, WQ_A), "starts at byte", f"expected it behind {WQ_A}")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"dtype": "BF16"},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 1]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [0, 1, 2]},
        {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]},
    ],
    ids=str,
)
def test_malformed_header_entry(damaged, shard_of, edit_header, entry):
    edit_header(shard_of(damaged, WKV), lambda header: header.update({WKV: entry}))
    _refused(damaged, shard_of(damaged, WKV), WKV, "expected dtype, shape and data_offsets")


def test_extra_tensors_are_one_warning(damaged, shard_of, edit_header, caplog):
    shard = shard_of(damaged, WQ_A)

    def add(header):
        header["surplus.b"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header["surplus.a"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}

    edit_header(shard, add)
    names = {"surplus.b": shard.name, "surplus.a": shard.name}
    _edit_index(damaged, lambda data: data["weight_map"].update(names))
    with caplog.at_level(logging.WARNING, logger="ftruntime.checkpoint.index"):
        _open(damaged)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert re.search(r"count=2 first=surplus\.b", lines[0])
