"""Progress of a start-up off and on a terminal."""

from __future__ import annotations

import logging

import pytest

from ftruntime.progress import StartProgress


def test_a_line_every_tenth(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), StartProgress(terminal=False) as progress:
        for number in range(101):
            progress("load weights", number / 100)
        progress("warm up", 0.0)
        progress("warm up", 0.05)
        progress("warm up", 1.0)
        progress("warm up", 1.0)
    lines = [record.getMessage() for record in caplog.records]
    loads = [line for line in lines if "load weights" in line]
    assert loads[0] == "starting phase='load weights' progress=0%"
    assert loads[-1] == "starting phase='load weights' progress=100%"
    assert 10 <= len(loads) <= 12
    assert [line.rpartition("=")[2] for line in lines if "warm up" in line] == ["0%", "100%"]


def test_a_bar_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with StartProgress(terminal=True) as progress:
        progress("load weights", 0.5)
        progress("warm up", 1.0)
    err = capsys.readouterr().err
    assert "load weights" in err
    assert "warm up" in err
    assert "100%" in err


def test_what_stands_behind_a_colon_is_the_same_phase(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), StartProgress(terminal=False) as progress:
        for number in range(101):
            progress(f"load weights: {number} of 100 GiB", number / 100)
    lines = [record.getMessage() for record in caplog.records]
    assert 10 <= len(lines) <= 12
    assert lines[-1] == "starting phase='load weights: 100 of 100 GiB' progress=100%"
    with StartProgress(terminal=True) as progress:
        progress("load weights: 1 of 4 GiB", 0.25)
        progress("load weights: 3 of 4 GiB", 0.75)
    last = capsys.readouterr().err.rpartition("load weights")[2]
    assert "3 of 4 GiB" in last
    assert "75%" in last
