"""Cards through stand-ins for the driver's library and for torch's: every state of each check.

Mutants tried: a driver that does not answer taken for none, capability compared as a number, the
current PCIe generation, a narrow slot passed, shared memory above the need failed, the library not
shut down, a hidden link that ends the check, the driver's cards ignored where torch sees none, a
pattern not compared, memory not released, the slowest copy told, a slow bus passed, widths left out
of what is expected of it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from ftkernels.moe import host_memory
from ftruntime.doctor import card
from ftruntime.doctor.card import Card

ADA = Card("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9), 4, 16, 16, "580.1")


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"code {value}")
        self.value = value


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch):
    monkeypatch.setattr(card, "_HOST_BYTES", 2 << 20)


@pytest.fixture
def nvml(monkeypatch):
    """A driver with one card; its fields can be changed, None is not told."""
    told = {"name": b"NVIDIA GeForce RTX 4090", "capability": (8, 9), "generation": 4, "width": 16,
            "max_width": 16, "count": 1, "init": None, "closed": 0}  # fmt: skip

    def get(name):
        def ask(*handle):
            if told[name] is None:
                raise NVMLError(3)
            return told[name]

        return ask

    def init():
        if told["init"]:
            raise NVMLError(told["init"])

    module = types.ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=NVMLError, NVML_ERROR_LIBRARY_NOT_FOUND=12, NVML_ERROR_DRIVER_NOT_LOADED=9,
        nvmlInit=init, nvmlDeviceGetCount=get("count"),
        nvmlShutdown=lambda: told.update(closed=told["closed"] + 1),
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=get("name"),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30),
        nvmlDeviceGetCudaComputeCapability=get("capability"),
        nvmlDeviceGetMaxPcieLinkGeneration=get("generation"),
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: 1,
        nvmlDeviceGetCurrPcieLinkWidth=get("width"),
        nvmlDeviceGetMaxPcieLinkWidth=get("max_width"),
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return told


def test_a_card_is_told(nvml):
    cards, (check,) = card.found_cards()
    assert cards == [ADA]
    assert check.state == "ok"
    assert check.found == (
        "NVIDIA GeForce RTX 4090, 24.0 GiB, capability 8.9, PCIe 4 x16, driver 580.1"
    )
    assert check.facts["capability"] == (8, 9)
    assert nvml["closed"] == 1


@pytest.mark.parametrize(
    ("change", "state"),
    [({"capability": (8, 6)}, "failed"), ({"capability": (7, 9)}, "failed"),
     ({"capability": (9, 0)}, "ok"), ({"capability": (12, 0)}, "ok"), ({"width": 8}, "warning"),
     ({"width": 8, "max_width": 8}, "ok"), ({"width": None}, "ok"), ({"generation": None}, "ok")],
    ids=str,
)  # fmt: skip
def test_states_of_a_card(nvml, change, state):
    nvml.update(change)
    cards, (check,) = card.found_cards()
    assert check.state == state
    assert check.found.startswith(f"{cards[0].name}, 24.0 GiB")
    assert bool(check.remedy) == (state != "ok")


def test_no_library_no_driver_no_card(nvml, monkeypatch):
    nvml["count"] = 0
    assert card.found_cards()[1][0].found == "the driver sees none"
    for code in (9, 12):
        nvml["init"] = code
        cards, (check,) = card.found_cards()
        assert (cards, check.state) == ([], "ok")
        assert check.found == f"no NVIDIA driver (code {code})"
    nvml["init"] = 18  # another version of the library than the driver's
    cards, (check,) = card.found_cards()
    assert (cards, check.state, check.found) == ([], "failed", "code 18")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cards, (check,) = card.found_cards()
    assert (cards, check.state) == ([], "warning")
    assert "ftkernels[serve]" in check.remedy


def test_a_driver_that_stops_answering_is_let_go(nvml):
    nvml["name"] = None
    assert card.found_cards()[1][0].state == "failed"
    assert nvml["closed"] == 1


class Runtime:
    """Stands in for the CUDA runtime's registration of host memory."""

    def __init__(self, error=0):
        self.error, self.held = error, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if not self.error:
            self.held[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.held[address]
        return 0

    def cudaGetErrorString(self, error):
        return "out of memory"


@pytest.fixture
def cuda(monkeypatch):
    """A torch with one card of 101376 bytes a block whose copies take the given milliseconds."""
    told = SimpleNamespace(
        shared=101376, ms=[99.0, 12.0, 11.0, 10.7, 12.0, 13.0], runtime=Runtime()
    )
    times = iter(())

    class Event:
        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            nonlocal times
            ms = next(times, None)
            if ms is None:
                times = iter(told.ms)
                ms = next(times)
            return ms

    properties = SimpleNamespace(shared_memory_per_block_optin=told.shared)
    told.properties = properties
    plain = {name: getattr(torch, name) for name in ("zeros", "empty")}

    monkeypatch.setattr(card, "_COPY_BYTES", 1 << 28)
    monkeypatch.setattr(card, "_event", Event)
    monkeypatch.setattr(torch, "zeros", lambda n, **k: plain["zeros"](1, dtype=torch.uint8))
    monkeypatch.setattr(torch, "empty", lambda n, **k: plain["empty"](1, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ADA.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: told.runtime)
    return told


def test_a_sound_card(cuda):
    found = {check.name: check for check in card.torch_checks([ADA])}
    assert list(found) == ["torch device", "shared memory 0", "pinned memory", "PCIe copies 0"]
    assert {check.state for check in found.values()} == {"ok"}
    assert found["shared memory 0"].found == "101376 bytes a block, 101376 needed"
    assert "2 MiB mapped, written, page-locked, read back" in found["pinned memory"].found
    assert cuda.runtime.held == {}
    # 256 MiB in 10.7 ms, the fastest
    assert found["PCIe copies 0"].facts["gb_per_s"] == pytest.approx(25.09, abs=0.01)


def test_too_little_shared_memory_fails(cuda):
    cuda.properties.shared_memory_per_block_optin = 101375
    assert card._shared_memory(0).state == "failed"
    cuda.properties.shared_memory_per_block_optin = 232448
    assert card._shared_memory(0).state == "ok"
    del cuda.properties.shared_memory_per_block_optin
    assert card._shared_memory(0).state == "warning"


@pytest.mark.parametrize(
    ("width", "generation", "ms", "state"),
    [(16, 4, 10.7, "ok"), (16, 4, 15.0, "warning"), (8, 4, 20.0, "ok"), (8, 4, 30.0, "warning"),
     (16, 3, 22.0, "ok"), (None, 4, 99.0, "ok"), (16, None, 99.0, "ok")],
    ids=str,
)  # fmt: skip
def test_a_bus_is_held_against_its_link(cuda, width, generation, ms, state):
    cuda.ms = [ms] * 6
    link = Card("x", 1, (8, 9), generation, width, 16, "580.1")
    check = card._bus(0, [link])
    assert check.state == state
    assert "24 to 26" in check.found
    assert card._bus(0, []).state == "ok"


def test_a_card_that_takes_no_copy_fails(cuda, monkeypatch):
    def refuse(number):
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(card, "copy_gb_per_s", refuse)
    check = card._bus(0, [ADA])
    assert (check.state, check.found) == ("failed", "CUDA error: unspecified launch failure")


def test_memory_that_cannot_be_locked_fails(cuda):
    cuda.runtime = Runtime(error=2)
    check = card.pinned_memory()
    assert check.state == "failed"
    assert "page-locking" in check.found
    assert "memlock" in check.remedy


def test_memory_that_forgets_fails(monkeypatch):
    assert card._plain_memory().state == "ok"
    made = host_memory.HostMemory.pin

    def forget(self, block):
        made(self, block)
        block[1, 77] ^= 1

    monkeypatch.setattr(host_memory.HostMemory, "pin", forget)
    assert card._plain_memory().state == "failed"


@pytest.mark.parametrize(
    ("build", "cards", "state", "remedy"),
    [(None, [], "ok", ""), (None, [ADA], "failed", "install torch with CUDA"),
     ("12.8", [], "ok", ""), ("12.8", [ADA], "failed", "CUDA_VISIBLE_DEVICES")],
    ids=str,
)  # fmt: skip
def test_cards_that_torch_does_not_see(monkeypatch, build, cards, state, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    device, memory = card.torch_checks(cards)
    assert device.state == state
    assert remedy in device.remedy
    assert memory.name == "host mapping"
    assert "pinning needs a card" in memory.found


def test_a_torch_that_cannot_be_imported_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (check,) = card.torch_checks([])
    assert (check.name, check.state) == ("torch device", "failed")
