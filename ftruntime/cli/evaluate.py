"""``ftruntime eval``: bits per character of a text, and recall of needles, through the engine."""

from __future__ import annotations

import json
import logging
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import click

from ftruntime import log
from ftruntime.cli.common import checkpoint_shape, progress_bar
from ftruntime.cli.group import FAILED, USAGE, refusals
from ftruntime.cli.sections import SectionedCommand
from ftruntime.config import RuntimeConfig
from ftruntime.evaluate.settings import DEFAULT_CONTEXT, eval_specs, help_sections
from ftruntime.facts import probe
from ftruntime.flags import checked, flag_name, parse, refuse
from ftruntime.options import flag_options, options, read_config
from ftruntime.plan import resolve

_logger = logging.getLogger(__name__)


_UNLISTED = "Every other flag of `serve` is accepted too: `ftruntime serve --help` lists them."


@click.command("eval", cls=SectionedCommand, sections=help_sections(), unlisted=_UNLISTED)
@click.argument("model_dir", metavar="[MODEL]", required=False)
@click.option(
    "--needles", is_flag=True,
    help="Also hide needles in the text and ask for them 300 to 3000 tokens later, each --trials "
    "times; far ones need a text as long.",
)  # fmt: skip
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
        given = _given(params)
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
        longest = resolve(config, shape, facts).max_model_len
        context = _context(given["context"], longest)
    _check_text(text, Path(str(config.model)), longest if needles else None)
    with refusals(FAILED):
        values = _run(config, text, context, longest, needles, given)
    click.echo(json.dumps(values, allow_nan=False) if as_json else table(values))


def _given(params: Mapping[str, str | bool | None]) -> dict[str, int | str | None]:
    values: dict[str, int | str | None] = {}
    for name, spec in eval_specs().items():
        word = params[name]
        value = spec.default if word is None else checked(name, parse(str(word), spec), spec)
        assert not isinstance(value, bool | float)
        values[name] = value
    return values


def _read(path: int | str | None) -> str:
    """The text of the file, as it is."""
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
    if not text:
        refuse("text", str(file), "a file that is not empty")
    return text


def _context(given: int | str | None, longest: int) -> int:
    most = longest - 1  # the engine generates one token behind a window
    if most < 2:
        refuse("max-model-len", longest, "at least 3 to score a text")
    if given is None:
        return min(DEFAULT_CONTEXT, most)
    if int(given) > most:
        refuse("context", given, f"at most {most}, one less than the longest sequence served")
    return int(given)


def _check_text(text: str, directory: Path, longest: int | None) -> None:
    """What only the tokenizer can tell of the text; `longest` of a prompt with needles, if any."""
    from ftruntime.evaluate.score import DISTANCES, distances_of
    from ftruntime.tokenizer.tokenizer import Tokenizer

    with refusals(FAILED):
        tokenizer = Tokenizer.from_dir(directory)
    with refusals(USAGE):
        ids = tokenizer.encode(text)
        fitting = DISTANCES if longest is None else distances_of(len(ids), longest)
    missing = [str(distance) for distance in DISTANCES if distance not in fitting]
    if missing:
        _logger.warning(
            "no needles %s tokens back: --text has %d tokens and --max-model-len is %d, too few",
            ", ".join(missing), len(ids), longest,
        )  # fmt: skip
    added = tokenizer.backend.get_added_tokens_decoder()
    special = [added[i].content for i in ids if i in added]
    if special:
        _logger.warning(
            "--text spells out %d special tokens such as %s: each is scored as one token",
            len(special), special[0],
        )  # fmt: skip


def _run(
    config: RuntimeConfig, text: str, context: int, longest: int, needles: bool,
    given: Mapping[str, int | str | None],
) -> dict[str, object]:  # fmt: skip
    from ftruntime.evaluate import score
    from ftruntime.llm import LLM

    flags = {n: getattr(config, n) for n in sorted(config.explicit) if n != "model"}
    began = time.monotonic()
    with LLM(config.model, **flags) as llm, progress_bar("scoring") as progress:
        # enough to fill a step, and the bar moves
        together = min(config.max_running_requests, 4)
        result = score.score_text(
            llm, llm.tokenizer, text, context=context, together=together, progress=progress
        )
        recalls = None
        if needles:
            recalls = score.score_needles(
                llm, llm.tokenizer, text, trials=int(given["trials"] or 1),
                seed=int(given["seed"] or 0), longest=longest, progress=progress,
                together=config.max_running_requests,
            )  # fmt: skip
    return {
        "model": config.model, "text": given["text"],
        "flags": flags, **result.to_dict(),
        "seconds": round(time.monotonic() - began, 3),
        "needles": None if recalls is None else [recall.to_dict() for recall in recalls],
    }  # fmt: skip


def table(values: Mapping[str, object]) -> str:
    """The values as lines."""
    flags = values["flags"]
    assert isinstance(flags, dict)
    given = " ".join(f"{flag_name(name)} {value}" for name, value in flags.items())
    lines = [
        f"model               {values['model']}",
        f"flags               {given or 'none'}",
        f"bits per character  {values['bits_per_character']:.4f}",
        f"bits per token      {values['bits_per_token']:.4f}",
        f"characters          {values['characters']}",
        f"tokens              {values['tokens']} in {values['windows']} windows of up to "
        f"{values['context']}",
        f"seconds             {values['seconds']:.1f}, loading among them",
    ]
    needles = values["needles"]
    if isinstance(needles, list):
        lines += ["", "distance  found"]
        lines += [f"{n['distance']:8d}  {n['found']} of {n['trials']}" for n in needles]
    return "\n".join(lines)
