"""What steps would compile on a card: every launch of an op with all a compiled kernel depends on.

Nothing is computed. An op runs on meta tensors of its arguments' shapes and strides, where it takes
the path to its launch, which is noted; its results are zeros.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from triton.runtime.jit import JITFunction

import ftkernels
from ftkernels import target

Variant = tuple[str, tuple[tuple[str, object], ...], tuple[bool, ...]]


@contextlib.contextmanager
def noted(arch: int = 89) -> Iterator[set[Variant]]:
    """Variants of kernels launched inside: name, arguments as the compiler sees them, and which of
    the op's tensors begin at a multiple of 16 bytes."""
    seen: set[Variant] = set()
    here = threading.local()  # loaders call ops in threads
    known: dict[object, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        kinds = {p.name: p for p in self.params}
        named = tuple((name, _kind(value, kinds.get(name))) for name, value in bound.items())
        here.launches.append((self.__name__, named))

    def watched(op: Any) -> Any:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, layout = tree_flatten((args, kwargs))
            key = (op, str(layout), *map(_form, leaves))
            if key not in known:
                here.launches = []
                metas = tree_unflatten([_meta(x) for x in leaves], layout)
                with target.offline(arch):
                    known[key] = op(*metas[0], **metas[1])
                aligned = tuple(
                    x.data_ptr() % 16 == 0 for x in leaves if isinstance(x, torch.Tensor)
                )
                seen.update((name, named, aligned) for name, named in here.launches)
            if kwargs.get("out") is not None:
                return kwargs["out"]
            return tree_map_only(torch.Tensor, _zeros, known[key])

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for spec in ftkernels.registry():
            stack.enter_context(mock.patch.object(ftkernels, spec.name, watched(spec.op)))
        yield seen


def _form(x: object) -> object:
    """What of an argument an op can see on a meta tensor, and where it begins."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.data_ptr() % 16
    return repr(x)


def _meta(x: object) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()


def _kind(value: object, parameter: Any) -> object:
    """What of an argument makes another kernel: all of a constexpr or option, the type of a tensor,
    of a number whether it is 1 or a multiple of 16."""
    if parameter is None or parameter.is_constexpr:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, int) and not parameter.do_not_specialize:
        return "1" if value == 1 else "16n" if value % 16 == 0 else "int"
    return type(value).__name__


def unlike(new: Variant, known: set[Variant]) -> str:
    """What sets a variant apart from the nearest that is known."""

    def fields(variant: Variant) -> dict[str, object]:
        name, named, aligned = variant
        return {**dict(named), **{f"tensor {i}": x for i, x in enumerate(aligned)}, "": name}

    mine, best = fields(new), dict[str, object]()
    for other in map(fields, (variant for variant in known if variant[0] == new[0])):
        apart = {name: x for name, x in mine.items() if other.get(name, x) != x}
        best = apart if not best or len(apart) < len(best) else best
    return f"{new[0]}: {best or 'not known'}"
