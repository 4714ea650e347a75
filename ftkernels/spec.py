"""One record per op, read by tests, benches and the tuner."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ftkernels.scratch import COUNTER_BYTES as COUNTER_BYTES
from ftkernels.target import Target
from ftkernels.work import Work, no_work

Case = Mapping[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _no_candidates(key: Case, target: Target) -> Iterable[object]:
    return ()


def _one(case: Case) -> int:
    return 1


@dataclass(frozen=True)
class KernelSpec:
    """What there is to know about an op besides its code.

    Args:
        op, reference: the public function and its plain-torch twin of the same signature.
        default: config for a key when no tuned entry fits; None for reference-only ops.
        candidates: `(key, target) -> configs` the tuner may try.
        cases: sizes by name, the model's own among them.
        inputs: `(case, *, device, seed) -> (args, kwargs)` of a call of `op`; works on meta.
        tolerance: largest error against the reference, relative to the row's largest value.
        bytes_moved, flops: useful work of a case.
        launches: kernel launches of a case.
        grows: the key field that is bucketed, "" when none is.
        scratch: bytes of scratch as a pure function of sizes, None when the op takes none.
        kernel: False while the op has only its reference.
        work: `(case, kernel, config) -> Work`, the loops of products of the launch of that kernel
            with those constexprs; None for a launch without. For the static model.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    inputs: Callable[..., Inputs]
    bytes_moved: Callable[[Case], int]
    default: Callable[[Any], object] | None = None
    candidates: Callable[[Any, Target], Iterable[object]] = _no_candidates
    tolerance: float = 0.0
    flops: Callable[[Case], int] = lambda case: 0
    launches: Callable[[Case], int] = _one
    grows: str = ""
    scratch: Callable[..., int] | None = None
    kernel: bool = True
    work: Callable[[Case, str, Case], Work | None] = no_work

    @property
    def name(self) -> str:
        return self.op.__name__


MODULES = (
    "quant.act_quant", "quant.weight_quant", "quant.round_trip", "quant.pack", "quant.hadamard",
    "norm.rms_norm", "rope.rope",
    "linear.embed", "linear.linear", "linear.fp8_linear", "linear.grouped_linear",
    "linear.mixed_linear",
    "moe.router", "moe.hash_router", "moe.gate", "moe.align", "moe.gemm_fp4", "moe.gemv_fp4",
    "moe.swiglu", "moe.combine", "moe.moe_fp4", "moe.count_missing",
    "attention.kv_store", "attention.compressor", "attention.indexer", "attention.prefill",
    "attention.decode", "attention.merge", "attention.append", "attention.index_query",
    "attention.carry",
    "mhc.pre", "mhc.post", "mhc.post_pre", "mhc.head",
    "sampling.sample", "sampling.logprobs", "sampling.adjust",
)  # fmt: skip


@lru_cache(maxsize=1)
def registry() -> tuple[KernelSpec, ...]:
    """The KernelSpec of every op, reference-only ones too (`kernel=False`)."""
    specs: list[KernelSpec] = []
    for name in MODULES:
        module = importlib.import_module(f"ftkernels.{name}")
        specs.extend(getattr(module, "SPECS", None) or (module.SPEC,))
    return tuple(specs)


def _check_dims(op: str, function: Callable[..., int], dims: Mapping[str, int]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in dims]
    unknown = [name for name in dims if name not in parameters]
    if missing or unknown:
        raise ValueError(
            f"scratch_bytes: sizes of {op} are {', '.join(dims) or 'none'}, expected "
            f"{', '.join(parameters)}"
        )
    for name, size in dims.items():
        if type(size) is not int:
            raise TypeError(f"scratch_bytes: {name} is {size!r}, expected an integer >= 0")
        if size < 0:
            raise ValueError(f"scratch_bytes: {name} is {size}, expected an integer >= 0")


def scratch_bytes(op: str, **dims: int) -> int:
    """Bytes of `scratch` that `op` needs for these sizes; a pure function.

    Raises:
        ValueError: no such op, or the op takes no scratch.
    """
    for spec in registry():
        if spec.name == op:
            if spec.scratch is None:
                raise ValueError(f"scratch_bytes: op is {op!r}, expected an op that takes scratch")
            _check_dims(op, spec.scratch, dims)
            return spec.scratch(**dims)
    raise ValueError(f"scratch_bytes: op is {op!r}, expected the name of an op")
