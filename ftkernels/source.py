"""What a tuned entry follows from: the code that an op can reach, its kernels and their launches.

A module's text counts without comments, docstrings and blank lines, so that words make nothing
stale. It is read without a parser: a process that serves does this at its first lookups.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# strings are found so that a # in one begins no comment
_PIECES = re.compile(
    r'''"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""|'''
    r'''\'\'\'[^'\\]*(?:(?:\\.|'(?!\'\'))[^'\\]*)*\'\'\'|'''
    r""""[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'|\#[^\n]*""",
    re.DOTALL,
)
_LINE_END = re.compile(r"[ \t]*(?:#|\n|\Z)")
_FROM = re.compile(r"^from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
_IMPORT = re.compile(r"^import ([\w.]+)", re.MULTILINE)
# of a package, what can change neither a kernel nor its launch: checks and formats, lookups, which
# path runs, records of ops, cards (for candidates and the static model), stand-ins for tests
_INFRASTRUCTURE = frozenset(
    ("backend", "check", "config", "source", "spec", "target", "testing", "work")
)


@dataclass(frozen=True)
class _Module:
    """Of a module: hash of its code, and modules of its package that it imports."""

    digest: str
    imports: frozenset[str]


@lru_cache(maxsize=256)
def source_hash(*functions: Callable[..., Any]) -> str:
    """Hash of the modules that define the functions, and of those that they import.

    Imports are followed at any depth inside the modules' own package, where they stand at the head
    of a module. Infrastructure that is imported does not count, but what it imports does.
    """
    roots = {function.__module__ for function in functions}
    reached, open_ = set(roots), list(roots)
    while open_:
        found = _module(open_.pop()).imports - reached
        reached |= found
        open_ += found
    counted = sorted(x for x in reached if x in roots or not _is_infrastructure(x))
    parts = (f"{x} {_module(x).digest}" for x in counted)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _is_infrastructure(name: str) -> bool:
    return name.partition(".")[2] in _INFRASTRUCTURE


@lru_cache(maxsize=1024)
def _module(name: str) -> _Module:
    code = "\n".join(code_lines(inspect.getsource(sys.modules[name])))
    package = name.partition(".")[0] + "."
    imports = {x for x in _imported(code) if x.startswith(package) and x in sys.modules}
    digest = hashlib.sha256(code.encode()).hexdigest()
    return _Module(digest, frozenset(imports))


def _imported(code: str) -> Iterator[str]:
    """Names at the head of a module that may be those of modules."""
    yield from _IMPORT.findall(code)
    for package, names in _FROM.findall(code):
        yield package
        for name in names.strip("()").split(","):
            yield f"{package}.{name.split()[0]}" if name.strip() else package


def code_lines(source: str) -> list[str]:
    """The lines of a module without comments, docstrings and blank ones.

    A docstring is a string on lines of its own, first in a body or not indented.
    """
    kept: list[str] = []
    end, last = 0, ":"  # a module begins as a body does
    for piece in _PIECES.finditer(source):
        between = source[end : piece.start()]
        kept.append(between)
        last = between.rstrip()[-1:] or last
        end = piece.end()
        if piece[0][0] == "#":
            continue
        begins_line = not between or "\n" in between[len(between.rstrip()) :]
        is_first = last == ":" or between[-1:] in ("", "\n")
        if not (begins_line and is_first and _LINE_END.match(source, end)):
            kept.append(piece[0])
            last = piece[0][-1]
    kept.append(source[end:])
    return [line.rstrip() for line in "".join(kept).split("\n") if line.strip()]
