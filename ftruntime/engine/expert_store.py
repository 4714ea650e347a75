"""Routed experts of one rank as the engine owns them: cache, host banks, and their numbers."""

from __future__ import annotations

from collections.abc import Callable

import ftkernels
from ftruntime.plan import Plan

_COUNTS = ("hits", "misses", "bytes_h2d", "prefetch_used", "prefetch_wasted", "evictions")


class ExpertStore:
    """What `/v1/stats` tells of the experts, and what ends with the engine.

    Args:
        plan: its slots are reported.
        cache: None where all experts are on the device: nothing is then looked up or copied.
        release: gives the host memory of the banks back; called once, after the last copy.
    """

    def __init__(
        self, plan: Plan, cache: ftkernels.ExpertCache | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._sizes = {
            "num_slots": plan.expert_slots,
            "num_experts": plan.num_experts,
            "min_slots": plan.min_expert_slots,
        }
        self._cache = cache
        self._release = release
        self._closed = self._released = False
        self._last = dict.fromkeys(("decode", "prefill"), _phase({}))
        self._before: dict[str, dict[str, int]] = {"decode": {}, "prefill": {}}

    def begin(self) -> None:
        """Count from here on: what came before were the steps of the warm-up."""
        if self._cache is not None:
            counts = self._cache.stats()
            self._before = {phase: counts[phase] for phase in self._before}

    def stats(self) -> dict[str, object]:
        """Sizes, and by phase: hits, misses, bytes copied to the device, hinted copies used and
        wasted, evictions; ``hit_rate`` of all look-ups, of which hints made ``prefetch_used``, and
        ``resident_rate`` without those. Callable from any thread."""
        if self._cache is not None and not self._closed:
            counts = self._cache.stats()
            self._last = {
                phase: _phase({
                    name: counts[phase][name] - before.get(name, 0) for name in _COUNTS
                })
                for phase, before in self._before.items()
            }  # fmt: skip
        return {**self._sizes, **self._last}

    def check(self) -> None:
        """Raises AssertionError when slots do not add up, or one is in use between steps."""
        if self._cache is not None and not self._closed:
            self._cache.check()

    def close(self) -> None:
        """Wait for copies under way and give slots and pinned bytes back."""
        if self._released:
            return
        self.stats()
        # a reader of the numbers in another thread must not meet a closed cache
        self._closed = True
        if self._cache is not None:
            self._cache.close()
        self._released = True
        self._release()


def _phase(counts: dict[str, int]) -> dict[str, int | float | None]:
    """The rates are None before the first look-up."""
    values: dict[str, int | float | None] = {name: counts.get(name, 0) for name in _COUNTS}
    looked_up = counts.get("hits", 0) + counts.get("misses", 0)
    values["hit_rate"] = values["resident_rate"] = None
    if looked_up:
        values["hit_rate"] = counts["hits"] / looked_up
        values["resident_rate"] = (counts["hits"] - counts["prefetch_used"]) / looked_up
    return values
