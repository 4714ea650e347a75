"""Operator schemas of the public ops, derived from their Python signatures.

An op has up to four overloads. Each takes the arguments of the Python function under their names,
but for what another overload is there for:

* the default one returns new tensors;
* ``out`` writes into the tensors of ``out`` (a list where the op returns several) and returns
  nothing;
* ``lse`` and ``lse_out`` are those two with ``return_lse``, of which they take only True;
* ``routed`` is `moe_fp4` with ``routed_out``, and returns nothing.

``quantize`` stays False: results then are the same tensors for every call of an overload.

A call of the packet, ``torch.ops.ftkernels.<op>(...)``, finds its overload by these keywords.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# what an op writes besides `out`, `scratch` and `routed_out`
_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("residual",),
    "store_kv": ("pool",),
    "compress_kv": ("state", "pool", "carry_snapshots"),
    "append_kv": ("window_kv", "state", "cmp_kv", "carry_snapshots"),
    "load_carry": ("state",),
}
_ALWAYS_WRITTEN = ("out", "scratch", "routed_out")
_TYPES: Mapping[object, str] = {
    torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str",
    torch.dtype: "ScalarType", torch.device: "Device",
    Mapping[str, float]: "Dict(str, float)",
}  # fmt: skip
_INT_OR_PAIR = int | tuple[int, int]
_TENSOR_OR_PAIR = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_DEVICE_OR_NAME = torch.device | str


@dataclass(frozen=True)
class Overload:
    """One operator: a public op with some of its arguments left out.

    Args:
        op: the public function.
        name: "" for the default overload.
        schema: of the operator, without a namespace.
        num_results: tensors it returns.
    """

    op: Callable[..., Any]
    name: str
    schema: str
    num_results: int


def overloads(op: Callable[..., Any]) -> Iterator[Overload]:
    """The operators of a public op."""
    hints = typing.get_type_hints(op)
    names = inspect.signature(op).parameters
    with_lse = "return_lse" in names
    count = _num_results(hints["return"])
    extra = {"out", "return_lse", "routed_out", "quantize"} & names.keys()
    yield _overload(op, hints, "", extra, count - with_lse)
    if "out" in names:
        yield _overload(op, hints, "out", extra - {"out"}, 0, count - with_lse)
    if with_lse:
        yield _overload(op, hints, "lse", {"out"}, count)
        yield _overload(op, hints, "lse_out", set(), 0, count)
    if "routed_out" in names:
        yield _overload(op, hints, "routed", {"out"}, 0)


def _num_results(hint: Any) -> int:
    """Tensors that an op returns, the optional ``lse`` included."""
    if hint in (type(None), torch.Tensor):
        return int(hint is torch.Tensor)
    pairs = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is tuple]
    return len(typing.get_args(pairs[0]))


def _overload(
    op: Callable[..., Any], hints: Mapping[str, Any], name: str, left_out: set[str],
    num_results: int, num_outs: int = 1,
) -> Overload:  # fmt: skip
    written = (*_WRITTEN.get(op.__name__, ()), *_ALWAYS_WRITTEN)
    letters = iter("abcdefgh")
    arguments, keyword = [], False
    for parameter in inspect.signature(op).parameters.values():
        if parameter.name in left_out:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            arguments.append("*")
            keyword = True
        alias = f"({next(letters)}!)" if parameter.name in written else ""
        if parameter.name == "out":
            arguments.append(f"Tensor{alias}{'[]' if num_outs > 1 else ''} out")
        elif parameter.name in ("return_lse", "routed_out"):
            kind = "bool" if parameter.name == "return_lse" else f"Tensor{alias}"
            arguments.append(f"{kind} {parameter.name}")
        else:
            arguments.append(_argument(parameter, hints[parameter.name], alias))
    if hints[next(iter(hints))] == _TENSOR_OR_PAIR:
        arguments.append("Tensor? x_scale=None")
    results = "Tensor" if num_results == 1 else f"({', '.join(['Tensor'] * num_results)})"
    full = f"{op.__name__}.{name}" if name else op.__name__
    return Overload(op, name, f"{full}({', '.join(arguments)}) -> {results}", num_results)


def _argument(parameter: inspect.Parameter, hint: Any, alias: str) -> str:
    optional = ""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kept = [h for h in typing.get_args(hint) if h is not type(None)]
        optional = "?" if len(kept) < len(typing.get_args(hint)) else ""
        hint = typing.Union[tuple(kept)]  # noqa: UP007
    if hint == _INT_OR_PAIR:
        kind = "int[1]"  # takes a number too
    elif hint == _DEVICE_OR_NAME:
        kind = "Device"
    elif hint == _TENSOR_OR_PAIR:
        kind = "Tensor"
    else:
        kind = _TYPES[hint]
    kind = kind.replace("Tensor", f"Tensor{alias}") + optional
    if parameter.default is parameter.empty:
        return f"{kind} {parameter.name}"
    return f"{kind} {parameter.name}={_default(parameter.default)}"


def _default(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f'"{value}"' if isinstance(value, str) else repr(value)
