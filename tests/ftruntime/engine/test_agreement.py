"""Ranks that would decide differently do not start.

Mutants run, each noticed: any of the parts left out, a rank compared with itself, names of files
not hashed, a rank's own settings compared.
"""

from __future__ import annotations

import dataclasses
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
from ftruntime.engine.agreement import identity, require_alike
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
        f"rank 2 of 3 has {name} 9.9, expected {ours[name]}, which rank 0 has"
    )


@pytest.mark.parametrize(
    "flags", [{"numerics": "exact"}, {"moe_prefetch_layers": 0}, {"cache_type": "naive"}], ids=str
)
def test_settings_are_compared(directory, flags):
    with pytest.raises(EngineFailedError, match=r"^rank 1 of 2 has settings \w+, expected"):
        require_alike([made(directory), made(directory, **flags)])


def test_what_a_plan_came_to_is_compared(directory):
    config = RuntimeConfig.from_flags(num_tokens=4096)
    plan = resolve(config, ModelConfig.from_dir(directory), FACTS)
    other = dataclasses.replace(plan, expert_slots=plan.expert_slots - 1)
    ranks = [identity(config, directory, x) for x in (plan, other)]
    with pytest.raises(EngineFailedError, match=r"^rank 1 of 2 has plan "):
        require_alike(ranks)


@pytest.mark.parametrize(
    ("change", "what"), [("entry", "tuned configs"), ("rename", "tuned configs"),
                         ("kernel", "library"), ("model", "config.json")],
)  # fmt: skip
def test_files_are_compared(directory, tmp_path, monkeypatch, change, what):
    ours = made(directory)
    package = Path(ftkernels.__file__).parent
    copy = tmp_path / "ftkernels"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(agreement.ftkernels, "__file__", str(copy / "__init__.py"))
    monkeypatch.setattr(tuned, "_ROOT", copy / "configs")
    assert made(directory) == ours
    entry = next(iter(sorted((copy / "configs").rglob("*.json"))))
    if change == "entry":
        entry.write_text(entry.read_text().replace("modelled", "measured", 1))
    elif change == "rename":
        entry.rename(entry.with_name("other.json"))
    elif change == "kernel":
        (copy / "target.py").write_text((copy / "target.py").read_text() + "X = 1\n")
    else:
        text = (directory / "config.json").read_text()
        (directory / "config.json").write_text(text.replace(" ", "  ", 1))
    with pytest.raises(EngineFailedError, match=f"^rank 1 of 2 has {what} "):
        require_alike([ours, made(directory)])


@pytest.mark.parametrize(("kind", "ranks", "cores", "threads"), [
    ("cpu", 1, 16, 1), ("cpu", 8, 16, 1), ("cuda", 8, 64, 8), ("cuda", 8, 4, 1), ("cuda", 3, 16, 5),
])  # fmt: skip
def test_a_rank_has_its_share_of_the_cores(kind, ranks, cores, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_threads(kind, ranks) == threads
