"""Hardware facts by compute capability. Kernels receive them as constexprs and never ask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Target:
    """One kind of card. Rates are the vendor's dense peaks, in TFLOP/s and GB/s."""

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


TARGETS = {
    89: Target("nvidia_geforce_rtx_4090", 89, 128, 101376, 102400, 65536, 48, 24,
               72 << 20, 1008.0, 165.0, 330.0, 25.0),
    90: Target("nvidia_h200", 90, 132, 232448, 233472, 65536, 64, 32,
               50 << 20, 4800.0, 989.0, 1979.0, 55.0),
    120: Target("nvidia_geforce_rtx_5090", 120, 170, 101376, 102400, 65536, 48, 24,
                96 << 20, 1792.0, 209.0, 419.0, 55.0),
}  # fmt: skip


def of_arch(arch: int) -> Target:
    """The card that stands for a compute capability.

    Raises:
        ValueError: no facts are known for `arch`.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch is {arch}, expected one of {sorted(TARGETS)}")
    return TARGETS[arch]


@lru_cache(maxsize=None)
def gpu_name(index: int) -> str:
    """Name of CUDA device `index`, in the spelling of `configs/`."""
    return torch.cuda.get_device_name(index).lower().replace(" ", "_")


def config_name() -> str:
    """Whose tuned configs apply now: the current card's, or the captured arch's, else the RTX 4090's."""
    from triton.runtime import driver

    from ftkernels.testing.aot import FakeCuda

    active = driver._active
    if isinstance(active, FakeCuda):
        return of_arch(active.arch).name
    if torch.cuda.is_available():
        return gpu_name(torch.cuda.current_device())
    return TARGETS[89].name
