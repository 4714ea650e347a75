"""`ft-autotune` from the shell: rows, table, exit codes, refusals.

Mutants tried: progress on stdout, exit 0 for a kernel that spills, the reference ops listed, rows
of the wrong arch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from autotune import cli, inspect
from ftkernels import backend, registry

ROOT = Path(__file__).parents[2]
KEYS = [
    "op", "kernel", "case", "config", "triton", "registers", "spill_bytes", "shared_bytes", "fits",
    "warps_per_sm", "mma", "issue_per_kmac", "ceiling_tflops", "bound", "source",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


def _run(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def _row(**changes: object) -> inspect.LaunchRow:
    sound = inspect.LaunchRow(
        op="rms_norm", kernel="_rms_norm_kernel", case={"name": "small", "T": 5},
        config={"block_d": 128, "num_warps": 1}, triton="3.7.1", registers=40, spill_bytes=0,
        shared_bytes=1024, fits=True, warps_per_sm=24, mma=None, issue_per_kmac=None,
        ceiling_tflops=None, bound=None, source="default",
    )  # fmt: skip
    return inspect.LaunchRow(**{**vars(sound), **changes})  # type: ignore[arg-type]


@pytest.fixture
def shown(monkeypatch):
    """Lets `inspect` find the given rows."""

    def show(*rows: inspect.LaunchRow) -> None:
        monkeypatch.setattr(inspect, "inspect", lambda work, *, arch, advance: list(rows))
        monkeypatch.setattr(backend, "interpreted", lambda: False)

    return show


@needs_compiler
@pytest.mark.parametrize("arch", [89, 90, 120])
def test_json_has_a_row_per_launch(arch, capsys):
    resident_warps = {89: 24, 90: 32, 120: 24}  # blocks an SM holds, of one warp each
    code, out, err = _run(capsys, "inspect", "rms_norm", "--arch", str(arch), "--json")
    assert code == 0, err
    rows = json.loads(out)
    spec = next(x for x in registry() if x.name == "rms_norm")
    assert [row["case"]["name"] for row in rows] == [case["name"] for case in spec.cases]
    assert rows[0]["warps_per_sm"] == resident_warps[arch] * rows[0]["config"]["num_warps"]
    for row, case in zip(rows, spec.cases, strict=True):
        assert list(row) == KEYS
        assert row["op"] == "rms_norm"
        assert row["kernel"] == "_rms_norm_kernel"
        assert row["case"] == dict(case)
        assert set(row["config"]) == {"block_d", "num_warps"}
        assert row["triton"] == triton.__version__
        assert 0 < row["registers"] <= 255
        assert (row["spill_bytes"], row["fits"], row["source"]) == (0, True, "default")
        assert row["warps_per_sm"] >= row["config"]["num_warps"]
        assert [row[k] for k in ("mma", "issue_per_kmac", "ceiling_tflops", "bound")] == [None] * 4


@needs_compiler
def test_an_op_of_two_launches_has_two_rows(capsys):
    _, out, _ = _run(capsys, "inspect", "moe_gemm_fp4", "--json")
    spec = next(x for x in registry() if x.name == "moe_gemm_fp4")
    rows = json.loads(out)
    assert len(rows) == sum(spec.launches(case) for case in spec.cases)
    assert len({row["kernel"] for row in rows}) == 2


@needs_compiler
def test_table_has_the_same_numbers(capsys):
    code, out, _ = _run(capsys, "inspect", "swiglu_clamp")
    assert code == 0
    _, text, _ = _run(capsys, "inspect", "swiglu_clamp", "--json")
    lines = out.splitlines()
    assert lines[0].split() == ["launches", "on", "sm_89"]
    assert len(lines) == 2 + len(json.loads(text))
    for line, row in zip(lines[2:], json.loads(text), strict=True):
        numbers = [row["registers"], row["spill_bytes"], row["shared_bytes"], row["warps_per_sm"]]
        assert line.split()[-7:] == [*map(str, numbers), "yes", "-", "default"]
        assert row["case"]["name"] in line
        assert f"num_warps={row['config']['num_warps']}" in line


@needs_compiler
def test_a_tuned_entry_is_named_as_the_source(tmp_path, monkeypatch, capsys):
    from ftkernels import config
    from ftkernels.norm import rms_norm

    path = tmp_path / "nvidia_geforce_rtx_4090" / "rms_norm.json"
    path.parent.mkdir()
    entry = {
        "key": {"D": 4096}, "config": {"num_warps": 8}, "source": "modelled",
        "triton": triton.__version__, "source_hash": config.source_hash(rms_norm.default_config),
    }  # fmt: skip
    head = {"op": "rms_norm", "gpu": "nvidia_geforce_rtx_4090", "schema": 1}
    path.write_text(json.dumps({**head, "entries": [entry]}))
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()
    try:
        _, out, _ = _run(capsys, "inspect", "rms_norm", "--json")
    finally:
        config.forget()
    tuned = [row for row in json.loads(out) if row["source"] == "modelled"]
    assert tuned
    assert {(row["case"]["D"], row["config"]["num_warps"]) for row in tuned} == {(4096, 8)}


def test_without_names_every_op_with_kernels_is_compiled(shown, monkeypatch, capsys):
    asked = []

    def note(work, *, arch, advance):
        asked.extend((spec.name, arch) for spec, _ in work)
        return []

    shown()
    monkeypatch.setattr(inspect, "inspect", note)
    assert _run(capsys, "inspect", "--arch", "120", "--json")[:2] == (0, "[]\n")
    expected = [(x.name, 120) for x in registry() if x.kernel for _ in x.cases]
    assert asked == expected


@pytest.mark.parametrize("change", [{"fits": False}, {"spill_bytes": 8}], ids=str)
def test_a_launch_that_spills_or_does_not_fit_fails(change, shown, capsys):
    shown(_row(), _row(kernel="_bad_kernel", **change))
    code, out, err = _run(capsys, "inspect", "--json")
    assert code == 1
    assert len(json.loads(out)) == 2
    last = err.strip().splitlines()[-1]
    assert last == "ft-autotune: 1 of 2 launches spill or do not fit: _bad_kernel"


def test_sound_launches_pass(shown, capsys):
    shown(_row())
    assert _run(capsys, "inspect", "--json")[0] == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["inspect", "rmsnorm"],
            "OP is 'rmsnorm', expected the name of an op, such as rms_norm",
        ),
        (["inspect", "qqq"], "OP is 'qqq', expected the name of an op"),
        (
            ["inspect", "rope_tables"],
            "OP is 'rope_tables', which runs its reference only, expected an op with kernels",
        ),
        (["inspect", "--arch", "86"], "Invalid value for '--arch': '86' is not one of"),
        (["inspect", "--fast"], "No such option"),
        (["tuna"], "No such command 'tuna'"),
    ],
    ids=str,
)
def test_wrong_command_lines_exit_2_with_one_sentence(args, sentence, capsys):
    code, out, err = _run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"ft-autotune: {sentence}")
    assert err.count("\n") == 1


def test_help_names_what_exists(capsys):
    code, out, _ = _run(capsys, "inspect", "--help")
    assert code == 0
    assert "--arch" in out
    assert "--json" in out


def _python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env={**os.environ, **env}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip


def test_interpreted_processes_are_refused():
    done = _python("-m", "autotune", "inspect", "rms_norm", TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert done.stderr == "ft-autotune: TRITON_INTERPRET is on, expected a process without it\n"


def test_a_missing_package_is_one_sentence():
    done = _python("-c", "import sys; sys.modules['rich'] = None; import autotune.cli")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "ft-autotune: package rich is missing, expected the extra `serve`: "
        "pip install 'ftkernels[serve]'"
    )
