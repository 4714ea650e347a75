"""Memory, cores, what runs where, and tuned entries.

Mutants tried: loading left out of what is needed, memory that is just enough warned of, the cores
of the machine in place of the process's, the interpreter told as the reference, a bad setting that
raises, entries counted that lookups ignore or that stand behind others, no word of the reference,
a refused setting told for all that needs kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ftkernels
from ftkernels import backend, config, target
from ftruntime.doctor import host
from tests.autotune.toy import ENTRY, HOST, PLAIN, TOY

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


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes the entries of `toy` for the card that is there."""
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    monkeypatch.setattr(target, "config_name", lambda: "nvidia_x")
    monkeypatch.setattr(backend, "always_reference", lambda: False)
    monkeypatch.setattr(ftkernels, "registry", lambda: (TOY, HOST, PLAIN))

    def write(*entries: object, op: str = "toy") -> Path:
        path = tmp_path / "nvidia_x" / "toy.json"
        path.parent.mkdir(exist_ok=True)
        head = {"schema": config.SCHEMA, "op": op, "gpu": "nvidia_x"}
        path.write_text(json.dumps({**head, "entries": entries}))
        return path

    return write


def test_no_entries_is_a_warning(write):
    check = host.tuned()
    assert (check.state, check.found) == ("warning", "none for nvidia_x")


def test_entries_that_lookups_take_are_counted_by_source(write):
    """A modelled one behind a measured one of its key is not taken."""
    others = [{**ENTRY, "key": {"I": 128, "T": t}} for t in (1, 2, 4)]
    write(ENTRY, {**ENTRY, "source": "measured"}, *others)
    check = host.tuned()
    assert (check.state, check.remedy) == ("ok", "")
    assert check.found == "nvidia_x: 1 measured, 3 modelled entries"
    assert check.facts["entries"] == {"measured": 1, "modelled": 3}


def test_entries_that_lookups_ignore_are_none(write):
    stale = {**ENTRY, "source_hash": "0"}
    write(stale, {**stale, "key": {"I": 1, "T": 1}}, {**ENTRY, "key": 7})
    check = host.tuned()
    assert check.state == "warning"
    assert check.found == (
        "nvidia_x: no entries; ignored: 2 for another source hash, 1 for a damaged key"
    )
    assert check.remedy == "Defaults are used for them; `ft-autotune tune toy` writes them anew."
    write(stale, {**ENTRY, "key": {"I": 1, "T": 1}})
    assert host.tuned().found.startswith("nvidia_x: 1 modelled entries; ignored: 1 for another")


def test_a_damaged_file_is_named(write):
    path = write(ENTRY, op="other")
    check = host.tuned()
    assert (check.state, check.found) == (
        "failed", f"nvidia_x: {path} is damaged (op is 'other', expected 'toy')",
    )  # fmt: skip
    assert check.remedy == "Remove it, and `ft-autotune tune toy` writes it anew."
    path.write_text("{")
    assert host.tuned().state == "failed"


def test_the_reference_uses_no_entry(write, monkeypatch):
    write(ENTRY)
    monkeypatch.setattr(backend, "always_reference", lambda: True)
    check = host.tuned()
    assert (check.state, check.found) == (
        "warning", "none used: FTKERNELS_BACKEND is 'reference'",
    )  # fmt: skip


def test_a_setting_that_the_library_refuses_is_one_line():
    code = (
        "from ftruntime import doctor\n"
        "print([(x.name, x.found) for x in doctor.checkup() if x.name not in ('cards', 'cores')\n"
        "       and 'FTKERNELS' in x.found + x.remedy or x.name == 'tuned configs'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "FTKERNELS_BACKEND": "cuda"},
    )  # fmt: skip
    told = "FTKERNELS_BACKEND is 'cuda', expected 'reference' or unset"
    assert done.stdout.strip() == str([("kernels", told)]), done.stderr
    assert host.setting() == []
