"""Sources read the same everywhere: no machine's paths, no registry's name, ASCII, 100 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ftkernels", "ftruntime", "autotune", "bench_kernels", "demo", "tests", ".ci")
SUFFIXES = {".py", ".toml", ".txt", ".md", ".json", ".sh", ".jinja"}
COLUMNS = 100
# the model's own tokens, and texts that test how characters are encoded
FOREIGN = (
    "ftruntime/tokenizer/", "ftruntime/demo/vocabulary.py", "ftruntime/demo/demo-kjv/",
    "tests/ftruntime/", "tests/e2e/", "tests/support/", "tests/vectors/",
)  # fmt: skip
MACHINE = re.compile(r"(?<![\w.~<])/(?:work|root|home|Users|mnt|opt|srv)/\w")
REGISTRY = re.compile(
    r"\b(?:pypi|pythonhosted|pytorch|anaconda|npmjs|artifactory|jfrog|nexus|devpi)\b"
    r"[\w.-]*\.(?:org|com|io|net|internal|local)\b|\bdownload\.pytorch\b|(?:proxy|mirror)\.\w+\.\w+"
)
PRAGMA = re.compile(r"\s*# (?:type: ignore|noqa)\b.*")  # the linter does not count these either


def _files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    below = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES or (folder == ".ci" and path.is_file())
    ]
    return [path.relative_to(ROOT) for path in sorted(top) + below if path.is_file()]


FILES = [path for path in _files() if path != Path(__file__).relative_to(ROOT)]
each_file = pytest.mark.parametrize("path", FILES, ids=str)


def _lines(path: Path) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


@each_file
def test_names_no_machine_and_no_registry(path):
    for number, line in enumerate(_lines(path), 1):
        assert not MACHINE.search(line), f"{path}:{number}: a machine's path: {line.strip()}"
        assert not REGISTRY.search(line), f"{path}:{number}: a registry's name: {line.strip()}"


@each_file
def test_is_ascii_where_nothing_else_is_needed(path):
    if path.suffix == ".md" or str(path).startswith(FOREIGN):
        return
    for number, line in enumerate(_lines(path), 1):
        assert line.isascii(), f"{path}:{number}: {line.strip()}"


@each_file
def test_fits_its_columns(path):
    if path.suffix not in (".py", ".toml") and path.name != "Makefile":
        return
    for number, line in enumerate(_lines(path), 1):
        columns = len(PRAGMA.sub("", line))
        assert columns <= COLUMNS, f"{path}:{number}: {columns} columns"
        assert line == line.rstrip(), f"{path}:{number}: space at the end"


@pytest.mark.parametrize(
    ("line", "machine", "registry"),
    [
        ("see /home/someone/file", True, False),
        ("cd /work/main", True, False),
        ("GET /v1/models and ./home/x and ~/work/x", False, False),
        ("https://pypi.org/simple", False, True),
        ("https://download.pytorch.org/whl/cpu", False, True),
        ("https://files.pythonhosted.org/packages", False, True),
        ("pip install torch from PyPI", False, False),
    ],
)
def test_the_rules_see_what_they_should(line, machine, registry):
    assert bool(MACHINE.search(line)) == machine
    assert bool(REGISTRY.search(line)) == registry
