"""Experts of all layers in host memory, and a pool of slots on the device that holds some of them.

Slots belong to keys, ``layer * num_experts + expert``. A copy into a slot comes after the kernels
that last read it, and kernels come after the copies of what they read: by events, the host does
not wait. All calls are made by one thread, on one stream of compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ftkernels import check
from ftkernels.moe import expert_ids as args
from ftkernels.moe.bank import ExpertBank
from ftkernels.moe.copier import Copier, CpuCopier, CudaCopier, check_copies
from ftkernels.moe.count_missing import count_missing
from ftkernels.moe.expert_moves import PHASES, ExpertMoves
from ftkernels.moe.expert_pool import ExpertPool, Matrices, check_banks
from ftkernels.moe.expert_steps import Group, Step
from ftkernels.moe.slot_map import SlotMap
from ftkernels.moe.slot_policy import SlotPolicy, make_policy
from ftkernels.moe.slot_table import SlotTable, uploaded

# hints in flight are bounded as if no call asked for fewer experts
_LEAST_WIDTH = 8


class ExpertCache:
    """Slots for experts, filled from banks in host memory.

    Args:
        num_layers, num_experts: layers, and experts of each.
        num_slots: slots of all layers together.
        banks: one a layer, in host memory, all of one shape, dtype and order; pinned when the
            device is a card.
        device: of the slots.
        policy: who leaves a slot first: "scan-resistant", "lru", or a `SlotPolicy`
            (`ftkernels.moe.slot_policy`).
        copier: a `Copier` (`ftkernels.moe.copier`); by the kind of device when omitted.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
        RuntimeError: a copy from the banks' memory to the device changes its bytes.
    """

    def __init__(
        self, num_layers: int, num_experts: int, num_slots: int, banks: Sequence[ExpertBank], *,
        device: torch.device | str, policy: str | SlotPolicy = "scan-resistant",
        copier: Copier[Any] | None = None,
    ) -> None:  # fmt: skip
        op = "ExpertCache"
        sizes = {"num_layers": num_layers, "num_experts": num_experts, "num_slots": num_slots}
        for name, value in sizes.items():
            check.integer(op, name, value, 1)
        check.require(
            num_slots <= num_layers * num_experts,
            f"{op}: num_slots is {num_slots}, expected at most {num_layers * num_experts}, "
            "all experts of all layers",
        )
        check_banks(op, banks, num_layers, num_experts)
        self._device = args.checked_device(op, device)
        args.check_policy(op, policy)
        if copier is None:
            on_card = self._device.type == "cuda"
            copier = CudaCopier(self._device) if on_card else CpuCopier()
        args.check_copier(op, copier)
        if isinstance(policy, str):
            policy = make_policy(policy, **sizes)
        self.num_layers, self.num_experts, self.num_slots = num_layers, num_experts, num_slots
        self._policy = policy
        self._pool = pool = ExpertPool(banks, num_slots, self._device)
        for layer in {0, num_layers - 1}:
            check_copies(copier, *pool.probe(layer))
        self._map = SlotMap(num_layers * num_experts, num_slots, policy)
        self._table = SlotTable(num_layers, num_experts, self._device)
        self._moves = ExpertMoves(self._map, pool, self._table, copier, num_experts)
        self._step: Step | None = None
        self._phase, self._width = PHASES[0], dict.fromkeys(PHASES, 0)
        self._is_open = True

    @contextlib.contextmanager
    def step(self, phase: str) -> Iterator[None]:
        """Slots handed out inside are in use until the kernels issued inside have run; an error
        releases them as well.

        Args:
            phase: "decode" or "prefill".

        Raises:
            ValueError: another phase.
            RuntimeError: a step is open.
        """
        self._require_open("step")
        check.require(
            phase in PHASES,
            lambda: f'ExpertCache.step: phase is {phase!r}, expected "decode" or "prefill"',
        )
        if self._step is not None:
            raise RuntimeError("ExpertCache.step: a step is open, expected one at a time")
        self._step, self._phase = Step(self._moves, phase, self.num_experts), phase
        step = self._step
        try:
            self._policy.begin(phase)
            if self._table.is_read and not self._is_capturing():
                self._moves.land()
                self._table.publish()
            yield
        finally:
            self._step, self._width[phase] = None, step.width
            if not self._is_capturing():
                step.end()

    def ensure(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Bring in the experts of a layer; they stay until the step's end.

        Args:
            layer: of the experts.
            topk_ids: int32 or int64 of any shape and device, read on the host; below 0: skipped.

        Returns:
            ``slot_of_expert [E]`` int32 on the device, -1 for all experts but these.

        Raises:
            TypeError: ids of another dtype.
            ValueError: a layer or id out of range, or more experts than slots that are not in use;
                nothing is changed then.
            RuntimeError: no step is open.
        """
        step, experts = self._asked("ensure", layer, topk_ids)
        return self._slot_of_expert(step.all_at_once(layer, experts))

    def groups(
        self, layer: int, topk_ids: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """The experts of a layer in as many disjoint groups as they need, those that are resident
        first; a group is in use until the next one is asked for.

        The copies of a group are issued before the group ahead of it is handed out when there are
        slots for both.

        Args:
            layer, topk_ids: as in `ensure`.
            out: ``[E]`` int32 on the device that every item is written to, in the order of compute;
                for captured kernels, which read the same memory each time.

        Returns:
            An iterator of ``slot_of_expert [E]`` int32, -1 for experts of other groups; one item
            when all fit, or when there are none.

        Raises:
            TypeError, RuntimeError: as `ensure`, and (from the iterator) once the step has ended.
            ValueError: a layer, id or `out` outside the contract, or (from the iterator) no slot
                that is not in use.
        """
        step, experts = self._asked("groups", layer, topk_ids)
        if out is not None:
            size, like = (self.num_experts,), self._table.rows
            check.tensor("ExpertCache.groups", "out", out, (torch.int32,), size, "[E]", like)
        return self._handed_out(step.in_groups(layer, experts), out)

    def lookup(
        self, layer: int, topk_ids: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the experts of a layer are; copies and evicts nothing. Graph-safe.

        Args:
            layer: of the experts.
            topk_ids: ``[T, topk]`` int32 on the device, not read on the host.
            out: ``[1]`` int32 for ``num_missing``.

        Returns:
            ``slot_of_expert [E]`` int32, a view that is good for kernels issued before the next
            call that may copy, and in a replay for those of a step; ``num_missing [1]`` int32, the
            routes whose expert has no slot.

        Raises:
            TypeError, ValueError: ids or layer outside the contract.
            RuntimeError: while a stream is captured, when the table on the device is out of date.
        """
        self._require_open("lookup")
        args.check_layer("ExpertCache.lookup", layer, self.num_layers)
        args.readable("ExpertCache.lookup", "topk_ids", topk_ids)
        if not self._is_capturing():
            self._table.publish()
        elif self._table.is_stale:
            raise RuntimeError(
                "ExpertCache.lookup: the table on the device is out of date while a stream is "
                "captured, expected a lookup before the capture"
            )
        self._table.is_read = True
        slots = self._table.rows[layer]
        return slots, count_missing(slots, topk_ids, out=out)

    def prefetch(self, layer: int, expert_ids: Sequence[int] | torch.Tensor) -> None:
        """Hint that a step may soon use these experts.

        Never waits, never takes a slot that is in use, in flight or still read by a kernel, nor, in
        a step after the first `lookup`, any but a free one; what does not fit is dropped. At most
        twice as many hints are in flight as experts of the largest call of the open step and of the
        last one of its phase, and 16 where those were few.

        Args:
            layer: of the experts.
            expert_ids: a list or a CPU tensor; below 0: skipped.

        Raises:
            TypeError, ValueError: a layer or id outside the contract.
        """
        self._require_open("prefetch")
        args.check_layer("ExpertCache.prefetch", layer, self.num_layers)
        experts = args.hinted("ExpertCache.prefetch", "expert_ids", expert_ids, self.num_experts)
        if self._is_capturing():
            return
        moves, base = self._moves, layer * self.num_experts
        moves.land()
        moves.marks.sweep()
        width = max(_LEAST_WIDTH, self._width[self._phase], self._step.width if self._step else 0)
        misses = [e for e in experts if self._map.slot(base + e) < 0]
        misses = misses[: max(0, 2 * width - moves.hints_in_flight)]
        if self._step is not None and self._table.is_read:
            # a replay may read whatever the table names, so nobody gives way
            misses = misses[: self._map.num_free]
        wanted = {base + e for e in experts}

        def is_spare(key: int) -> bool:
            return key not in wanted and moves.is_idle(key)

        moves.bring(layer, misses, self._phase, hint=True, spare=is_spare)

    def slots(self, layer: int) -> Matrices:
        """``w13, w13_scale, w2, w2_scale``, ``[num_slots, ...]`` on the device, the same tensors
        for every layer; scales are None for dequantized banks."""
        self._require_open("slots")
        args.check_layer("ExpertCache.slots", layer, self.num_layers)
        return self._pool.matrices

    def stats(self) -> dict[str, Any]:
        """Counts since the start, from any thread; hits and misses are of distinct experts a call.

        Returns:
            ``{"decode": counts, "prefill": counts, "layers": [{"hits", "misses"}, ...],
            "num_slots", "num_experts"}``, counts being hits, misses, bytes_h2d, prefetch_used,
            prefetch_wasted (hints that left unused) and evictions, and experts those of all layers.
        """
        self._require_open("stats")
        return {
            **{phase: dict(counts) for phase, counts in self._moves.counts.items()},
            "layers": [dict(counts) for counts in self._moves.layer_counts],
            "num_slots": self.num_slots,
            "num_experts": self.num_layers * self.num_experts,
        }

    def check(self) -> None:
        """No slot is lost, held by nobody, or in flight without its copies.

        Raises:
            AssertionError: one is.
        """
        self._require_open("check")
        self._moves.check()
        holders = self._step.holders() if self._step else [0] * self.num_slots
        if holders != self._map.holders():
            raise AssertionError("ExpertCache: holders of slots do not add up")

    def close(self) -> None:
        """Wait for all copies and let go of slots and banks; again: nothing, unless it failed.

        Raises:
            RuntimeError: a step is open.
        """
        if not self._is_open:
            return
        if self._step is not None:
            raise RuntimeError("ExpertCache.close: a step is open, expected its end before")
        self._moves.close()
        self._is_open = False

    def _asked(self, name: str, layer: int, topk_ids: torch.Tensor) -> tuple[Step, list[int]]:
        """The open step and the distinct experts of a call."""
        op, step = f"ExpertCache.{name}", self._step
        self._require_open(name)
        if step is None:
            raise RuntimeError(f"{op}: no step is open, expected a call within one")
        if self._is_capturing():
            raise RuntimeError(f"{op}: a stream is captured, expected lookup there")
        args.check_layer(op, layer, self.num_layers)
        experts = args.distinct(op, "topk_ids", topk_ids, self.num_experts)
        step.width = max(step.width, len(experts))
        return step, experts

    def _handed_out(
        self, groups: Generator[Group, None, None], out: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        with contextlib.closing(groups):
            for group in groups:
                yield self._slot_of_expert(group, out)

    def _slot_of_expert(self, group: Group, out: torch.Tensor | None = None) -> torch.Tensor:
        slots = np.full(self.num_experts, -1, dtype=np.int32)
        slots[group.experts] = group.slots
        return uploaded(slots, self._device, out)

    def _require_open(self, name: str) -> None:
        if not self._is_open:
            raise RuntimeError(f"ExpertCache.{name}: the cache is closed, expected an open one")

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
