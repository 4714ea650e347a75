"""Blocks of host memory: what is registered, what an error leaves, and that close ends it all.

CUDA is a stub that counts. Mutants tried: a block registered twice; an empty block registered;
a refusal ignored; close that stops at the first refusal; close that forgets memory which stays
registered; registering without a card; the size in place of the address at unregistering.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from ftkernels.moe import host_memory
from ftkernels.moe.host_memory import HostMemory


class Runtime:
    """Registers nothing, but knows what is registered; `accept` is how many calls come through."""

    def __init__(self, accept: int = 1000) -> None:
        self.accept = accept
        self.registered: dict[int, int] = {}
        self.keep: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert num_bytes > 0
        assert flags == 1
        assert address % mmap.PAGESIZE == 0
        assert address not in self.registered
        if len(self.registered) == self.accept:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address in self.keep:
            return 713
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory", 713: "not registered"}[error]


def test_blocks_are_zeros_of_their_own():
    memory = HostMemory(pinned=False)
    first, second = memory.empty(3, 5), memory.empty(2, 5000)
    assert first.dtype == torch.uint8
    assert first.shape == (3, 5)
    assert not first.any()
    first.fill_(7)
    assert not second.any()
    assert memory.num_bytes == 15 + 10000


def test_pinned_in_place_and_back():
    runtime = Runtime()
    memory = HostMemory(pinned=True, runtime=runtime)
    blocks = [memory.empty(1, size) for size in (1, 4096, 5000)]
    assert memory.pinned_bytes == 0
    for block in (*blocks, blocks[0]):
        memory.pin(block)
        memory.check()
    assert runtime.registered == {block.data_ptr(): block.nbytes for block in blocks}
    assert memory.pinned_bytes == memory.num_bytes == 9097
    memory.close()
    assert runtime.registered == {}
    assert memory.pinned_bytes == memory.num_bytes == 0
    memory.check()
    memory.close()
    # tensors that are left are ordinary memory
    assert int(blocks[2].fill_(1).sum()) == 5000


def test_without_a_card_nothing_is_registered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA was started"))
    memory = HostMemory(pinned=False, runtime=Runtime(accept=0))
    memory.pin(memory.empty(4, 4))
    assert memory.pinned_bytes == 0
    memory.close()


def test_with_a_card_cuda_registers(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(pinned=True)
    memory.pin(memory.empty(4, 4))
    assert list(runtime.registered.values()) == [16]


def test_g05_no_bytes_are_not_registered():
    runtime = Runtime()
    memory = HostMemory(pinned=True, runtime=runtime)
    for shape in ((0, 8), (8, 0)):
        block = memory.empty(*shape)
        assert block.shape == shape
        memory.pin(block)
    assert runtime.registered == {}


def test_a_refusal_says_what_helps_and_leaves_the_rest():
    runtime = Runtime(accept=1)
    memory = HostMemory(pinned=True, runtime=runtime)
    first, second = memory.empty(1, 1 << 20), memory.empty(1, 2 << 20)
    memory.pin(first)
    with pytest.raises(MemoryError) as caught:
        memory.pin(second)
    text = str(caught.value)
    assert "out of memory" in text
    assert "memlock" in text
    assert "\n" not in text
    assert memory.pinned_bytes == 1 << 20
    memory.close()
    assert runtime.registered == {}


def test_close_goes_on_past_a_refusal_and_keeps_what_stays_registered():
    runtime = Runtime()
    memory = HostMemory(pinned=True, runtime=runtime)
    blocks = [memory.empty(1, 100) for _ in range(3)]
    for block in blocks:
        memory.pin(block)
    runtime.keep = {blocks[0].data_ptr()}
    with pytest.raises(RuntimeError, match="page-locked after close, expected none"):
        memory.close()
    assert list(runtime.registered) == [blocks[0].data_ptr()]
    assert memory.num_bytes == memory.pinned_bytes == 100
    memory.check()
    runtime.keep = set()
    memory.close()
    assert memory.num_bytes == 0


def test_check_finds_bytes_that_no_block_holds():
    runtime = Runtime()
    memory, other = (HostMemory(pinned=True, runtime=runtime) for _ in range(2))
    memory.pin(other.empty(1, 8))
    with pytest.raises(RuntimeError, match="page-locked outside any block"):
        memory.check()


def test_a_map_that_the_system_refuses(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"a block is 2\.00 GiB .* \(Cannot allocate memory\)"):
        HostMemory(pinned=False).empty(2, 1 << 30)
