"""``ftruntime eval``: bits per character of a text, and recall of needles, through the engine."""

from __future__ import annotations

import json
import logging
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ftruntime import log
from ftruntime.cli.common import checkpoint_shape, progress_bar
from ftruntime.cli.group import FAILED, USAGE, refusals
from ftruntime.cli.sections import SectionedCommand
from ftruntime.config import RuntimeConfig
from ftruntime.effective import idle_flags, inactive_line
from ftruntime.evaluate.settings import (
    DEFAULT_CONTEXT,
    NEEDLES_HELP,
    LengthLimit,
    eval_specs,
    help_sections,
    length_limit,
    read_values,
    unused_flags,
)
from ftruntime.facts import probe
from ftruntime.flags import flag_name, refuse, shown
from ftruntime.options import flag_options, options, read_config
from ftruntime.plan import resolve

if TYPE_CHECKING:
    from ftruntime.evaluate.score import Recall

_logger = logging.getLogger(__name__)


_UNLISTED = (
    "Every other flag of `serve` is accepted too, and named where it has no effect: `ftruntime "
    "serve --help` lists them."
)


@click.command("eval", cls=SectionedCommand, sections=help_sections(), unlisted=_UNLISTED)
@click.argument("model_dir", metavar="[MODEL]", required=False)
@click.option("--needles", is_flag=True, help=NEEDLES_HELP)
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of a table.")
@options(eval_specs())
@flag_options
def evaluate(
    model_dir: str | None, needles: bool, as_json: bool, **params: str | bool | None
) -> None:
    """Score how well MODEL predicts a text: bits per character and per token.

    With --needles also how often it finds a number that stood far back.
    """
    with refusals(USAGE):
        given = read_values(params, needles=needles)
        text = _read(given["text"])
        config = read_config(
            {name: value for name, value in params.items() if name not in eval_specs()}, model_dir
        )
        facts = probe(config.device)
    log.setup("warning")
    with refusals(FAILED):
        config = config.with_model()
    shape = checkpoint_shape(config)
    with refusals(USAGE):
        plan = resolve(config, shape, facts)
        limit = length_limit(config, plan)
        context = _context(given["context"], limit)
    of_needles = limit if needles else None
    _check_text(text, str(given["text"]), Path(str(config.model)), of_needles)
    idle = {**idle_flags(config, plan), **unused_flags(config, needles=needles)}
    _tell_idle(config, idle)
    flags = {n: getattr(config, n) for n in sorted(config.explicit - idle.keys() - {"model"})}
    with refusals(FAILED):
        values = _run(config, flags, text, context, of_needles, given)
    click.echo(json.dumps(values, allow_nan=False) if as_json else table(values))


def _tell_idle(config: RuntimeConfig, reasons: Mapping[str, str]) -> None:
    """A line for each flag of the command line; what the environment sets is meant for others."""
    source = click.get_current_context().get_parameter_source
    for name, reason in reasons.items():
        if source(name) is not ParameterSource.ENVIRONMENT:
            _logger.warning("%s", inactive_line(name, getattr(config, name), reason))


def _read(path: int | str | None) -> str:
    """The text of the file, as it is but for a byte order mark."""
    if path is None:
        refuse("text", "missing", "a UTF-8 file")
    file = Path(str(path))
    try:
        mode = file.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            refuse("text", str(file), "a file or a pipe")
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        refuse("text", str(file), f"a file that can be read ({error.strerror})")
    except UnicodeDecodeError as error:
        refuse("text", str(file), f"a UTF-8 file ({error.reason} at byte {error.start})")
    text = text.removeprefix("\ufeff")  # a byte order mark
    if not text:
        refuse("text", str(file), "a file that is not empty")
    return text


def _context(given: int | str | None, limit: LengthLimit) -> int:
    most = limit.longest - 1  # the engine generates one token behind a window
    if most < 2:
        refuse(limit.flag, limit.value, "at least 3 to score a text")
    if given is None:
        return min(DEFAULT_CONTEXT, most)
    if int(given) > most:
        refuse("context", given, f"at most {most}, one less than the longest sequence by {limit}")
    return int(given)


def _check_text(text: str, file: str, directory: Path, limit: LengthLimit | None) -> None:
    """What only the tokenizer can tell of the text; `limit` of a prompt with needles, if any."""
    from ftruntime.tokenizer.tokenizer import Tokenizer

    with refusals(FAILED):
        tokenizer = Tokenizer.from_dir(directory)
    with refusals(USAGE):
        ids = tokenizer.encode(text)
        if limit is not None:
            _check_room(len(ids), file, limit)
    added = tokenizer.backend.get_added_tokens_decoder()
    special = [added[i].content for i in ids if i in added]
    if special:
        _logger.warning(
            "--text spells out %s such as %s: each is scored as one token",
            _counted(len(special), "special token"), special[0],
        )  # fmt: skip


def _check_room(num_tokens: int, file: str, limit: LengthLimit) -> None:
    """There is room for needles, and a word of each distance that has none."""
    from ftruntime.evaluate.score import DISTANCES, LEAST_LENGTH, TEXT_OVER, short_of

    tokens = _counted(num_tokens, "token")
    if limit.longest < LEAST_LENGTH:
        refuse(limit.flag, limit.value, f"at least {limit.least(LEAST_LENGTH)} with --needles")
    if num_tokens <= TEXT_OVER:
        held = f"{shown(file)} with {tokens}"
        raise ValueError(f"--text is {held}, expected more than {TEXT_OVER} with --needles")
    left_out: dict[tuple[bool, bool], list[str]] = {}
    for distance in DISTANCES:
        left_out.setdefault(short_of(distance, num_tokens, limit.longest), []).append(str(distance))
    for (by_text, by_length), distances in left_out.items():
        reasons = [f"--text has {tokens}"] * by_text
        reasons += [f"{flag_name(limit.flag)} is {limit.value}"] * by_length
        if reasons:
            _logger.warning(
                "no needles %s tokens back: %s, too few",
                ", ".join(distances), " and ".join(reasons),
            )  # fmt: skip


def _run(
    config: RuntimeConfig, flags: Mapping[str, object], text: str, context: int,
    limit: LengthLimit | None, given: Mapping[str, int | str | None],
) -> dict[str, object]:  # fmt: skip
    """The values of a score; `flags` are those to show, `limit` as of `_check_text`."""
    from ftruntime.evaluate import score
    from ftruntime.llm import LLM

    began = time.monotonic()
    every = {name: getattr(config, name) for name in config.explicit | {"model"}}
    with LLM(**every) as llm, progress_bar("scoring") as progress:
        # enough to fill a step, and the bar moves
        together = min(config.max_running_requests, 4)
        result = score.score_text(
            llm, llm.tokenizer, text, context=context, together=together, progress=progress
        )
        recalls = None
        if limit is not None:
            recalls = score.score_needles(
                llm, llm.tokenizer, text, trials=int(given["trials"] or 1),
                seed=int(given["seed"] or 0), longest=limit.longest, progress=progress,
                together=config.max_running_requests,
            )  # fmt: skip
    return {
        "model": config.model, "text": given["text"],
        "flags": dict(flags), **result.to_dict(),
        "seconds": round(time.monotonic() - began, 3),
        "needles": None if recalls is None else _of_all(recalls),
    }  # fmt: skip


def _of_all(recalls: Sequence[Recall]) -> list[dict[str, float | None]]:
    """Of every distance, one that was left out with no trials."""
    from ftruntime.evaluate.score import DISTANCES, Recall

    of = {recall.distance: recall for recall in recalls}
    return [of.get(distance, Recall(distance, 0, 0)).to_dict() for distance in DISTANCES]


def _counted(number: object, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(values: Mapping[str, object]) -> str:
    """The values as lines."""
    flags = values["flags"]
    assert isinstance(flags, dict)
    given = " ".join(
        flag_name(name) if value is True else f"{flag_name(name)} {value}"
        for name, value in flags.items()
    )
    lines = [
        f"model               {values['model']}",
        f"flags               {given or 'none'}",
        f"bits per character  {values['bits_per_character']:.4f}",
        f"bits per token      {values['bits_per_token']:.4f}",
        f"characters          {values['characters']}",
        f"tokens              {values['tokens']} in {_counted(values['windows'], 'window')} of up "
        f"to {values['context']}",
        f"seconds             {values['seconds']:.1f}, loading among them",
    ]
    needles = values["needles"]
    if isinstance(needles, list):
        lines += ["", "distance  found"]
        for n in needles:
            found = f"{n['found']} of {n['trials']}" if n["trials"] else "left out"
            lines.append(f"{n['distance']:8d}  {found}")
    return "\n".join(lines)
