"""CUDA graphs on the CPU: what is launched is written down instead of run, and run when replayed.

As on a card, nothing runs during a capture, every launch keeps its tensors, its shapes and its
numbers, and a replay reads what those tensors hold by then. Nodes are ops of the library, which run
their references, and torch operators. While a graph is captured no tensor is read on the host; that
ops do not either is what meta tensors show, on which they take the path to their launches. Before a
replay the results hold rubbish, so that a value it does not make anew is seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from triton.runtime.jit import JITFunction

import ftkernels
from ftkernels import target

# methods that read a tensor on the host, and operators whose result's shape is data
_READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_SHAPED_BY_DATA = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}


class CaptureError(AssertionError):
    """Something that a stream that is captured refuses."""


class RecordedGraphs:
    """Makes graphs that are replayed by running what was written down."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self._known: dict[object, Any] = {}  # shapes of results, by op and shapes of arguments

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def graph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph(self._known))
        return self.graphs[-1]


class RecordedGraph(TorchDispatchMode):
    """One graph; `nodes` are names and what runs them."""

    def __init__(self, known: dict[object, Any]) -> None:
        super().__init__()
        self._known = known
        self.nodes: list[tuple[str, Callable[[], object]]] = []
        self.num_replays = 0
        self._results: list[torch.Tensor] = []
        self._inside_op = False

    def begin(self) -> None:
        with contextlib.ExitStack() as stack:
            for spec in ftkernels.registry():
                op = self._written_down(spec.name, spec.op)
                stack.enter_context(mock.patch.object(ftkernels, spec.name, op))
            for name in _READS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, _refusal(name)))
            stack.enter_context(self)
            self._recording = stack.pop_all()

    def end(self) -> None:
        self._recording.close()

    def replay(self) -> None:
        for x in self._results:
            x.fill_(float("nan") if x.is_floating_point() else 99)
        for _, run in self.nodes:
            run()
        self.num_replays += 1

    def _written_down(self, name: str, op: Any) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = self._shapes(op, args, kwargs) if kwargs.get("out") is None else None
            result = kwargs["out"] if made is None and "out" in kwargs else made
            self._add(name, op, args, kwargs, [] if made is None else tree_leaves(made))
            return result

        return call

    def _shapes(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Empty results of an op, which sees meta tensors."""
        leaves, layout = tree_flatten((args, kwargs))
        key = (op, str(layout), *map(_form, leaves))
        self._inside_op = True
        try:
            if key not in self._known:
                metas = tree_map_only(torch.Tensor, _meta, (args, kwargs))
                with (
                    target.offline(89),
                    mock.patch.object(JITFunction, "run", return_value=None),
                ):
                    self._known[key] = op(*metas[0], **metas[1])
            device = next(x.device for x in leaves if _is_tensor(x))
            return tree_map_only(
                torch.Tensor, lambda x: _empty_like(x, device), self._known[key]
            )  # fmt: skip
        finally:
            self._inside_op = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if self._inside_op:
            return func(*args, **kwargs)
        if name in _SHAPED_BY_DATA:
            raise CaptureError(f"{name} reads a device value on the host")
        if name.startswith(("empty", "new_empty")):
            made = func(*args, **kwargs)
            self._results.append(made)
            return made
        if func._schema.is_mutable:
            self.nodes.append((name, lambda: func(*args, **kwargs)))
            return args[0]
        result = func(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if _is_tensor(x)}
        made = [x for x in tree_leaves(result) if x.untyped_storage().data_ptr() not in inputs]
        if made:
            self._add(name, func, args, kwargs, made)
        return result

    def _add(self, name: str, run: Any, args: Any, kwargs: Any, made: list[Any]) -> None:
        results = [x for x in made if _is_tensor(x)]

        def node() -> None:
            found = run(*args, **kwargs)
            if results:
                for old, new in zip(results, filter(_is_tensor, tree_leaves(found)), strict=True):
                    old.copy_(new)

        self._results += results
        self.nodes.append((name, node))


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _form(x: object) -> object:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else repr(x)


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _empty_like(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _refusal(name: str) -> Callable[..., None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise CaptureError(f"Tensor.{name} reads a device value on the host")

    return refuse
