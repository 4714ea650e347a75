"""Python and packages: their versions by metadata, and whether the small ones can be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Sequence
from typing import Final

from ftruntime.distribution import DISTRIBUTION
from ftruntime.doctor.check import Check

OLDEST_PYTHON: Final = (3, 10)
TRITON_MINORS: Final = ((3, 6), (3, 9))
NEEDED: Final = ("torch", "triton", "numpy")
SERVE: Final = (
    "safetensors", "nvidia-ml-py", "tokenizers", "fastapi", "uvicorn", "pydantic",
    "prometheus-client", "click", "rich", "msgspec",
)  # fmt: skip
_MODULES: Final = {"nvidia-ml-py": "pynvml", "prometheus-client": "prometheus_client"}
_LARGE: Final = ("torch", "triton")  # what uses them imports them


def checks() -> list[Check]:
    """Python, packages, and whether Triton is one that torch and the kernels know."""
    return [python(), *(package(name) for name in NEEDED), library(), extras(), triton_fits()]


def python() -> Check:
    found, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    facts = {"python": found, "system": system}
    if system != "Linux x86_64":
        remedy = "expected Linux x86_64; serving runs nowhere else."
        return Check("python", f"{found} on {system}", "failed", remedy, facts)
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(str(part) for part in OLDEST_PYTHON)
        return Check("python", found, "failed", f"Install Python {oldest} or newer.", facts)
    return Check("python", found, facts=facts)


def version(name: str) -> str | None:
    """Version of an installed distribution; None also where its metadata cannot be read."""
    try:
        return importlib.metadata.version(name)
    except Exception:  # metadata that is damaged raises whatever its parser does
        return None


def fault(name: str) -> str | None:
    """What importing a distribution raises, in a line; None when it can be imported."""
    try:
        importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # a broken package raises anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def package(name: str) -> Check:
    found = version(name)
    if found is None:
        return Check(name, "not installed", "failed", f"pip install '{DISTRIBUTION}'.")
    if name not in _LARGE and (broken := fault(name)):
        remedy = f"Install {name} again: it cannot be imported."
        return Check(name, f"{found}, {broken}", "failed", remedy, {"version": found})
    return Check(name, found, facts={"version": found})


def library() -> Check:
    """The kernels: installed, or a source tree."""
    found = version(DISTRIBUTION)
    if found is not None:
        return Check(DISTRIBUTION, found, facts={"version": found})
    if importlib.util.find_spec("ftkernels") is not None:
        return Check(DISTRIBUTION, "a source tree, not installed")
    return Check(DISTRIBUTION, "not installed", "failed", f"pip install '{DISTRIBUTION}'.")


def extras() -> Check:
    """What `ftruntime serve` needs besides."""
    missing = [name for name in SERVE if version(name) is None]
    faults = {name: fault(name) for name in SERVE if name not in missing}
    broken = {name: words for name, words in faults.items() if words is not None}
    facts = {"missing": missing, "broken": broken}
    if not missing and not broken:
        return Check("serve packages", "all installed", facts=facts)
    told = [f"missing: {', '.join(missing)}"] if missing else []
    told += [f"broken: {name} ({words})" for name, words in broken.items()]
    remedy = f"pip install '{DISTRIBUTION}[serve]' for `ftruntime serve`."
    if broken:
        remedy = f"pip install --force-reinstall {' '.join(broken)} for `ftruntime serve`."
    return Check("serve packages", "; ".join(told), "warning", remedy, facts)


def triton_fits() -> Check:
    """Triton against the versions that were tested, and the one that torch asks for."""
    name, found = "triton version", version("triton")
    if found is None:
        return Check(name, "no triton", "failed", f"pip install '{DISTRIBUTION}'.")
    oldest, newest = TRITON_MINORS
    tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    minor = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    pinned = pinned_triton(_requirements("torch"))
    facts = {"triton": found, "tested": tested, "torch_asks_for": pinned}
    told = f"{found}, tested are {tested}; torch asks for {pinned or 'none by version'}"
    if minor < oldest:
        return Check(name, told, "failed", f"Install a Triton from {tested}.", facts)
    if minor > newest:
        return Check(name, told, "warning", f"Results are untested: Triton {tested} was.", facts)
    if pinned is not None and pinned != found:
        remedy = f"torch was built beside {pinned}: torch.compile may refuse; the kernels work."
        return Check(name, told, "warning", remedy, facts)
    return Check(name, told, facts=facts)


def _requirements(name: str) -> Sequence[str]:
    try:
        return importlib.metadata.requires(name) or ()
    except Exception:  # as above
        return ()


def pinned_triton(requirements: Sequence[str]) -> str | None:
    """The Triton version among the requirements of torch, None when there is none."""
    for line in requirements:
        match = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\w.]+)", line)
        if match is not None:
            return match[1]
    return None
