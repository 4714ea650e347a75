"""What settings come to: the worked chunk numbers, KV capacity, context, experts, and refusals.

Mutants tried and seen red: the CPU cap dropped, ranks on CPU given the whole memory each, auto KV
not limited by memory, explicit slots below the least accepted, the context warning inverted,
headroom not part of the sum, max_model_len not limited by the KV capacity, the interleave notice
dropped.
"""

from __future__ import annotations

import dataclasses

import pytest

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
        "weights", "experts", "expert_bank", "kv_rows", "kv_window", "carry", "rope_tables",
        "activations", "scratch", "graphs", "expert_staging", "headroom",
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


def test_slots_by_count_and_by_share():
    flags = {key: value for key, value in REPORT.items() if key != "moe_cache_auto"}
    assert plan_of(FLASH, EIGHT_CARDS, strict=False, **flags, moe_cache_size=77).expert_slots == 77
    half = plan_of(FLASH, EIGHT_CARDS, strict=False, **flags, moe_cache_rate=0.5)
    assert half.expert_slots == 43 * 128
    least = plan_of(FLASH, EIGHT_CARDS, strict=False, **flags, moe_cache_rate=0.0)
    assert least.expert_slots == 6
    assert any("expert slots raised to the least moe_cache_rate=0" in n for n in least.notes)


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
