"""The training text: the King James Bible out of two Debian packages, in chapters.

``bible-kjv-text`` holds it compressed, ``bible`` of ``bible-kjv`` writes it out. A document is one
chapter: a heading line, then one verse a line. Documents are joined by a blank line.
"""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("bible-kjv", "bible-kjv-text")
WHOLE: Final = "gen1:1-rev22:21"
_VERSE: Final = re.compile(r" +\d+ (.+)")
_HEADING: Final = re.compile(r"([1-3] )?[A-Z][A-Za-z ]+ \d+")


@dataclass(frozen=True)
class Chapter:
    """One document: heading such as "Genesis 1", and its verses."""

    heading: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join((self.heading, *self.verses))


def fetch(folder: Path) -> list[Chapter]:
    """Download the packages into `folder`, once, and read the text; needs Debian's ``apt-get``."""
    raw = folder / "kjv.txt"
    if not raw.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True)
        for package in sorted(folder.glob("bible-kjv*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, folder / "packages"], check=True)
        root = folder / "packages" / "usr"
        command = [str(root / "bin" / "bible"), "-p", str(root / "lib"), "-l100000", WHOLE]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        raw.write_text(done.stdout, encoding="utf-8")
    return parse(raw.read_text(encoding="utf-8"))


def parse(raw: str) -> list[Chapter]:
    """Chapters in the order of the book.

    Raises:
        ValueError: a line that is neither a heading, a verse nor blank; or no chapter at all.
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
    return [Chapter(heading, tuple(verses)) for heading, verses in chapters]


def split(
    chapters: list[Chapter], *, seed: int, held_out: float
) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters to train on and chapters held out, both in the book's order.

    Args:
        seed: picks the held-out chapters.
        held_out: their share of all chapters, in (0, 1); at least one is held out.
    """
    count = max(1, round(held_out * len(chapters)))
    chosen = set(random.Random(seed).sample(range(len(chapters)), count))
    train = [chapter for number, chapter in enumerate(chapters) if number not in chosen]
    return train, [chapters[number] for number in sorted(chosen)]


def join(chapters: list[Chapter]) -> str:
    """One text: documents with a blank line between them, a line feed at the end."""
    return "\n\n".join(chapter.text for chapter in chapters) + "\n"
