"""The ``ftruntime`` command: serve, inspect, simulate, bench-stall, eval, make-demo, doctor, a
file each.

Data goes to stdout, logs and refusals to stderr. Exit codes: 0 fine, 1 failed, 2 a wrong command
line. Every refusal is one sentence. Heavy imports wait until the command line is known to be right.
"""

from __future__ import annotations

import click

from ftruntime.cli import bench_stall, doctor, evaluate, inspect, make_demo, serve, simulate
from ftruntime.cli.group import Group
from ftruntime.distribution import version


@click.group(
    cls=Group,
    commands=(
        serve.serve, inspect.inspect, simulate.simulate, bench_stall.bench_stall,
        make_demo.make_demo, doctor.doctor, evaluate.evaluate,
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)  # fmt: skip
@click.version_option(version(), prog_name="ftruntime")
def main() -> None:
    """Serve DeepSeek-V4 models."""
