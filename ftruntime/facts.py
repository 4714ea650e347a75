"""What this machine offers, for `ftruntime.plan.resolve`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ftruntime.flags import refuse
from ftruntime.plan import DeviceFacts

_MEMINFO: Final = Path("/proc/meminfo")
_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")


def probe(device: str) -> DeviceFacts:
    """Look at this machine.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` (a GPU if PyTorch can use one). PyTorch is imported
            only where a driver is installed; no CUDA context is made.

    Raises:
        ValueError: ``cuda`` where PyTorch finds no GPU.
    """
    host = available_bytes()
    free = [] if device == "cpu" or not _NVIDIA_DRIVER.exists() else _free_card_bytes()
    if free:
        return DeviceFacts(kind="cuda", cards=len(free), memory_bytes=min(free), host_bytes=host)
    if device == "cuda":
        refuse("device", device, "auto or cpu: PyTorch finds no CUDA GPU here")
    return DeviceFacts(kind="cpu", cards=0, memory_bytes=host, host_bytes=host)


def available_bytes() -> int:
    """MemAvailable of this machine."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{_MEMINFO} has no MemAvailable line, expected Linux 3.14 or newer")


def _free_card_bytes() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    cards = range(torch.cuda.device_count())
    total = [torch.cuda.get_device_properties(card).total_memory for card in cards]
    return [total[card] - torch.cuda.device_memory_used(card) for card in cards]
