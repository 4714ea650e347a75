"""What settings come to: the worked chunk numbers, KV capacity, context, experts, and refusals.

Mutants tried and seen red: the CPU cap dropped, ranks on CPU given the whole memory each, a CPU's
bank not counted, auto KV not limited by memory or not by the reserve, a reserve not capped, room
for groups always, never, from another slot on or not part of the choice of slots, slots below the
least or above all, auto always fused or always offload, a graph cap above the running limit or left
out, graphs on CPU, a bank counted for one rank, its check dropped, fused not offered, the size
check dropped, a setting named that does not make it fit, a default before what was asked for, the
setting that gives most, a capacity below the context, headroom not part of the sum or negative, the
context warning inverted or without the reserve, max_model_len not limited by the KV capacity, the
padding page and the interleave notice dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftruntime import memory
from ftruntime.config import DeviceFacts, Plan, RuntimeConfig, resolve
from ftruntime.model.config import ModelConfig, builtin
from ftruntime.plan import NotEnoughMemoryError, min_expert_slots
from ftruntime.scheduler.policy import interleave_notice

GIB = 1 << 30
FLASH = builtin("flash")
TINY = dataclasses.replace(
    FLASH, vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
    head_dim=128, q_lora_rank=128, o_lora_rank=64, index_n_heads=8, index_head_dim=64,
    compress_ratios=(0, 4, 128, 4),
    n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, num_hash_layers=1,
    max_position_embeddings=65536,
)  # fmt: skip
CPU = DeviceFacts(kind="cpu", cards=0, memory_bytes=8 * GIB, host_bytes=8 * GIB)
EIGHT_CARDS = DeviceFacts(kind="cuda", cards=8, memory_bytes=24 * GIB)
REPORT = {
    "tp": 8, "moe_backend": "offload", "moe_cache_auto": True, "kv_reserve_tokens": 327680,
    "num_tokens": 327680, "swa_full_tokens_ratio": 0.12, "memory_ratio": 0.9,
    "max_running_requests": 50, "max_prefill_length": 4096,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _weights_counted_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "weight_bytes", functools.cache(memory.weight_bytes))
        yield


def plan_of(
    shape: ModelConfig = TINY, facts: DeviceFacts = CPU, strict: bool = True, **flags: object
) -> Plan:
    return resolve(RuntimeConfig.from_flags(**flags), shape, facts, strict=strict)


@pytest.mark.parametrize(("ratio", "window", "chunk"), [(0.12, 308, 3456), (0.02, 261, 384)])
def test_worked_chunk_numbers(ratio, window, chunk):
    plan = plan_of(FLASH, EIGHT_CARDS, strict=False, **{**REPORT, "swa_full_tokens_ratio": ratio})
    numbers = (plan.window_pages, plan.reserved_window_pages, plan.chunk_tokens, plan.limiting)
    assert numbers == (window, 253, chunk, "window_pages")


def test_s10_k07_a_clamped_chunk_is_said_with_its_reason():
    plan = plan_of(num_tokens=32768, swa_full_tokens_ratio=0.01, max_prefill_length=8192)
    assert plan.chunk_tokens < 8192
    (note,) = plan.notes
    assert f"chunk_tokens={plan.chunk_tokens} max_prefill_length=8192 limiting=window_pages" in note
    assert f"window_pages={plan.window_pages}" in note
    assert "--swa-full-tokens-ratio (now 0.01)" in note


def test_k07_an_explicit_prefill_length_is_honoured():
    plan = plan_of(max_prefill_length=1024, swa_full_tokens_ratio=1.0)
    assert (plan.chunk_tokens, plan.limiting, plan.notes) == (1024, "max_prefill_length", ())


def test_prefill_length_is_rounded_down_with_a_note():
    plan = plan_of(max_prefill_length=1000, swa_full_tokens_ratio=1.0)
    assert plan.chunk_tokens == 896
    assert plan.notes == (
        "prefill length rounded down max_prefill_length=1000 used=896 page_tokens=128",
    )


def test_capacity_by_default_is_at_most_65536_tokens_on_cpu():
    plan = plan_of(max_running_requests=4)
    assert (plan.num_tokens, plan.num_pages, plan.max_model_len) == (65536, 512, 65536)
    assert plan.max_waiting_tokens == 4 * 65536
    assert plan.warnings == ()
    assert plan_of(max_running_requests=1, max_model_len=1000).num_tokens == 1024


def test_bytes_sum_to_the_share_of_memory():
    plan = plan_of(memory_ratio=0.5)
    assert sum(plan.bytes.values()) == plan.total_bytes == plan.budget_bytes == 4 * GIB
    assert plan.fits
    assert plan.bytes["headroom"] > 0
    assert set(plan.bytes) == {
        "weights", "experts", "expert_bank", "kv_rows", "kv_window", "carry",
        "carry_snapshots", "rope_tables", "activations", "scratch", "graphs", "expert_staging",
        "headroom",
    }  # fmt: skip
    assert set(plan.why) == set(plan.bytes)


def test_automatic_capacity_is_the_largest_that_fits():
    small = dataclasses.replace(CPU, memory_bytes=160 << 20)
    plan = plan_of(facts=small, memory_ratio=0.9)
    assert 128 <= plan.num_tokens < 65536
    assert plan.num_tokens % 128 == 0
    again = plan_of(facts=small, memory_ratio=0.9, num_tokens=plan.num_tokens)
    assert again.fits
    with pytest.raises(ValueError, match="--num-tokens is"):
        plan_of(facts=small, memory_ratio=0.9, num_tokens=plan.num_tokens + 128)


def test_a_capacity_that_does_not_fit_names_the_largest_that_does():
    with pytest.raises(ValueError) as refusal:
        plan_of(num_tokens=1 << 30)
    sentence = str(refusal.value)
    assert sentence.startswith("--num-tokens is 1073741824, expected at most what fits: 7.20 GiB")
    nearest = int(sentence.split("(nearest: ")[1].rstrip(")"))
    assert plan_of(num_tokens=nearest).fits
    with pytest.raises(ValueError, match=rf"\(nearest: {nearest}\)"):
        plan_of(num_tokens=nearest + 128)
    with pytest.raises(
        ValueError, match=rf"--num-pages is 8388608, .*\(nearest: {nearest // 128}\)"
    ):
        plan_of(num_pages=1 << 23)


def test_a_model_that_does_not_fit_says_what_it_needs():
    with pytest.raises(NotEnoughMemoryError) as refusal:
        plan_of(FLASH)
    sentence = str(refusal.value)
    assert sentence.startswith("the model needs 1")
    assert "experts 1032.00" in sentence  # 43 x 256 experts of 25165824 parameters, fp32
    assert "7.20 GiB are free under --memory-ratio 0.9" in sentence


def test_s08_g14_a_context_far_below_the_models_is_a_warning_with_the_flags():
    plan = plan_of(num_tokens=4096)
    assert plan.max_model_len == 4096
    (warning,) = plan.warnings
    for part in ("max_model_len=4096", "model=65536", "--num-tokens (now 4096)",
                 "--memory-ratio (now 0.9)"):  # fmt: skip
        assert part in warning
    assert plan_of(num_tokens=32768 + 128).warnings == ()
    assert plan_of(num_tokens=4096, max_model_len=4096).warnings == ()


def test_s02_an_interleave_that_cannot_act_is_a_warning():
    flags = {"max_prefill_length": 8192, "max_model_len": 43_008, "swa_full_tokens_ratio": 1.0}
    plan = plan_of(decode_interleave_every=8, **flags)
    assert (plan.chunk_tokens, plan.max_model_len) == (8192, 43_008)
    (warning,) = plan.warnings
    assert warning == interleave_notice(8, chunk_tokens=8192, max_model_len=43_008)
    assert plan_of(decode_interleave_every=5, **flags).warnings == ()
    assert plan_of(**flags).warnings == ()


REFUSED = [
    ({"max_model_len": 65537}, "--max-model-len is 65537, expected at most the model's 65536"),
    ({"max_model_len": 2048, "num_tokens": 1024},
     "--max-model-len is 2048, expected at most the KV capacity of 1024 tokens"),
    ({"max_model_len": 2048, "num_pages": 8},
     "--max-model-len is 2048, expected at most the KV capacity of 1024 tokens"),
    ({"tensor_parallel_size": 3},
     "--tensor-parallel-size is 3, expected a divisor of num_attention_heads (8)"),
    ({"kv_format": "fp8"},
     "--kv-format is fp8, expected bf16: fp8 rows need head_dim 512 and qk_rope_head_dim 64, "
     "this model has 128 and 64"),
    ({"moe_cache_size": 3}, "--moe-cache-size is 3, expected 4 to 64, all experts of all layers"),
    ({"moe_cache_size": 65}, "--moe-cache-size is 65, expected 4 to 64, all experts of all layers"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "sentence"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_settings_against_the_shape(flags, sentence):
    with pytest.raises(ValueError) as refusal:
        plan_of(**flags)
    assert str(refusal.value).startswith(sentence)


def test_fp8_rows_where_the_shape_allows_them():
    flags = {**REPORT, "kv_format": "fp8"}
    fp8 = plan_of(FLASH, EIGHT_CARDS, strict=False, **flags)
    bf16 = plan_of(FLASH, EIGHT_CARDS, strict=False, **REPORT)
    assert fp8.bytes["kv_window"] * 1024 == bf16.bytes["kv_window"] * 584
    assert fp8.expert_slots > bf16.expert_slots


def test_ranks_need_cards():
    with pytest.raises(
        ValueError, match=r"--tensor-parallel-size is 8, expected at most the 4 cards"
    ):
        plan_of(FLASH, dataclasses.replace(EIGHT_CARDS, cards=4), strict=False, tp=8)


def test_ranks_on_cpu_share_one_memory():
    plan = plan_of(tp=8, strict=False)
    assert plan.budget_bytes == int(GIB * 0.9)


def test_experts_take_what_kv_leaves():
    plan = plan_of(FLASH, EIGHT_CARDS, strict=False, **REPORT)
    assert min_expert_slots(FLASH) == 6 <= plan.expert_slots < plan.num_experts == 43 * 256
    expert = 13369344 // 8
    assert plan.bytes["experts"] == plan.expert_slots * expert
    assert plan.bytes["headroom"] < expert
    assert plan.fits
    assert plan.max_decode_gap_s is None


def test_without_a_capacity_kv_gets_its_reserve_and_experts_the_rest():
    plan = plan_of(FLASH, EIGHT_CARDS, strict=False, tp=8)
    assert plan.num_tokens >= 8192
    assert plan.bytes["experts"] > 15 * GIB


def test_all_experts_stay_when_everything_fits():
    cards = dataclasses.replace(EIGHT_CARDS, memory_bytes=140 * GIB)
    plan = plan_of(FLASH, cards, strict=False, tp=8)
    assert plan.expert_slots == plan.num_experts
    assert plan.num_tokens == 4 * 1048576


def test_o03_slots_by_count_and_by_share_are_at_least_what_one_token_needs():
    flags = {key: value for key, value in REPORT.items() if key != "moe_cache_auto"}
    assert plan_of(FLASH, EIGHT_CARDS, **flags, moe_cache_size=77).expert_slots == 77
    half = plan_of(FLASH, EIGHT_CARDS, **flags, moe_cache_rate=0.5)
    assert half.expert_slots == 43 * 128
    least = plan_of(FLASH, EIGHT_CARDS, **flags, moe_cache_rate=0.0)
    assert least.expert_slots == least.min_expert_slots == 6
    assert any("expert slots raised to the least moe_cache_rate=0" in n for n in least.notes)
    with pytest.raises(ValueError, match=r"--moe-cache-size is 5, expected 6 to 11008"):
        plan_of(FLASH, EIGHT_CARDS, **flags, moe_cache_size=5)


def test_a_bank_on_the_host_beside_cards():
    plan = plan_of(FLASH, EIGHT_CARDS, **REPORT)
    bank = 43 * 256 * 13369344
    assert plan.moe_backend == "offload"
    assert plan.host_bytes == {"expert_bank": bank, "loading": bank // 20 + (256 << 20)}
    assert plan.bytes["expert_bank"] == 0
    room = dataclasses.replace(EIGHT_CARDS, host_bytes=sum(plan.host_bytes.values()))
    assert plan_of(FLASH, room, **REPORT) == plan
    missing = "bank needs 144.17 GiB of host memory, 144.16 GiB are free"
    with pytest.raises(NotEnoughMemoryError, match=missing):
        plan_of(FLASH, dataclasses.replace(room, host_bytes=room.host_bytes - (1 << 23)), **REPORT)


def test_bank_and_slots_share_the_memory_of_a_cpu():
    expert = 3 * 256 * 256 * 4
    assert plan_of().moe_backend == "fused"
    assert (plan_of().expert_slots, plan_of().bytes["expert_bank"]) == (64, 0)
    plan = plan_of(moe_backend="offload", moe_cache_size=4)
    assert (plan.moe_backend, plan.host_bytes) == ("offload", {})
    assert (plan.bytes["experts"], plan.bytes["expert_bank"]) == (4 * expert, 64 * expert)
    assert plan_of(moe_cache_rate=0.3).expert_slots == 19
    assert plan_of(moe_cache_auto=True).moe_backend == "offload"
    assert plan_of(moe_backend="offload").expert_slots == 64
    # memory for experts once, but not for a bank and slots
    once = plan_of(num_tokens=1024).total_bytes - plan_of(num_tokens=1024).bytes["headroom"]
    tight = dataclasses.replace(CPU, memory_bytes=int(once / 0.9) + 4096)
    assert plan_of(facts=tight, num_tokens=1024).moe_backend == "fused"
    with pytest.raises(ValueError, match="--moe-backend is offload, expected fused, which holds"):
        plan_of(facts=tight, num_tokens=1024, moe_backend="offload")


def test_a_bank_the_host_cannot_hold_names_fused_if_that_fits():
    cards = DeviceFacts(kind="cuda", cards=8, memory_bytes=40 * GIB, host_bytes=100 * GIB)
    assert plan_of(FLASH, cards, tp=8).moe_backend == "fused"
    with pytest.raises(ValueError, match="--moe-backend is offload, expected fused: the expert ba"):
        plan_of(FLASH, cards, tp=8, moe_backend="offload")
    shown = plan_of(FLASH, cards, strict=False, tp=8, moe_backend="offload")
    assert sum(shown.host_bytes.values()) > 100 * GIB


def test_a_chunk_in_groups_has_room_for_its_routes():
    def staging(slots: int) -> int:
        flags = {"num_tokens": 327680, "max_running_requests": 50, "swa_full_tokens_ratio": 0.12}
        return plan_of(FLASH, EIGHT_CARDS, tp=8, moe_cache_size=slots, **flags).bytes[
            "expert_staging"
        ]

    table = 43 * 256 * 4
    assert (staging(255), staging(256)) == (table + 3456 * 6 * 4096 * 2, table)


def test_why_has_the_numbers_that_make_the_bytes():
    plan = plan_of(FLASH, EIGHT_CARDS, **REPORT)
    slots, share = plan.expert_slots, f"{plan.expert_slots / 11008:.1%}"
    assert plan.why["experts"] == f"{slots} slots x 1.67 MB ({share} of 11008)"
    assert plan.bytes["kv_rows"] == 2561 * 128 * 6880
    assert plan.why["kv_rows"].startswith("327680 tokens and a padding page: 41 layers, 6880 B")
    assert plan.why["kv_window"].startswith("308 pages x 5.64 MB")
    assert plan.why["activations"].startswith("largest chunk 3456 tokens")
    assert plan.why["graphs"] == "decode of 1, 2, 4, 8, 16, 32, 50 rows, an estimate"
    assert plan.why["headroom"] == "left of 23.2 GB, 0.9 of what is free"
    assert plan.host_why["expert_bank"] == "11008 experts x 13.4 MB, pinned"
    assert "all resident" in plan_of().why["experts"]
    short = plan_of(FLASH, strict=False, num_tokens=1024)
    assert short.why["headroom"].startswith("1.13 TB more than 7.73 GB")
    assert plan_of(tp=2).why["headroom"] == (
        "left of 3.87 GB, 0.9 of what is free divided by the 2 ranks of one machine"
    )
    assert plan_of().why["headroom"] == "left of 7.73 GB, 0.9 of what is free"


@pytest.mark.parametrize(
    ("cap", "sizes"),
    [(None, "1, 2, 4, 6"), (0, ""), (1, "1"), (2, "1, 2"), (3, "1, 2, 3"), (4, "1, 2, 4"),
     (99, "1, 2, 4, 6")],
)  # fmt: skip
def test_captured_sizes_are_powers_of_two_and_the_cap(cap, sizes):
    cards = dataclasses.replace(EIGHT_CARDS, memory_bytes=GIB)
    plan = plan_of(facts=cards, max_running_requests=6, cuda_graph_max_bs=cap)
    expected = f"decode of {sizes} rows, an estimate" if sizes else "none are captured"
    assert plan.why["graphs"] == expected
    assert (plan.bytes["graphs"] > 0) == bool(sizes)
    assert plan_of(max_running_requests=6, cuda_graph_max_bs=cap).bytes["graphs"] == 0


GIVES_WAY = [
    ("num_tokens", 24, {"num_tokens": 1 << 20}),
    ("num_pages", 24, {"num_pages": 1 << 13}),
    ("kv_reserve_tokens", 24, {"kv_reserve_tokens": 1 << 22}),
    ("moe_cache_size", 24, {"moe_cache_size": 1100}),
    ("moe_cache_rate", 24, {"moe_cache_rate": 0.3}),
    ("max_running_requests", 14, {"max_running_requests": 500}),
    # a context that needs every token leaves the chunk, then the windows, to give way
    ("max_prefill_length", 15,
     {"num_tokens": 131072, "max_model_len": 131072, "max_prefill_length": 12160}),
    ("swa_full_tokens_ratio", 15,
     {"num_tokens": 65536, "max_model_len": 65536, "swa_full_tokens_ratio": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gib", "flags"), GIVES_WAY, ids=[row[0] for row in GIVES_WAY])
def test_a_plan_that_cannot_run_its_chunk_names_what_can_give_way(name, gib, flags):
    card = DeviceFacts(kind="cuda", cards=1, memory_bytes=gib * GIB)
    with pytest.raises(ValueError) as refusal:
        plan_of(FLASH, card, **flags)
    sentence = str(refusal.value)
    flag, value = f"--{name.replace('_', '-')}", flags[name]
    assert sentence.startswith(f"{flag} is {value}, expected at most what fits: ")
    near = sentence.split("(nearest: ")[1].rstrip(")")
    nearest = float(near) if "." in near else int(near)
    assert 0 < nearest < value
    assert plan_of(FLASH, card, **{**flags, name: nearest}).fits
    above = {"num_tokens": 128, "num_pages": 1, "kv_reserve_tokens": 128, "max_prefill_length": 128}
    step = above.get(name, 1 if isinstance(nearest, int) else 0.001)
    assert not plan_of(FLASH, card, strict=False, **{**flags, name: nearest + step}).fits


def test_a_reserve_that_nothing_could_use_is_lowered_with_a_note():
    card = dataclasses.replace(EIGHT_CARDS, memory_bytes=200 << 20)
    flags = {"moe_backend": "offload", "max_running_requests": 2, "max_model_len": 1000}
    plan = plan_of(facts=card, moe_cache_auto=True, kv_reserve_tokens=9999, **flags)
    assert plan.num_tokens == 2048
    assert "kv reserve lowered to what can be used kv_reserve_tokens=9999 used=2048" in plan.notes
    assert not any("kv reserve" in note for note in plan_of(num_tokens=1024, **flags).notes)


def test_a_short_context_behind_expert_slots_names_the_reserve():
    (warning,) = plan_of(FLASH, dataclasses.replace(EIGHT_CARDS, cards=1)).warnings
    assert "max_model_len=8192" in warning
    assert warning.endswith("raise --kv-reserve-tokens (now 8192) or --num-tokens")


_SLOTS = st.one_of(
    st.just({}),
    st.just({"moe_backend": "fused"}),
    st.just({"moe_backend": "offload"}),
    st.just({"moe_cache_auto": True}),
    st.builds(lambda n: {"moe_cache_size": n}, st.integers(4, 64)),
    st.builds(lambda share: {"moe_cache_rate": share}, st.floats(0, 1)),
)
_TOKENS = st.one_of(
    st.just({}),
    st.builds(lambda n: {"num_pages": n}, st.integers(1, 1 << 12)),
    st.builds(lambda n: {"num_tokens": 128 * n}, st.integers(1, 1 << 12)),
    st.builds(lambda n: {"kv_reserve_tokens": n}, st.integers(0, 1 << 20)),
)
_OTHERS = st.fixed_dictionaries({
    "tp": st.sampled_from([1, 2, 8]), "memory_ratio": st.floats(0.01, 0.99),
    "swa_full_tokens_ratio": st.floats(0.001, 1), "max_running_requests": st.integers(1, 300),
    "max_prefill_length": st.integers(128, 1 << 16), "cuda_graph_max_bs": st.integers(0, 300),
    "cache_type": st.sampled_from(["radix", "naive"]),
    "numerics": st.sampled_from(["official", "exact"]),
})  # fmt: skip
_MEMORY = st.builds(lambda octave, part: int((1 + part) * 2**octave), st.integers(20, 34),
                    st.floats(0, 1))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["cpu", "cuda"]), memory=_MEMORY, more=_MEMORY, slots=_SLOTS,
    tokens=_TOKENS, others=_OTHERS,
)  # fmt: skip
def test_any_settings(kind, memory, more, slots, tokens, others):
    flags = {**others, **slots, **tokens}
    facts = DeviceFacts(kind=kind, cards=8, memory_bytes=memory)
    plan = plan_of(facts=facts, strict=False, **flags)
    assert sum(plan.bytes.values()) == plan.total_bytes >= plan.budget_bytes
    assert plan.fits == (plan.total_bytes == plan.budget_bytes)
    assert plan.min_expert_slots <= plan.expert_slots <= plan.num_experts == 64
    assert plan.moe_backend == "offload" or plan.expert_slots == plan.num_experts
    assert plan.num_tokens == 128 * plan.num_pages > 0
    assert set(plan.why) == set(plan.bytes)

    larger = dataclasses.replace(facts, memory_bytes=memory + more)
    roomy = plan_of(facts=larger, strict=False, **flags)
    assert roomy.expert_slots >= plan.expert_slots
    assert roomy.num_tokens >= plan.num_tokens

    if plan.fits:
        assert plan_of(facts=facts, **flags) == plan
        return
    with pytest.raises(ValueError) as refusal:
        plan_of(facts=facts, **flags)
    named = re.match(r"--(\S+) is .*\(nearest: (.+)\)$", str(refusal.value))
    if named is None:
        return
    name, near = named[1].replace("-", "_"), named[2]
    assert plan_of(facts=facts, **{**flags, name: float(near) if "." in near else int(near)}).fits


def test_a_plan_that_does_not_fit_is_shown_when_not_strict():
    plan = plan_of(FLASH, strict=False, num_tokens=327680)
    assert not plan.fits
    assert plan.bytes["headroom"] == 0
    assert sum(plan.bytes.values()) == plan.total_bytes > plan.budget_bytes


def test_scheduler_limits():
    config = RuntimeConfig.from_flags(
        num_tokens=1024, decode_interleave_every=8, max_waiting_requests=7, max_waiting_tokens=999
    )
    limits = resolve(config, TINY, CPU).scheduler_limits(config, TINY)
    assert (limits.num_pages, limits.max_model_len, limits.num_layers) == (8, 1024, 4)
    assert (limits.decode_interleave_every, limits.max_waiting_requests) == (8, 7)
    assert (limits.max_waiting_tokens, limits.eos_token_ids) == (999, (1,))
