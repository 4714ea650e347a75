"""Command-line options generated from the fields of a settings dataclass, such as those of `serve`
and `inspect` from `RuntimeConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import click

from ftruntime.config import RuntimeConfig, flag_specs
from ftruntime.flags import FlagSpec, flag_name, parse, refuse

_Command = TypeVar("_Command", bound=Callable[..., object])
_METAVARS: Final = {"int": "N", "float": "F", "str": "TEXT"}


def flag_options(command: _Command) -> _Command:
    """Add every flag of `serve` to a click command."""
    return options(flag_specs())(command)


def options(specs: Mapping[str, FlagSpec]) -> Callable[[_Command], _Command]:
    """Add one option a flag to a click command. Values arrive as words: the dataclass converts and
    checks them.
    """

    def add(command: _Command) -> _Command:
        for name, spec in reversed(list(specs.items())):
            command = _option(name, spec)(command)
        return command

    return add


def given_values(
    params: Mapping[str, str | bool | None], specs: Mapping[str, FlagSpec]
) -> dict[str, object]:
    """What was given of these flags, as keywords of their dataclass."""
    given: dict[str, object] = {}
    for name, spec in specs.items():
        value = params[name]
        if isinstance(value, str):
            given[name] = parse(value, spec)
        elif value:
            given[name] = True
    return given


def _option(name: str, spec: FlagSpec) -> Callable[[_Command], _Command]:
    declarations = (flag_name(name), *spec.aliases, name)
    if spec.kind == "switch":
        return click.option(*declarations, is_flag=True, default=False, help=spec.help_line)
    metavar = "|".join(spec.choices) or _METAVARS[spec.kind]
    return click.option(
        *declarations, type=str, default=None, metavar=metavar, envvar=spec.env, help=spec.help_line
    )


def read_config(params: Mapping[str, str | bool | None], positional: str | None) -> RuntimeConfig:
    """The settings behind the options given on a command line, and the MODEL argument.

    Raises:
        ValueError: as `RuntimeConfig`; also two different models.
    """
    given = given_values(params, flag_specs())
    if positional is not None:
        named = given.setdefault("model", positional)
        if named != positional:
            refuse("model", named, f"only one model, {positional} was given too")
    return RuntimeConfig.from_flags(**given)
