"""`ftruntime doctor`: its lines, its JSON and its exit code.

Mutants tried: no way to `doctor` without click, our own import errors in one sentence, a host that
cannot be looked at raised, exit code 0 with a failed check, 1 for a warning, checks that need torch
run without it, remedies left out, lines of any width.
"""

from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner

from ftruntime import doctor
from ftruntime.cli import main
from ftruntime.doctor import card, host, software
from ftruntime.doctor.check import Check

OK = Check("cores", "8", facts={"cores": 8})
WARNING = Check("host memory", "4 GiB", "warning", "Add memory.")
FAILED = Check("torch", "not installed", "failed", "Install it.")


def _run(monkeypatch, *found, words=()):
    monkeypatch.setattr(doctor, "checkup", lambda: list(found))
    return CliRunner().invoke(main, ["doctor", *words])


def test_a_line_each_with_its_remedy(monkeypatch):
    result = _run(monkeypatch, OK, WARNING)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok       cores        8",
        "warning  host memory  4 GiB",
        "                      Add memory.",
    ]


def test_lines_end_where_the_screen_does(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    long = Check("host memory", "4 GiB of which little is free", "warning", "Add memory, or swap.")
    lines = _run(monkeypatch, long).stdout.splitlines()
    assert lines == [
        "warning  host memory  4 GiB of which little is",
        "                      free",
        "                      Add memory, or swap.",
    ]


def test_a_failed_check_is_exit_code_1(monkeypatch):
    assert _run(monkeypatch, OK, FAILED).exit_code == 1
    result = _run(monkeypatch, OK, FAILED, words=["--json"])
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert value["ok"] is False
    assert value["checks"][0] == {
        "name": "cores", "state": "ok", "found": "8", "remedy": "", "facts": {"cores": 8},
    }  # fmt: skip
    assert json.loads(_run(monkeypatch, WARNING, words=["--json"]).stdout)["ok"] is True


def test_nothing_is_imported_that_is_missing(monkeypatch):
    def missing(name):
        return None if name == "torch" else "1.0"

    def never(*args):
        raise AssertionError("torch is missing, and was asked for")

    monkeypatch.setattr(software, "version", missing)
    monkeypatch.setattr(card, "torch_checks", never)
    monkeypatch.setattr(host, "paths", never)
    monkeypatch.setattr(host, "tuned", never)
    found = {check.name: check.state for check in doctor.checkup()}
    assert found["torch"] == "failed"
    assert "cores" in found


def _broken(*words: str, modules: str) -> subprocess.CompletedProcess[str]:
    """`ftruntime` where these modules cannot be imported."""
    code = (
        f"import sys; sys.modules |= dict.fromkeys({modules.split()})\n"
        f"sys.argv = ['ftruntime', *{words}]\n"
        "from ftruntime.__main__ import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_doctor_needs_no_package():
    done = _broken("doctor", "--json", modules="click rich numpy torch triton msgspec pynvml")
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["numpy"]["state"] == "failed"
    assert {"click", "rich", "msgspec"} < set(checks["serve packages"]["facts"]["broken"])
    text = _broken("doctor", modules="click")
    assert (text.returncode, text.stderr) == (0, "")
    _, behind = text.stdout.split("warning  serve packages")
    assert "click (ModuleNotFoundError: " in " ".join(behind.split())


def test_other_commands_say_what_is_missing():
    done = _broken("serve", modules="click")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ftruntime cannot be imported (import of click halted")
    assert done.stderr.endswith("; `ftruntime doctor` says what is missing\n")
    assert done.stderr.count("\n") == 1
    ours = _broken("serve", modules="ftruntime.cli.group")
    assert "Traceback" in ours.stderr


def test_a_host_that_cannot_be_looked_at_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftruntime.doctor.host", None)
    monkeypatch.delattr(doctor, "host")
    (last,) = [check for check in doctor.checkup() if check.name == "ftruntime"]
    assert last.state == "failed"
    assert "halted" in last.found


def test_this_machine_is_looked_at():
    code = (
        "import sys; from ftruntime.doctor import software, host, card\n"
        "software.checks(); host.checks(); card.found_cards()\n"
        "print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False False", done.stderr
    names = [check.name for check in doctor.checkup()]
    assert names[0] == "python"
    assert {"kernels", "tuned configs", "torch device"} <= set(names)
    assert len(names) == len(set(names))
