"""``ftruntime simulate``: the scheduler against modelled step times."""

from __future__ import annotations

import json
import sys

import click

from ftruntime import log
from ftruntime import simulate as simulation
from ftruntime.cli.common import log_lines, progress_bar
from ftruntime.cli.group import FAILED, USAGE, refusals
from ftruntime.cli.sections import SectionedCommand
from ftruntime.options import options
from ftruntime.sim.settings import help_sections, prepare, preset_specs, simulate_specs

_UNLISTED = "Every other flag of `serve` is accepted too: `ftruntime serve --help` lists them."


@click.command(cls=SectionedCommand, sections=help_sections(), unlisted=_UNLISTED)
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@options(simulate_specs())
@options(preset_specs())
def simulate(as_json: bool, **params: str | bool | None) -> None:
    """Run the scheduler against modelled step times: a long prompt beside a running stream, or a
    trace of many clients. Needs no GPU and no weights. A flag of `serve` overrides the preset's.
    """
    log.setup("warning")
    with refusals(USAGE):
        experiment = prepare(params)
    log_lines((), experiment.plan.warnings)
    with refusals(FAILED), progress_bar("simulating") as progress:
        outcome = simulation.run(experiment, progress)
    reports = outcome.reports
    if as_json:
        click.echo(json.dumps(reports if len(reports) > 1 else reports[0], allow_nan=False))
    else:
        simulation.print_reports(experiment, reports, sys.stdout)
    with refusals(FAILED):
        simulation.draw(experiment, outcome)
