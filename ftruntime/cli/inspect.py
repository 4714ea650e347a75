"""``ftruntime inspect``: what the flags resolve to."""

from __future__ import annotations

import json
import logging
import sys

import click

from ftruntime import inspect as inspection
from ftruntime import log
from ftruntime.cli.common import checkpoint_shape, log_lines
from ftruntime.cli.group import FAILED, USAGE, refusals
from ftruntime.cli.sections import SectionedCommand
from ftruntime.effective import inactive_flags
from ftruntime.options import flag_options, flag_sections, read_config
from ftruntime.plan import resolve

_logger = logging.getLogger(__package__)


_PLANNED = {"What is planned for": ("cards", "card_gib", "as_json")}


@click.command(cls=SectionedCommand, sections={**_PLANNED, **flag_sections()})
@click.argument("model_dir", metavar="[MODEL]", required=False)
@click.option("--cards", metavar="N", help=inspection.CARDS.help_line)
@click.option("--card-gib", metavar="F", help=inspection.CARD_GIB.help_line)
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@flag_options
def inspect(
    model_dir: str | None,
    cards: str | None,
    card_gib: str | None,
    as_json: bool,
    **params: str | bool | None,
) -> None:
    """Show what the flags resolve to, without starting.

    MODEL is a checkpoint directory, flash or pro; without one, the trained demo.
    """
    with refusals(USAGE):
        config, facts = inspection.machine(read_config(params, model_dir), cards, card_gib)
    log.setup()
    with refusals(FAILED):
        config = config.with_model()
    builtin = str(config.model) in inspection.BUILTIN_MODELS
    shape = (
        inspection.shape_of(str(config.model)) if builtin
        else checkpoint_shape(config, ", flash or pro")
    )  # fmt: skip
    with refusals(USAGE):
        plan = resolve(config, shape, facts, strict=False)
    log_lines((*plan.notes, *inactive_flags(config, plan)), plan.warnings)
    if not plan.fits and facts.kind == "cpu":
        _logger.warning("this machine is what was planned for; --cards and --card-gib plan others")
    if not plan.fits:
        _logger.warning(
            "plan does not fit needed_bytes=%d budget_bytes=%d", plan.total_bytes, plan.budget_bytes
        )
    refusal = None
    try:
        resolve(config, shape, facts)
    except ValueError as error:
        refusal = str(error)
        _logger.warning("serve refuses to start with these flags: %s", error)
    values = inspection.report(str(config.model), config, shape, plan, refusal)
    if as_json:
        click.echo(json.dumps(values))
    else:
        inspection.print_table(values, plan, sys.stdout)
