"""What became of the flags: those without effect are named, and every value in force is told.

Mutants tried and seen red: idle cache flags not named under fused, a reserve not beside the number
it stands for, read-ahead not with the serial loader, the key among the flags, a default as given,
the asked value for the one in force (chunk, tokens, slots, graphs, device, name, loader), a note
left out, the demo as a model that was given, a model that was given as none.
"""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from ftruntime.checkpoint.index import how_to_load, num_shards
from ftruntime.config import DeviceFacts, RuntimeConfig, flag_specs, resolve
from ftruntime.effective import effective_flags, inactive_flags
from ftruntime.model.config import builtin

CPU = DeviceFacts(kind="cpu", cards=0, memory_bytes=8 << 30)
CUDA = DeviceFacts(kind="cuda", cards=1, memory_bytes=24 << 30)
LARGE = DeviceFacts(kind="cuda", cards=1, memory_bytes=240 << 30)


def idle(facts: DeviceFacts, **flags: object) -> dict[str, str]:
    """Flag without effect -> why, in a plan for Flash."""
    config = RuntimeConfig.from_flags(**flags)
    lines = inactive_flags(config, resolve(config, builtin("flash"), facts, strict=False))
    assert all(line.startswith("flag without effect --") and "\n" not in line for line in lines)
    words = [line.removeprefix("flag without effect ").split(": ", 1) for line in lines]
    return {name.split("=")[0]: why for name, why in words}


def test_only_flags_that_were_given_are_called_inactive():
    assert idle(CPU) == idle(CUDA) == {}
    report = {
        "disable_pynccl": True, "moe_backend": "offload", "moe_cache_auto": True,
        "kv_reserve_tokens": 8192, "expert_load": "parallel", "expert_prefetch": 2,
        "moe_prefill_hit_d2d": True, "cache_type": "radix", "moe_prefetch_layers": 1,
        "admission": "optimistic", "cuda_graph_max_bs": 64, "port": 1919,
        "decode_interleave_every": 8, "enable_cache_report": True,
    }  # fmt: skip
    assert list(idle(CPU, **report)) == [
        "--disable-pynccl", "--cuda-graph-max-bs", "--moe-prefill-hit-d2d",
    ]  # fmt: skip
    assert idle(CUDA, cache_type="naive", admission="reserve", cuda_graph_max_bs=4) == {}


def test_flags_of_the_cache_do_not_act_when_all_experts_are_resident():
    flags = {"moe_cache_auto": True, "kv_reserve_tokens": 4096, "moe_prefetch_layers": 2}
    named = ["--moe-cache-auto", "--kv-reserve-tokens", "--moe-prefetch-layers"]
    for lines in (idle(CPU, moe_backend="fused", **flags), idle(LARGE, **flags)):
        assert list(lines) == named
        assert set(lines.values()) == {"all experts are resident, there are no slots to fill"}
    assert idle(CUDA, **flags) == {}


def test_a_reserve_does_not_act_beside_the_number_it_stands_for():
    reserve = {"kv_reserve_tokens": 4096}
    for flag, what in (
        ("num_tokens", "the KV capacity"), ("num_pages", "the KV capacity"),
        ("moe_cache_size", "the expert slots"),
    ):  # fmt: skip
        name = f"--{flag.replace('_', '-')}"
        assert idle(CUDA, **{flag: 1280}, **reserve) == {
            "--kv-reserve-tokens": f"{name} sets {what}"
        }
    assert "--moe-cache-rate" in idle(CUDA, moe_cache_rate=0.5, **reserve)["--kv-reserve-tokens"]


def test_shards_are_not_read_ahead_by_the_serial_loader():
    assert list(idle(CPU, expert_load="serial", expert_prefetch=4)) == ["--expert-prefetch"]
    assert idle(CPU, expert_load="auto", expert_prefetch=4) == {}


def test_a_graph_batch_above_the_running_limit_is_said_on_a_gpu():
    assert idle(CUDA, cuda_graph_max_bs=64, max_running_requests=50) == {
        "--cuda-graph-max-bs": "no batch is larger than --max-running-requests (50)"
    }


def test_graphs_need_kernels():
    assert idle(CUDA, cuda_graph_max_bs=4, numerics="exact") == {
        "--cuda-graph-max-bs": "--numerics exact runs references, which read on the host"
    }


REPORT = {
    "tp": 8, "disable_pynccl": True, "moe_backend": "offload", "moe_cache_auto": True,
    "kv_reserve_tokens": 327680, "num_tokens": 327680, "swa_full_tokens_ratio": 0.12,
    "memory_ratio": 0.9, "max_running_requests": 50, "cuda_graph_max_bs": 64,
    "max_prefill_length": 4096, "expert_load": "parallel", "expert_prefetch": 2,
    "enable_cache_report": True, "decode_log_interval": 20, "decode_interleave_every": 8,
    "served_model_name": "deepseek-v4-flash", "host": "0.0.0.0", "port": 1919,
    "moe_prefill_hit_d2d": True,
}  # fmt: skip


def told(
    facts: DeviceFacts, load: str = "parallel", **flags: object
) -> dict[str, dict[str, object]]:
    config = RuntimeConfig.from_flags(**flags)
    found = effective_flags(config, resolve(config, builtin("flash"), facts, strict=False), load)
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_command_line_of_the_report_on_eight_cards():
    """Sizes from the contract: 3456 tokens a chunk, 50 rows at most in a graph."""
    cards = DeviceFacts(kind="cuda", cards=8, memory_bytes=24 << 30)
    flags = told(cards, **REPORT)
    assert list(flags) == [
        f"--{name.replace('_', '-')}" for name in flag_specs() if name != "api_key"
    ]
    names = {"tp": "tensor_parallel_size"}
    given = {f"--{names.get(n, n).replace('_', '-')}": value for n, value in REPORT.items()}
    became = {"--max-prefill-length": 3456, "--cuda-graph-max-bs": 50}
    for name, value in given.items():
        assert flags[name]["given"] == value
        assert flags[name]["value"] == became.get(name, value)
    assert all(flag["given"] is None for name, flag in flags.items() if name not in given)
    assert flags["--num-pages"]["value"] == 2560
    assert flags["--max-model-len"]["value"] == 327680
    assert flags["--max-waiting-tokens"]["value"] == 4 * 327680
    assert flags["--device"]["value"] == "cuda"
    slots, rate = flags["--moe-cache-size"]["value"], flags["--moe-cache-rate"]["value"]
    assert 0.8 < rate < 0.95
    assert rate == round(slots / (43 * 256), 4)
    assert {name for name, flag in flags.items() if "note" in flag} == {
        "--disable-pynccl", "--kv-reserve-tokens", "--cuda-graph-max-bs", "--moe-prefill-hit-d2d",
        "--max-prefill-length",
    }  # fmt: skip
    note = str(flags["--max-prefill-length"]["note"])
    assert note.startswith("prefill chunk clamped chunk_tokens=3456 max_prefill_length=4096 ")
    assert "limiting=window_pages" in note


def test_a_prefill_length_says_why_it_became_less():
    flag = told(CPU, max_prefill_length=1000, num_tokens=65536)["--max-prefill-length"]
    note = "prefill length rounded down max_prefill_length=1000 used=896 page_tokens=128"
    assert flag == {"given": 1000, "value": 896, "note": note}
    whole = told(CPU, max_prefill_length=1024, num_tokens=65536)["--max-prefill-length"]
    assert whole == {"given": 1024, "value": 1024}


def test_a_demo_in_place_of_a_model_was_not_given():
    plan = resolve(RuntimeConfig(), builtin("flash"), CPU, strict=False)
    for given in ({}, {"model": None}):
        demo = dataclasses.replace(RuntimeConfig.from_flags(**given), model="/package/demo")
        again = RuntimeConfig.from_dict(json.loads(json.dumps(demo.to_dict())))
        flag = effective_flags(again, plan, "serial")["--model"]
        assert flag == {"given": None, "value": "/package/demo"}
    assert told(CPU, model="/package/demo")["--model"] == {
        "given": "/package/demo", "value": "/package/demo",
    }  # fmt: skip


def test_the_name_and_the_loader_are_those_in_force():
    flags = told(CPU, "serial", model="/models/flash/", expert_prefetch=4)
    assert flags["--served-model-name"] == {"given": None, "value": "flash"}
    assert flags["--expert-load"] == {"given": None, "value": "serial"}
    note = "--expert-load auto reads one shard after the other"
    assert flags["--expert-prefetch"] == {"given": 4, "value": 4, "note": note}
    flags = told(CPU, served_model_name="a", model="b", expert_load="parallel")
    assert flags["--served-model-name"] == {"given": "a", "value": "a"}
    assert flags["--expert-load"] == {"given": "parallel", "value": "parallel"}
    assert "note" not in flags["--expert-prefetch"]


@pytest.mark.parametrize(
    ("asked", "shards", "cores", "expected"),
    [("auto", 2, 2, "parallel"), ("auto", 1, 2, "serial"), ("auto", 2, 1, "serial"),
     ("serial", 2, 2, "serial"), ("parallel", 1, 1, "parallel")],
)  # fmt: skip
def test_experts_are_placed_in_parallel_where_it_can_help(
    asked, shards, cores, expected, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert how_to_load(asked, shards) == expected


def test_shards_are_counted_without_opening_them(tmp_path):
    assert num_shards(tmp_path) == 1
    weight_map = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors",
                  "mtp.a": "3.safetensors"}  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert num_shards(tmp_path) == 2


def test_a_cpu_says_what_it_leaves_out():
    flags = told(CPU, cuda_graph_max_bs=8, api_key="s3cret")
    assert flags["--cuda-graph-max-bs"] == {
        "given": 8, "value": 0, "note": "there are no CUDA graphs without a GPU",
    }  # fmt: skip
    assert flags["--device"] == {"given": None, "value": "cpu"}
    assert "s3cret" not in json.dumps(flags)
