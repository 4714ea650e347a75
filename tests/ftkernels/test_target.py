"""Facts by capability, and whose tuned configs apply."""

from __future__ import annotations

import pytest
import torch

from ftkernels import target


def test_facts_of_the_rtx_4090():
    card = target.of_arch(89)
    assert card.name == "nvidia_geforce_rtx_4090"
    # by the vendor's table of capability 8.9
    assert (card.shared_bytes_per_block, card.shared_bytes_per_sm) == (99 << 10, 100 << 10)
    assert (card.registers_per_sm, card.warps_per_sm, card.blocks_per_sm) == (1 << 16, 48, 24)


@pytest.mark.parametrize("arch", sorted(target.TARGETS))
def test_facts_hang_together(arch):
    card = target.of_arch(arch)
    assert card.arch == arch
    assert card.shared_bytes_per_block + 1024 == card.shared_bytes_per_sm
    assert card.bf16_tflops < card.fp8_tflops
    assert card.link_gb_per_s < card.memory_gb_per_s


def test_unknown_arch_is_refused():
    with pytest.raises(ValueError, match=r"arch is 86, expected one of \[89, 90, 120\]"):
        target.of_arch(86)
    with pytest.raises(ValueError, match="arch is 86"), target.offline(86):
        pass


def test_configs_are_those_of_the_4090_without_a_card(monkeypatch):
    monkeypatch.setattr(target, "_has_cuda", lambda: False)
    assert target.config_name() == "nvidia_geforce_rtx_4090"
    with target.offline(90) as card:
        assert target.config_name() == card.name == "nvidia_h200"
        with target.offline(120):
            assert target.config_name() == "nvidia_geforce_rtx_5090"
        assert target.config_name() == "nvidia_h200"
    assert target.config_name() == "nvidia_geforce_rtx_4090"


def test_configs_are_those_of_the_current_card(monkeypatch):
    monkeypatch.setattr(target, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"NVIDIA Card {i}")
    target.gpu_name.cache_clear()
    assert target.config_name() == "nvidia_card_1"
    with target.offline(89):
        assert target.config_name() == "nvidia_geforce_rtx_4090"
    target.gpu_name.cache_clear()
