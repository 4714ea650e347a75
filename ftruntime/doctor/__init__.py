"""Whether this machine can run the kernels and the server: findings with a remedy each.

Nothing is started and nothing is kept. A check imports what it looks at and no more, so a package
that is missing or broken is a finding.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable

from ftruntime.distribution import DISTRIBUTION
from ftruntime.doctor import card, software
from ftruntime.doctor.check import Check, State, failed

__all__ = ["Check", "State", "checkup", "examine"]
_FAILED = 1
_COLUMNS = 100  # where no terminal bounds them


def checkup() -> list[Check]:
    """All findings, in the order in which one needs the other."""
    found = software.checks()
    try:
        from ftruntime.doctor import host
    except Exception as error:  # whatever a broken package raises
        return [*found, failed("ftruntime", error, f"pip install '{DISTRIBUTION}[serve]'.")]
    found += host.checks()
    cards, told = card.found_cards()
    found += told
    missing = {check.name for check in found if check.state == "failed"}
    if missing & {"torch", "triton", "numpy", "triton version"}:
        return found  # what follows would only say so again
    if refused := host.setting():
        return [*found, *refused]
    return [*found, *card.torch_checks(cards), host.paths(), host.tuned()]


def examine(write: Callable[[str], object], *, as_json: bool) -> int:
    """Write all findings, a line each with its remedy below, or one JSON value.

    Returns:
        The exit code: 1 when a check failed.
    """
    found = checkup()
    broken = any(check.state == "failed" for check in found)
    if as_json:
        write(json.dumps({"ok": not broken, "checks": [check.to_dict() for check in found]}))
        return _FAILED if broken else 0
    width = max(len(check.name) for check in found)
    indent = " " * (width + 11)
    columns = max(shutil.get_terminal_size((_COLUMNS, 1)).columns, 2 * len(indent))
    for check in found:
        for number, text in enumerate(filter(None, (check.found, check.remedy))):
            head = indent if number else f"{check.state:7}  {check.name:{width}}  "
            write(textwrap.fill(
                text, columns, initial_indent=head, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            ))  # fmt: skip
    return _FAILED if broken else 0
