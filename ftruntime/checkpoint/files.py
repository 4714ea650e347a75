"""Reads of stored tensors straight into memory that waits for them.

Files are read, not mapped: a file cut short while it is read is then an error with a name, where a
mapped page would kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from ftruntime.checkpoint.header import TensorEntry

# the kernel reads ahead no more than the device's window for one request; this is the usual window
_ADVICE_BYTES: Final = 128 << 10


class ShardFiles:
    """The shards of a checkpoint, open; threads may read at the same time."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._descriptors: dict[Path, int] = {}
        try:
            for file in files:
                if file not in self._descriptors:
                    self._descriptors[file] = os.open(file, os.O_RDONLY)
        except OSError:
            self.close()
            raise

    def read(self, entry: TensorEntry, into: torch.Tensor, *, skip: int = 0) -> None:
        """Fill `into`, contiguous, with the bytes of a stored tensor from its byte `skip` on.

        Raises:
            ValueError: the file ends early, or the system cannot read it.
        """
        room = into.view(torch.uint8).flatten().numpy().data
        position = entry.start + skip
        assert position + len(room) <= entry.end
        while len(room):
            try:
                count = os.preadv(self._descriptors[entry.file], [room], position)
            except OSError as error:
                raise ValueError(
                    f"{entry.file}: tensor {entry.name} cannot be read at byte {position} "
                    f"({error.strerror}), expected a readable file"
                ) from error
            if count == 0:
                raise ValueError(
                    f"{entry.file}: the file ends at byte {position}, expected the tensor "
                    f"{entry.name} up to byte {entry.end} (was it cut while it was read?)"
                )
            position += count
            room = room[count:]

    def read_ahead(self, file: Path) -> None:
        """Ask the system to have a whole shard in its page cache soon; does not wait for it."""
        descriptor = self._descriptors[file]
        for start in range(0, os.fstat(descriptor).st_size, _ADVICE_BYTES):
            os.posix_fadvise(descriptor, start, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close every file; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
