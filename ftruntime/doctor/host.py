"""Memory and cores of the machine, and what the kernels would do here."""

from __future__ import annotations

import os
from typing import Final

from ftruntime.config import RuntimeConfig
from ftruntime.doctor.check import GIB, Check, failed
from ftruntime.facts import available_bytes
from ftruntime.model.config import builtin
from ftruntime.plan import DeviceFacts, resolve

_FEW_CORES: Final = 4


def checks() -> list[Check]:
    """Memory and cores."""
    return [memory(), cores()]


def flash_bytes() -> dict[str, int]:
    """Host memory that DeepSeek-V4-Flash takes beside cards, as the plan counts it."""
    config = RuntimeConfig.from_flags(moe_backend="offload")
    facts = DeviceFacts(kind="cuda", cards=1, memory_bytes=24 << 30)
    return dict(resolve(config, builtin("flash"), facts, strict=False).host_bytes)


def memory() -> Check:
    """Against the experts of DeepSeek-V4-Flash and what loading them takes."""
    needed, name = flash_bytes(), "host memory"
    try:
        got = available_bytes()
    except OSError as error:
        return failed(name, error, "Use Linux 3.14 or newer.")
    experts, loading = needed["expert_bank"] / GIB, needed["loading"] / GIB
    told = (
        f"{got / GIB:.1f} GiB available; DeepSeek-V4-Flash: {experts:.0f} GiB of experts and "
        f"{loading:.0f} while loading"
    )
    facts = {"available_bytes": got, "flash_bytes": needed}
    if got < sum(needed.values()):
        remedy = "Too little for DeepSeek-V4-Flash with experts in host memory; demos run."
        return Check(name, told, "warning", remedy, facts)
    return Check(name, told, facts=facts)


def cores() -> Check:
    got = len(os.sched_getaffinity(0))
    if got < _FEW_CORES:
        remedy = "Loading and tokenizing wait for each other; four cores or more are better."
        return Check("cores", str(got), "warning", remedy, {"cores": got})
    return Check("cores", str(got), facts={"cores": got})


def paths() -> Check:
    """What runs where: reference, interpreter or compiled kernels."""
    name = "kernels"
    try:
        import torch

        from ftkernels import backend

        on_cpu = backend.use_reference(torch.empty(0))
        cuda = torch.cuda.is_available()
        on_card = backend.use_reference(torch.empty(0, device="cuda")) if cuda else None
    except Exception as error:  # a broken package raises anything
        return failed(name, error, "Nothing of the kernel library runs until that is mended.")
    cpu = "plain-torch reference" if on_cpu else "Triton's interpreter (very slow)"
    card = "no card" if on_card is None else _on_card(on_card)
    facts = {"cpu": "reference" if on_cpu else "interpreter", "cuda": None}
    if on_card is not None:
        facts["cuda"] = "reference" if on_card else "compiled"
    told = f"CPU tensors: {cpu}; CUDA tensors: {card}"
    if on_card:
        remedy = "Unset FTKERNELS_BACKEND: the reference is slow."
        return Check(name, told, "warning", remedy, facts)
    return Check(name, told, facts=facts)


def _on_card(reference: bool) -> str:
    return "plain-torch reference" if reference else "compiled Triton"


def tuned() -> Check:
    """Tuned entries for the card that is there, of an RTX 4090 without one."""
    name = "tuned configs"
    try:
        from ftkernels import config, target

        card = target.config_name()
        sources = config.sources(card)
    except Exception as error:  # as above
        return failed(name, error, "Install the package again, or run ft-autotune tune.")
    told = ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))
    facts = {"card": card, "entries": dict(sources)}
    if not sources:
        remedy = "The defaults of the kernels are used; `ft-autotune tune` writes better ones."
        return Check(name, f"none for {card}", "warning", remedy, facts)
    return Check(name, f"{card}: {told} entries", facts=facts)
