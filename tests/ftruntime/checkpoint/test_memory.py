"""Host memory is known before reading: estimates against what is loaded, limits from meminfo and
cgroups.

Mutants tried: limits of parent groups ignored; page cache not counted; scales counted although
dequantized.
"""

from __future__ import annotations

import pytest
import torch

from ftruntime.checkpoint import loader
from ftruntime.checkpoint.memory import available_bytes, estimate, require_memory
from ftruntime.model.config import ModelConfig, builtin

GIB = 1 << 30


def _write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "ascii")
    return root


def _total(weights):
    bank = [t for e in weights.experts for t in (e.w13, e.w13_scale, e.w2, e.w2_scale)]
    linear = [t for lin in weights.linears.values() for t in (lin.weight, lin.scale)]
    held = [t for t in (*bank, *linear, *weights.tensors.values()) if t is not None]
    return sum(t.nbytes for t in held), sum(t.nbytes for t in bank if t is not None)


@pytest.mark.parametrize("dequantize", [None, torch.bfloat16, torch.float32], ids=str)
def test_q05_estimate_equals_what_is_loaded(tiny, dequantize):
    config = ModelConfig.from_dir(tiny)
    weights = loader.load_weights(tiny, config, dequantize=dequantize)
    expected = estimate(config, dequantize)
    total, banks = _total(weights)
    assert expected.expert_bytes == banks
    assert expected.dense_bytes == total - banks
    assert expected.host_bytes(on_device=False) == total + expected.temporary_bytes


def test_q05_flash_needs_at_most_a_fifth_more_than_its_banks():
    flash = estimate(builtin("flash"), None)
    # spec section 17.1: 43 banks of 3422.55 MB
    assert flash.expert_bytes == pytest.approx(43 * 3422.55e6, rel=1e-5)
    assert flash.host_bytes(on_device=True) <= 1.2 * flash.expert_bytes


def test_q05_refuses_before_reading(tiny, monkeypatch):
    monkeypatch.setattr(loader, "available_bytes", lambda: 100 << 20)
    monkeypatch.setattr(loader.mmap, "mmap", lambda *a, **k: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=r"needs 0\.\d\d GiB .* but 0\.10 GiB is available"):
        loader.load_weights(tiny, ModelConfig.from_dir(tiny), dequantize=None)


def test_require_memory_limits():
    require_memory(10, what="checkpoint x", available=10)
    require_memory(10, what="checkpoint x", available=None)
    with pytest.raises(ValueError, match="nothing was read"):
        require_memory(11, what="checkpoint x", available=10)


def test_available_is_the_least_of_meminfo_and_the_groups(tmp_path):
    root = _write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   20971520 kB\n",
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{13 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{4 * GIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "77\n",
        },
    )
    assert available_bytes(root) == 10 * GIB


def test_available_under_version_1_and_without_a_limit(tmp_path):
    files = {
        "proc/meminfo": "MemAvailable: 1048576 kB\n",
        "proc/self/cgroup": "5:cpu,memory:/job\n1:name=systemd:/\n",
    }
    root = _write(tmp_path, files)
    assert available_bytes(root) == GIB
    _write(
        root,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "600",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 40\n",
        },
    )
    assert available_bytes(root) == 140


def test_available_is_unknown_elsewhere(tmp_path):
    assert available_bytes(tmp_path) is None
