"""Versions by metadata: what is missing, too old, too new, or not what torch asks for.

Mutants tried: a package passed whose import fails, damaged metadata raised, torch imported for its
version, an absent package passed, the oldest Triton excluded, a too new one failed, a
mismatch with torch's own failed, versions compared as text, an extra's package not asked for.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from ftruntime.doctor import software

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch):
    """The versions that metadata knows, all of which can be imported, and what torch requires."""
    versions = {"torch": "2.11.0", "triton": "3.7.1", "numpy": "2.1.0", "ftkernels": "0.1.0"}
    versions |= dict.fromkeys(software.SERVE, "1.0")
    requires: list[str] = []

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(software.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    return versions, requires


def test_all_is_well(installed):
    assert {check.state for check in software.checks()} == {"ok"}
    names = [check.name for check in software.checks()]
    assert names == [
        "python", "torch", "triton", "numpy", "ftkernels", "serve packages", "triton version",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "triton", "numpy"])
def test_a_missing_package_is_a_line(installed, name):
    del installed[0][name]
    check = software.package(name)
    assert (check.found, check.state) == ("not installed", "failed")
    assert check.remedy == "pip install 'ftkernels'."
    assert software.package("numpy" if name == "torch" else "torch").state == "ok"


def test_a_source_tree_is_no_failure(installed, monkeypatch):
    del installed[0]["ftkernels"]
    assert software.library().state == "ok"
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    assert software.library().state == "failed"


def test_what_serve_lacks_is_a_warning(installed):
    del installed[0]["fastapi"], installed[0]["nvidia-ml-py"]
    check = software.extras()
    assert (check.state, check.found) == ("warning", "missing: nvidia-ml-py, fastapi")
    assert "ftkernels[serve]" in check.remedy


def test_a_package_that_cannot_be_imported_is_a_line(installed, monkeypatch):
    asked = []

    def broken(name):
        asked.append(name)
        if name in ("pynvml", "numpy"):
            raise OSError("libx.so: cannot open\nshared object file")

    monkeypatch.setattr(software.importlib, "import_module", broken)
    check = software.extras()
    told = "OSError: libx.so: cannot open"
    assert (check.state, check.found) == ("warning", f"broken: nvidia-ml-py ({told})")
    assert check.facts["broken"] == {"nvidia-ml-py": told}
    assert "--force-reinstall nvidia-ml-py " in check.remedy
    assert software.package("numpy").state == "failed"
    assert software.package("numpy").found == f"2.1.0, {told}"
    assert {software.package(name).state for name in ("torch", "triton")} == {"ok"}
    assert not {"torch", "triton"} & set(asked)


def test_every_package_of_the_extra_is_imported_by_its_own_name():
    assert software.extras().found == "all installed"


@pytest.mark.parametrize("error", [KeyError("Version"), ValueError("x"), UnicodeError("y")])
def test_damaged_metadata_is_a_line(installed, monkeypatch, error):
    def damaged(name):
        raise error

    monkeypatch.setattr(importlib.metadata, "version", damaged)
    monkeypatch.setattr(importlib.metadata, "requires", damaged)
    states = {check.name: check.state for check in software.checks()}
    assert (states["torch"], states["triton version"]) == ("failed", "failed")
    assert states["serve packages"] == "warning"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.7.1")
    assert software.triton_fits().facts["torch_asks_for"] is None


def test_the_extra_is_that_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"serve = \[(.*?)\]", text, re.DOTALL)
    assert listed is not None
    assert tuple(re.findall(r'"([a-z-]+)', listed[1])) == software.SERVE


@pytest.mark.parametrize(
    ("version", "state"),
    [("3.5.1", "failed"), ("2.9", "failed"), ("3.6.0", "ok"), ("3.9.2", "ok"),
     ("3.10.0", "warning"), ("4.0.0", "warning"), ("3.7.0+git1234", "ok")],
)  # fmt: skip
def test_versions_of_triton(installed, version, state):
    installed[0]["triton"] = version
    check = software.triton_fits()
    assert check.state == state
    assert bool(check.remedy) == (state != "ok")
    assert check.facts["triton"] == version


def test_no_triton_at_all(installed):
    del installed[0]["triton"]
    assert software.triton_fits().state == "failed"


@pytest.mark.parametrize(
    ("line", "pinned"),
    [("triton==3.7.1; platform_system == 'Linux'", "3.7.1"), ("triton (==3.6.0)", "3.6.0"),
     ("pytorch-triton==3.7.0+git9", "3.7.0"), ("triton>=3", None), ("tritonclient==1.0", None),
     ("numpy==2.0", None)],
)  # fmt: skip
def test_what_torch_asks_for(line, pinned):
    assert software.pinned_triton(["filelock", line]) == pinned


def test_another_triton_than_torchs_is_a_warning(installed):
    installed[1].append("triton==3.6.0; platform_system == 'Linux'")
    check = software.triton_fits()
    assert check.state == "warning"
    assert check.remedy.startswith("torch was built beside 3.6.0")
    installed[1][:] = ["triton==3.7.1"]
    assert software.triton_fits().state == "ok"


def test_an_old_python_and_another_system_fail(monkeypatch):
    monkeypatch.setattr(software.sys, "version_info", (3, 9, 9))
    assert software.python().state == "failed"
    monkeypatch.undo()
    assert software.python().state == "ok"
    monkeypatch.setattr(software.platform, "machine", lambda: "aarch64")
    assert software.python().state == "failed"
