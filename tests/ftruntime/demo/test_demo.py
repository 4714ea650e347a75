"""The demo checkpoint: format, determinism, tokenizer, and greedy text that is alive.

Mutants tried: one random stream for all tensors; quiet rows left loud; `force` removing foreign
files; chat texts left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from ftruntime.demo import make_demo
from ftruntime.demo.vocabulary import ADDED_TOKENS, SPECIAL_TOKENS, readable_ids
from ftruntime.model.config import ModelConfig
from ftruntime.tokenizer.fixed_texts import FixedTexts
from tests.support.files import files_of
from tests.support.hf_model import build_hf

PROMPTS = ("Hello", "x" * 40)


@pytest.fixture(scope="module", params=["small", "tiny"])
def demo(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / request.param
    make_demo(directory, preset=request.param)
    return directory


@pytest.fixture(scope="module")
def tokenizer(demo):
    return Tokenizer.from_file(str(demo / "tokenizer.json"))


def _digests(directory):
    files = files_of(directory).items()
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files}


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        make_demo(tmp_path / "demo", preset="tiny")
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in files_of(tmp_path / "demo").values()}
    assert modes == {0o640}


def test_a_file_among_the_parents_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=f"{tmp_path}/file is a file, expected a directory"):
        make_demo(tmp_path / "file" / "a" / "b")


def test_files_and_index(demo):
    index = json.loads((demo / "model.safetensors.index.json").read_text("utf-8"))
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) >= 2
    assert shards == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert files_of(demo).keys() == {
        *shards, "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "model.safetensors.index.json", "encoding/encoding_dsv4.py",
    }  # fmt: skip
    total = 0
    stored = {}
    for shard in shards:
        with safe_open(demo / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, no iterator of its own
                total += file.get_tensor(name).nbytes
                stored[name] = shard
    assert stored == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    assert sum(file.stat().st_size for file in files_of(demo).values()) < 40e6


def test_chat_texts_come_along(demo, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ftruntime"):
        of_demo = FixedTexts.from_dir(demo)
    assert caplog.records == []
    without = FixedTexts.from_dir(tmp_path)
    assert of_demo.tools([{"name": "f"}]) == without.tools([{"name": "f"}])
    assert of_demo.response_format({"a": 1}) == without.response_format({"a": 1})
    assert of_demo.effort_max() == without.effort_max()


def test_runs_on_eight_ranks_and_has_every_layer_type(demo):
    config = ModelConfig.from_dir(demo)
    for size in (config.num_attention_heads, config.o_groups, config.vocab_size):
        assert size % 8 == 0
    assert config.moe_intermediate_size >= 256
    assert config.max_position_embeddings == 65536
    assert set(config.compress_ratios) == {0, 4, 128}
    assert 0 < config.num_hash_layers < config.num_hidden_layers


def test_same_seed_same_bytes(tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        make_demo(tmp_path / name, preset="tiny", seed=seed)
    first, second, other = (_digests(tmp_path / name) for name in "abc")
    assert first == second
    same = {name for name in first if first[name] == other[name]}
    assert same == {name for name in first if not name.startswith("model-")}


def test_small_is_made_in_seconds(tmp_path):
    calls = []
    start = time.process_time()
    make_demo(tmp_path / "demo", progress=lambda text, share: calls.append(share))
    assert time.process_time() - start < 10
    assert calls == sorted(calls)
    assert calls[-1] == 1.0


def test_refusals(tmp_path):
    target = tmp_path / "demo"
    with pytest.raises(ValueError, match="preset is 'large', expected one of small, tiny"):
        make_demo(target, preset="large")
    with pytest.raises(ValueError, match="seed is -1"):
        make_demo(target, seed=-1)
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    make_demo(target, preset="tiny")
    with pytest.raises(FileExistsError, match="is not empty"):
        make_demo(target, preset="tiny")
    make_demo(target, preset="tiny", seed=1, force=True)
    (target / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(FileExistsError, match=r"holds notes\.txt"):
        make_demo(target, preset="tiny", force=True)
    assert (target / "notes.txt").read_text("utf-8") == "mine"
    with pytest.raises(FileExistsError, match="is a file"):
        make_demo(target / "notes.txt", force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"]


def test_an_interrupted_call_leaves_nothing(tmp_path):
    def stop(text, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo(tmp_path / "demo", preset="tiny", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary(tokenizer, demo):
    assert tokenizer.get_vocab_size() == ModelConfig.from_dir(demo).vocab_size
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    for token in ADDED_TOKENS:
        ids = tokenizer.encode(f"a{token}b").ids
        assert tokenizer.token_to_id(token) in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"a{token}b"
    marked = "".join(SPECIAL_TOKENS)
    assert tokenizer.decode(tokenizer.encode(marked).ids, skip_special_tokens=True) == ""
    assert len(readable_ids(tokenizer)) >= 256


@pytest.mark.parametrize(
    "text", ["", "Hello, world", "naïve Ωμέγα 漢字 🙂", "a\n\n\tb  c", "\x00\x7f"], ids=repr
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert 0 not in ids  # no BOS of its own
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_scales_differ_from_block_to_block(demo):
    with safe_open(sorted(demo.glob("*.safetensors"))[0], framework="pt") as file:
        fp8 = file.get_tensor("layers.0.attn.wq_b.scale").view(torch.uint8)
        fp4 = file.get_tensor("layers.0.ffn.experts.0.w1.scale").view(torch.uint8)
    assert fp8.unique().numel() >= 2 or fp8.numel() < 3
    assert fp4.unique().numel() >= 3
    assert int(fp4.max()) < 127


def test_greedy_text_varies_with_the_prompt(demo, tokenizer):
    """200 greedy tokens of the transformers model: at least 50 distinct, readable, no short
    loop."""
    model = build_hf(demo)
    readable = set(readable_ids(tokenizer))
    texts = set()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)
        new = output[0, ids.shape[1] :].tolist()
        assert len(new) == 200
        assert len(set(new)) >= 50
        assert set(new) <= readable
        for period in range(1, 60):
            assert new[-2 * period : -period] != new[-period:]
        texts.add(tuple(new[:20]))
    assert len(texts) == len(PROMPTS)
