"""The cards: what the driver says of them, whether torch uses them, page-locked memory, the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ftruntime.distribution import DISTRIBUTION
from ftruntime.doctor.check import GIB, MIB, Check, failed

if TYPE_CHECKING:
    import torch

OLDEST_CAPABILITY: Final = (8, 9)
# pinned copies to a card at 16 lanes, GB/s by PCIe generation: the vendor's rate less its framing
_GB_PER_S: Final = {3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
_ENOUGH: Final = 0.8
_HOST_BYTES, _COPY_BYTES, _COPIES = 64 * MIB, 256 * MIB, 5


@dataclass(frozen=True)
class Card:
    """What the driver says of a card; PCIe fields are None where it does not say."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    driver: str


class NoDriverError(RuntimeError):
    """The machine has no NVIDIA driver."""


def driver_cards() -> list[Card]:
    """All cards, by nvidia-ml-py.

    Raises:
        ModuleNotFoundError: it is not installed.
        NoDriverError: there is no driver.
        RuntimeError: the driver does not answer.
    """
    import pynvml

    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        kind = NoDriverError if error.value in absent else RuntimeError
        raise kind(str(error)) from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        return [_card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
    except pynvml.NVMLError as error:
        raise RuntimeError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, handle: Any) -> Card:
    def link(name: str) -> int | None:
        try:
            return int(getattr(nvml, name)(handle))
        except nvml.NVMLError:  # virtual machines hide it
            return None

    return Card(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        # the current generation falls when a card has nothing to do
        pcie_generation=link("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=link("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_max_width=link("nvmlDeviceGetMaxPcieLinkWidth"),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def found_cards() -> tuple[list[Card], list[Check]]:
    """The cards of the driver, and a finding for each."""
    try:
        cards = driver_cards()
    except ModuleNotFoundError:
        remedy = f"pip install '{DISTRIBUTION}[serve]' to see the driver and the PCIe link."
        return [], [Check("cards", "nvidia-ml-py is not installed", "warning", remedy)]
    except NoDriverError as error:
        return [], [Check("cards", f"no NVIDIA driver ({error})", facts={"cards": 0})]
    except RuntimeError as error:
        remedy = "Restart the machine if the driver was updated; else install it again."
        return [], [failed("cards", error, remedy)]
    except Exception as error:  # a broken package raises anything
        return [], [failed("cards", error, "Install nvidia-ml-py again.")]
    if not cards:
        return [], [Check("cards", "the driver sees none", facts={"cards": 0})]
    return cards, [_of(number, card) for number, card in enumerate(cards)]


def _of(number: int, card: Card) -> Check:
    name, capability = f"card {number}", ".".join(str(part) for part in card.capability)
    lanes = f"x{card.pcie_width}" if card.pcie_width else "unknown width"
    told = (
        f"{card.name}, {card.memory_bytes / GIB:.1f} GiB, capability {capability}, PCIe "
        f"{card.pcie_generation or 'unknown'} {lanes}, driver {card.driver}"
    )
    facts = asdict(card)
    if card.capability < OLDEST_CAPABILITY:
        remedy = "Kernels need capability 8.9 or newer; FTKERNELS_BACKEND=reference runs anywhere."
        return Check(name, told, "failed", remedy, facts)
    if card.pcie_width and card.pcie_max_width and card.pcie_width < card.pcie_max_width:
        remedy = f"The slot gives {card.pcie_width} of {card.pcie_max_width} lanes: use another."
        return Check(name, told, "warning", remedy, facts)
    return Check(name, told, facts=facts)


def torch_checks(cards: Sequence[Card]) -> list[Check]:
    """Whether torch uses the cards, shared memory, page-locked memory and the bus."""
    name = "torch device"
    try:
        import torch
    except Exception as error:  # a broken torch raises anything
        return [failed(name, error, "Install torch again: it cannot be imported.")]
    if not torch.cuda.is_available():
        build = torch.version.cuda
        told = f"torch sees no card (built for CUDA {build})" if build else "a CPU build of torch"
        if cards and build:
            remedy = "The driver has cards: update it, or look at CUDA_VISIBLE_DEVICES."
            return [Check(name, told, "failed", remedy), _plain_memory()]
        if cards:
            remedy = "The driver has cards: install torch with CUDA."
            return [Check(name, told, "failed", remedy), _plain_memory()]
        return [Check(name, told, facts={"cards": 0}), _plain_memory()]
    count = torch.cuda.device_count()
    first = torch.cuda.get_device_name(0)
    found = [Check(name, f"torch sees {count}, first {first}", facts={"cards": count})]
    found += [_shared_memory(number) for number in range(count)]
    return [*found, pinned_memory(), *(_bus(number, cards) for number in range(count))]


def _shared_memory(number: int) -> Check:
    import torch

    from ftkernels import target

    name, needed = f"shared memory {number}", target.of_arch(89).shared_bytes_per_block
    properties = torch.cuda.get_device_properties(number)
    got = getattr(properties, "shared_memory_per_block_optin", None)
    if got is None:
        remedy = "This torch does not tell the limit of a block; a newer one does."
        return Check(name, f"unknown, {needed} bytes needed", "warning", remedy)
    told = f"{got} bytes a block, {needed} needed"
    facts = {"shared_bytes_per_block": got, "needed": needed}
    if got < needed:
        remedy = "Kernels with large tiles cannot be launched; use a card of capability 8.9."
        return Check(name, told, "failed", remedy, facts)
    return Check(name, told, facts=facts)


def _plain_memory() -> Check:
    """Without a card: map huge pages, write, read back, let go."""
    return _memory("host mapping", _HOST_BYTES, pinned=False)


def pinned_memory() -> Check:
    """With a card: map, write, page-lock, read back, release."""
    return _memory("pinned memory", _HOST_BYTES, pinned=True)


def _memory(name: str, num_bytes: int, *, pinned: bool) -> Check:
    remedy = "Raise the memlock limit (ulimit -l unlimited) or free memory."
    try:
        from ftkernels.moe.host_memory import HostMemory

        memory = HostMemory(pinned=pinned)
        try:
            block = memory.empty(num_bytes // MIB, MIB)
            pattern = _pattern(block)
            block.copy_(pattern)
            memory.pin(block)
            same = bool((block == pattern).all())
            locked = memory.pinned_bytes
        finally:
            memory.close()
    except Exception as error:  # memory that is refused, or a broken package
        return failed(name, error, remedy)
    facts = {"num_bytes": num_bytes, "pinned_bytes": locked}
    if not same or locked != (num_bytes if pinned else 0):
        return Check(name, "does not hold what was written", "failed", remedy, facts)
    done = "page-locked, " if pinned else ""
    told = f"{num_bytes // MIB} MiB mapped, written, {done}read back and released"
    return Check(name, told if pinned else f"{told}; pinning needs a card", facts=facts)


def _pattern(block: torch.Tensor) -> torch.Tensor:
    """A byte for every row and column that depends on both."""
    import torch

    rows, columns = (torch.arange(size, dtype=torch.uint8) for size in block.shape)
    return rows[:, None] * 7 + columns[None, :]


def _bus(number: int, cards: Sequence[Card]) -> Check:
    """Copies from pinned memory to a card, beside what its link allows."""
    name = f"PCIe copies {number}"
    try:
        got = copy_gb_per_s(number)
    except RuntimeError as error:
        return failed(name, error, "The card does not take a copy: look at dmesg.")
    card = cards[number] if number < len(cards) else None
    rate = _GB_PER_S.get(card.pcie_generation or 0) if card else None
    expected = rate * card.pcie_width / 16 if rate and card and card.pcie_width else None
    told = f"{got:.1f} GB/s from pinned memory (PCIe 4.0 x16: 24 to 26)"
    facts = {"gb_per_s": round(got, 2), "expected_gb_per_s": expected}
    if expected is not None and got < _ENOUGH * expected:
        remedy = f"The link allows about {expected:.0f} GB/s: look for risers and shared lanes."
        return Check(name, told, "warning", remedy, facts)
    return Check(name, told, facts=facts)


def copy_gb_per_s(number: int) -> float:
    """The fastest of a few copies, after one to warm up."""
    import torch

    with torch.cuda.device(number):
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        best = 0.0
        for _ in range(_COPIES + 1):
            begin, end = (_event() for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = max(best, 1e-6 * _COPY_BYTES / float(begin.elapsed_time(end)))
    return best


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
