"""Big blocks of host memory, page-locked where they lie when there is a card.

``pin_memory=True`` rounds an allocation up to a power of two, so a bank of 3.4 GB would hold 4.
Here a block is an anonymous mapping of huge pages, registered with CUDA after it is filled.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every card
_GIB = 1 << 30


class CudaRuntime(Protocol):
    """What is used of ``torch.cuda.cudart()``; every call returns an error number, 0 for none."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...

    def cudaGetErrorString(self, error: int) -> str: ...


class HostMemory:
    """Allocates blocks, page-locks them on request, and lets go of all of them at once.

    Args:
        pinned: whether `pin` registers; False without a card.
        runtime: in place of ``torch.cuda.cudart()``, for tests.

    Registering uses the current device of the calling thread. `close` may come while tensors still
    view the blocks: they keep their memory, ordinary from then on.
    """

    def __init__(self, *, pinned: bool, runtime: CudaRuntime | None = None) -> None:
        self._runtime: CudaRuntime | None = runtime
        if pinned and runtime is None:
            self._runtime = torch.cuda.cudart()
        elif not pinned:
            self._runtime = None
        self._blocks: list[torch.Tensor] = []
        self._registered: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the blocks that are registered."""
        return sum(self._registered.values())

    def empty(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """A block ``[num_rows, row_bytes]`` uint8 of zeros that take no memory until written.

        Raises:
            MemoryError: the system refuses to map that much.
        """
        num_bytes = num_rows * row_bytes
        if num_bytes == 0:
            return torch.empty((num_rows, row_bytes), dtype=torch.uint8)
        try:
            mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"host memory: a block is {num_bytes / _GIB:.2f} GiB beside {self._held()}, "
                f"expected what the system maps ({error.strerror})"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(mapped, dtype=torch.uint8).view(num_rows, row_bytes)
        self._blocks.append(block)
        return block

    def pin(self, block: torch.Tensor) -> None:
        """Page-lock a block of `empty`; once, and not at all without a card or bytes.

        Raises:
            MemoryError: CUDA refuses; the other blocks stay as they are.
        """
        address = block.data_ptr()
        if self._runtime is None or block.nbytes == 0 or address in self._registered:
            return
        error = self._runtime.cudaHostRegister(address, block.nbytes, _PORTABLE)
        if int(error) != 0:
            raise MemoryError(
                f"host memory: page-locking {block.nbytes / _GIB:.2f} GiB beside {self._held()} "
                f"failed ({self._runtime.cudaGetErrorString(error)}), expected a memlock limit and "
                "free memory for all experts (ulimit -l unlimited; containers: --ulimit memlock=-1)"
            )
        self._registered[address] = block.nbytes

    def close(self) -> None:
        """Unregister and forget every block; a second call does nothing.

        Raises:
            RuntimeError: CUDA refuses to unregister; the rest is unregistered all the same.
        """
        refused = []
        for address in list(self._registered):
            assert self._runtime is not None
            error = self._runtime.cudaHostUnregister(address)
            if int(error) == 0:
                del self._registered[address]
            else:
                refused.append(self._runtime.cudaGetErrorString(error))
        # memory that stays registered must stay mapped
        self._blocks = [block for block in self._blocks if block.data_ptr() in self._registered]
        if refused:
            raise RuntimeError(
                f"host memory: {self.pinned_bytes / _GIB:.2f} GiB stay page-locked after close, "
                f"expected none ({refused[0]})"
            )

    def check(self) -> None:
        """Registered blocks are blocks that are held.

        Raises:
            RuntimeError: bytes are page-locked that no block holds.
        """
        held = {block.data_ptr(): block.nbytes for block in self._blocks}
        lost = sum(size for at, size in self._registered.items() if held.get(at) != size)
        if lost:
            raise RuntimeError(
                f"host memory: {lost} bytes are page-locked outside any block, expected none"
            )

    def _held(self) -> str:
        return (
            f"{self.num_bytes / _GIB:.2f} GiB, {self.pinned_bytes / _GIB:.2f} of them page-locked,"
        )
