"""``ftruntime doctor``: what this machine has and lacks."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of lines.")
def doctor(as_json: bool) -> int:
    """Look at this machine: versions, cards, memory, and what will run where.

    A line each: ok, warning (works with a loss) or failed, with a remedy. Exit code 1 when one
    failed. Needs no GPU; with one, it page-locks memory and times copies to each card.
    """
    from ftruntime.doctor import examine

    return examine(click.echo, as_json=as_json)
