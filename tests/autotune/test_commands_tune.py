"""`ft-autotune tune` from the shell: what it prints, writes and refuses.

Mutants tried: a dry run that compiles, sizes of a group that no case has let through, a folder
tried after the search, its files not looked at, a total of the first op alone, rules not printed, a
table wider than the screen, warnings of stale entries, changed keys not listed.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from autotune import tune
from autotune.search import Choice
from ftkernels import backend, config
from tests.autotune.command import run

GPU = "nvidia_geforce_rtx_4090"


@pytest.fixture
def chosen(monkeypatch):
    """A search that compiles nothing and takes the last candidate of each key."""
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    setups = []

    def search(found, setup):
        setups.append(setup)
        rules = {"spills": 2}
        return [Choice(x, x.candidates[-1], 1.0, 2.0, x.candidates, rules, 5) for x in found]

    monkeypatch.setattr(tune, "search", search)
    return setups


def test_tune_writes_a_file_an_op_and_prints_a_table(chosen, tmp_path, monkeypatch, capsys):
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s"), "--jobs", "3"]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "tune", "swiglu_clamp", "rms_norm", "--tp", "8", *arguments)
    assert code == 0, err
    data = json.loads((tmp_path / GPU / "swiglu_clamp.json").read_text())
    assert [x["key"] for x in data["entries"]] == [{"I": 256, "T": 4096}]
    assert not (tmp_path / GPU / "rms_norm.json").exists()  # nothing to choose from
    row = next(line for line in out.splitlines() if "swiglu_clamp" in line)
    # keys, kept, changed, unsound, gain, tried, of
    assert row.split() == ["swiglu_clamp", "1", "0", "1", "0", "50%", "5", "6"]
    assert "swiglu_clamp, dropped: spills 2" in out.splitlines()
    total = next(line for line in out.splitlines() if line.split()[:1] == ["all"])
    assert total.split() == ["all", "4", "3", "1", "0", "50%", "20", "9"]
    assert max(map(len, out.splitlines())) <= 80
    assert chosen[0].prune  # nothing would be measured
    said = " ".join(out.split())
    assert "modelled by a static model, no times" in said
    assert "none could win by more than the model's margin" in said
    assert out.endswith("\n  swiglu_clamp I=256 T=4096: block_i 256 -> 512; gain 50%\n")
    assert "wrote 1 file in" in err
    assert (chosen[0].arch, chosen[0].num_workers) == (89, 3)


def test_stale_entries_are_no_warning(chosen, tmp_path, monkeypatch, capsys):
    path = tmp_path / GPU / "swiglu_clamp.json"
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(capsys, "tune", "swiglu_clamp", "--dry-run")[0] == 0
    config.forget()


def test_a_dry_run_searches_nothing(chosen, tmp_path, capsys):
    code, out, _ = run(capsys, "tune", "swiglu_clamp", "--dry-run", "--out", str(tmp_path))
    assert (code, chosen, list(tmp_path.iterdir())) == (0, [], [])
    assert "I=2048 T=4096" in out
    assert out.splitlines()[-1].split() == ["all", "2", "keys", "18"]


def test_other_arches_have_their_own_folder(chosen, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s"), "--arch", "90"]
    assert run(capsys, "tune", "swiglu_clamp", *arguments)[0] == 0
    assert (tmp_path / "nvidia_h200" / "swiglu_clamp.json").exists()
    assert chosen[0].arch == 90


def test_keys_without_a_sound_config_fail(chosen, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "search", lambda found, setup: [None for _ in found])
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s")]
    code, _, err = run(capsys, "tune", "swiglu_clamp", *arguments)
    assert code == 1
    assert err.splitlines()[-1] == (
        "ft-autotune: 2 keys have no sound config, not even the default"
    )


def test_a_folder_that_cannot_be_written_is_one_sentence(chosen, tmp_path, capsys):
    (tmp_path / GPU).write_text("a file in the way")
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s")]
    code, _, err = run(capsys, "tune", "swiglu_clamp", *arguments)
    assert code == 1
    said = err.strip()
    assert said.startswith(f"ft-autotune: --out is {tmp_path}, expected a folder that can be")
    assert "\n" not in said
    assert chosen == []  # before the search


def test_a_damaged_file_of_entries_is_refused_before_the_search(chosen, tmp_path, capsys):
    path = tmp_path / GPU / "swiglu_clamp.json"
    path.parent.mkdir()
    path.write_text("{")
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s")]
    code, _, err = run(capsys, "tune", "swiglu_clamp", *arguments)
    assert (code, chosen, path.read_text()) == (1, [], "{")
    assert err.startswith(f"ft-autotune: config file {path}")
    assert err.count("\n") == 1


def test_a_file_of_something_else_is_refused_as_state(chosen, tmp_path, capsys):
    state = tmp_path / "notes.txt"
    state.write_text("{\n")
    arguments = ["--out", str(tmp_path), "--state", str(state)]
    code, _, err = run(capsys, "tune", "swiglu_clamp", *arguments)
    assert code == 2
    expected = f"--state is {state}, expected a file that ft-autotune wrote"
    assert err.strip() == f"ft-autotune: {expected}"
    assert state.read_text() == "{\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["tune", "--tp", "1,x"], "--tp is 1,x, expected some of 1, 2, 4, 8, such as 1,8"),
        (["tune", "--tp", "8,3"], "--tp is 8,3, expected some of 1, 2, 4, 8, such as 1,8"),
        (["tune", "--tp", ""], "--tp is '', expected some of 1, 2, 4, 8, such as 1,8"),
        (["tune", "--tp", "a\nb"], "--tp is 'a\\nb', expected some of 1, 2, 4, 8, such as 1,8"),
        (["tune", "--tp", "9" * 5000], f"--tp is {'9' * 40}..., expected some of 1, 2, 4, 8"),
        (["tune", "--arch", "86"], "Invalid value for '--arch': '86' is not one of"),
        (["tune", "--top", "0"], "Invalid value for '--top'"),
        (["tune", "rmsnorm"], "OP is 'rmsnorm', expected the name of an op, such as rms_norm"),
        (["verify", "rope_tables"], "OP is 'rope_tables', which runs its reference only"),
        (["report", "--arch", "86"], "Invalid value for '--arch'"),
    ],
    ids=str,
)
def test_wrong_command_lines_exit_2_with_one_sentence(args, sentence, capsys):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"ft-autotune: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["tune", "report"])
def test_interpreted_processes_are_refused(command, monkeypatch, capsys):
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    code, _, err = run(capsys, command, "rms_norm")
    assert code == 1
    assert err == "ft-autotune: TRITON_INTERPRET is on, expected a process without it\n"


class FakeCuda:
    """Stands in for `torch.cuda` where a command asks which card there is."""

    def __init__(self, monkeypatch, capability: tuple[int, int]) -> None:
        for name, value in {
            "is_available": True, "get_device_capability": capability, "current_device": 0,
            "get_device_name": "NVIDIA Some Card",
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_an_older_card_gets_one_sentence(chosen, monkeypatch, capsys):
    FakeCuda(monkeypatch, (8, 6))
    code, _, err = run(capsys, "tune", "swiglu_clamp")
    assert code == 1
    assert err == (
        "ft-autotune: the card is NVIDIA Some Card of capability 8.6, expected 8.9, 9.0, 12.0; "
        "--arch 89 models one without it\n"
    )
    assert chosen == []


def test_a_card_of_another_arch_measures_nothing(chosen, tmp_path, monkeypatch, capsys):
    FakeCuda(monkeypatch, (8, 6))
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path / "s"), "--arch", "89"]
    code, out, _ = run(capsys, "tune", "swiglu_clamp", *arguments)
    assert code == 0
    assert "modelled" in out
