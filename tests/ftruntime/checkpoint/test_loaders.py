"""The serial and the parallel loader: same bits, bounded reading ahead, and nothing left behind by
an error.

Mutants tried: a shard skipped; another expert placed; reading ahead one shard too far,
or all at once; threads not joined; the torch thread count left at 1; memory pinned before it is
full; pinned memory left after an error; a short read taken for a full one; files left open.
"""

from __future__ import annotations

import os
import re
import threading

import pytest
import torch

from ftkernels.moe.host_memory import HostMemory
from ftruntime.checkpoint import loader
from ftruntime.checkpoint.banks import BankBuilder
from ftruntime.checkpoint.files import ShardFiles
from ftruntime.model.config import ModelConfig


class Runtime:
    """Stands for CUDA: knows what is registered, refuses from the call `refuse` on."""

    def __init__(self, refuse: int = 1000) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls += 1
        if self.calls >= self.refuse:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"


def _load(directory, **options):
    options = {"dequantize": None, **options}
    return loader.load_weights(directory, ModelConfig.from_dir(directory), **options)


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def _loading_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("expert-load")]


def _tensors(weights):
    found = dict(weights.tensors)
    for name, linear in weights.linears.items():
        found |= {f"{name}.weight": linear.weight, f"{name}.scale": linear.scale}
    for layer, bank in enumerate(weights.experts):
        found |= {f"bank.{layer}.{n}": x for n, x in enumerate(bank.tensors)}
    return {name: x for name, x in found.items() if x is not None}


@pytest.fixture(autouse=True)
def intra_op_threads():
    """Not 1, which is what the parallel loader sets while it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pinned(monkeypatch):
    """Banks are page-locked, by a stub."""

    def use(refuse: int = 1000) -> Runtime:
        runtime = Runtime(refuse)
        make = lambda *, pinned: HostMemory(pinned=True, runtime=runtime)  # noqa: E731
        monkeypatch.setattr(loader, "HostMemory", make)
        return runtime

    return use


@pytest.mark.parametrize("dequantize", [None, torch.float32], ids=str)
def test_loaders_agree_bit_for_bit(scattered, tiny, dequantize):
    expected = _tensors(_load(tiny, dequantize=dequantize, expert_load="serial"))
    for options in (
        {"expert_load": "serial"},
        {"expert_load": "parallel"},
        {"expert_load": "parallel", "threads": 1, "expert_prefetch": 1},
        {"expert_load": "parallel", "threads": 8, "expert_prefetch": 100},
    ):
        found = _tensors(_load(scattered, dequantize=dequantize, **options))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.dtype == expected[name].dtype
            mine, theirs = value.contiguous(), expected[name].contiguous()
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("cores", "ranks", "kind", "threads"),
    [(1, 1, "serial", 1), (2, 1, "parallel", 2), (9, 4, "parallel", 2), (2, 8, "parallel", 1)],
)
def test_auto_is_parallel_with_several_cores_and_shards(
    scattered, monkeypatch, caplog, cores, ranks, kind, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with caplog.at_level("INFO"):
        _load(scattered, ranks=ranks)
    last = caplog.records[-1].getMessage()
    assert f"loader={kind} threads={threads}" in last
    assert re.search(r"bytes=0\.0\dGiB seconds=\d+\.\d rate=\d+\.\d\dGB/s", last)


def test_auto_is_serial_for_one_file(tiny, stored, tmp_path, monkeypatch, caplog):
    from safetensors.torch import save_file

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    save_file(stored(tiny), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with caplog.at_level("INFO"):
        _load(tmp_path)
    assert "loader=serial threads=1" in caplog.text


@pytest.mark.parametrize("prefetch", [1, 2, 50])
@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_shards_are_read_ahead_in_order_and_no_further(
    scattered, monkeypatch, prefetch, expert_load
):
    seen: list[object] = []
    place = BankBuilder.place

    def placed(self, layer, expert):
        name = f"layers.{layer}.ffn.experts.{expert}.w1.weight"
        seen.append(self._index.entries[name].file)
        place(self, layer, expert)

    monkeypatch.setattr(BankBuilder, "place", placed)
    monkeypatch.setattr(ShardFiles, "read_ahead", lambda self, file: seen.append(("ahead", file)))
    _load(scattered, expert_load=expert_load, threads=1, expert_prefetch=prefetch)
    order = list(dict.fromkeys(x for x in seen if not isinstance(x, tuple)))
    assert len([x for x in seen if not isinstance(x, tuple)]) == 6 * 16
    advised = [x[1] for x in seen if isinstance(x, tuple)]
    if expert_load == "serial":
        assert advised == []
        return
    assert advised == order
    for number, file in enumerate(order):
        before = seen[: seen.index(file)]
        ahead = [x for x in before if isinstance(x, tuple)]
        assert len(ahead) == min(number + 1 + prefetch, len(order))


def test_reading_ahead_covers_the_whole_file(scattered, monkeypatch):
    calls = []
    advise = lambda fd, start, size, advice: calls.append((start, size, advice))  # noqa: E731
    monkeypatch.setattr(os, "posix_fadvise", advise)
    file = max(scattered.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    with ShardFiles([file]) as files:
        files.read_ahead(file)
    assert [start for start, _, _ in calls] == list(range(0, file.stat().st_size, 128 << 10))
    assert {(size, advice) for _, size, advice in calls} == {(128 << 10, os.POSIX_FADV_WILLNEED)}


@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_a_file_cut_short_ends_in_one_sentence(
    scattered, tmp_path, shard_of, monkeypatch, pinned, expert_load
):
    import shutil

    directory = shutil.copytree(scattered, tmp_path / "cut")
    name = "layers.3.ffn.experts.4.w2.weight"
    runtime, before = pinned(), _open_files()
    real = loader.open_checkpoint

    def cut(*args):
        index = real(*args)
        os.truncate(shard_of(directory, name), index.entries[name].end - 1)
        return index

    monkeypatch.setattr(loader, "open_checkpoint", cut)
    with pytest.raises(ValueError, match=r"the file ends at byte .*was it cut") as caught:
        _load(directory, expert_load=expert_load, threads=3)
    assert str(shard_of(directory, name)) in str(caught.value)
    assert "\n" not in str(caught.value)
    _nothing_left(runtime, before)


@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
@pytest.mark.parametrize("where", ["place", "progress"])
def test_an_interrupt_leaves_nothing(scattered, monkeypatch, pinned, expert_load, where):
    runtime, before = pinned(), _open_files()
    calls = []

    def interrupt(*args):
        calls.append(args)
        if where == "place" and len(calls) == 40:
            raise KeyboardInterrupt
        if where == "progress" and args[1] > 0.9:
            raise KeyboardInterrupt

    if where == "place":
        real = BankBuilder.place
        both = lambda self, *args: (interrupt(*args), real(self, *args))  # noqa: E731
        monkeypatch.setattr(BankBuilder, "place", both)
    progress = interrupt if where == "progress" else None
    with pytest.raises(KeyboardInterrupt):
        _load(scattered, expert_load=expert_load, threads=3, progress=progress)
    _nothing_left(runtime, before)


@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_memory_that_cannot_be_locked_leaves_nothing(scattered, pinned, expert_load):
    runtime, before = pinned(refuse=3), _open_files()
    with pytest.raises(MemoryError, match="memlock"):
        _load(scattered, expert_load=expert_load, threads=2)
    assert runtime.calls == 3
    _nothing_left(runtime, before)


def _nothing_left(runtime, before):
    assert runtime.registered == {}
    assert _loading_threads() == []
    assert _open_files() == before
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_full_banks_are_pinned_and_released(scattered, pinned, expert_load, monkeypatch):
    runtime, before = pinned(), _open_files()
    pin = HostMemory.pin

    def full(self, block):
        # the last expert's last scales are in, whatever the order
        assert bool(block.count_nonzero(dim=1).all())
        pin(self, block)

    monkeypatch.setattr(HostMemory, "pin", full)
    weights = _load(scattered, expert_load=expert_load, threads=3)
    banks = {bank.w13.data_ptr(): bank.rows().nbytes for bank in weights.experts}
    assert runtime.registered == banks
    weights.host_memory.check()
    value = weights.experts[2].w13.clone()
    weights.release()
    _nothing_left(runtime, before)
    assert torch.equal(weights.experts[2].w13, value)


def test_an_unreadable_file_is_named(scattered, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"safetensors: tensor \S+ cannot be read .*Input/output"):
        _load(scattered)


def test_short_reads_go_on(scattered, monkeypatch):
    expected = _tensors(_load(scattered))
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, rooms, at: real(fd, [rooms[0][: 1 + len(rooms[0]) // 3]], at)
    )
    found = _tensors(_load(scattered, expert_load="parallel", threads=2))
    for name, value in found.items():
        theirs = expected[name].contiguous()
        assert torch.equal(value.contiguous().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_progress_tells_bytes_and_rate(scattered, expert_load, monkeypatch):
    monkeypatch.setattr(loader, "GIB", 1 << 20)
    calls = []
    _load(scattered, expert_load=expert_load, progress=lambda *args: calls.append(args))
    size = sum(f.stat().st_size for f in scattered.glob("*.safetensors")) / (1 << 20)
    for text, share in calls:
        done, total = re.fullmatch(r"([\d.]+) of ([\d.]+) GiB, \d+\.\d\d GB/s", text).groups()
        assert float(done) == pytest.approx(share * float(total), abs=0.02)
        # headers and draft modules are not loaded
        assert 0.5 * size < float(total) < size
    assert calls[-1][1] == 1.0
