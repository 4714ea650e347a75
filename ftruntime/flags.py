"""What one flag accepts, and the one sentence that refuses anything else.

A flag is a dataclass field whose metadata holds a :class:`FlagSpec`. The command line is generated
from these, and the dataclass checks itself with them, so that both refuse a value in the same
words: ``--flag is VALUE, expected WHAT (nearest: ...)``.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn, TypeVar, cast

_LIMIT: Final = 2**40
"""No setting is as large: sizes made of several settings stay inside 64 bits."""

Kind = Literal["int", "float", "str", "switch"]
FlagValue = int | float | str | bool | None
_Int = TypeVar("_Int", bound="int | None")
_Float = TypeVar("_Float", bound="float | None")
_Str = TypeVar("_Str", bound="str | None")


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """Type, range and help of one flag. ``low_open`` and ``high_open`` exclude the bound itself."""

    kind: Kind
    help: str
    default: FlagValue = None
    shown_default: str | None = None  # words for a default that is computed
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    group: str | None = None  # at most one flag of a group may be given
    aliases: tuple[str, ...] = ()
    env: str | None = None
    secret: bool = False

    @property
    def help_line(self) -> str:
        """Help with the default, on one line."""
        if self.kind == "switch":
            return self.help
        default = self.shown_default or ("unset" if self.default is None else str(self.default))
        return f"{self.help} [default: {default}]"


def _field(spec: FlagSpec) -> object:
    return field(default=spec.default, repr=not spec.secret, metadata={"flag": spec})


def integer(
    default: _Int,
    text: str,
    *,
    low: int,
    high: int | None = None,
    multiple_of: int = 1,
    group: str | None = None,
    aliases: tuple[str, ...] = (),
    shown_default: str | None = None,
) -> _Int:
    """A whole number in ``[low, high]``, a multiple of ``multiple_of``."""
    spec = FlagSpec(
        kind="int", help=text, default=default, low=low, high=high, multiple_of=multiple_of,
        group=group, aliases=aliases, shown_default=shown_default,
    )  # fmt: skip
    return cast(_Int, _field(spec))


def number(
    default: _Float,
    text: str,
    *,
    low: float,
    high: float | None = None,
    low_open: bool = False,
    high_open: bool = False,
    group: str | None = None,
    shown_default: str | None = None,
) -> _Float:
    """A finite number between ``low`` and ``high``."""
    spec = FlagSpec(
        kind="float", help=text, default=default, low=low, high=high, low_open=low_open,
        high_open=high_open, group=group, shown_default=shown_default,
    )  # fmt: skip
    return cast(_Float, _field(spec))


def choice(default: str, text: str, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    return cast(str, _field(FlagSpec(kind="str", help=text, default=default, choices=choices)))


def words(
    default: _Str,
    text: str,
    *,
    env: str | None = None,
    secret: bool = False,
    shown_default: str | None = None,
) -> _Str:
    """A non-empty string."""
    spec = FlagSpec(
        kind="str", help=text, default=default, env=env, secret=secret, shown_default=shown_default
    )
    return cast(_Str, _field(spec))


def switch(text: str, *, group: str | None = None) -> bool:
    """On when given."""
    return cast(bool, _field(FlagSpec(kind="switch", help=text, default=False, group=group)))


def flag_name(field_name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``."""
    return "--" + field_name.replace("_", "-")


def parse(text: str, spec: FlagSpec) -> FlagValue:
    """The number a command-line word stands for where a number is wanted, else the word itself for
    `checked` to refuse.
    """
    if spec.kind not in ("int", "float") or "_" in text:
        return text
    for convert in (int, float):
        try:
            return cast(FlagValue, convert(text))
        except ValueError:
            continue
    return text


def checked(name: str, value: object, spec: FlagSpec) -> FlagValue:
    """``value`` as its flag's type, or a ``ValueError`` naming flag, value and what was
    expected.
    """
    if value is None and spec.default is None:
        return None
    if spec.kind == "switch":
        if not isinstance(value, bool):
            refuse(name, value, "true or false", spec)
        return value
    if spec.kind == "str":
        return _checked_words(name, value, spec)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        refuse(name, value, _range_text(spec), spec)
    if abs(value) >= _LIMIT:
        refuse(name, value, f"{_range_text(spec)}, below 2^40", spec)
    if not _inside(value, spec) or (spec.kind == "int" and not _whole(value, spec)):
        refuse(name, value, _range_text(spec) + _nearest_text(value, spec), spec)
    return float(value) if spec.kind == "float" else int(value)


def refuse(name: str, value: object, expected: str, spec: FlagSpec | None = None) -> NoReturn:
    """Raise the one sentence."""
    hidden = spec is not None and spec.secret and value != ""
    raise ValueError(
        f"{flag_name(name)} is {'***' if hidden else shown(value)}, expected {expected}"
    )


def shown(value: object) -> str:
    """A value as it would be typed; quoted only when bare words would mislead."""
    if isinstance(value, str) and value and value.isprintable() and " " not in value:
        return value
    return repr(value)


def _checked_words(name: str, value: object, spec: FlagSpec) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        refuse(name, value, _choices_text(spec) if spec.choices else "a non-empty string", spec)
    if spec.choices and text not in spec.choices:
        near = difflib.get_close_matches(text, spec.choices, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        refuse(name, text, _choices_text(spec) + hint, spec)
    return text


def _choices_text(spec: FlagSpec) -> str:
    return f"one of {', '.join(spec.choices)}"


def _inside(value: float, spec: FlagSpec) -> bool:
    low_ok = spec.low is None or value > spec.low or (value == spec.low and not spec.low_open)
    high_ok = spec.high is None or value < spec.high or (value == spec.high and not spec.high_open)
    return low_ok and high_ok


def _whole(value: float, spec: FlagSpec) -> bool:
    return isinstance(value, int) and value % spec.multiple_of == 0


def _range_text(spec: FlagSpec) -> str:
    kind = "a number" if spec.kind == "float" else "an integer"
    if spec.multiple_of > 1:
        kind = f"a multiple of {spec.multiple_of}"
    if spec.low is None:
        return kind
    if spec.high is None:
        return f"{kind} {'>' if spec.low_open else '>='} {spec.low:g}"
    left, right = "(" if spec.low_open else "[", ")" if spec.high_open else "]"
    return f"{kind} in {left}{spec.low:g}, {spec.high:g}{right}"


def _nearest_text(value: float, spec: FlagSpec) -> str:
    """The legal neighbours of a refused number; an open bound has none, so the default is offered
    as an example.
    """
    if spec.kind == "float":
        if spec.low is not None and value <= spec.low:
            near = None if spec.low_open else spec.low
        else:
            near = None if spec.high_open else spec.high
        if near is not None:
            return f" (nearest: {near:g})"
        return "" if spec.default is None else f" (for example {spec.default})"
    step = spec.multiple_of
    legal = {_clamped(edge(value / step) * step, spec) for edge in (math.floor, math.ceil)}
    return f" (nearest: {', '.join(str(c) for c in sorted(legal))})"


def _clamped(value: int, spec: FlagSpec) -> int:
    step = spec.multiple_of
    if spec.low is not None:
        value = max(value, math.ceil(spec.low / step) * step)
    if spec.high is not None:
        value = min(value, math.floor(spec.high / step) * step)
    return value
