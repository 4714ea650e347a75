"""The plot of a token timeline; what is drawn is read back from the SVG.

Mutants tried and seen red: a stream left out of the legend, a suffix that is not checked, a legend
of every stream, a directory that is not there let through, rights not asked for.
"""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import matplotlib
import pytest

from ftruntime.timeline import check_drawable, draw


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_draws_a_file(tmp_path, suffix):
    path = tmp_path / f"plot.{suffix}"
    draw(path, {"victim": [0.0, 0.5, 7.0], "silent": []}, "simulated", spans={"prefill": (0.5, 7)})
    start = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)


def test_names_every_stream_and_span(tmp_path):
    path = tmp_path / "plot.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(path, {"victim": [1.0], "other": [2.0]}, "a title", spans={"prefill": (0.0, 1.0)})
    text = path.read_text()
    for word in ("victim", "other", "prefill", "a title", "time (s)", "tokens received"):
        assert word in text


@pytest.mark.parametrize(("num_streams", "rows"), [(11, 12), (12, 12), (40, 12), (3, 4)])
def test_a_long_legend_is_cut(tmp_path, num_streams, rows):
    path = tmp_path / "plot.svg"
    series = {f"stream-{number}": [1.0 * number] for number in range(num_streams)}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(path, series, "a title", spans={"prefill": (0.0, 1.0)})
    text = path.read_text()
    assert text.count(">stream-") + text.count(">prefill<") == rows
    cut = f">{rows} of {num_streams + 1}<"
    assert (cut in text) == (num_streams + 1 > rows)


@pytest.mark.parametrize("name", ["plot.gif", "plot", "png"])
def test_refuses_other_formats(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--plot is .*, expected a file name that ends in \.png"):
        check_drawable(tmp_path / name)


@pytest.mark.parametrize("place", ["none/plot.svg", "file/plot.svg", "directory.svg"])
def test_refuses_a_place_where_no_file_can_be(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "directory.svg").mkdir()
    with pytest.raises(ValueError, match=r"^--plot is .*\.svg, expected a file that can be writ"):
        check_drawable(tmp_path / place)


@pytest.mark.parametrize(("there", "asked"), [(False, ""), (True, "plot.svg")])
def test_refuses_what_may_not_be_written(tmp_path, monkeypatch, there, asked):
    path = tmp_path / "plot.svg"
    if there:
        path.touch()
    check_drawable(path)
    monkeypatch.setattr(os, "access", lambda target, mode: Path(target) != tmp_path / asked)
    with pytest.raises(ValueError, match=r"^--plot is .*\.svg, expected a file that can be writ"):
        check_drawable(path)


def test_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (check_drawable, lambda path: draw(path, {}, "x")):
        with pytest.raises(
            ValueError, match=r"^matplotlib is not installed, expected: pip install"
        ):
            call(tmp_path / "plot.png")
