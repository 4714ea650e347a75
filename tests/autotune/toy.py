"""An op that looks a config up and launches nothing, one that holds it, their SPECs, an entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ftkernels import KernelSpec, config
from ftkernels.spec import Case, Inputs


@dataclass(frozen=True)
class Tile:
    block: int
    num_warps: int


def default_tile(key: Case) -> Tile:
    """Follows the key, so that a test sees which one it was asked with."""
    return Tile(block=16 if key["T"] <= 64 else 32 if key["T"] == 512 else 64, num_warps=4)


def candidates(key: Case, target: object) -> list[Tile]:
    return [Tile(block, warps) for warps in (8, 4) for block in (64, 32, 16)]


def toy(x: torch.Tensor) -> torch.Tensor:
    config.lookup("toy", {"T": x.shape[0], "I": x.shape[1]}, default_tile, grows="T")
    return 2 * x


def toy_reference(x: torch.Tensor) -> torch.Tensor:
    return x + x


def host(x: torch.Tensor) -> torch.Tensor:
    config.lookup("toy", {"T": x.shape[0], "I": x.shape[1]}, default_tile, grows="T")
    return x


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    if case.get("S", 1) < 1:
        raise ValueError("toy: S is 0, expected at least 1")
    x = torch.full((case["T"], case["I"]), 1.0 + seed, device=device)
    return (x,), {}


TOY = KernelSpec(
    op=toy, reference=toy_reference, default=default_tile, candidates=candidates, inputs=_inputs,
    grows="T", bytes_moved=lambda case: 8 * case["T"] * case["I"],
    flops=lambda case: case["T"] * case["I"],
    cases=(
        {"name": "small", "T": 3, "I": 8},
        {"name": "flash-t1", "T": 1, "I": 128},
        {"name": "flash-tp1-t300", "T": 300, "I": 128},
        {"name": "flash-tp1-t400", "T": 400, "I": 128},
        {"name": "flash-tp8-t300", "T": 300, "I": 16},
        {"name": "pro-t9", "T": 9, "I": 256},
    ),
)  # fmt: skip
HOST = KernelSpec(
    op=host, reference=host, default=default_tile, inputs=_inputs, bytes_moved=lambda case: 1,
    cases=(
        {"name": "flash-tp1-inside", "T": 512, "I": 128},
        {"name": "flash-alone", "T": 9, "I": 7},
    ),
)  # fmt: skip
ENTRY = {
    "key": {"I": 128, "T": 512}, "config": {"block": 32, "num_warps": 8}, "us": 1.0,
    "source": "modelled", "triton": triton.__version__,
    "source_hash": config.source_hash(default_tile),
}  # fmt: skip
PLAIN = KernelSpec(
    op=toy_reference, reference=toy_reference, inputs=_inputs, bytes_moved=lambda case: 1,
    cases=({"name": "flash", "T": 1, "I": 1},), kernel=False,
)  # fmt: skip
