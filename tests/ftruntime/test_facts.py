"""What a machine offers. Mutant tried and seen red: kilobytes taken for bytes."""

from __future__ import annotations

import pytest

from ftruntime import facts


@pytest.fixture
def no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(facts, "_NVIDIA_DRIVER", tmp_path / "none")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(facts, "_MEMINFO", meminfo)
    return meminfo


def test_cpu(no_driver):
    for device in ("auto", "cpu"):
        found = facts.probe(device)
        assert (found.kind, found.cards) == ("cpu", 0)
        assert (found.memory_bytes, found.host_bytes) == (4096000, 4096000)


def test_cuda_without_a_gpu(no_driver):
    with pytest.raises(ValueError) as refusal:
        facts.probe("cuda")
    expected = "--device is cuda, expected auto or cpu: PyTorch finds no CUDA GPU here"
    assert str(refusal.value) == expected


def test_cards(no_driver, monkeypatch):
    monkeypatch.setattr(facts, "_NVIDIA_DRIVER", no_driver)
    monkeypatch.setattr(facts, "_free_card_bytes", lambda: [30, 20])
    found = facts.probe("auto")
    assert (found.kind, found.cards, found.memory_bytes) == ("cuda", 2, 20)
    assert facts.probe("cpu").kind == "cpu"


def test_a_kernel_without_the_line(no_driver):
    no_driver.write_text("MemTotal: 9000 kB\n")
    with pytest.raises(OSError, match="no MemAvailable line"):
        facts.available_bytes()
