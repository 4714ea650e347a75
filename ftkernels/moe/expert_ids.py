"""Expert ids that are read on the host, and the refusal of bad arguments of the cache."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Sequence

import numpy as np
import torch

from ftkernels import check
from ftkernels.moe.copier import Copier
from ftkernels.moe.slot_policy import SlotPolicy

_FEW = 64


def distinct(op: str, name: str, ids: torch.Tensor, num_experts: int) -> list[int]:
    """The different ids of a tensor that are not below 0, ascending.

    Raises:
        TypeError: no tensor of int32 or int64.
        ValueError: an id past the last expert, or ids that cannot be read.
    """
    check.dtype(op, name, ids, check.INTS)
    readable(op, name, ids)
    if ids.numel() <= _FEW:
        found: list[int] = sorted(set(ids.flatten().tolist()))
    else:
        found = np.unique(ids.cpu().numpy()).tolist()
    _require_below(op, name, found, num_experts)
    return [e for e in found if e >= 0]


def hinted(op: str, name: str, ids: Sequence[int] | torch.Tensor, num_experts: int) -> list[int]:
    """As `distinct`, of a list, whose order is kept, or of a CPU tensor."""
    if isinstance(ids, torch.Tensor):
        check.require(
            ids.device.type == "cpu", lambda: f"{op}: {name} is on {ids.device}, expected cpu"
        )
        return distinct(op, name, ids, num_experts)
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    if not is_list or not all(type(e) is int for e in ids):
        raise TypeError(
            f"{op}: {name} is {reprlib.repr(ids)}, expected a list of integers or a tensor"
        )
    _require_below(op, name, ids, num_experts)
    return [e for e in dict.fromkeys(ids) if e >= 0]


def check_layer(op: str, layer: object, num_layers: int) -> None:
    """Refuse what is no layer."""
    if type(layer) is not int:
        raise TypeError(f"{op}: layer is {reprlib.repr(layer)}, expected an integer")
    if not 0 <= layer < num_layers:
        raise ValueError(f"{op}: layer is {layer}, expected 0 to {num_layers - 1}")


def check_policy(op: str, policy: object) -> None:
    """Refuse what is neither the name of a policy nor one."""
    text = f"{op}: policy is {reprlib.repr(policy)}, expected 'scan-resistant', 'lru' or a"
    if isinstance(policy, str):
        check.require(policy in ("scan-resistant", "lru"), f"{text} SlotPolicy")
    else:
        _require_methods(policy, SlotPolicy, text)


def check_copier(op: str, copier: object) -> None:
    """Refuse what is no copier."""
    _require_methods(copier, Copier, f"{op}: copier is {reprlib.repr(copier)}, expected a")


def checked_device(op: str, device: object) -> torch.device:
    """The host or a card that is there.

    Raises:
        TypeError: neither a name nor a device.
        ValueError: another device.
    """
    text = f"{op}: device is {_named(device)}, expected cpu, or cuda where PyTorch finds a card"
    if not isinstance(device, str | torch.device):
        raise TypeError(text)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(text) from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        check.require((found.index or 0) < count, text)
    else:
        check.require(found.type == "cpu", text)
    return found


def readable(op: str, name: str, ids: object) -> None:
    """Refuse a tensor without ids in memory."""
    if isinstance(ids, torch.Tensor) and (ids.is_meta or ids.layout != torch.strided):
        given = "on meta" if ids.is_meta else str(ids.layout).removeprefix("torch.")
        raise ValueError(f"{op}: {name} is {given}, expected a dense tensor on a device")


def _require_methods(given: object, protocol: type, text: str) -> None:
    """Raise unless ``given`` is an object with all public methods of the protocol."""
    names = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction)]
    names = [name for name in names if not name.startswith("_")]
    if isinstance(given, type) or not all(callable(getattr(given, n, None)) for n in names):
        raise TypeError(f"{text} {protocol.__name__}, an object with {', '.join(names)}")


def _named(device: object) -> str:
    return repr(str(device)) if isinstance(device, torch.device) else reprlib.repr(device)


def _require_below(op: str, name: str, ids: Sequence[int], num_experts: int) -> None:
    if ids and max(ids) >= num_experts:
        raise ValueError(f"{op}: {name} holds {max(ids)}, expected ids below {num_experts}")
