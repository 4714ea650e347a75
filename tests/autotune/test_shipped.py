"""The entries that ship: one for each key that has a choice, current, found by lookups, right.

Mutants tried: an entry left out, one of another source, one for no key, one that is no candidate.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from autotune.search import Problem, problems
from autotune.tune import VERSIONS, default_of
from ftkernels import KernelSpec, config, registry, target

ROOT = Path(__file__).parents[2]
SPECS = {spec.name: spec for spec in registry() if spec.kernel}


@cache
def _problems(op: str) -> list[Problem]:
    return [x for x in _all_problems() if x.op == op and len(x.candidates) > 1]


@cache
def _all_problems() -> list[Problem]:
    return problems(list(SPECS.values()), arch=89)


def _entries(op: str) -> list[dict[str, object]]:
    path = config.folder() / target.of_arch(89).name / f"{op}.json"
    return json.loads(path.read_text())["entries"] if path.exists() else []


@pytest.fixture(autouse=True)
def _afresh():
    config.forget()
    yield
    config.forget()


@pytest.mark.parametrize("op", SPECS)
def test_every_key_with_a_choice_has_a_current_entry(op: str) -> None:
    remedy = f"run `.venv/bin/ft-autotune tune {op}` and commit ftkernels/configs"
    entries = _entries(op)
    keys = {x.key for x in _problems(op)}
    modelled = [config.entry_key(x["key"]) for x in entries if x["source"] == "modelled"]  # type: ignore[arg-type]
    assert sorted(modelled) == sorted(keys), f"{op}: entries are not those of its keys; {remedy}"
    for entry in entries:
        current = config.made_from(op, default_of(op))
        assert entry["source_hash"] == current, f"{op}: made from other source; {remedy}"
        if entry["source"] == "modelled":
            assert set(VERSIONS.split()) <= set(str(entry["triton"]).split())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_lookups_find_the_entries_without_a_warning(spec: KernelSpec) -> None:
    # measured ones stand before modelled ones, and are what a lookup takes
    entries = reversed(_entries(spec.name))
    by_key = {config.entry_key(x["key"]): x for x in entries}  # type: ignore[arg-type]
    heard: list[config.Found] = []
    with warnings.catch_warnings(), target.offline(89), config.watch(heard.append):
        warnings.simplefilter("error")
        for problem in _problems(spec.name):
            config.lookup(spec.name, dict(problem.key), default_of(spec.name), grows=spec.grows)
    for problem, found in zip(_problems(spec.name), heard, strict=True):
        entry = by_key[problem.key]
        assert (found.source, asdict(found.config)) == (entry["source"], entry["config"])
        assert found.config in problem.candidates


@pytest.mark.parametrize("arch", [90, 120])
def test_other_cards_get_the_defaults_without_a_warning(arch: int) -> None:
    heard: list[config.Found] = []
    with warnings.catch_warnings(), target.offline(arch), config.watch(heard.append):
        warnings.simplefilter("error")
        for problem in _all_problems():
            grows = SPECS[problem.op].grows
            config.lookup(problem.op, dict(problem.key), default_of(problem.op), grows=grows)
    assert {found.source for found in heard} == {"default"}


def test_the_smallest_keys_of_each_op_are_right_by_value() -> None:
    """In a process that interprets; `make test-triton` verifies all entries on each version."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "verify", "--quick"], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    looked_up, ran, failed = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert 0 < ran <= looked_up
    assert failed == 0
