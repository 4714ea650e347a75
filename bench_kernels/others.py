"""Ops of other engines that compute what ours do, where they are installed.

Each adapter turns the inputs of our op into a call of theirs; converting them is not timed. A call
whose values are not ours is said, not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import ftkernels

Call = Callable[[], torch.Tensor]
ENGINES = {
    "flashinfer": "flashinfer",
    "vllm": "vLLM",
    "sgl_kernel": "sgl-kernel",
    "sglang": "SGLang",
}
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Other:
    """One op of an engine.

    Args:
        package: what has to be installed; `module` of it has the function.
        op: ours that computes the same.
        adapt: `(module, args, kwargs)` of our call to theirs; None for inputs it does not take.
    """

    package: str
    module: str
    op: str
    adapt: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Call | None]


def _norm(function: str) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Call | None]:
    def adapt(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        x, weight = args
        if weight is None or kwargs.get("residual") is not None:
            return None
        return lambda: getattr(module, function)(x, weight, 1e-6)

    return adapt


def _norm_into(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    x, weight = args
    if weight is None or kwargs.get("residual") is not None:
        return None
    out = torch.empty_like(x)

    def call() -> torch.Tensor:
        module.rms_norm(out, x, weight, 1e-6)
        return out

    return call


def _block_product(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    rows, weight, scale = args
    if not isinstance(rows, tuple) or kwargs:
        return None
    x, x_scale = rows
    scales = [torch.exp2(codes.float() - 127) for codes in (x_scale, scale)]
    return lambda: module.w8a8_block_fp8_matmul(
        x, weight, *scales, [128, 128], output_dtype=torch.bfloat16
    )


OTHERS = (
    Other("flashinfer", "flashinfer.norm", "rms_norm", _norm("rmsnorm")),
    Other("sgl_kernel", "sgl_kernel", "rms_norm", _norm("rmsnorm")),
    Other("vllm", "vllm._custom_ops", "rms_norm", _norm_into),
    Other("vllm", "vllm.model_executor.layers.quantization.utils.fp8_utils", "fp8_linear",
          _block_product),
    Other("sglang", "sglang.srt.layers.quantization.fp8_kernel", "fp8_linear", _block_product),
)  # fmt: skip


def installed() -> dict[str, bool]:
    """Which of the packages can be imported."""
    return {name: _module(name) is not None for name in ENGINES}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # absent, or built for another card or driver
        return None


def calls(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], packages: Mapping[str, bool]
) -> dict[str, Call]:
    """The other engines' calls for inputs of an op of ours, by engine."""
    found = {}
    for other in OTHERS:
        if other.op != op or not packages.get(other.package):
            continue
        module = _module(other.module)
        call = None if module is None else other.adapt(module, args, kwargs)
        if call is not None:
            found[ENGINES[other.package]] = call
    return found


def agrees(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call) -> bool:
    """Whether a call of another engine gives our values, within their formats."""
    ours, theirs = getattr(ftkernels, op)(*args, **kwargs).float(), call().float()
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).abs().max() <= _TOLERANCE * ours.abs().max())
