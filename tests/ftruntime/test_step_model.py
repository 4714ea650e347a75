"""Modelled step times against figures worked out from the shapes and the specification's roofline
section.

Mutants tried and seen red: hits counted as misses, decode's hit rate in prefill, experts of one
layer, experts, tables, streams, index rows or the rows of other sequences left out or in, picks
not bounded, the ring's factor or the latency dropped, one all-reduce a layer or some on one card,
attention whole on each rank, index scores cut, the wrong ceiling for few heads or slices, output
groups as FP8, the head for every token, sharded FLOPs whole, one FLOP a weight, no fill of the
pipeline, all-reduces hidden, memory after compute, no interpolation, steps modelled on CPU, in fp32
or where the plan does not fit, a chunk longer than the context.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from ftruntime import memory, step_model
from ftruntime.checkpoint.names import expected_tensors
from ftruntime.config import DeviceFacts, RuntimeConfig, resolve
from ftruntime.model.config import builtin
from ftruntime.plan import Plan
from ftruntime.step_model import (
    HIT_RATES,
    RTX_4090,
    StepModel,
    StepTime,
    attention_flops,
    experts_touched,
    hit_rate,
    linear_flops,
    looked_up_bytes,
    modelled,
)

FLASH = builtin("flash")
EXPERT = 3 * 4096 * 2048 * 17 // 32  # half a byte a value and one scale byte for 32 of them
HEAD = 129280 * 4096 * 2


@pytest.fixture(autouse=True, scope="module")
def _shapes_counted_once():
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(expected_tensors)
        patch.setattr(memory, "expected_tensors", cached)
        patch.setattr(step_model, "expected_tensors", cached)
        yield


def planned(cards: int = 8, gib: float = 24, **flags: object) -> tuple[RuntimeConfig, Plan]:
    config = RuntimeConfig.from_flags(tp=cards, **flags)
    facts = DeviceFacts(kind="cuda", cards=cards, memory_bytes=int(gib * 2**30))
    return config, resolve(config, FLASH, facts, strict=False)


def model(cards: int = 8, **flags: object) -> StepModel:
    config, plan = planned(cards, **flags)
    return StepModel(config, FLASH, plan, RTX_4090)


def test_the_bus_carries_the_missing_experts_of_a_decode_step():
    assert EXPERT == 13369344
    step = model(moe_cache_rate=0.5, num_tokens=8192).decode(1, 4096)
    missing = 43 * 6 * (1 - hit_rate(0.5)) * EXPERT / 8
    assert step.bus_s == pytest.approx(missing / 25e9)
    whole = model(1, moe_cache_size=500).decode(1, 4096)
    assert whole.bus_s == pytest.approx(43 * 6 * (1 - hit_rate(500 / 11008)) * EXPERT / 25e9)
    # without a slot worth mentioning a token brings 3.449 GB
    least = model(1, moe_cache_size=6).decode(1, 4096)
    assert least.bus_s == pytest.approx(3.449e9 / 25e9, rel=0.01)


def test_a_chunk_brings_what_is_not_resident_of_every_expert():
    step = model(2, moe_cache_rate=0.25, num_tokens=32768).prefill(4096, 32768)
    assert step.bus_s == pytest.approx(0.75 * 147.17e9 / 2 / 25e9, rel=1e-3)
    resident = model(8, moe_backend="fused")
    assert resident.prefill(4096, 32768).bus_s == resident.decode(8, 32768).bus_s == 0


def test_device_memory_is_read_once():
    slots = {"moe_cache_size": 500, "num_tokens": 8192}
    step = model(1, **slots).decode(1, 8192)
    # roofline section: dense 6.709 GB and the head; 3.449 GB of experts; KV rows
    windows, picks, csa, hca = 43 * 128, 21 * 512, 21 * 2048 * 256, 20 * 64
    rows = (windows + picks + hca) * 1024 + csa
    streams = 43 * 2 * 2 * 4 * 4096 * 2
    read = 6.709e9 + 1.059e9 + 3.449e9 + rows + streams
    assert step.memory_s == pytest.approx(read / 1008e9, rel=1e-3)
    long = model(1, **slots).decode(1, 65536)
    more = 21 * (16384 - 2048) * 256 + 20 * (512 - 64) * 1024
    assert long.memory_s - step.memory_s == pytest.approx(more / 1008e9, rel=1e-6)
    four = model(1, **slots).decode(4, 65536)
    experts = 43 * (experts_touched(FLASH, 4) - 6) * EXPERT
    more = 3 * ((windows + picks + 20 * 512) * 1024 + 21 * 16384 * 256 + streams)
    assert four.memory_s - long.memory_s == pytest.approx((experts + more) / 1008e9, rel=1e-6)
    chunk = model(1, **slots).prefill(1024, 8192)
    rows = (windows + 21 * 2048 + hca) * 1024 + csa
    read = 6.709e9 + 1.059e9 + 147.17e9 + rows + 1024 * streams
    assert chunk.memory_s == pytest.approx(read / 1008e9, rel=1e-3)
    fp8 = model(1, kv_format="fp8", **slots).decode(1, 8192)
    assert step.memory_s - fp8.memory_s == pytest.approx(
        (windows + picks + hca) * 440 / 1008e9, rel=1e-3
    )


def test_linear_flops_are_those_of_the_roofline_section():
    experts = 43 * 6 * 6 * 4096 * 2048
    flops = linear_flops(FLASH, ranks=1)
    # without the 0.79 MFLOP of each hyper-connection
    expected = 2 * 0.570e9 + 21 * 0.608e9 + 20 * 0.578e9 - 86 * 0.79e6
    assert flops["fp8"] + flops["bf16"] + experts == pytest.approx(expected, rel=2e-3)
    groups = 43 * 2 * 8192 * 4096
    narrow = 21 * 8.39e6 + 20 * 4.26e6 + 43 * 1.05e6 + 21 * (10.75e6 - 8192 * 1024)
    assert flops["bf16"] == pytest.approx(groups + 2 * narrow, rel=2e-3)
    eight = linear_flops(FLASH, ranks=8)
    assert flops["bf16"] - eight["bf16"] == pytest.approx(groups * 7 / 8)
    sharded = 43 * 2 * (32768 * 1024 + 8192 * 4096 + 25165824)
    assert flops["fp8"] - eight["fp8"] == pytest.approx(sharded * 7 / 8)


def test_attention_flops_are_those_of_the_roofline_section():
    def layers(ratio: int, position: int) -> dict[str, float]:
        one = dataclasses.replace(
            FLASH, compress_ratios=(ratio,), num_hidden_layers=1, num_hash_layers=0
        )
        return dict(attention_flops(one, position))

    assert layers(0, 100_000)["attention"] == 131072 * 128
    assert layers(4, 4096)["attention"] == pytest.approx(83.9e6, rel=1e-3)
    assert layers(128, 131071)["attention"] == pytest.approx(151e6, rel=1e-3)
    assert layers(4, 131071)["index"] == pytest.approx(537e6, rel=1e-3)
    assert layers(4, 2) == {"attention": 131072 * 3, "index": 0}
    assert layers(128, 126) == {"attention": 131072 * 127, "index": 0}


def test_compute_takes_each_part_at_its_ceiling():
    step = model(1, moe_cache_size=500, num_tokens=8192).prefill(1024, 8192)
    flops, work = linear_flops(FLASH, ranks=1), attention_flops(FLASH, 8191 - 512)
    a_token = flops["fp8"] / 318e12 + flops["bf16"] / 164e12 + 43 * 6 * 50331648 / 324e12
    a_token += work["attention"] / 161e12 + work["index"] / 294e12
    assert step.compute_s == pytest.approx(1024 * a_token + 2 * 129280 * 4096 / 164e12)
    eight = model(8).decode(4, 8192)
    flops, work = linear_flops(FLASH, ranks=8), attention_flops(FLASH, 8191)
    a_token = flops["fp8"] / 318e12 + flops["bf16"] / 164e12 + 43 * 6 * 50331648 / 8 / 308e12
    a_token += work["attention"] / 8 / 138e12 + work["index"] / 294e12
    assert eight.compute_s == pytest.approx(4 * (a_token + 2 * 129280 * 4096 / 8 / 164e12))


def test_all_reduces_of_a_chunk_on_eight_cards():
    # 86 of 28 MB each, 7/4 of the bytes by ring, 12 GB/s
    step = model().prefill(3456, 32768)
    # in halves twice as many calls
    assert step.all_reduce_s == pytest.approx(0.355 + 2 * 86 * 30e-6, rel=2e-3)
    two = model(2).prefill(3456, 32768)
    assert two.all_reduce_s == pytest.approx(0.203 + 2 * 86 * 30e-6, rel=2e-3)
    assert model(1).prefill(3456, 8192).all_reduce_s == 0


def test_distinct_experts_of_a_step():
    assert experts_touched(FLASH, 1) == pytest.approx(6)
    # two tokens share 6 * 6 / 256 of theirs on average
    assert experts_touched(FLASH, 2) == pytest.approx(12 - 36 / 256)
    assert experts_touched(FLASH, 3456) == pytest.approx(256)


def test_rows_that_are_looked_up_are_not_read():
    tables = 3 * 129280 * 6 * 8
    assert looked_up_bytes(FLASH, 1) == HEAD + tables
    assert looked_up_bytes(FLASH, 8) == HEAD // 8 + tables


def test_both_ends_of_what_overlaps():
    bus, work, reduce = 8.0, 4.0, 1.0
    step = StepTime(10, 4, bus, 3.0, work, reduce)
    assert step.sum_s == 16
    # the first layer's misses come, then copies and products side by side, and the last products
    assert step.overlapped_s == bus + work / 4 + reduce
    assert StepTime(10, 4, 2.0, 3.0, work, reduce).overlapped_s == work + 2.0 / 4 + reduce
    values = step.to_dict()
    assert (values["sum_ms"], values["overlapped_ms"]) == (16000, 10000)
    assert (values["tokens_per_s"], values["tokens_per_s_overlapped"]) == (0.6, 1)


def test_halves_hide_sums_and_read_weights_twice():
    bus, work, reduce = 8.0, 4.0, 1.0
    assert StepTime(10, 4, bus, 3.0, work, reduce, halves=True).overlapped_s == bus + reduce + 1
    step = StepTime(10, 4, 0.5, 3.0, work, reduce, halves=True)
    assert step.overlapped_s == work + 1.5 / 4
    assert step.sum_s == 8.5
    config, plan = planned()
    whole = StepModel(config, FLASH, dataclasses.replace(plan, in_halves=False), RTX_4090)
    halved = StepModel(config, FLASH, plan, RTX_4090)
    assert plan.in_halves
    before, after = whole.prefill(3456, 32768), halved.prefill(3456, 32768)
    twice = plan.bytes["weights"] - looked_up_bytes(FLASH, 8) + 43 * 256 * EXPERT / 8
    assert after.memory_s - before.memory_s == pytest.approx(twice / 1008e9, rel=1e-4)
    assert (after.bus_s, after.compute_s) == (before.bus_s, before.compute_s)
    assert after.overlapped_s < 0.85 * before.overlapped_s
    assert halved.prefill(511, 32768) == whole.prefill(511, 32768)
    assert halved.decode(50, 32768) == whole.decode(50, 32768)


@pytest.mark.parametrize(
    ("cards", "flags", "halves"),
    [
        (8, {}, True), (1, {}, False), (2, {"moe_cache_size": 256}, True),
        (2, {"moe_cache_size": 255}, False), (8, {"moe_backend": "fused"}, True),
    ],
)  # fmt: skip
def test_a_chunk_runs_in_halves_where_it_pays(cards, flags, halves):
    """Not alone, nor where the second half had to bring a layer's experts in again."""
    assert planned(cards, num_tokens=8192, **flags)[1].in_halves is halves


def test_hit_rates_between_the_simulated_points():
    assert (hit_rate(0.0), hit_rate(1.0)) == (0, 1)
    for (low, below), (high, above) in itertools.pairwise(HIT_RATES):
        assert low < high
        assert below < above
        assert hit_rate(high) == pytest.approx(above)
        assert hit_rate((low + high) / 2) == pytest.approx((below + above) / 2)
        # the wanted experts are resident more often than a random share of them
        assert above >= high


def test_many_rows_hit_what_is_resident_and_no_more():
    """A step that touches every expert finds the resident share; one row the simulated rate."""
    config, plan = planned(moe_cache_rate=0.3, num_tokens=65536)
    model = StepModel(config, FLASH, plan, RTX_4090)
    share = plan.expert_slots / 11008
    assert model.hit_rate(1) == pytest.approx(hit_rate(share))
    assert model.hit_rate(5000) == pytest.approx(share)
    rates = [model.hit_rate(rows) for rows in (1, 2, 4, 16, 64, 256)]
    assert rates == sorted(rates, reverse=True)
    touched = 1 - (1 - 6 / 256) ** 16
    kept = (1 - touched) / (1 - 6 / 256)
    assert model.hit_rate(16) == pytest.approx(share + kept * (hit_rate(share) - share))


def test_steps_for_inspect():
    config, plan = planned(num_tokens=327680, max_running_requests=50, swa_full_tokens_ratio=0.12)
    values = modelled(config, FLASH, plan)
    assert (values["card"], values["cards"]) == ("NVIDIA GeForce RTX 4090", 8)
    assert values["context_tokens"] == 32768
    assert values["prefill_hit_rate"] == pytest.approx(plan.expert_slots / 11008, abs=1e-4)
    assert values["decode_hit_rate"] == pytest.approx(hit_rate(plan.expert_slots / 11008), abs=1e-4)
    full = StepModel(config, FLASH, plan, RTX_4090).hit_rate(50)
    assert values["decode_full_hit_rate"] == pytest.approx(full, abs=1e-4)
    assert (values["link_gb_per_s"], values["all_reduce_gb_per_s"]) == (25, 12)
    tokens = {name: step["tokens"] for name, step in values["steps"].items()}
    assert tokens == {"decode": 1, "decode_full": 50, "prefill": 3456}
    one = StepModel(config, FLASH, plan, RTX_4090).decode(1, 32768)
    assert values["steps"]["decode"] == one.to_dict()
    slow = dataclasses.replace(RTX_4090, name="slow", link_bytes=1e9)
    slower = modelled(config, FLASH, plan, slow)
    assert slower["steps"]["prefill"]["bus_ms"] > 20 * values["steps"]["prefill"]["bus_ms"]


def test_a_chunk_is_no_longer_than_the_context():
    config, plan = planned(max_model_len=256, num_tokens=65536, moe_cache_rate=0.5)
    assert plan.chunk_tokens > 256
    values = modelled(config, FLASH, plan)
    assert (values["context_tokens"], values["steps"]["prefill"]["tokens"]) == (256, 256)


def test_nothing_is_modelled_without_cards_for_fp32_or_where_a_plan_does_not_fit():
    for cards, gib, flags in ((8, 24, {"numerics": "exact"}), (1, 4, {})):
        config, plan = planned(cards, gib, **flags)
        assert modelled(config, FLASH, plan) is None
    config = RuntimeConfig()
    cpu = DeviceFacts(kind="cpu", cards=0, memory_bytes=2**41)
    assert modelled(config, FLASH, resolve(config, FLASH, cpu)) is None
