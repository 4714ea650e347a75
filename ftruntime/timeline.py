"""Plot of a token timeline: how many tokens each stream had at each moment."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ftruntime.distribution import DISTRIBUTION
from ftruntime.flags import FlagSpec, refuse

SUFFIXES = (".png", ".svg", ".pdf")
_TITLE_CHARS, _LEGEND_ROWS = 95, 12

PLOT: Final = FlagSpec(kind="str", help="Draw the token timeline into this png, svg or pdf file.")


def check_drawable(path: Path) -> None:
    """Refuse what `draw` could not do, before the run whose result it would draw.

    Raises:
        ValueError: matplotlib is not installed, the file name says no known format, or no file
            can be written there.
    """
    if path.suffix.lower() not in SUFFIXES:
        refuse("plot", str(path), f"a file name that ends in {', '.join(SUFFIXES)}")
    target = path if os.path.exists(path) else path.parent
    if os.path.isdir(path) or not os.path.isdir(path.parent) or not os.access(target, os.W_OK):
        refuse("plot", str(path), "a file that can be written, in a directory that exists")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed, expected: pip install '{DISTRIBUTION}[bench]'"
        raise ValueError(sentence) from error


def draw(
    path: Path,
    series: Mapping[str, Sequence[float]],
    title: str,
    *,
    spans: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Write the plot to `path`; the suffix (png, svg, pdf) chooses the format.

    Args:
        series: for each stream, the times in seconds at which a token of it arrived, rising. A
            stream that stands still is a level line.
        title: above the plot; says whether the times are measured or simulated.
        spans: named stretches of time in seconds, shaded; a prompt that is being prefilled.

    Raises:
        ValueError: as `check_drawable`.
        OSError: the file cannot be written.
    """
    check_drawable(path)
    # the object interface: pyplot would look for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, (start_s, end_s)) in enumerate((spans or {}).items()):
        axes.axvspan(start_s, end_s, alpha=0.15, color=f"C{number + len(series)}", label=name)
    for name, times in series.items():
        axes.step(list(times), range(1, len(times) + 1), where="post", label=name)
    axes.set(xlabel="time (s)", ylabel="tokens received")
    axes.set_title(textwrap.fill(title, _TITLE_CHARS), fontsize="medium")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        rows = min(len(labels), _LEGEND_ROWS)
        left_out = None if rows == len(labels) else f"{rows} of {len(labels)}"
        axes.legend(handles[:rows], labels[:rows], title=left_out)
    figure.savefig(path)
