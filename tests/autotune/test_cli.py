"""`ft-autotune` from the shell: rows, table, exit codes, refusals.

Mutants tried: progress on stdout, exit 0 for a kernel that spills, the reference ops listed, rows
of the wrong arch; a worse figure that exits 0, a contract of another Triton compared, unsound
figures committed, candidates that fail the command or pass for what serving uses, loops unasked
for, a table above 100 columns, kernels of an op in one table, figures left out of the wide one,
other ops' figures dropped where some are named, an empty table for no change, cases left over let
be, candidates without their config, cells cut off where the screen ends, COLUMNS not heeded, an
empty line where no bar is shown, no word of launches that are not compared, the contract named by
its file alone, a flag named that was not given, an op like no other refused without a way out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import ftkernels
from autotune import contract, inspect
from autotune.static import LaunchFigures, LoopFigures
from ftkernels import backend, registry
from tests.autotune.command import run

ROOT = Path(__file__).parents[2]
KEYS = [
    "op", "kernel", "case", "config", "triton", "registers", "spill_bytes", "shared_bytes", "fits",
    "warps_per_sm", "mma", "issue_per_kmac", "ceiling_tflops", "bound", "source",
    "figures_source", "static_model", "arch", "card",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


def _run(capsys, *args: str) -> tuple[int, str, str]:
    # one process: what a test replaces is replaced there
    if args[:1] == ("inspect",) and "--jobs" not in args:
        args = (*args, "--jobs", "1")
    return run(capsys, *args)


_LOOP = LoopFigures(
    why=("mma",), passes=8.0, useful_macs=4096.0, mma_macs=8192, mma={"QMMA.16832.F32": 2},
    slots=40, loads={16: 3}, copies=2, load_bytes=6144, store_bytes=0,
    cycles={"tensor": 16.0, "issue": 10.0}, bound="tensor",
)  # fmt: skip
_FIGURES = LaunchFigures(
    kernel="_rms_norm_kernel", grid=(5, 1, 1), blocks=5, registers=40, spill_bytes=0,
    shared_bytes=1024, fits=True, blocks_per_sm=24, warps_per_sm=24, mma=None, issue_per_kmac=None,
    issue_per_filled_kmac=None, ceiling_tflops=None, block_tflops=None, bound="dram",
    load_bytes=2000.0, store_bytes=1000.0, useful_bytes=2000.0, wide_share=1.0, issue_per_kib=50.0,
    ceiling_gb_per_s=900.0, chip_us=0.1, dram_us=0.2, l2_us=0.05, us=0.2, loops=(),
    rest=dataclasses.replace(_LOOP, why=(), passes=1.0, useful_macs=0.0, mma_macs=0, mma={}),
)  # fmt: skip


def _row(name: str = "small", source: str = "default", **changes: object) -> inspect.LaunchRow:
    return inspect.LaunchRow(
        op="rms_norm", case={"name": name, "T": 5}, config={"block_d": 128, "num_warps": 1},
        triton="3.7.1", source=source,
        figures=dataclasses.replace(_FIGURES, **changes),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def shown(monkeypatch):
    """Lets `inspect` find the given rows."""

    def show(*rows: inspect.LaunchRow) -> None:
        monkeypatch.setattr(inspect, "inspect", lambda work, *, arch, advance, jobs: list(rows))
        monkeypatch.setattr(backend, "interpreted", lambda: False)

    return show


@needs_compiler
@pytest.mark.parametrize("arch", [89, 90, 120])
def test_json_has_a_row_per_launch(arch, capsys):
    cards = {89: "nvidia_geforce_rtx_4090", 90: "nvidia_h200", 120: "nvidia_geforce_rtx_5090"}
    resident_warps = {89: 24, 90: 32, 120: 24}  # blocks an SM holds, of one warp each
    code, out, err = _run(capsys, "inspect", "rms_norm", "--arch", str(arch), "--json")
    assert code == 0, err
    rows = json.loads(out)
    spec = next(x for x in registry() if x.name == "rms_norm")
    assert [row["case"]["name"] for row in rows] == [case["name"] for case in spec.cases]
    assert rows[0]["warps_per_sm"] == resident_warps[arch] * rows[0]["config"]["num_warps"]
    for row, case in zip(rows, spec.cases, strict=True):
        assert list(row) == KEYS
        assert (row["arch"], row["card"]) == (arch, cards[arch])
        assert row["op"] == "rms_norm"
        assert row["kernel"] == "_rms_norm_kernel"
        assert row["case"] == dict(case)
        assert set(row["config"]) == {"block_d", "num_warps"}
        assert row["triton"] == triton.__version__
        assert 0 < row["registers"] <= 255
        assert (row["spill_bytes"], row["fits"], row["source"]) == (0, True, "default")
        assert row["warps_per_sm"] >= row["config"]["num_warps"]
        assert [row[k] for k in ("mma", "issue_per_kmac", "ceiling_tflops")] == [None] * 3
        assert row["bound"] in ("dram", "l2", "latency", "issue", "alu", "memory", "fma")
        assert row["static_model"]["us"] > 0
        assert row["figures_source"] == row["static_model"]["source"] == "modelled"


@needs_compiler
def test_an_op_of_two_launches_has_two_rows(monkeypatch, capsys):
    whole = inspect.work_list
    monkeypatch.setattr(inspect, "work_list", lambda specs, **kwargs: whole(specs, **kwargs)[:3])
    _, out, _ = _run(capsys, "inspect", "moe_gemm_fp4", "--json")
    spec = next(x for x in registry() if x.name == "moe_gemm_fp4")
    rows = json.loads(out)
    assert len(rows) == sum(spec.launches(case) for case in spec.cases[:3])
    assert len({row["kernel"] for row in rows}) == 2


@needs_compiler
def test_candidates_are_compiled_beside_what_serving_uses(monkeypatch, capsys):
    whole = inspect.work_list
    monkeypatch.setattr(inspect, "work_list", lambda specs, **kwargs: whole(specs, **kwargs)[:3])
    _, out, _ = _run(capsys, "inspect", "linear", "--candidates", "--json")
    rows = json.loads(out)
    assert [row["source"] for row in rows] == ["default", "candidate", "candidate"]
    assert [row["case"]["name"] for row in rows] == ["small"] * 3
    assert sorted(row["config"]["num_stages"] for row in rows) == [2, 3, 4]


@needs_compiler
def test_tables_have_the_same_numbers(capsys):
    rows = json.loads(_run(capsys, "inspect", "swiglu_clamp", "--json")[1])
    code, out, _ = _run(capsys, "inspect", "swiglu_clamp", "--jobs", "2")
    assert code == 0
    *head, name, names = out.splitlines()[: -len(rows)]
    caption = " ".join(head)
    assert caption.startswith("launches on sm_89, nvidia_geforce_rtx_4090, 1008 GB/s. ")
    assert "By a static model, no times:" in caption
    assert name == "swiglu_clamp  _swiglu_clamp_kernel"
    shown = "case regs spill shared warps slots TF/s us mma bound source"
    assert names.split() == shown.split()
    for line, row in zip(out.splitlines()[-len(rows) :], rows, strict=True):
        us = row["static_model"]["us"]
        numbers = [row[x] for x in ("registers", "spill_bytes", "shared_bytes", "warps_per_sm")]
        assert line.split() == [
            row["case"]["name"], *map(str, numbers), "-", "-",
            f"{us:.3g}" if us < 1000 else f"{us:.0f}", "-", row["bound"], row["source"],
        ]  # fmt: skip

    _, out, _ = _run(capsys, "inspect", "swiglu_clamp", "--wide")
    for line, row in zip(out.splitlines()[-len(rows) :], rows, strict=True):
        assert f"num_warps={row['config']['num_warps']}" in line
        assert f" I={row['case']['I']} " in line


@pytest.mark.parametrize(
    ("arch", "card"), [("90", "nvidia_h200, 4800 GB/s"), ("120", "nvidia_geforce_rtx_5090, 1792")]
)
def test_captions_name_the_card(arch, card, shown, capsys):
    shown(_row(loops=(_LOOP,)))
    _, out, _ = _run(capsys, "inspect", "--arch", arch, "--loops")
    assert out.count(f" on sm_{arch}, {card}") == 2


def test_a_candidate_is_shown_with_its_config(shown, capsys):
    shown(_row("small"), _row("small", "candidate"))
    _, out, _ = _run(capsys, "inspect", "--candidates")
    lines = [line for line in out.splitlines() if "small" in line]
    assert [line.split()[1:3] for line in lines] == [["block_d=128", "num_warps=1"]] * 2
    shown(_row("small"))
    assert "num_warps" not in _run(capsys, "inspect")[1]


@pytest.mark.parametrize("columns", ["60", "80", "300"])
def test_a_wide_table_has_every_cell_on_any_screen(columns, shown, monkeypatch, capsys):
    shown(_row("small", kernel="_k" * 20))
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = _run(capsys, "inspect", "--wide")[1]
    monkeypatch.setenv("COLUMNS", columns)
    out = _run(capsys, "inspect", "--wide")[1]
    assert out.split() == whole.split()
    assert max(map(len, out.splitlines())) <= int(columns)
    assert len(whole.splitlines()[-1]) > 160  # a pipe takes a row of any width as one line


def test_tables_are_read_at_100_columns(shown, capsys):
    long = {"us": 123456.7, "mma": "QMMA.16832.F32.E4M3.E4M3", "issue_per_kmac": 298.25,
            "ceiling_tflops": 329.9, "shared_bytes": 101376, "registers": 255, "bound": "special",
            "spill_bytes": 10240, "loops": (_LOOP,)}  # fmt: skip
    shown(
        _row("flash-latent-quantized-t128", **long), _row("small", "modelled", fits=False),
        _row("small", kernel="_other_kernel"),
    )  # fmt: skip
    _, out, _ = _run(capsys, "inspect", "--loops")
    assert max(map(len, out.splitlines())) <= 100
    names = [line.split()[1] for line in out.splitlines() if line.startswith("rms_norm  ")]
    assert names == ["_rms_norm_kernel", "_other_kernel"]
    lines = [line for line in out.splitlines() if line.startswith(("flash-latent", "small"))]
    assert lines[0].split() == [
        "flash-latent-quantized-t128", "255", "10240", "101376", "24", "298.25", "330", "123457",
        "QMMA.16832", "special", "default",
    ]  # fmt: skip
    assert " NO FIT " in lines[1]
    assert lines[1].endswith("modelled")
    assert lines[2].split()[:2] == ["small", "40"]


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

    def note(work, *, arch, advance, jobs):
        asked.extend((item.op, arch) for item in work)
        return []

    shown()
    monkeypatch.setattr(inspect, "inspect", note)
    assert _run(capsys, "inspect", "--arch", "120", "--json")[:2] == (0, "[]\n")
    expected = [(x.name, 120) for x in registry() if x.kernel for _ in x.cases]
    assert asked == expected


def test_where_no_bar_is_shown_there_is_no_line_of_it(shown, capsys):
    shown(_row())
    assert _run(capsys, "inspect")[2] == _run(capsys, "inspect", "--json")[2] == ""


@pytest.mark.parametrize("change", [{"fits": False}, {"spill_bytes": 8}], ids=str)
def test_a_launch_that_spills_or_does_not_fit_fails(change, shown, capsys):
    shown(_row(), _row(kernel="_bad_kernel", **change))
    code, out, err = _run(capsys, "inspect", "--json")
    assert code == 1
    assert len(json.loads(out)) == 2
    last = err.strip().splitlines()[-1]
    assert last == "ft-autotune: 1 of 2 launches spill or do not fit: _bad_kernel"


def test_an_unsound_candidate_is_no_failure(shown, capsys):
    shown(_row(), _row(source="candidate", spill_bytes=8))
    assert _run(capsys, "inspect", "--candidates", "--json")[0] == 0


def test_loops_have_a_table_of_their_own(shown, capsys):
    shown(_row(mma="QMMA.16832.F32", loops=(_LOOP,)))
    _, plain, _ = _run(capsys, "inspect")
    assert "loops on" not in plain
    code, out, _ = _run(capsys, "inspect", "--loops")
    assert code == 0
    assert out.startswith(plain)
    *title, _, name, _, loop, rest = out.removeprefix(plain).splitlines()
    assert title[1].startswith("loops on sm_89, nvidia_geforce_rtx_4090, 1008 GB/s, a pass of one")
    assert "a static model, no times" in " ".join(title)
    assert name == "rms_norm small  _rms_norm_kernel"
    # 1024 * 40 slots over 4096 useful multiply-adds
    assert loop.split() == [
        "0", "8.00", "QMMA.16832x2", "4096", "40", "10.00", "16x3", "tensor", "16",
    ]  # fmt: skip
    assert rest.startswith("rest ")
    _, out, _ = _run(capsys, "inspect", "--loops", "--wide")
    assert out.splitlines()[-2].split()[-13:] == [
        "0", "mma", "8.00", "QMMA.16832.F32x2", "4096", "40", "10.00", "16x3", "2", "6144", "0",
        "tensor", "16",
    ]  # fmt: skip


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """A contract of its own, with the given rows."""
    path = tmp_path / "contract.json"
    monkeypatch.setattr(contract, "COMMITTED", path)
    monkeypatch.setattr(contract.read, "__defaults__", (path,))
    monkeypatch.setattr(contract.write, "__defaults__", (path,))
    monkeypatch.setattr(contract.Contract, "strays", lambda self, specs: [])
    monkeypatch.setattr(contract, "ignored", lambda specs: "")
    monkeypatch.setattr(contract, "num_left_out", lambda specs: 0)
    return path


def test_the_contract_is_written_and_compared(committed, shown, capsys):
    shown(_row("flash-t1"))
    code, out, err = _run(capsys, "inspect", "--write-contract")
    assert (code, out) == (0, "")
    assert err == "ft-autotune: 1 launches in bench_kernels/contract.json\n"
    assert json.loads(committed.read_text())["triton"] == "3.7.1"
    code, out, err = _run(capsys, "inspect", "--diff", "--json")
    told = {"source": "modelled", "changes": [], "strays": [], "ignored": None, "left_out": 0}
    assert (code, json.loads(out)) == (0, told)
    code, out, err = _run(capsys, "inspect", "--diff")
    assert (code, out) == (0, "none of 1 launches differs from bench_kernels/contract.json\n")

    shown(_row("flash-t1", registers=50))
    code, out, err = _run(capsys, "inspect", "--diff", "--json")
    assert code == 0
    assert json.loads(out)["changes"] == [
        {"op": "rms_norm", "case": "flash-t1", "kernel": "_rms_norm_kernel",
         "figure": "registers", "committed": 40, "now": 50, "fails": False}
    ]  # fmt: skip

    shown(_row("flash-t1", wide_share=0.5))
    code, out, err = _run(capsys, "inspect", "--diff")
    assert code == 1
    assert "WORSE" in out
    assert out.startswith("figures that differ from bench_kernels/contract.json; ")
    assert "a static model, no times" in " ".join(out.split())
    assert err.splitlines()[-3:] == [
        "ft-autotune: rms_norm flash-t1 _rms_norm_kernel: wide_share was 1.0, is 0.5",
        f"ft-autotune: {contract.way_out('rms_norm')}",
        "ft-autotune: 1 figure is worse than the contract allows",
    ]


def test_cases_left_over_fail_a_comparison(committed, shown, monkeypatch, capsys):
    shown(_row("flash-t1"))
    assert _run(capsys, "inspect", "--write-contract")[0] == 0
    asked = []

    def strays(self, specs):
        asked.extend(spec.name for spec in specs)
        return ["contract: case a b has 1 launches, expected 0: a command"]

    monkeypatch.setattr(contract.Contract, "strays", strays)
    code, out, err = _run(capsys, "inspect", "--diff", "rms_norm")
    assert (code, out, asked) == (1, "", ["rms_norm"])
    assert err.splitlines()[-2:] == [
        "ft-autotune: contract: case a b has 1 launches, expected 0: a command",
        "ft-autotune: 1 case has other launches",
    ]
    _, out, _ = _run(capsys, "inspect", "--diff", "--json")
    assert json.loads(out)["strays"] == ["contract: case a b has 1 launches, expected 0: a command"]


def test_ignored_entries_are_one_line_and_no_failure(committed, shown, monkeypatch, capsys):
    shown(_row("flash-t1"))
    assert _run(capsys, "inspect", "--write-contract")[0] == 0
    monkeypatch.setattr(contract, "ignored", lambda specs: f"contract: {len(specs)}")
    code, out, err = _run(capsys, "inspect", "--diff", "rms_norm")
    assert (code, out) == (0, "none of 1 launches differs from bench_kernels/contract.json\n")
    assert err.splitlines()[-1] == "ft-autotune: contract: 1"
    _, out, _ = _run(capsys, "inspect", "--diff", "--json", "rms_norm")
    assert json.loads(out)["ignored"] == "contract: 1"


def test_launches_that_are_not_compared_are_counted(committed, shown, monkeypatch, capsys):
    shown(_row("flash-t1"))
    assert _run(capsys, "inspect", "--write-contract")[0] == 0
    monkeypatch.setattr(contract, "num_left_out", lambda specs: len(specs))
    for registers in (40, 50):
        shown(_row("flash-t1", registers=registers))
        _, out, _ = _run(capsys, "inspect", "--diff", "rms_norm")
        assert len(out.splitlines()) > 1
        assert out.splitlines()[-1] == (
            "left out of bench_kernels/contract.json, so not compared: 1 launch"
        )
    _, out, _ = _run(capsys, "inspect", "--diff", "rms_norm", "--json")
    assert json.loads(out)["left_out"] == 1


@pytest.mark.parametrize(("named", "others"), [([], False), (["rms_norm"], True)])
def test_other_ops_stay_where_some_are_named(named, others, committed, shown, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(contract, "write", lambda rows, *, others: asked.append(others) or 1)
    shown(_row("flash-t1"))
    assert _run(capsys, "inspect", "--write-contract", *named)[0] == 0
    assert asked == [others]


def test_a_contract_that_cannot_be_written_is_one_sentence(committed, shown, capsys):
    committed.mkdir()
    shown(_row("flash-t1"))
    code, out, err = _run(capsys, "inspect", "--write-contract")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].endswith("(Is a directory), expected a file to replace")
    assert list(committed.parent.iterdir()) == [committed]


def test_unsound_figures_are_not_committed(committed, shown, capsys):
    shown(_row("flash-t1", spill_bytes=16))
    code, _, err = _run(capsys, "inspect", "--write-contract")
    assert code == 1
    assert "1 of 1 launches spill or do not fit" in err
    assert not committed.exists()


def test_a_contract_of_another_triton_is_no_measure(committed, shown, monkeypatch, capsys):
    shown(_row("flash-t1"))
    assert _run(capsys, "inspect", "--write-contract")[0] == 0
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    monkeypatch.setattr(inspect, "inspect", None)  # refused before any work
    code, out, err = _run(capsys, "inspect", "--diff")
    assert (code, out) == (1, "")
    assert err.endswith("triton is 3.9.0, expected 3.7.1, which the contract is of\n")


def test_a_missing_contract_is_one_sentence(committed, shown, capsys):
    shown(_row("flash-t1"))
    code, out, err = _run(capsys, "inspect", "--diff")
    assert (code, out) == (1, "")
    assert err.strip().startswith("ft-autotune: contract: ")
    assert "is unreadable (" in err


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
        (
            ["inspect", "qqq"],
            "OP is 'qqq', expected the name of an op, such as those that `ft-autotune tune "
            "--dry-run` lists",
        ),
        (
            ["inspect", "rope_tables"],
            "OP is 'rope_tables', which runs its reference only, expected an op with kernels",
        ),
        (
            ["inspect", "--diff", "--write-contract"],
            "--write-contract is given with --diff, expected one of the two",
        ),
        (
            ["inspect", "--write-contract", "--json"],
            "--write-contract is given with --json, expected one of the two",
        ),
        (
            ["inspect", "--diff", "--arch", "90"],
            "--arch 90 is given with --diff, expected --arch 89",
        ),
        (
            ["inspect", "--write-contract", "--candidates"],
            "--candidates is given with --write-contract, expected one of the two",
        ),
        (["inspect", "--jobs", "0"], "Invalid value for '--jobs': 0 is not in the range"),
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


def test_the_version_is_that_of_the_library(capsys):
    assert _run(capsys, "--version") == (0, f"ft-autotune, version {ftkernels.__version__}\n", "")


def test_help_names_what_exists(capsys):
    code, out, _ = _run(capsys, "inspect", "--help")
    assert code == 0
    for option in ("--arch", "--json", "--candidates", "--loops", "--diff", "--write-contract"):
        assert option in out
    assert "a static model of the machine code, no time" in " ".join(out.split())


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
