"""Host memory is known before reading: estimates against what is loaded, limits from meminfo and
cgroups.

Mutants tried: limits of parent groups ignored; page cache not counted; scales counted although
dequantized; passing copies of one thread only; the whole intermediate width for a slice;
`extra_bytes` left out; the dense part never counted.
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
    linear = [t for lin in weights.linears.values() for t in (lin.weight, lin.scale)]
    held = [t for t in (*linear, *weights.tensors.values()) if t is not None]
    return sum(t.nbytes for t in held), sum(bank.rows().nbytes for bank in weights.experts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("dequantize", "pack"),
    [(None, False), (None, True), (torch.bfloat16, False), (torch.float32, False)],
    ids=str,
)
def test_q05_estimate_equals_what_is_loaded(tiny, dequantize, pack, ranks):
    config = ModelConfig.from_dir(tiny)
    form = {"dequantize": dequantize, "pack": pack, "ranks": ranks}
    weights = loader.load_weights(tiny, config, rank=ranks - 1, **form)
    expected = estimate(config, **form)
    dense, banks = _total(weights)
    assert expected.expert_bytes == banks == weights.host_memory.num_bytes
    assert expected.dense_bytes == dense
    least = dense + banks + expected.expert_temporary_bytes
    assert expected.host_bytes(on_device=False) >= least
    # a card takes the dense part, one tensor at a time
    on_card = expected.host_bytes(on_device=True)
    assert expected.host_bytes(on_device=False) - on_card == dense


@pytest.mark.parametrize("pack", [False, True])
def test_q05_every_thread_holds_passing_copies(pack):
    one, three = (estimate(builtin("flash"), None, ranks=2, pack=pack, threads=n) for n in (1, 3))
    assert three.expert_temporary_bytes == 3 * one.expert_temporary_bytes > 0
    more = three.host_bytes(on_device=True) - one.host_bytes(on_device=True)
    assert more == 2 * one.expert_temporary_bytes


def test_q05_flash_needs_at_most_a_fifth_more_than_its_banks():
    flash = estimate(builtin("flash"), None, pack=True, threads=32)
    # spec section 17.1: 43 banks of 3422.55 MB
    assert flash.expert_bytes == pytest.approx(43 * 3422.55e6, rel=1e-5)
    assert flash.host_bytes(on_device=True) <= 1.2 * flash.expert_bytes


@pytest.mark.parametrize("extra", [0, 1 << 50])
def test_q05_refuses_before_reading(tiny, monkeypatch, extra):
    config = ModelConfig.from_dir(tiny)
    room = (1 << 50) if extra else 100 << 20
    monkeypatch.setattr(loader, "available_bytes", lambda: room)
    monkeypatch.setattr(loader, "ShardFiles", lambda *a: pytest.fail("a shard was opened"))
    need = r"needs \d+\.\d\d GiB .* but \d+\.\d\d GiB is available"
    with pytest.raises(ValueError, match=need):
        loader.load_weights(tiny, config, dequantize=None, extra_bytes=extra)


def test_q05_the_estimate_is_logged_before_the_first_shard_is_opened(tiny, monkeypatch, caplog):
    monkeypatch.setattr(loader, "ShardFiles", lambda *a: pytest.fail(caplog.text))
    with caplog.at_level("INFO"), pytest.raises(pytest.fail.Exception, match="memory needed=0"):
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
