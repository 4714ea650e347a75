"""``ftruntime bench-stall``: the waits of running streams, measured over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from ftruntime import log
from ftruntime.bench.report import print_table
from ftruntime.bench.settings import BenchError, StallSettings, stall_specs
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.distribution import DISTRIBUTION
from ftruntime.flags import checked
from ftruntime.options import given_values, options
from ftruntime.timeline import PLOT, check_drawable


@click.command("bench-stall")
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@options({**stall_specs(), "plot": PLOT})
def bench_stall(as_json: bool, plot: str | None, **params: str | bool | None) -> None:
    """Measure over HTTP how long running streams wait while a long prompt is prefilled.

    Works with any OpenAI-compatible server. Victims stream alone first; then they stream again, and
    --attack-after seconds later a long prompt arrives that asks for 3 tokens. Waits are between
    consecutive received pieces. The server should have nothing else to do.
    """
    with refusals(USAGE):
        settings = StallSettings(**given_values(params, stall_specs()))  # type: ignore[arg-type]
        path = None if plot is None else Path(str(checked("plot", plot, PLOT)))
        if path is not None:
            check_drawable(path)
    log.setup()
    try:
        from ftruntime.bench import client, stall
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed, expected: pip install '{DISTRIBUTION}[bench]'"
        raise Failure(sentence, FAILED) from error
    with refusals(USAGE):
        client.check_url(settings)
    try:
        result = asyncio.run(stall.run_stall(settings))
    except BenchError as error:
        raise Failure(str(error), FAILED) from error
    if as_json:
        click.echo(json.dumps(result.report.to_dict(), allow_nan=False))
    else:
        print_table(result.report, stall.caption(settings, result), sys.stdout)
    if path is not None:
        with refusals(FAILED):
            stall.plot(path, settings, result)
