"""Whether this machine can run the kernels and the server: findings with a remedy each.

Nothing is started and nothing is kept. A check imports what it looks at and no more, so a missing
package is a finding.
"""

from __future__ import annotations

from ftruntime.doctor import card, host, software
from ftruntime.doctor.check import Check, State

__all__ = ["Check", "State", "checkup"]


def checkup() -> list[Check]:
    """All findings, in the order in which one needs the other."""
    found = [*software.checks(), *host.checks()]
    cards, told = card.found_cards()
    found += told
    missing = {check.name for check in found if check.state == "failed"}
    if missing & {"torch", "triton", "numpy", "triton version"}:
        return found  # what follows would only say so again
    return [*found, *card.torch_checks(cards), host.paths(), host.tuned()]
