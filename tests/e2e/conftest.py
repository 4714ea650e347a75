"""Demo checkpoints of both geometries and their oracles, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.live import launcher, server  # noqa: F401

PRESETS = ("small", "tiny")


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from ftruntime.demo import make_demo

    root = tmp_path_factory.mktemp("demos")
    for preset in PRESETS:
        make_demo(root / preset, preset=preset)
    return {preset: root / preset for preset in PRESETS}


@pytest.fixture(scope="session")
def oracles(demos: dict[str, Path]):  # type: ignore[no-untyped-def]
    """transformers' model of each demo, fp32."""
    from tests.support.hf_model import build_hf

    return {preset: build_hf(path) for preset, path in demos.items()}


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
