"""Run wrappers without a GPU: compile each kernel they launch, list torch operators, execute none.

Needs a process without TRITON_INTERPRET. Tensors are on meta, or on the CPU for code that has no
reference path; the launches then have the very signature, alignment hints and constexprs they
would have on the card::

    with capture_launches(arch=89) as got:
        my_op(torch.empty(16, 4096, device="meta"))
    assert got  # a wrapper that launched nothing must not pass
    for report in got:
        report.check()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ftkernels import target
from ftkernels.testing.report import WARP, Report, compile_for, jit_of, ptxas_v, report_of

__all__ = [
    "Captured", "FakeCuda", "Launch", "Report", "capture_launches", "compile_for", "jit_of",
    "ptxas_v",
]  # fmt: skip

_TORCH = (
    "aten", "prim", "prims", "c10d", "c10d_functional", "_c10d_functional",
    "_c10d_functional_autograd", "profiler",
)  # fmt: skip
_NO_NODE = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "_unsafe_view", "device", "record_stream", "wait_tensor", "_wrap_tensor_autograd",
    "_assert_scalar", "_record_function_enter_new",
}  # fmt: skip


class FakeCuda:
    """Enough of a driver for a warm-up run of a kernel: it names a target and launches nothing."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 1000 + self.arch  # a slot of its own in Triton's caches by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Launch:
    """One launch: `grid` is three numbers, `config` num_warps, num_stages and the constexprs."""

    name: str
    grid: tuple[int, int, int]
    config: dict[str, Any]
    report: Report


class Captured(list[Report]):
    """Reports of the distinct kernels, and the nodes that one run would put into a CUDA graph.

    `launches` has every launch in order, `torch_ops` every torch operator that would run on the
    device, in order (one of them, a sort for example, may be several kernels).
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.torch_ops: list[str] = []

    @property
    def num_nodes(self) -> int:
        return len(self.launches) + len(self.torch_ops)


@contextlib.contextmanager
def capture_launches(
    arch: int = 89, pick: Callable[[list[Any]], Sequence[Any]] = lambda configs: configs
) -> Iterator[Captured]:
    """Compile for `arch` what is launched inside; nothing is executed.

    An autotuned kernel compiles each config that `pick` leaves and counts as one launch of the
    first. An empty grid and `kernel.warmup()` launch nothing.

    Raises:
        ValueError: no facts are known for `arch`.
    """
    got, seen, compile_only = Captured(), dict[int, tuple[Any, Report]](), JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        start = time.perf_counter()
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if compiled is None:
            return None
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        if id(compiled) not in seen:
            report = report_of(compiled, arch, time.perf_counter() - start, named)
            seen[id(compiled)] = compiled, report  # held, so that its id stays its own
            got.append(report)
        if not warmup:
            launch = _launch(self, args, named, grid, seen[id(compiled)][1])
            got.launches.extend([launch] if min(launch.grid) > 0 else [])
        return compiled

    def run_configs(self: Any, *args: Any, **kwargs: Any) -> None:
        for index, config in enumerate(pick(list(self.configs))):
            warmup = index > 0 or kwargs.get("warmup", False)
            self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": warmup})

    with (
        target.offline(arch),
        mock.patch.object(driver, "_active", FakeCuda(arch)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Autotuner, "run", run_configs),
        _OpCounter(got),
    ):
        yield got


def _launch(
    kernel: Any, args: Sequence[Any], named: dict[str, Any], grid: Any, report: Report
) -> Launch:
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    bound = defaults | dict(zip(kernel.arg_names, args, strict=False)) | named
    x, y, z = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
    config = {"num_warps": report.num_warps, "num_stages": report.num_stages}
    config |= {p.name: bound[p.name] for p in kernel.params if p.is_constexpr}
    return Launch(kernel.__name__, (x, y, z), config, report)


class _OpCounter(TorchDispatchMode):
    """Lists every operator that launches something: copies, fills, products, collectives.

    Views, metadata and bare allocations are left out. Composite and custom operators count as what
    they call.
    """

    def __init__(self, got: Captured) -> None:
        super().__init__()
        self._got = got

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # under inference_mode composites arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.namespace not in _TORCH:
            return self._custom(func, args, kwargs)
        if _is_node(func):
            self._got.torch_ops.append(str(func))
        return func(*args, **kwargs)

    def _custom(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look inside a custom operator; one with nothing to see counts as one."""
        before = self._got.num_nodes
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = [x.device.type for x in leaves if isinstance(x, torch.Tensor)]
        kind = torch._C._dispatch_key_for_device(devices[0] if devices else "cpu")
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind))
        with self:
            result = func.redispatch(keys, *args, **kwargs)
        if self._got.num_nodes == before:
            self._got.torch_ops.append(str(func))
        return result


def _is_node(func: Any) -> bool:
    name = func._schema.name.split("::")[1]
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    return name not in _NO_NODE and not name.startswith(("sym_", "is_"))
