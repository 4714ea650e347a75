"""Memory and cores of the machine, and what the kernels would do here."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, get_type_hints

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


def setting() -> list[Check]:
    """A finding when the library refuses the settings of this process, whatever would use it."""
    try:
        import ftkernels as ftkernels
    except ValueError as error:
        return [failed("kernels", error, "Unset it: nothing of the kernel library runs.")]
    except Exception:  # of a broken package: whoever needs it says so
        pass
    return []


def tuned() -> Check:
    """What lookups take of the entries for the card that is there, of an RTX 4090 without one."""
    name = "tuned configs"
    try:
        from ftkernels import backend, target

        card = target.config_name()
        if backend.always_reference():
            remedy = "Unset FTKERNELS_BACKEND: the reference has no kernels to tune."
            return Check(name, "none used: FTKERNELS_BACKEND is 'reference'", "warning", remedy)
        found = _entries(card)
    except Exception as error:  # as above
        return failed(name, error, "Install the package again: it cannot be read.")
    facts = {
        "card": card, "entries": dict(found.taken), "ignored": dict(found.ignored),
        "damaged": found.damaged,
    }  # fmt: skip
    counts = [f"{count} {source}" for source, count in sorted(found.taken.items())]
    told = f"{card}: {', '.join(counts) or 'no'} entries"
    if found.damaged:
        remedy = f"Remove it, and `ft-autotune tune {found.stale[0]}` writes it anew."
        return Check(name, f"{card}: {found.damaged[0]}", "failed", remedy, facts)
    ops = " ".join(found.stale)
    if found.ignored:
        why = ", ".join(f"{count} for {reason}" for reason, count in found.ignored.items())
        remedy = f"Defaults are used for them; `ft-autotune tune {ops}` writes them anew."
        return Check(name, f"{told}; ignored: {why}", "warning", remedy, facts)
    if not found.taken:
        remedy = "The defaults of the kernels are used; `ft-autotune tune` writes better ones."
        return Check(name, f"none for {card}", "warning", remedy, facts)
    return Check(name, told, facts=facts)


@dataclass
class _Entries:
    """Those of a card: taken by source, ignored by reason; sentences for files; ops to tune."""

    taken: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def _entries(card: str) -> _Entries:
    from ftkernels import config, registry

    found = _Entries()
    for spec in registry():
        path = config.folder() / card / f"{spec.name}.json"
        if spec.default is None or not path.exists():
            continue
        try:
            entries = config.read(path, spec.name, card)
        except (OSError, ValueError) as error:
            found.damaged.append(f"{path} is damaged ({error})")
            found.stale.insert(0, spec.name)
            continue
        source = config.made_from(spec.name, spec.default)
        taken, reasons = config.taken(entries, source, get_type_hints(spec.default)["return"])
        found.taken.update(str(entry["source"]) for entry in taken.values())
        found.ignored.update(filter(None, reasons))
        found.stale += [spec.name] if any(reasons) else []
    return found
