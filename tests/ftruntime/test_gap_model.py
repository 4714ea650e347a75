"""The bound that the policy flags come to, and what the start log says of it.

Mutants run, each noticed: the decode step left out; the even share of a slice instead of the
largest; N in place of N chunks; the flag's bound where the model says that it cannot hold; the
smallest piece as the bound there; a modelled bound in the name of the flag.
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


def gap_of(plan: Plan) -> tuple[float | None, str | None]:
    return plan.max_decode_gap_s, plan.max_decode_gap_source


def gap_notes(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("decode gap")]


def gap_warnings(plan: Plan) -> list[str]:
    return [line for line in plan.warnings if line.startswith("gap bound")]


@pytest.mark.parametrize("flags", [{}, {"prefill_layer_groups": 1}], ids=str)
def test_without_a_flag_nothing_is_bounded(flags: dict[str, object]) -> None:
    plan, _ = plan_of(**flags)
    assert gap_of(plan) == (None, None)
    assert gap_notes(plan) == gap_warnings(plan) == []


def test_n_chunks_and_a_decode_step() -> None:
    plan, model = plan_of(decode_interleave_every=8)
    chunk_s = model.prefill(3456, 327680).sum_s
    decode_s = model.decode(50, 327680).sum_s
    assert gap_of(plan) == (pytest.approx(8 * chunk_s + decode_s), "modelled")
    assert gap_notes(plan) == [
        f"decode gap modelled, not promised: max_decode_gap_s={plan.max_decode_gap_s:.3f} "
        "source=modelled: at most 8 chunks of 3456 tokens between two decode steps, whose time "
        "was not measured"
    ]
    assert gap_warnings(plan) == []


@pytest.mark.parametrize(("groups", "largest"), [(2, 22), (4, 11), (8, 6), (43, 1), (99, 1)])
def test_the_largest_slice_and_a_decode_step(groups: int, largest: int) -> None:
    plan, model = plan_of(prefill_layer_groups=groups, decode_interleave_every=3)
    chunk_s = model.prefill(3456, 327680).sum_s
    expected = largest / 43 * chunk_s + model.decode(50, 327680).sum_s
    assert gap_of(plan) == (pytest.approx(expected), "modelled")
    assert f"at most 1 of {groups} slices of a chunk of 3456 tokens" in gap_notes(plan)[0]


@pytest.mark.parametrize(
    ("groups", "layers", "words"),
    [(None, 1, "one layer"), (1, 43, "all layers"), (4, 11, "the longest of 4 slices")],
    ids=str,
)
def test_a_bound_by_time_is_null_where_it_cannot_hold(
    groups: int | None, layers: int, words: str
) -> None:
    # one page through the fewest layers and a decode step of all rows at the longest context
    _, model = plan_of()
    least_s = layers / 43 * model.prefill(128, 327680).sum_s + model.decode(50, 327680).sum_s
    above_ms, below_ms = int(1e3 * least_s) + 1, int(1e3 * least_s)
    smallest = (
        f"one page through {words} and a decode step of 50 rows at 327680 tokens are modelled to "
        f"take {1e3 * least_s:.1f} ms"
    )
    plan, _ = plan_of(max_decode_gap_ms=above_ms, prefill_layer_groups=groups)
    assert gap_of(plan) == (above_ms / 1e3, "flag")
    assert gap_warnings(plan) == []
    assert gap_notes(plan) == [
        f"decode gap bounded max_decode_gap_s={above_ms / 1e3:.3f} source=flag: {smallest}"
    ]
    plan, _ = plan_of(max_decode_gap_ms=below_ms, prefill_layer_groups=groups)
    assert gap_warnings(plan) == [
        f"gap bound cannot hold at full load max_decode_gap_ms={below_ms}: {smallest}; pieces of "
        "prefill then grow with the wait of the oldest prompt"
    ]
    if groups != 4:  # slices are bounded by the work in them
        assert gap_of(plan) == (None, None)
        assert gap_notes(plan) == []


@pytest.mark.parametrize(
    "work", [{"decode_interleave_every": 2}, {"prefill_layer_groups": 4}], ids=str
)
def test_work_bounds_where_time_cannot(work: dict[str, object]) -> None:
    alone, _ = plan_of(**work)
    plan, _ = plan_of(max_decode_gap_ms=1, **work)
    assert gap_of(plan) == gap_of(alone)
    assert gap_of(plan)[1] == "modelled"
    assert gap_notes(plan) == gap_notes(alone)
    assert len(gap_warnings(plan)) == 1
    held, _ = plan_of(max_decode_gap_ms=5000, **work)
    assert gap_of(held) == (5.0, "flag")


def test_without_cards_only_the_flag_is_known() -> None:
    flags = {"tp": 1, "num_tokens": 8192, "max_running_requests": 4}
    plan, _ = plan_of(CPU, max_decode_gap_ms=50, **flags)
    assert gap_of(plan) == (0.05, "flag")
    (note,) = gap_notes(plan)
    assert note.startswith("decode gap bounded max_decode_gap_s=0.050 source=flag: whether it can ")
    for more, words in (
        ({"decode_interleave_every": 8}, "at most 8 chunks of "),
        ({"prefill_layer_groups": 4}, "at most 1 of 4 slices of a chunk of "),
    ):
        plan, _ = plan_of(CPU, **flags, **more)
        assert gap_of(plan) == (None, None)
        (note,) = gap_notes(plan)
        assert words in note
        assert note.endswith("their time is not modelled for this plan")


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
