"""The one switch: reference, interpreter or GPU. No other file asks where it runs.

Imported before every kernel module, since Triton fixes interpretation when a kernel is decorated.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""For inline assembly inside kernels only."""

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_ENV_AT_IMPORT = os.environb.get(b"TRITON_INTERPRET")
_OLDEST_CAPABILITY = (8, 9)
_OLDEST_TRITON, _NEWEST_TRITON = (3, 6), (3, 9)


class UnsupportedDeviceError(RuntimeError):
    """The device is too old for the kernels; the reference path still works."""


def _backend_setting() -> str | None:
    value = os.environ.get("FTKERNELS_BACKEND")
    if value not in (None, "", "reference"):
        raise ValueError(f"FTKERNELS_BACKEND is {value!r}, expected 'reference' or unset")
    return value or None


def _check_triton(version: str) -> None:
    minor = tuple(int(part) for part in version.split(".")[:2])
    if minor < _OLDEST_TRITON:
        raise ImportError(f"triton is {version}, expected 3.6 to 3.9")
    if minor > _NEWEST_TRITON:
        warnings.warn(f"triton is {version}, tested are 3.6 to 3.9", stacklevel=2)


def _check_order() -> None:
    # tl.sum is itself a kernel helper, fixed when triton was imported
    if isinstance(tl.sum, JITFunction) == _INTERPRETED:
        raise ImportError(
            "TRITON_INTERPRET was changed after triton was imported, expected it to be set before"
        )


_REFERENCE_ALWAYS = _backend_setting() == "reference"
_check_triton(triton.__version__)
_check_order()
if _INTERPRETED:
    from ftkernels.testing import interp_fix

    interp_fix.apply(check_bounds=True, poison=True)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter in this process."""
    return _INTERPRETED


def interpreting() -> dict[str, str]:
    """Settings of the environment with which another process interprets its kernels."""
    return {"TRITON_INTERPRET": "1"}


def always_reference() -> bool:
    """Whether every op runs its reference in this process, wherever its tensors are."""
    return _REFERENCE_ALWAYS


def use_reference(x: torch.Tensor) -> bool:
    """Whether the op called with `x` runs its reference; asked once an op, after its checks.

    Raises:
        UnsupportedDeviceError: a CUDA device below capability 8.9, or no device for kernels at all.
        RuntimeError: `TRITON_INTERPRET` was changed after import.
    """
    if _REFERENCE_ALWAYS:
        return True
    _check_unchanged()
    kind = x.device.type
    if kind == "cpu":
        return not _INTERPRETED
    if kind == "cuda":
        _check_capability(x.device.index)
        return False
    if kind == "meta":
        return False
    raise UnsupportedDeviceError(
        f"device is {x.device}, expected cuda, cpu or meta; "
        "FTKERNELS_BACKEND=reference runs anywhere"
    )


def _check_unchanged() -> None:
    # the text first, as it costs least: this runs once for every op of a decode step
    if os.environb.get(b"TRITON_INTERPRET") == _ENV_AT_IMPORT:
        return
    if bool(triton.knobs.runtime.interpret) != _INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET was changed after ftkernels was imported, "
            "expected it to be set before"
        )


@cache
def _check_capability(index: int) -> None:
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST_CAPABILITY:
        raise UnsupportedDeviceError(
            f"device cuda:{index} ({torch.cuda.get_device_name(index)}) has capability "
            f"{capability[0]}.{capability[1]}, expected 8.9 or newer; "
            "FTKERNELS_BACKEND=reference runs the plain-torch path"
        )


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the device of `x` current while a kernel is launched."""
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
