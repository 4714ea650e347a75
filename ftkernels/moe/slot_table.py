"""The table on the device in which a captured step finds the slots of its experts."""

from __future__ import annotations

import numpy as np
import torch


def uploaded(
    values: np.ndarray, device: torch.device, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``values`` on the device, in ``out`` if given, in the order of compute; the host does not
    wait."""
    x = torch.from_numpy(values)
    if device.type == "cuda":
        # a pinned block of its own, which its allocator keeps until the copy has ended
        x = x.pin_memory()
    if out is not None:
        return out.copy_(x, non_blocking=True)
    return x.to(device, non_blocking=True)


class SlotTable:
    """``rows [L, E]`` int32 on the device: slot of each expert, -1 for none, as of `publish`.

    Entries stand for what compute comes after. They leave by a `publish` before their slot is
    overwritten, and the copy comes after that.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.rows = torch.full((num_layers, num_experts), -1, dtype=torch.int32, device=device)
        self.is_read = False  # nobody pays for publishing before the first lookup
        self._slots = np.full(num_layers * num_experts, -1, dtype=np.int32)
        self._published = self._slots.copy()
        self._stale = False

    @property
    def is_stale(self) -> bool:
        """Whether the device has other entries than there are."""
        return self._stale

    def enter(self, key: int, slot: int) -> None:
        self._slots[key] = slot
        self._stale = True

    def withdraw(self, key: int) -> bool:
        """Take the entry of ``key`` out; True when the device still has it."""
        if self._slots[key] >= 0:
            self._slots[key] = -1
            self._stale = True
        return bool(self._published[key] >= 0)

    def is_published(self, key: int) -> bool:
        return bool(self._published[key] >= 0)

    def publish(self) -> None:
        """Bring the device up to date, in the order of compute."""
        if not self._stale:
            return
        uploaded(self._slots.copy(), self.rows.device, self.rows.view(-1))
        self._published[:] = self._slots
        self._stale = False

    def entries(self) -> dict[int, int]:
        """Key and slot of every entry, published or not."""
        keys = np.flatnonzero(self._slots >= 0)
        return {int(key): int(self._slots[key]) for key in keys}
