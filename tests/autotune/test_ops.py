"""What command lines have in common.

Mutants tried: an unknown backend let through, the reference let through, one command that imports
kernels before it asks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what each command says, then its exit code
EACH = """
import sys
from autotune import cli
for name in ("tune", "verify", "report", "inspect"):
    try:
        cli.main([name, "rms_norm"])
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""
TOLD = {
    "reference": "FTKERNELS_BACKEND is 'reference', which runs no kernels, expected it unset",
    "cuda": "FTKERNELS_BACKEND is 'cuda', expected 'reference' or unset",
}


@pytest.mark.parametrize("value", TOLD)
def test_a_process_without_kernels_is_refused_in_one_sentence(value):
    done = subprocess.run(
        [sys.executable, "-c", EACH], cwd=ROOT, text=True, capture_output=True, check=False,
        env={**os.environ, "FTKERNELS_BACKEND": value},
    )  # fmt: skip
    assert done.stderr.splitlines() == [f"ft-autotune: {TOLD[value]}", "1"] * 4
    assert (done.returncode, done.stdout) == (0, "")
