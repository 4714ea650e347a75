"""Ranks that would decide differently do not start.

Mutants run, each noticed: any of the parts left out, a rank compared with itself, what rank 0 alone
or another alone has passed over, values of the two exchanged, a rank's own settings compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

import ftkernels
from ftkernels import config as tuned
from ftruntime.config import DeviceFacts, RuntimeConfig, resolve
from ftruntime.demo.presets import demo_config
from ftruntime.engine import agreement
from ftruntime.engine.agreement import digests, identity, require_alike
from ftruntime.engine.build import num_threads
from ftruntime.model.config import ModelConfig
from ftruntime.types import EngineFailedError

FACTS = DeviceFacts(kind="cpu", cards=0, memory_bytes=8 << 30)


@pytest.fixture
def directory(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(demo_config("tiny")))
    return tmp_path


def made(directory, **flags):
    config = RuntimeConfig.from_flags(**{"num_tokens": 4096, "tp": 2, **flags})
    plan = resolve(config, ModelConfig.from_dir(directory), FACTS)
    return identity(config, directory, plan)


def test_ranks_alike_start(directory):
    own = {"model": "/elsewhere", "host": "0.0.0.0", "port": 7, "api_key": "x"}
    assert made(directory) == made(directory, **own)
    require_alike([made(directory)] * 3)
    require_alike([made(directory), json.loads(json.dumps(made(directory, **own)))])


@pytest.mark.parametrize("name", ["version of torch", "version of triton"])
def test_versions_are_named_with_both(directory, name):
    ours = made(directory)
    with pytest.raises(EngineFailedError) as caught:
        require_alike([ours, ours, {**ours, name: "9.9"}])
    assert str(caught.value) == (
        f"{name} is 9.9 on rank 2 of 3, expected {ours[name]}, as on rank 0"
    )


@pytest.mark.parametrize(("flags", "flag", "theirs", "ours"), [
    ({"numerics": "exact"}, "--numerics", "exact", "official"),
    ({"moe_prefetch_layers": 0}, "--moe-prefetch-layers", "0", "1"),
    ({"decode_interleave_every": 8}, "--decode-interleave-every", "8", "unset"),
], ids=str)  # fmt: skip
def test_settings_are_named_as_flags(directory, flags, flag, theirs, ours):
    with pytest.raises(EngineFailedError) as caught:
        require_alike([made(directory), made(directory, **flags)])
    assert str(caught.value) == f"{flag} is {theirs} on rank 1 of 2, expected {ours}, as on rank 0"


def test_what_a_plan_came_to_is_named(directory):
    config = RuntimeConfig.from_flags(num_tokens=4096)
    plan = resolve(config, ModelConfig.from_dir(directory), FACTS)
    fewer = dataclasses.replace(plan, expert_slots=plan.expert_slots - 1)
    smaller = dataclasses.replace(plan, bytes={**plan.bytes, "experts": 5})
    for other, name, theirs, ours in (
        (fewer, "expert_slots", plan.expert_slots - 1, plan.expert_slots),
        (smaller, "bytes.experts", 5, plan.bytes["experts"]),
    ):
        with pytest.raises(EngineFailedError) as caught:
            require_alike([identity(config, directory, x) for x in (plan, other)])
        assert str(caught.value) == (
            f"plan: {name} is {theirs} on rank 1 of 2, expected {ours}, as on rank 0"
        )


@pytest.mark.parametrize(("change", "what"), [
    ("entry", "tuned configs: file {entry} is sha256 {there} on rank 1 of 2, expected {here},"),
    ("rename", "tuned configs: file {entry} is missing on rank 1 of 2, expected {here},"),
    ("more", "tuned configs: file other.json is sha256 {there} on rank 1 of 2, expected missing,"),
    ("kernel", "library: file target.py is sha256 {there} on rank 1 of 2, expected {here},"),
    ("model", "checkpoint: file config.json is sha256 {there} on rank 1 of 2, expected {here},"),
], ids=["entry", "rename", "more", "kernel", "model"])  # fmt: skip
def test_the_first_file_that_differs_is_named(directory, tmp_path, monkeypatch, change, what):
    ours = made(directory)
    package = Path(ftkernels.__file__).parent
    copy = tmp_path / "ftkernels"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(agreement.ftkernels, "__file__", str(copy / "__init__.py"))
    monkeypatch.setattr(tuned, "_ROOT", copy / "configs")
    assert made(directory) == ours
    entry = min((copy / "configs").rglob("*.json"))
    name = str(entry.relative_to(tuned.folder()))
    file = {"kernel": copy / "target.py", "model": directory / "config.json"}.get(change, entry)
    before = file.read_bytes()
    if change == "rename":
        entry.rename(entry.with_name("other.json"))
    elif change == "more":
        file = tuned.folder() / "other.json"
        file.write_bytes(b"{}")
    else:
        file.write_bytes(before + b"\n")
    here, there = (hashlib.sha256(x).hexdigest()[:12] for x in (before, before + b"\n"))
    if change == "more":
        there = hashlib.sha256(b"{}").hexdigest()[:12]
    with pytest.raises(EngineFailedError) as caught:
        require_alike([ours, made(directory)])
    expected = what.format(entry=name, there=there, here=f"sha256 {here}")
    assert str(caught.value) == f"{expected} as on rank 0"


def test_the_runtime_is_compared_too(directory, tmp_path, monkeypatch):
    ours = made(directory)
    assert "runtime: file engine/tp.py" in ours
    copy = tmp_path / "ftruntime"
    copy.mkdir()
    (copy / "__init__.py").write_bytes(Path(agreement.ftruntime.__file__).read_bytes())
    monkeypatch.setattr(agreement.ftruntime, "__file__", str(copy / "__init__.py"))
    with pytest.raises(EngineFailedError, match=r"^runtime: file \S+ is missing on rank 1 of 2"):
        require_alike([ours, made(directory)])


def test_weights_are_compared_too(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(bytes(100))
    ours = made(directory)
    weights.write_bytes(bytes(99) + b"1")
    with pytest.raises(EngineFailedError, match=r"^fingerprint of the weights is \w+ on rank 1 of"):
        require_alike([ours, made(directory)])


def test_digests_stand_for_all_of_it(directory):
    """The first is the same at every start, whatever memory is free then."""
    ours = made(directory)
    assert digests(ours) == digests(made(directory, port=7))
    assert len({digests(ours)[0], digests(made(directory, numerics="exact"))[0],
                digests({**ours, "version of torch": "9.9"})[0]}) == 3  # fmt: skip
    config = RuntimeConfig.from_flags(num_tokens=4096, tp=2)
    more = dataclasses.replace(FACTS, memory_bytes=9 << 30)
    plan = resolve(config, ModelConfig.from_dir(directory), more)
    then = digests(identity(config, directory, plan))
    assert then[0] == digests(ours)[0]
    assert then[1] != digests(ours)[1]


@pytest.mark.parametrize(("kind", "ranks", "cores", "threads"), [
    ("cpu", 1, 16, 1), ("cpu", 8, 16, 1), ("cuda", 8, 64, 8), ("cuda", 8, 4, 1), ("cuda", 3, 16, 5),
])  # fmt: skip
def test_a_rank_has_its_share_of_the_cores(kind, ranks, cores, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_threads(kind, ranks) == threads
