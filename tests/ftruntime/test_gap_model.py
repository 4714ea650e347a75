"""The bound that the policy flags come to, and what the start log says of it.

Mutants run, each noticed: the decode step left out; the even share of a slice instead of the
largest; N in place of N chunks; the flag's bound where the model says that it cannot hold.
"""

from __future__ import annotations

import pytest

from ftruntime.config import DeviceFacts, RuntimeConfig, resolve
from ftruntime.model.config import builtin
from ftruntime.plan import Plan
from ftruntime.step_model import RTX_4090, StepModel

FLASH = builtin("flash")
CARDS = DeviceFacts(kind="cuda", cards=8, memory_bytes=24 << 30)
CPU = DeviceFacts(kind="cpu", cards=1, memory_bytes=1 << 40)
SEED = {
    "tp": 8, "moe_backend": "offload", "num_tokens": 327680, "max_running_requests": 50,
    "swa_full_tokens_ratio": 0.12, "max_prefill_length": 4096,
}  # fmt: skip


def plan_of(facts: DeviceFacts = CARDS, **flags: object) -> tuple[Plan, StepModel]:
    config = RuntimeConfig.from_flags(**{**SEED, **flags})
    plan = resolve(config, FLASH, facts, strict=False)
    return plan, StepModel(config, FLASH, plan, RTX_4090)


def gap_notes(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("decode gap")]


@pytest.mark.parametrize("flags", [{}, {"prefill_layer_groups": 1}], ids=str)
def test_without_a_flag_nothing_is_bounded(flags: dict[str, object]) -> None:
    plan, _ = plan_of(**flags)
    assert plan.max_decode_gap_s is None
    assert gap_notes(plan) == []


def test_n_chunks_and_a_decode_step() -> None:
    plan, model = plan_of(decode_interleave_every=8)
    chunk_s = model.prefill(3456, 327680).sum_s
    decode_s = model.decode(50, 327680).sum_s
    assert plan.max_decode_gap_s == pytest.approx(8 * chunk_s + decode_s)
    (note,) = gap_notes(plan)
    assert note.endswith(f"max_decode_gap_s={plan.max_decode_gap_s:.3f} source=modelled")


@pytest.mark.parametrize(("groups", "largest"), [(2, 22), (4, 11), (8, 6), (43, 1), (99, 1)])
def test_the_largest_slice_and_a_decode_step(groups: int, largest: int) -> None:
    plan, model = plan_of(prefill_layer_groups=groups, decode_interleave_every=3)
    chunk_s = model.prefill(3456, 327680).sum_s
    expected = largest / 43 * chunk_s + model.decode(50, 327680).sum_s
    assert plan.max_decode_gap_s == pytest.approx(expected)


def test_a_bound_by_time_is_the_flag_where_it_can_hold() -> None:
    plan, _ = plan_of(max_decode_gap_ms=900, decode_interleave_every=8, prefill_layer_groups=4)
    assert plan.max_decode_gap_s == 0.9
    assert gap_notes(plan) == ["decode gap bounded max_decode_gap_s=0.900 source=flag"]


@pytest.mark.parametrize(("groups", "layers"), [(None, 1), (1, 43), (4, 11)], ids=str)
def test_a_bound_below_the_smallest_piece(groups: int | None, layers: int) -> None:
    plan, model = plan_of(max_decode_gap_ms=1, prefill_layer_groups=groups)
    page_s = model.prefill(128, 327680).sum_s
    expected = layers / 43 * page_s + model.decode(50, 327680).sum_s
    assert plan.max_decode_gap_s == pytest.approx(expected)
    assert "source=modelled" in gap_notes(plan)[0]


def test_without_cards_only_the_flag_is_known() -> None:
    flags = {"tp": 1, "num_tokens": 8192, "max_running_requests": 4}
    assert plan_of(CPU, max_decode_gap_ms=50, **flags)[0].max_decode_gap_s == 0.05
    for more, words in (
        ({"decode_interleave_every": 8}, "at most 8 chunks of "),
        ({"prefill_layer_groups": 4}, "at most 1 of 4 slices of a chunk of "),
    ):
        plan, _ = plan_of(CPU, **flags, **more)
        assert plan.max_decode_gap_s is None
        (note,) = gap_notes(plan)
        assert words in note
        assert note.endswith("is not modelled for this machine")


def test_one_more_request_that_would_halve_the_chunk() -> None:
    """Eleven spare window pages make chunks of 5 pages; two are left for one request more."""
    flags = {"tp": 1, "max_model_len": 256, "max_running_requests": 4, "num_tokens": 128 * 67}
    reserved = 2 * 5 + 3 * 4 + 1  # 23; 34 window pages of 68
    plan, _ = plan_of(CPU, **{**flags, "swa_full_tokens_ratio": 0.5})
    assert (plan.window_pages, plan.reserved_window_pages) == (34, reserved)
    assert plan.chunk_tokens == (34 - 1 - reserved) // 2 * 128 == 5 * 128
    (warning,) = [line for line in plan.warnings if "shrink by more than half" in line]
    assert "chunk_tokens=640 then=256" in warning
    plan, _ = plan_of(CPU, **{**flags, "swa_full_tokens_ratio": 0.7})
    assert not any("shrink" in line for line in plan.warnings)
