"""Host memory a checkpoint needs, known before a byte of it is read, and what the machine can
give."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ftruntime.checkpoint.banks import BankForm
from ftruntime.checkpoint.names import TensorSpec, expected_tensors, num_shares
from ftruntime.model.config import ModelConfig

DEQUANTIZE_DTYPES: Final = (torch.bfloat16, torch.float32)
_QUANTIZED: Final = ("F8_E4M3", "I8")
_FLOAT: Final = ("BF16", "F32")
GIB: Final = 1 << 30
# bytes an element while codes widen, and copies of the codes while they are packed
_WIDENING: Final = 18
_PACKING: Final = 3
# interpreter, libraries, and what allocators hold back
_FIXED_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the loaded weights, and of the largest passing copies while they are read."""

    dense_bytes: int  # everything but the routed experts; on the device if there is one
    expert_bytes: int  # this rank's banks, always on the host
    dense_temporary_bytes: int  # beside the dense part
    transfer_bytes: int  # in place of the dense part, when it leaves for an accelerator
    expert_temporary_bytes: int

    def host_bytes(self, *, on_device: bool) -> int:
        """Peak on the host; `on_device`: the dense part leaves for an accelerator."""
        dense = 0 if on_device else self.dense_bytes
        passing = self.dense_temporary_bytes + (self.transfer_bytes if on_device else 0)
        # banks take memory as they fill, and they do so after the dense part has passed
        filled = max(passing, self.expert_bytes + self.expert_temporary_bytes)
        return dense + filled + _FIXED_BYTES


def estimate(
    config: ModelConfig, dequantize: torch.dtype | None, *, ranks: int = 1, pack: bool = False,
    threads: int = 1,
) -> MemoryEstimate:  # fmt: skip
    """What `load_weights` with the same arguments will hold; `threads` place experts at a time."""
    dense = temporary = transfer = 0
    for name, spec in expected_tensors(config).items():
        if ".ffn.experts." in name:
            continue
        num_bytes = loaded_bytes(name, spec, dequantize) // num_shares(name, ranks)
        dense += num_bytes
        transfer = max(transfer, num_bytes)
        if dequantize is not None and spec.dtype in _QUANTIZED:
            # codes widen to the target type by way of fp32
            temporary = max(temporary, _WIDENING * spec.num_elements)
        elif dequantize == torch.float32 and spec.dtype == "BF16":
            temporary = max(temporary, spec.num_bytes)
    form = BankForm(config, dequantize, pack=pack, ranks=ranks)
    expert = threads * _expert_temporary(form)
    return MemoryEstimate(dense, form.num_bytes, temporary, transfer, expert)


def _expert_temporary(form: BankForm) -> int:
    """Passing copies of the thread that places an expert."""
    weights = form.stored()[0::2]
    largest = max(part.num_bytes for part in weights)
    whole = form.ranks * weights[1].num_bytes if form.ranks > 1 else 0
    if form.dequantize is not None:
        return form.stored_bytes + max(whole, 2 * _WIDENING * largest)
    return max(whole, form.stored_bytes + _PACKING * largest) if form.pack else whole


def loaded_bytes(name: str, spec: TensorSpec, dequantize: torch.dtype | None) -> int:
    """Bytes that the stored tensor takes once loaded; 0 for a scale that went into its weight."""
    if dequantize is None:
        return spec.num_bytes
    if name.endswith(".scale"):
        return 0
    if spec.dtype in _QUANTIZED:
        codes = 2 if spec.dtype == "I8" else 1  # two FP4 codes a byte
        return spec.num_elements * codes * dequantize.itemsize
    if spec.dtype in _FLOAT and dequantize == torch.float32:
        return spec.num_elements * 4
    return spec.num_bytes


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process may still take: MemAvailable, or less where a cgroup limits it; None if
    unknown."""
    candidates = [_mem_available(root), *_cgroup_room(root)]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def require_memory(needed: int, *, what: str, available: int | None) -> None:
    """Refuse with one sentence when `needed` bytes are not there; an unknown `available` passes.

    Raises:
        ValueError: both numbers are in the text.
    """
    if available is not None and needed > available:
        raise ValueError(
            f"{what} needs {needed / GIB:.2f} GiB of host memory, "
            f"but {available / GIB:.2f} GiB is available; nothing was read"
        )


def _mem_available(root: Path) -> int | None:
    text = _read(root / "proc/meminfo")
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(root: Path) -> list[int | None]:
    """Room under each limit on the way from this process's group to the top (version 2, then
    version 1)."""
    rooms: list[int | None] = []
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit, usage, stat = mount, "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            base = mount / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            stat = "total_inactive_file "
        else:
            continue
        relative = Path(os.path.normpath("/" + path.lstrip("/"))).relative_to("/")
        # inside a container the path of the host may not exist; its own group is then the mount
        # itself
        for part in (relative, *relative.parents):
            rooms.append(_room(base / part, limit, usage, stat))
    return rooms


def _room(group: Path, limit_file: str, usage_file: str, stat: str) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # "max", or no such group
    # page cache that can be dropped at once counts as free
    cached = sum(
        int(line.split()[1])
        for line in _read(group / "memory.stat").splitlines()
        if line.startswith(stat)
    )
    return max(0, int(limit) - int(usage) + cached)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
