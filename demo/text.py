"""The training text: the King James Bible out of two Debian packages, in chapters.

``bible-kjv-text`` holds it compressed, ``bible`` of ``bible-kjv`` writes it out. A document is one
chapter: a heading line, then one verse a line. Documents are joined by a blank line.
"""

from __future__ import annotations

import logging
import random
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from demo.files import digest, replaced

FILE: Final = "kjv.txt"
HELD_OUT_FILE: Final = "held_out.txt"
PACKAGES: Final = ("bible-kjv", "bible-kjv-text")
# of the file that version 4.38 of both packages yields
SHA256: Final = "6f74f5589333c56c263963e6347dba662bae2d96861302e690aaae0b4a855eda"
HELD_OUT: Final = 0.05
SPLIT_SEED: Final = 20
WHOLE: Final = "gen1:1-rev22:21"
_VERSE: Final = re.compile(r" +\d+ (.+)")
_HEADING: Final = re.compile(r"([1-3] )?[A-Z][A-Za-z ]+ \d+")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chapter:
    """One document: heading such as "Genesis 1", and its verses."""

    heading: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join((self.heading, *self.verses))


def fetch(folder: Path) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters to train on and chapters held out, of the text in `folder`; it is downloaded first
    if it is not there, with Debian's ``apt-get``. Warns of another text than the known one.

    Raises:
        OSError: a file or a program cannot be used.
        ValueError: what is there is not the text.
    """
    file = folder / FILE
    there = file.exists()
    raw = file.read_bytes() if there else _printed(folder)
    try:
        parts = split(parse(raw.decode("utf-8")), seed=SPLIT_SEED, held_out=HELD_OUT)
    except ValueError as error:
        hint = "; removed, it is fetched again" if there else ""
        raise ValueError(f"{file}: {error}{hint}") from error
    if not there:
        with replaced(file) as partial:
            partial.write_bytes(raw)
    if digest(raw) != SHA256:
        _logger.warning(
            "%s has sha256 %s, not %s of the text that the figures of demo/README.md are of",
            file, digest(raw)[:16], SHA256[:16],
        )  # fmt: skip
    return parts


def _printed(folder: Path) -> bytes:
    """The text as the packages' own program prints it; nothing of them stays in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name).resolve()
        _output(["apt-get", "download", "-qq", *PACKAGES], place, folder)
        root = place / "packages"
        for package in sorted(place.glob("*.deb")):
            _output(["dpkg-deb", "-x", str(package), str(root)], place, folder)
        program = str(root / "usr" / "bin" / "bible")
        return _output([program, "-p", str(root / "usr" / "lib"), "-l100000", WHOLE], place, folder)


def _output(command: list[str], place: Path, folder: Path) -> bytes:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, cwd=place, capture_output=True)
    except OSError as error:
        failure = f"{name} cannot be run ({error.strerror})"
    else:
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        failure = f"{name} failed ({lines[-1] if lines else f'exit code {done.returncode}'})"
    raise OSError(
        f"{failure}: the text comes from Debian's packages {' and '.join(PACKAGES)}, over the "
        f"network; elsewhere, put the {FILE} of another folder into {folder}"
    )


def parse(raw: str) -> list[Chapter]:
    """Chapters in the order of the book.

    Raises:
        ValueError: a line that is neither a heading, a verse nor blank; a chapter without verses;
            no chapter at all.
    """
    chapters: list[tuple[str, list[str]]] = []
    for number, line in enumerate(raw.splitlines(), start=1):
        verse = _VERSE.fullmatch(line)
        if verse and chapters:
            chapters[-1][1].append(verse[1].strip())
        elif _HEADING.fullmatch(line):
            chapters.append((line, []))
        elif line.strip():
            raise ValueError(f"line {number} is {line[:40]!r}, expected a heading or a verse")
    if not chapters:
        raise ValueError("text is empty, expected chapters")
    bare = next((heading for heading, verses in chapters if not verses), None)
    if bare is not None:
        raise ValueError(f"{bare} is empty, expected verses")
    return [Chapter(heading, tuple(verses)) for heading, verses in chapters]


def split(
    chapters: list[Chapter], *, seed: int, held_out: float
) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters to train on and chapters held out, both in the book's order.

    Args:
        seed: picks the held-out chapters.
        held_out: their share of all chapters, in (0, 1); at least one is held out.

    Raises:
        ValueError: none would be left to train on.
    """
    count = max(1, round(held_out * len(chapters)))
    if count >= len(chapters):
        raise ValueError(f"text has {len(chapters)} chapters, expected more than {count}")
    chosen = set(random.Random(seed).sample(range(len(chapters)), count))
    train = [chapter for number, chapter in enumerate(chapters) if number not in chosen]
    return train, [chapters[number] for number in sorted(chosen)]


def join(chapters: list[Chapter]) -> str:
    """One text: documents with a blank line between them, a line feed at the end."""
    return "\n\n".join(chapter.text for chapter in chapters) + "\n"


def write_held_out(folder: Path, held_out: str) -> None:
    """Leave the chapters that training never saw in `folder`."""
    with replaced(folder / HELD_OUT_FILE) as partial:
        partial.write_text(held_out, encoding="utf-8")
