"""One tensor-parallel rank of a process group, over torch.distributed.

Rank 0 decides and tells the others by small messages; sums of tensors go through a group of their
own, NCCL's between cards, gloo's on CPU. Sums and what rank 0 tells have a timeout, which ends a
run in which a rank hangs.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ftruntime.engine.meeting import Meeting
from ftruntime.types import EngineFailedError

START_S: Final = 60.0  # for the slowest rank to import what the first one has
# for the next plan as long as nobody asks for anything, and for ranks that are still loading
_WITHOUT_END: Final = datetime.timedelta(days=365)
_TEST_VALUES: Final = 1 << 16


class TensorParallel:
    """Sums, joins and messages among the ranks of one model."""

    def __init__(
        self, meeting: Meeting, *, device: str, timeout_s: float, store: Store | None = None
    ) -> None:
        """Meet the other ranks, then check that sums arrive.

        Args:
            device: "cpu" or "cuda".
            timeout_s: of the way to the store, of every sum and every message to the other ranks.
            store: rank 0's own, when it was made before the others were started.

        Raises:
            EngineFailedError: not all ranks came in time, or sums are wrong; in one sentence.
        """
        self.rank, self.size, self._timeout_s = meeting.rank, meeting.size, timeout_s
        self.local_size = meeting.local_size
        timeout = datetime.timedelta(seconds=timeout_s)
        meeting_s = timeout_s  # of the store; then of ranks, which may still import
        if device == "cuda":
            torch.cuda.set_device(meeting.local_rank)
        try:
            if store is None:
                store = TCPStore(
                    meeting.host, meeting.port, meeting.size, is_master=False, timeout=timeout
                )
            meeting_s = max(timeout_s, START_S)
            store.set_timeout(datetime.timedelta(seconds=meeting_s))
            dist.init_process_group(
                # ranks that torchrun starts again find the addresses of those before in its store
                "gloo", store=PrefixStore(f"attempt {meeting.attempt}", store), rank=self.rank,
                world_size=self.size, timeout=datetime.timedelta(seconds=meeting_s),
            )  # fmt: skip
            self._sums = dist.new_group(
                backend="nccl" if device == "cuda" else "gloo", timeout=timeout
            )
            # each rank's own side of a group waits as long as it says
            self._messages = dist.new_group(
                backend="gloo", timeout=_WITHOUT_END if self.rank else timeout
            )
            self._values = dist.new_group(backend="gloo", timeout=_WITHOUT_END)
        except RuntimeError as error:
            raise EngineFailedError(
                f"rank {self.rank} of {self.size} did not meet the others at {meeting.host}:"
                f"{meeting.port} within {meeting_s:g} s ({_first_sentence(error)})"
            ) from error
        self._check_sums(device)

    def _check_sums(self, device: str) -> None:
        values = torch.arange(_TEST_VALUES, dtype=torch.float32, device=device) % 251
        total = self.sum(values * (self.rank + 1))
        factor = self.size * (self.size + 1) // 2
        if not torch.equal(total, values * factor):
            raise EngineFailedError(
                f"rank {self.rank} of {self.size}: the test sum of all ranks is wrong, expected "
                f"{factor} times each value"
            )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, the same bits everywhere; written into `x`."""
        try:
            dist.all_reduce(x, group=self._sums)
        except RuntimeError as error:
            raise self._lost(error) from error
        return x

    def begin_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As `sum`; the result is called for after what may be computed meanwhile."""
        try:
            work = dist.all_reduce(x, group=self._sums, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

        def wait() -> torch.Tensor:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error
            return x

        return wait

    def join(self, x: torch.Tensor) -> torch.Tensor | None:
        """All ranks' columns `[N, v]` side by side on rank 0, None on the others."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        try:
            dist.gather(x, parts, group=self._sums)
        except RuntimeError as error:
            raise self._lost(error) from error
        return None if parts is None else torch.cat(parts, dim=1)

    def tell(self, message: object) -> None:
        """Send a message to every other rank; rank 0 only."""
        self._broadcast([message])

    def hear(self) -> Any:
        """Rank 0's next message."""
        box: list[object] = [None]
        self._broadcast(box)
        return box[0]

    def collect(self, value: object) -> list[Any]:
        """Every rank's value, in the order of the ranks; for as long as the slowest takes."""
        values: list[object] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._values)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, box: list[object]) -> None:
        try:
            dist.broadcast_object_list(box, src=0, group=self._messages)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> EngineFailedError:
        return EngineFailedError(
            f"rank {self.rank} of {self.size} lost the others, or waited longer than "
            f"{self._timeout_s:g} s for them ({_first_sentence(error)})"
        )


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0]
