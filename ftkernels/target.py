"""Hardware facts by compute capability. Kernels receive them as constexprs and never ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """One kind of card. Rates are the vendor's dense peaks, in TFLOP/s and GB/s.

    The rate of L2 is no vendor's: a rounded figure of published microbenchmarks.
    """

    name: str
    arch: int
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    link_gb_per_s: float
    l2_gb_per_s: float
    ghz: float  # boost clock, at which the peaks hold


TARGETS = {
    89: Target("nvidia_geforce_rtx_4090", 89, 128, 101376, 102400, 65536, 48, 24,
               72 << 20, 1008.0, 165.0, 330.0, 25.0, 5000.0, 2.52),
    90: Target("nvidia_h200", 90, 132, 232448, 233472, 65536, 64, 32,
               50 << 20, 4800.0, 989.0, 1979.0, 55.0, 5500.0, 1.83),
    120: Target("nvidia_geforce_rtx_5090", 120, 170, 101376, 102400, 65536, 48, 24,
                96 << 20, 1792.0, 209.0, 419.0, 55.0, 7000.0, 2.407),
}  # fmt: skip

_offline_arch: ContextVar[int | None] = ContextVar("offline_arch", default=None)


def of_arch(arch: int) -> Target:
    """The card that stands for a compute capability.

    Raises:
        ValueError: no facts are known for `arch`.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch is {arch}, expected one of {sorted(TARGETS)}")
    return TARGETS[arch]


@contextlib.contextmanager
def offline(arch: int) -> Iterator[Target]:
    """While the context is open, configs are looked up for the card of `arch`, not this machine.

    Raises:
        ValueError: no facts are known for `arch`.
    """
    token = _offline_arch.set(arch)
    try:
        yield of_arch(arch)
    finally:
        _offline_arch.reset(token)


@cache
def gpu_name(index: int) -> str:
    """Name of CUDA device `index`, in the spelling of `configs/`."""
    return torch.cuda.get_device_name(index).lower().replace(" ", "_")


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def config_name() -> str:
    """Whose tuned configs apply: those of `offline`, of the current card, or of the RTX 4090."""
    arch = _offline_arch.get()
    if arch is not None:
        return of_arch(arch).name
    if _has_cuda():
        return gpu_name(torch.cuda.current_device())
    return TARGETS[89].name
