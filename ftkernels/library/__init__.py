"""Every public op as ``torch.ops.ftkernels.<op>``, for engines that trace.

The operators call the plain Python functions, which stay the API for eager code, and have what a
tracer asks for: a schema that names what is written, and a fake implementation that gives shape,
element type, device and strides without launching. `ftkernels.library.schema` lists the overloads.

Where they differ from the functions: operators that write into ``out`` or ``routed_out`` return
nothing; ``(x_fp8, x_scale)`` of `fp8_linear` is passed as ``x`` and ``x_scale``; ``group`` of
`dequantize_fp8` is a number or a list of two. Arguments are checked when an operator runs, not when
it is traced. Meta tensors run the fake implementation, where the functions run the launch path.
For inference: there are no derivatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ftkernels.library.results import RESULTS
from ftkernels.library.schema import Overload, overloads
from ftkernels.spec import registry

_NAMESPACE = "ftkernels"


def _run(overload: Overload) -> Callable[..., Any]:
    """The op as the dispatcher calls it."""
    op, name = overload.op, overload.op.__name__
    if name == "fp8_linear":
        op = _scaled(op)
    elif name == "dequantize_fp8":
        op = _grouped(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_lse") is False:
            raise ValueError(f"{name}: return_lse is False, expected True or no such argument")
        if isinstance(kwargs.get("out"), list):
            kwargs["out"] = tuple(kwargs["out"])
        result = op(*args, **kwargs)
        if not overload.num_results:
            return None
        return _own(result) if isinstance(result, torch.Tensor) else tuple(map(_own, result))

    return run


def _own(x: torch.Tensor) -> torch.Tensor:
    """A result as tracers expect it: contiguous, and sharing no storage with another."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _scaled(op: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(x: torch.Tensor, *args: Any, x_scale: torch.Tensor | None = None, **kw: Any) -> Any:
        return op(x if x_scale is None else (x, x_scale), *args, **kw)

    return scaled


def _grouped(op: Callable[..., Any]) -> Callable[..., Any]:
    def grouped(*args: Any, group: tuple[int, ...] = (128,), **kwargs: Any) -> Any:
        return op(*args, group=group[0] if len(group) == 1 else tuple(group), **kwargs)

    return grouped


def _fake(overload: Overload) -> Callable[..., Any]:
    """What the operator returns, of the right form and unwritten."""
    signature, forms = inspect.signature(overload.op), RESULTS[overload.op.__name__]

    def fake(*args: Any, **kwargs: Any) -> Any:
        own = {name: x for name, x in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **own)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        first = next((x for x in args if isinstance(x, torch.Tensor)), None)
        device = kwargs.get("device") if first is None else first.device
        made = [
            torch.empty(size, dtype=dtype, device=device)
            for size, dtype in forms(given)[: overload.num_results]
        ]
        return made[0] if len(made) == 1 else tuple(made) or None

    return fake


def _register() -> torch.library.Library:
    library = torch.library.Library(_NAMESPACE, "DEF")
    for spec in registry():
        for overload in overloads(spec.op):
            library.define(overload.schema, tags=(torch.Tag.pt2_compliant_tag,))
            name = overload.schema.split("(")[0]
            library.impl(name, _run(overload), "CompositeExplicitAutograd")
            library._register_fake(name, _fake(overload))
    return library


LIBRARY = _register()
"""Keeps the operators registered; they go when it does."""
