"""Variables that change what Triton compiles, what follows from them, and where they are refused.

Mutants tried: a variable left out, a value that says the default taken for a change, a change taken
for the default, a file's own change not seen, the contract or shipped entries written in spite of a
change, other folders refused, the sentence left out of one command or begun another way, settings
left out of what a trial follows from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from triton import knobs

from autotune import inspect, search, settings
from autotune.cli import cli
from ftkernels import backend, config
from tests.autotune.command import run

# of Triton's own list what changes no code: dumps, messages, caches, tools of other cards
_NO_CODE = {
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES", "NVPTX_ENABLE_DUMP", "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS",
    "TRITON_ALWAYS_COMPILE", "TRITON_DISABLE_LINE_INFO", "TRITON_DUMP_PTXAS_LOG",
    "TRITON_FRONT_END_DEBUGGING", "TRITON_INTERPRET", "TRITON_KERNEL_DUMP",
    "TRITON_LIBCUDA_PATH", "TRITON_STORE_BINARY_ONLY", "USE_IR_LOC",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in settings.changed():
        monkeypatch.delenv(name)


def _variables() -> set[str]:
    """Of Triton's settings, those of this card's compiler."""
    groups = (knobs.compilation, knobs.language, knobs.nvidia, knobs.runtime)
    return {
        held.key for group in groups for held in vars(type(group)).values()
        if isinstance(held, knobs.env_base)
    }  # fmt: skip


def test_every_setting_of_the_compiler_counts(monkeypatch):
    assert len(_variables()) > 20
    for name in (*sorted(_variables() - _NO_CODE), "DISABLE_LLVM_OPT", "TRITON_DEBUG"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "other")
            assert settings.changed() == {name: "other"}, name
            assert settings.identity() == [(name, "other")]


@pytest.mark.parametrize(
    ("name", "defaults", "others"),
    [
        ("DISABLE_PTXAS_OPT", ("", "0", "false", "OFF"), ("1", "true", "ON")),
        ("TRITON_DEFAULT_FP_FUSION", ("1", "True", "on"), ("0", "false", "off", "")),
        ("PTXAS_OPTIONS", ("",), ("-O1", "0", "1")),
    ],
)
def test_a_value_that_says_the_default_is_none(name, defaults, others, monkeypatch):
    for value in (*defaults, *others):
        monkeypatch.setenv(name, value)
        assert settings.changed() == ({name: value} if value in others else {}), value
    if name == "DISABLE_PTXAS_OPT":
        for value in (*defaults, *others):  # as Triton itself reads it
            monkeypatch.setenv(name, value)
            assert knobs.nvidia.disable_ptxas_opt == bool(settings.changed()), value


def test_another_tool_of_the_same_name_is_another_setting(tmp_path, monkeypatch):
    tool = tmp_path / "ptxas"
    tool.write_text("one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    before = settings.identity()
    assert settings.identity() == before
    os.utime(tool, ns=(1, 1))
    again = settings.identity()
    tool.write_text("two and three")
    os.utime(tool, ns=(1, 1))
    assert before != again != settings.identity()


_compiles = pytest.mark.skipif(backend.interpreted(), reason="compiles")


@_compiles
def test_a_changed_compiler_writes_nothing_that_is_shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    state = ["--state", os.devnull]
    link = tmp_path / "link"
    link.symlink_to(config.folder())
    for arguments, what in (
        (["tune", "count_missing", *state], "shipped entries are written"),
        (["tune", "count_missing", *state, "--out", str(link)], "shipped entries are written"),
        (["inspect", "count_missing", "--write-contract"], "a contract is written"),
    ):
        ended = CliRunner().invoke(cli, arguments)
        assert (ended.exit_code, ended.stderr) == (
            1, f"Error: PTXAS_OPTIONS is -O1, expected it unset where {what}: it changes what is "
            "compiled\n",
        ), ended.output  # fmt: skip


TOLD = "ft-autotune: PTXAS_OPTIONS is -O1, which changes what is compiled: "


def _begin(*_: object, **__: object) -> None:
    """Stands in for what compiles."""
    raise KeyError("begun")


@_compiles
@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--diff"], ["report"]], ids=" ".join)
def test_figures_of_a_changed_compiler_are_told(monkeypatch, words):
    monkeypatch.setattr(inspect, "inspect", _begin)
    monkeypatch.setattr(search, "problems", _begin)
    ended = CliRunner().invoke(cli, [*words, "count_missing"])
    assert isinstance(ended.exception, KeyError), ended.output
    assert ended.stderr == ""
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    ended = CliRunner().invoke(cli, [*words, "count_missing"])
    assert isinstance(ended.exception, KeyError), ended.output
    assert ended.stderr.startswith(TOLD), ended.output
    assert ended.stderr.count("\n") == 1


@_compiles
def test_figures_of_a_changed_compiler_are_others(tmp_path, capsys):
    """Though both processes keep theirs in one file."""
    arguments = ["report", "count_missing", "--jobs", "1", "--json", "--state", str(tmp_path / "s")]
    before = run(capsys, *arguments)
    assert before[2] == ""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments], cwd=Path(__file__).parents[2], text=True,
        capture_output=True, check=True, env={**os.environ, "PTXAS_OPTIONS": "-O1"},
    )  # fmt: skip
    assert done.stderr.startswith(TOLD)
    both = (json.loads(x) for x in (before[1], done.stdout))
    registers = [[row["after"]["registers"] for row in rows] for rows in both]
    assert registers[0] != registers[1]
    assert run(capsys, *arguments) == before


@_compiles
def test_elsewhere_a_changed_compiler_is_let(tmp_path, monkeypatch):
    """What is tried there has an identity of its own."""
    monkeypatch.setattr(search, "problems", _begin)
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    for out in (["--out", str(tmp_path / "out")], []):
        arguments = ["tune", "count_missing", "--state", str(tmp_path / "s"), *out]
        ended = CliRunner().invoke(cli, arguments)
        assert isinstance(ended.exception, KeyError) == bool(out), ended.output
        assert ended.stderr.startswith(TOLD if out else "Error: ")
    assert isinstance(CliRunner().invoke(cli, [*arguments, "--dry-run"]).exception, KeyError)
    monkeypatch.delenv("PTXAS_OPTIONS")
    assert isinstance(CliRunner().invoke(cli, arguments).exception, KeyError)
