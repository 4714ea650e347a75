"""Runs `ft-autotune` in this process."""

from __future__ import annotations

import pytest

from autotune import cli


def run(capsys, *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err
