"""Memory, cores, what runs where, and tuned entries.

Mutants tried: loading left out of what is needed, memory that is just enough warned of, the cores
of the machine in place of the process's, the interpreter told as the reference, a bad setting that
raises, entries counted by files.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from ftkernels import backend, config, target
from ftruntime.doctor import host

NEEDED = 147169738752 + 7626922393  # the experts' bytes, and what `inspect flash` says of loading


def test_flash_takes_what_the_plan_says():
    assert sum(host.flash_bytes().values()) == NEEDED
    assert host.flash_bytes()["expert_bank"] == 43 * 256 * 3 * 4096 * 2048 * 17 // 32


@pytest.mark.parametrize(
    ("free", "state"), [(NEEDED, "ok"), (NEEDED - 1, "warning"), (1 << 30, "warning")]
)
def test_memory_for_flash(monkeypatch, free, state):
    monkeypatch.setattr(host, "available_bytes", lambda: free)
    check = host.memory()
    assert check.state == state
    assert "137 GiB of experts and 7 while loading" in check.found


def test_memory_that_cannot_be_told(monkeypatch):
    def refuse():
        raise OSError("no MemAvailable line")

    monkeypatch.setattr(host, "available_bytes", refuse)
    assert host.memory().state == "failed"


@pytest.mark.parametrize(("count", "state"), [(1, "warning"), (3, "warning"), (4, "ok")])
def test_cores_are_those_of_the_process(monkeypatch, count, state):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    check = host.cores()
    assert (check.found, check.state) == (str(count), state)


def test_what_runs_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "use_reference", lambda x: True)
    check = host.paths()
    assert check.found == "CPU tensors: plain-torch reference; CUDA tensors: no card"
    assert check.facts == {"cpu": "reference", "cuda": None}
    monkeypatch.setattr(backend, "use_reference", lambda x: False)
    assert host.paths().facts["cpu"] == "interpreter"


@pytest.mark.parametrize(("reference", "state"), [(False, "ok"), (True, "warning")])
def test_what_runs_on_a_card(monkeypatch, reference, state):
    answers = iter([True, reference])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: None)
    monkeypatch.setattr(backend, "use_reference", lambda x: next(answers))
    check = host.paths()
    assert check.state == state
    assert check.facts["cuda"] == ("reference" if reference else "compiled")


def test_a_bad_setting_is_a_line(monkeypatch):
    def refuse(x):
        raise backend.UnsupportedDeviceError("device cuda:0 has capability 8.6, expected 8.9")

    monkeypatch.setattr(backend, "use_reference", refuse)
    check = host.paths()
    assert (check.state, check.found) == (
        "failed", "device cuda:0 has capability 8.6, expected 8.9",
    )  # fmt: skip


def test_tuned_entries_are_counted_by_source(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    monkeypatch.setattr(target, "config_name", lambda: "nvidia_x")
    check = host.tuned()
    assert (check.state, check.found) == ("warning", "none for nvidia_x")
    folder = tmp_path / "nvidia_x"
    folder.mkdir()
    for op, sources in {"a": ["modelled"] * 3, "b": ["measured", "modelled"]}.items():
        entries = [{"source": source} for source in sources]
        head = {"schema": config.SCHEMA, "op": op, "gpu": "nvidia_x"}
        (folder / f"{op}.json").write_text(json.dumps({**head, "entries": entries}))
    check = host.tuned()
    assert check.state == "ok"
    assert check.found == "nvidia_x: 1 measured, 4 modelled entries"
    (folder / "a.json").write_text((folder / "b.json").read_text())
    check = host.tuned()
    assert (check.state, check.found) == ("failed", "op is 'b', expected 'a'")
    (folder / "a.json").write_text("{")
    assert host.tuned().state == "failed"
