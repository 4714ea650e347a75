"""The ``ftruntime`` command: serve, inspect, simulate, bench-stall, make-demo.

Data goes to stdout, logs and refusals to stderr. Exit codes: 0 fine, 1 failed, 2 a wrong command
line. Every refusal is one sentence. Heavy imports wait until the command line is known to be right.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from ftruntime import inspect as inspection
from ftruntime import log
from ftruntime import simulate as simulation
from ftruntime.bench.report import print_table
from ftruntime.bench.settings import BenchError, StallSettings, stall_specs
from ftruntime.config import RuntimeConfig, check_servable, inactive_flags
from ftruntime.demo_cache import DISTRIBUTION, ensure_demo, version
from ftruntime.facts import probe
from ftruntime.flags import FlagSpec, checked, flag_name, parse
from ftruntime.model.config import ModelConfig
from ftruntime.options import flag_options, given_values, options, read_config
from ftruntime.plan import NotEnoughMemoryError, Plan, resolve
from ftruntime.sim.settings import prepare, simulate_specs
from ftruntime.timeline import check_drawable

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SEED = FlagSpec(kind="int", help="Seed of all weights.", default=0, low=0)
_PRESET = FlagSpec(
    kind="str", help="small (head 128) or tiny (head 64).", default="small",
    choices=("small", "tiny"),
)  # fmt: skip

_logger = logging.getLogger(__name__)


class Failure(click.ClickException):
    """Ends the command with one sentence on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


class _Group(click.Group):
    """A command group whose refusals are one sentence, without click's usage lines around it."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> object:
        try:
            with _writable_stdout():
                code = super().main(
                    args, prog_name or "ftruntime", complete_var, standalone_mode=False, **extra
                )
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "", err=True)
            code = _USAGE
        except click.ClickException as error:
            click.echo(error.format_message(), err=True)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = _INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _writable_stdout() -> Iterator[None]:
    """A full disk behind stdout is one sentence; a reader that left ends the command in silence."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # what is still buffered would fail once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise Failure(f"stdout cannot be written ({error.strerror})", _FAILED) from error


@contextlib.contextmanager
def _refusals(exit_code: int) -> Iterator[None]:
    """Refusals raised inside end the command with this code; anything else is a bug and shows
    where it is.
    """
    try:
        yield
    except NotEnoughMemoryError as error:
        raise Failure(str(error), _FAILED) from error
    except OSError as error:
        if error.filename is None:
            raise Failure(str(error), exit_code) from error
        sentence = f"{error.filename} cannot be opened or written ({error.strerror})"
        raise Failure(sentence, exit_code) from error
    except ValueError as error:
        raise Failure(str(error), exit_code) from error


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.version_option(version(), prog_name="ftruntime")
def main() -> None:
    """Serve DeepSeek-V4 models."""


@main.command()
@click.argument("model_dir", metavar="[MODEL]", required=False)
@flag_options
def serve(model_dir: str | None, **params: str | bool | None) -> int:
    """Serve MODEL, a checkpoint directory, over HTTP; without one, a demo model."""
    with _refusals(_USAGE):
        config = read_config(params, model_dir)
        check_servable(config)
        facts = probe(config.device)
    log.setup()
    _check_platform()
    config = _with_model(config)
    shape = _checkpoint_shape(config)
    with _refusals(_USAGE):
        plan = resolve(config, shape, facts)
    _log_plan(config, plan)
    with _refusals(_FAILED):
        return _run(config, shape)


def _run(config: RuntimeConfig, shape: ModelConfig) -> int:
    """Hand over to the HTTP front; returns when the server has shut down."""
    try:
        _front()
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed, expected: pip install '{DISTRIBUTION}[serve]'"
        raise Failure(sentence, _FAILED) from error
    from ftruntime.server.bridge import Bridge
    from ftruntime.server.serve import claim_port, run_server
    from ftruntime.tokenizer.chat import ChatFormat
    from ftruntime.tokenizer.tokenizer import Tokenizer

    # held from here on, so that nobody takes the port while the model loads
    listener = claim_port(config.host, config.port)
    directory = Path(str(config.model))
    tokenizer, chat = Tokenizer.from_dir(directory), ChatFormat.from_dir(directory)
    tokenizer.check_model(
        bos_token_id=shape.bos_token_id, eos_token_ids=shape.eos_token_ids,
        vocab_size=shape.vocab_size,
    )  # fmt: skip
    # the engine has no use for the key
    engine_config = replace(config, api_key=None).to_dict()
    client = Bridge(engine_config, stall_timeout_s=config.stall_timeout_s)
    return run_server(config, client, tokenizer, chat, listener=listener)


def _front() -> None:
    """Import what an installation without the extra lacks."""
    import fastapi
    import tokenizers
    import uvicorn

    _logger.debug(
        "front fastapi=%s tokenizers=%s uvicorn=%s",
        fastapi.__version__, tokenizers.__version__, uvicorn.__version__,
    )  # fmt: skip


@main.command()
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
    """Show what the flags resolve to for MODEL (a directory, flash or pro), without starting."""
    with _refusals(_USAGE):
        config, facts = inspection.machine(read_config(params, model_dir), cards, card_gib)
    log.setup()
    if config.model is None or config.model in inspection.BUILTIN_MODELS:
        with _refusals(_USAGE):
            shape = inspection.shape_of(config.model)
    else:
        shape = _checkpoint_shape(config)
    with _refusals(_USAGE):
        plan = resolve(config, shape, facts, strict=False)
    _log_lines((*plan.notes, *inactive_flags(config, plan)), plan.warnings)
    if not plan.fits and facts.kind == "cpu":
        _logger.warning("this machine is what was planned for; --cards and --card-gib plan others")
    if not plan.fits:
        _logger.warning(
            "plan does not fit needed_bytes=%d budget_bytes=%d", plan.total_bytes, plan.budget_bytes
        )
    refusals = []
    for check in (lambda: check_servable(config), lambda: resolve(config, shape, facts)):
        try:
            check()
        except ValueError as error:
            refusals.append(str(error))
            _logger.warning("serve refuses to start with these flags: %s", error)
    refusal = refusals[0] if refusals else None
    values = inspection.report(str(config.model), config, shape, plan, refusal)
    if as_json:
        click.echo(json.dumps(values))
    else:
        inspection.print_table(values, plan, sys.stdout)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@options(simulate_specs())
@flag_options
def simulate(as_json: bool, **params: str | bool | None) -> None:
    """Run the scheduler against modelled step times: a long prompt beside a running stream, or a
    trace of many clients. Needs no GPU and no weights. A flag of `serve` overrides the preset's.
    """
    log.setup("warning")
    with _refusals(_USAGE):
        experiment = prepare(params)
    _log_lines((), experiment.plan.warnings)
    with _refusals(_FAILED), _progress("simulating") as progress:
        reports = simulation.run(experiment, progress)
    if as_json:
        click.echo(json.dumps(reports if len(reports) > 1 else reports[0]))
    else:
        simulation.print_reports(experiment, reports, sys.stdout)


@main.command("bench-stall")
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path),
    help="Draw the tokens of every victim over time (png, svg or pdf).",
)  # fmt: skip
@options(stall_specs())
def bench_stall(as_json: bool, plot: Path | None, **params: str | bool | None) -> None:
    """Measure over HTTP how long running streams wait while a long prompt is prefilled.

    Works with any OpenAI-compatible server. Victims stream alone first; then they stream again, and
    --attack-after seconds later a long prompt arrives that asks for 3 tokens. Waits are between
    consecutive received pieces. The server should have nothing else to do.
    """
    with _refusals(_USAGE):
        settings = StallSettings(**given_values(params, stall_specs()))  # type: ignore[arg-type]
        if plot is not None:
            check_drawable(plot)
    log.setup()
    try:
        from ftruntime.bench import stall
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed, expected: pip install '{DISTRIBUTION}[bench]'"
        raise Failure(sentence, _FAILED) from error
    try:
        result = asyncio.run(stall.run_stall(settings))
    except BenchError as error:
        raise Failure(str(error), _FAILED) from error
    if as_json:
        click.echo(json.dumps(result.report.to_dict()))
    else:
        print_table(result.report, stall.caption(settings, result), sys.stdout)
    if plot is not None:
        with _refusals(_FAILED):
            stall.plot(plot, settings, result)


@main.command("make-demo")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--seed", default="0", metavar="N", help=_SEED.help_line)
@click.option("--preset", default="small", metavar="small|tiny", help=_PRESET.help_line)
@click.option("--force", is_flag=True, help="Replace a demo checkpoint that is already there.")
def make_demo(directory: Path, seed: str, preset: str, force: bool) -> None:
    """Write a tiny random checkpoint in the official format to DIR."""
    with _refusals(_USAGE):
        number = checked("seed", parse(seed, _SEED), _SEED)
        checked("preset", preset, _PRESET)
    log.setup()
    from ftruntime import demo

    with _refusals(_FAILED), _progress(f"writing {directory}") as progress:
        try:
            demo.make_demo(
                directory, seed=int(number or 0), preset=preset, force=force, progress=progress
            )
        except FileExistsError as error:
            raise Failure(str(error), _USAGE) from error
    click.echo(str(directory))


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=f"{title} {name}")


def _with_model(config: RuntimeConfig) -> RuntimeConfig:
    if config.model is not None:
        return config
    with _refusals(_FAILED), _progress("writing the demo checkpoint") as progress:
        return replace(config, model=str(ensure_demo(progress)))


def _checkpoint_shape(config: RuntimeConfig) -> ModelConfig:
    directory = Path(str(config.model))
    if not directory.is_dir():
        _usage("model", directory, "a checkpoint directory")
    with _refusals(_FAILED):
        return ModelConfig.from_dir(directory)


def _usage(name: str, value: object, expected: str) -> NoReturn:
    raise Failure(f"{flag_name(name)} is {value}, expected {expected}", _USAGE)


def _check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise Failure(f"this machine is {system} {machine}, expected Linux x86_64", _FAILED)


def _log_plan(config: RuntimeConfig, plan: Plan) -> None:
    _logger.info(
        "plan ready chunk_tokens=%d limiting=%s window_pages=%d reserved_window_pages=%d "
        "num_tokens=%d max_model_len=%d max_running=%d device=%s moe_backend=%s expert_slots=%d "
        "num_experts=%d",
        plan.chunk_tokens, plan.limiting, plan.window_pages, plan.reserved_window_pages,
        plan.num_tokens, plan.max_model_len, plan.max_running, plan.kind, plan.moe_backend,
        plan.expert_slots, plan.num_experts,
    )  # fmt: skip
    _log_lines((*plan.notes, *inactive_flags(config, plan)), plan.warnings)


def _log_lines(notes: Sequence[str], warnings: Sequence[str]) -> None:
    for line in notes:
        _logger.info("%s", line)
    for line in warnings:
        _logger.warning("%s", line)
