"""`ft-autotune verify` and `report` from the shell: what they print and how they end.

Mutants tried: exit 0 with wrong entries, ignored entries left out of the list, a missing folder
that passes, a missing file that passes, strays let be, wrong entries counted among those looked up
only, `report` silent about them, every key run with `--quick`, `--out` left to lookups of the
serving folder or not passed on, files of ops without names missed there, keys
without an entry passed, those of ignored entries said twice, those of other ops asked for, a state
that is named left unread or, where it cannot be used, let be.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import triton

import ftkernels
from autotune import entries, search, trials, verify
from autotune.progress import state_file
from ftkernels import backend, config
from tests.autotune.command import run
from tests.autotune.toy import ENTRY, HOST, TOY

GPU = "nvidia_geforce_rtx_4090"
SMALL = {**ENTRY, "key": {"I": 7, "T": 16}}
REST = [{**ENTRY, "key": {"I": 128, "T": 1}}, {**ENTRY, "key": {"I": 16, "T": 512}}]
needs_compiler = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where lookups read, and the file of `toy` belongs."""
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    for module in (ftkernels, search, verify, entries):
        monkeypatch.setattr(module, "registry", lambda: (TOY, HOST))
    (tmp_path / GPU).mkdir()
    config.forget()
    yield tmp_path / GPU
    config.forget()


def _write(folder: Path, *found: object, op: str = "toy") -> None:
    head = {"op": "toy", "gpu": GPU, "schema": config.SCHEMA}
    (folder / f"{op}.json").write_text(json.dumps({**head, "entries": found}))


def test_good_entries_pass(folder, capsys):
    _write(folder, ENTRY, SMALL, *REST)
    assert run(capsys, "verify")[:2] == (0, "4 entries looked up, 4 run by value, 0 failed\n")
    assert run(capsys, "verify", "--quick")[:2] == (
        0, "1 entry looked up, 1 run by value, 0 failed\n"
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:config file")
def test_what_is_wrong_is_listed_and_counted(folder, capsys):
    stray = {**ENTRY, "key": {"I": 5, "T": 512}}
    _write(folder, ENTRY, {**SMALL, "triton": "3.1"}, stray, 7, REST[0])
    (folder / "other.json").touch()
    (folder / ".toy.json.12").touch()
    code, out, err = run(capsys, "verify")
    minor = ".".join(triton.__version__.split(".")[:2])
    assert code == 1
    assert out.splitlines() == [
        ".toy.json.12: left over from a writer that was killed, it can be removed",
        "other.json: no op of the library has this file",
        "toy.json: I=16 T=512: no entry, expected what `ft-autotune tune toy` writes",
        f"toy.json: I=7 T=16: ignored for a Triton other than {minor}",
        "toy.json: entry 4: ignored for not being an object",
        "toy.json: I=5 T=512: no case of the registry looks it up",
        "3 entries looked up, 2 run by value, 6 failed",
    ]
    assert err.strip() == f"ft-autotune: 6 entries or files of {folder} are wrong"


@pytest.mark.parametrize("arch", ["89", "90"])
def test_a_folder_without_files_is_one_sentence(arch, folder, capsys):
    """That of another card is missing, that of this one empty."""
    where, how = (folder, "empty") if arch == "89" else (folder.parent / "nvidia_h200", "missing")
    code, out, err = run(capsys, "verify", "--arch", arch)
    assert (code, out) == (1, "")
    assert err == f"ft-autotune: config folder {where} is {how}, expected a file for each op\n"


def test_an_op_that_has_a_choice_has_a_file_of_entries(folder, capsys):
    _write(folder, op="host")
    code, out, _ = run(capsys, "verify")
    assert code == 1
    assert out.splitlines()[:2] == [
        "toy.json: missing, expected what `ft-autotune tune toy` writes",
        "host.json: ignored, op is 'toy', expected 'host'",
    ]
    (folder / "host.json").unlink()
    _write(folder)
    code, out, _ = run(capsys, "verify")
    assert (code, out.splitlines()[0]) == (1, "toy.json: no entries")
    (folder / "toy.json").rename(folder / "host.json")
    _write(folder, *REST, op="host")
    assert "toy.json" not in run(capsys, "verify", "host")[1]


def test_entries_of_another_folder_are_what_lookups_find(folder, tmp_path, capsys):
    """An op may lack its file there, unless it is named."""
    _write(folder, SMALL)
    out_dir = tmp_path / "elsewhere" / GPU
    out_dir.mkdir(parents=True)
    where = ("--out", str(out_dir.parent))
    code, _, err = run(capsys, "verify", *where)
    assert (code, err.strip()) == (1, f"ft-autotune: config folder {out_dir} is empty, expected a "
                                      "file for each op")  # fmt: skip
    _write(out_dir, ENTRY)
    assert run(capsys, "verify", *where)[:2] == (
        0, "1 entry looked up, 1 run by value, 0 failed\n"
    )  # fmt: skip
    (out_dir / "toy.json").rename(out_dir / "host.json")
    assert "toy.json: missing" not in run(capsys, "verify", *where)[1]
    assert "toy.json: missing" in run(capsys, "verify", "toy", *where)[1]


def test_verify_interprets_without_a_card(folder, monkeypatch, capsys):
    """From a process without the interpreter: it becomes one with it."""
    ran = []

    def become(path, command, env):
        ran.append((path, command, env))
        raise SystemExit(3)

    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "execve", become)
    assert run(capsys, "verify", "toy", "--quick")[0] == 3
    ((path, command, env),) = ran
    expected = [sys.executable, "-m", "autotune", "verify", "toy", "--arch", "89", "--quick"]
    assert (path, command) == (sys.executable, expected)
    assert env == {**os.environ, **backend.interpreting()}
    assert run(capsys, "verify", "toy", "--out", "here")[0] == 3
    assert ran[1][1][4:] == ["toy", "--arch", "89", "--out", "here"]


@needs_compiler
@pytest.mark.filterwarnings("ignore:config file")
def test_report_shows_an_entry_beside_its_default(tmp_path, capsys):
    from ftkernels.sampling import adjust

    default = adjust.default_config({"N": 20000})
    entry = {
        "key": {"N": 8192}, "config": {"block_n": 64, "num_warps": 2}, "us": 1.5, "default_us": 2.0,
        "source": "measured", "triton": triton.__version__,
        "source_hash": config.source_hash(adjust.default_config),
    }  # fmt: skip
    head = {"op": "adjust_logits", "gpu": GPU, "schema": 1}
    path = tmp_path / GPU / "adjust_logits.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**head, "entries": [{"key": 3}, entry]}))
    options = ("--jobs", "1", "--out", str(tmp_path))
    code, out, err = run(capsys, "report", "adjust_logits", *options, "--json")
    assert code == 1
    assert err.splitlines()[-2:] == [
        "ft-autotune: adjust_logits.json: entry 1: ignored for a damaged key",
        f"ft-autotune: 1 entry or file of {path.parent} is wrong",
    ]
    (row,) = json.loads(out)
    assert (row["source"], row["before"]["us"], row["after"]["us"]) == ("measured", 2.0, 1.5)
    assert [row[side]["source"] for side in ("before", "after")] == ["measured"] * 2
    assert row["before"]["config"] == vars(default)
    assert row["after"]["config"] == {"block_n": 64, "num_warps": 2}
    assert row["after"]["spill_bytes"] == 0
    assert row["after"]["registers"] > 0

    path.write_text(json.dumps({**head, "entries": [{**entry, "default_us": None}]}))
    code, out, _ = run(capsys, "report", "adjust_logits", *options)
    assert code == 0
    assert "block_n 128 -> 64, num_warps 4 -> 2" in out
    assert "- -> 1.5" in out
    assert max(map(len, out.splitlines())) <= 100

    code, _, err = run(capsys, "report", "adjust_logits", "--out", str(tmp_path / "none"))
    assert (code, err) == (1, f"ft-autotune: config folder {tmp_path / 'none' / GPU} is missing, "
                              "expected a file for each op\n")  # fmt: skip


@needs_compiler
def test_report_goes_on_from_a_state(home, tmp_path, monkeypatch, capsys):
    options = ("adjust_logits", "--jobs", "1", "--json")
    kept = tmp_path / "kept"
    _, first, _ = run(capsys, "report", *options, "--state", str(kept))
    before = kept.read_bytes()
    assert before
    assert list(home.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(trials, "_attempt", pytest.fail)
        assert run(capsys, "report", *options, "--state", str(kept))[1] == first
    assert kept.read_bytes() == before
    assert run(capsys, "report", *options)[1] == first
    assert state_file(GPU).read_bytes() == before
    assert state_file(GPU).is_relative_to(home)

    kept.write_text("mine")
    code, out, err = run(capsys, "report", *options, "--state", str(kept))
    assert (code, out) == (2, "")
    assert err == f"ft-autotune: --state is {kept}, expected a file that ft-autotune wrote\n"
