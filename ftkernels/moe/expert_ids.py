"""Expert ids that are read on the host, and the refusal of bad arguments of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftkernels import check

_FEW = 64


def distinct(op: str, name: str, ids: torch.Tensor, num_experts: int) -> list[int]:
    """The different ids of a tensor that are not below 0, ascending.

    Raises:
        TypeError: no tensor of int32 or int64.
        ValueError: an id past the last expert.
    """
    check.dtype(op, name, ids, check.INTS)
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
    if not isinstance(ids, Sequence) or not all(type(e) is int for e in ids):
        raise TypeError(f"{op}: {name} is {ids!r}, expected a list of integers or a tensor")
    _require_below(op, name, ids, num_experts)
    return [e for e in dict.fromkeys(ids) if e >= 0]


def check_layer(op: str, layer: object, num_layers: int) -> None:
    """Refuse what is no layer."""
    if type(layer) is not int:
        raise TypeError(f"{op}: layer is {layer!r}, expected an integer")
    if not 0 <= layer < num_layers:
        raise ValueError(f"{op}: layer is {layer}, expected 0 to {num_layers - 1}")


def check_policy(op: str, policy: object) -> None:
    """Refuse what is neither the name of a policy nor one."""
    text = f"{op}: policy is {policy!r}, expected 'scan-resistant', 'lru' or a SlotPolicy"
    if isinstance(policy, str):
        check.require(policy in ("scan-resistant", "lru"), text)
    elif not callable(getattr(policy, "victim", None)):
        raise TypeError(text)


def _require_below(op: str, name: str, ids: Sequence[int], num_experts: int) -> None:
    if ids and max(ids) >= num_experts:
        raise ValueError(f"{op}: {name} holds {max(ids)}, expected ids below {num_experts}")
