"""A picture of the terms of steps; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench_kernels.terms import TERMS, StepTerms

_SUFFIXES = (".png", ".svg", ".pdf")


def check_drawable(path: Path) -> None:
    """Refuse what `draw` could not do, before the work whose result it would draw.

    Raises:
        ValueError: the file name says no known format, no file can be written there, or matplotlib
            is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        wanted = ", ".join(_SUFFIXES)
        raise ValueError(f"--plot is {path}, expected a file name that ends in {wanted}")
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"--plot is {path}, expected a file to write in a directory that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot is {path}, expected matplotlib ({error}): pip install 'ftkernels[bench]'"
        ) from error


def draw(path: Path, found: Sequence[StepTerms], title: str) -> None:
    """The terms of every step as shares of its sum, a bar for each step.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{step.name}\n{1e3 * step.sum_s:.3g} ms modelled" for step in found]
    left = [0.0] * len(found)
    for term in TERMS:
        widths = [float(getattr(step, f"{term}_s")) / step.sum_s for step in found]
        axes.barh(labels, widths, left=left, label=term.replace("_", "-"))
        left = [x + y for x, y in zip(left, widths, strict=True)]
    axes.set(xlabel="share of the sum, nothing overlapping")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.35), ncols=len(TERMS))
    figure.savefig(path)
