"""``ftruntime doctor``: what this machine has and lacks."""

from __future__ import annotations

import json

import click

from ftruntime.cli.group import FAILED


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of lines.")
def doctor(as_json: bool) -> int:
    """Look at this machine: versions, cards, memory, and what will run where.

    A line each: ok, warning (works with a loss) or failed, with a remedy. Exit code 1 when one
    failed. Needs no GPU; with one, it page-locks memory and times copies to each card.
    """
    from ftruntime.doctor import checkup

    found = checkup()
    broken = any(check.state == "failed" for check in found)
    if as_json:
        value = {"ok": not broken, "checks": [check.to_dict() for check in found]}
        click.echo(json.dumps(value))
        return FAILED if broken else 0
    width = max(len(check.name) for check in found)
    for check in found:
        remedy = f"\n{'':{width + 11}}{check.remedy}" if check.remedy else ""
        click.echo(f"{check.state:7}  {check.name:{width}}  {check.found}{remedy}")
    return FAILED if broken else 0
