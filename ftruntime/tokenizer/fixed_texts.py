"""The three fixed texts of a prompt: read from the checkpoint, as data.

A checkpoint's `encoding/encoding_dsv4.py` assigns them as string literals. The file is parsed,
never imported or run, and placeholders are substituted by name. The demo has neutral texts, which
describe the same markup and stand in for those of a checkpoint without the file.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ftruntime.distribution import DEMO_DIRECTORY
from ftruntime.tokenizer import special

_LOG = logging.getLogger(__name__)

_TOKENS = {
    "dsml_token": special.DSML,
    "thinking_start_token": special.THINK_OPEN,
    "thinking_end_token": special.THINK_CLOSE,
}

FIXED_TEXTS_FILE: Final = "encoding/encoding_dsv4.py"
"""Within a checkpoint's directory."""


@dataclass(frozen=True)
class FixedTexts:
    """Templates of the three texts; `names` holds what other placeholders stand for."""

    tools_template: str
    response_format_template: str
    effort_max_text: str
    names: Mapping[str, str]

    @classmethod
    def from_dir(cls, path: Path) -> FixedTexts:
        """Read the texts of a checkpoint directory; the demo's, with a warning, if it has none.

        Raises:
            ValueError: the file is damaged or does not assign the three texts as string literals.
        """
        file = path / FIXED_TEXTS_FILE
        if file.is_file():
            return cls.of_file(file)
        if os.path.lexists(file):
            raise ValueError(f"{file}: not a regular file, expected one or none")
        if os.path.lexists(file.parent) and not file.parent.is_dir():
            raise ValueError(f"{file.parent}: not a directory, expected one or none")
        texts = cls.of_file(DEMO_DIRECTORY / FIXED_TEXTS_FILE)
        _LOG.warning("no chat texts in the checkpoint, using neutral ones path=%s", file)
        return texts

    @classmethod
    def of_file(cls, file: Path) -> FixedTexts:
        """Read the texts of one file.

        Raises:
            ValueError: as `from_dir`; also without the file.
        """
        literals = _string_literals(file)
        wanted = ("TOOLS_TEMPLATE", "response_format_template", "REASONING_EFFORT_MAX")
        for name in wanted:
            if name not in literals:
                raise ValueError(f"{file}: no {name}, expected it assigned as a string literal")
        tools, response_format, effort_max = (literals[name] for name in wanted)
        texts = cls(tools, response_format, effort_max, {**literals, **_TOKENS})
        try:
            texts.tools([])
            texts.response_format({})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        return texts

    def tools(self, functions: Sequence[Mapping[str, object]]) -> str:
        """The tools text, one JSON line per function; ends with one line feed."""
        schemas = "\n".join(to_json(function) for function in functions)
        names = {**self.names, "tool_schemas": schemas}
        return _substitute("TOOLS_TEMPLATE", self.tools_template, names).rstrip("\n") + "\n"

    def response_format(self, form: Mapping[str, object]) -> str:
        names = {**self.names, "schema": to_json(form)}
        return _substitute("response_format_template", self.response_format_template, names)

    def effort_max(self) -> str:
        """The maximal-effort text; ends with two line feeds."""
        return self.effort_max_text.rstrip("\n") + "\n\n"


def to_json(value: object) -> str:
    """JSON as prompts have it: non-ASCII kept, separators `, ` and `: `."""
    return json.dumps(value, ensure_ascii=False)


def _string_literals(file: Path) -> dict[str, str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read, {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid Python, {error}") from error
    except MemoryError as error:  # what the parser says when its stack is full
        raise ValueError(f"{file}: nested too deeply, expected plain assignments") from error
    found: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update({t.id: node.value.value for t in targets if isinstance(t, ast.Name)})
    return found


def _substitute(template_name: str, template: str, names: Mapping[str, str]) -> str:
    """Replace `{name}`; doubled braces stand for single ones, nothing else is understood."""
    out = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        out.append(text)
        if name is None:
            continue
        if name not in names or spec or conversion:
            raise ValueError(f"{template_name} has the placeholder {name!r}, which has no value")
        out.append(names[name])
    return "".join(out)
