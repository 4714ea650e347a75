"""What the log says of each rank, against sizes of the official format.

Mutants run, each noticed: the bank of all ranks, no bank on the CPU, or none on cards.
"""

from __future__ import annotations

import pytest

from ftruntime.config import DeviceFacts, RuntimeConfig, resolve
from ftruntime.engine.build import held_by_rank
from ftruntime.model.config import builtin

# three matrices of 2048 x 4096 in four bits, and a scale for 32 of them
EXPERT = 3 * 2048 * 4096 // 2 + 3 * 2048 * 4096 // 32


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_of_cards_holds_its_share_of_the_host_bank(ranks):
    facts = DeviceFacts(kind="cuda", cards=ranks, memory_bytes=40 << 30)
    config = RuntimeConfig.from_flags(tp=ranks, moe_backend="offload", moe_cache_size=300)
    plan = resolve(config, builtin("flash"), facts)
    assert held_by_rank(plan) == (
        f"ranks={ranks} weights_bytes={plan.bytes['weights']} expert_slots=300 "
        f"expert_slot_bytes={300 * EXPERT // ranks} expert_bank_bytes={11008 * EXPERT // ranks}"
    )


def test_a_rank_on_the_cpu_holds_its_share_in_fp32():
    facts = DeviceFacts(kind="cpu", cards=0, memory_bytes=8 << 40)
    config = RuntimeConfig.from_flags(tp=4, moe_backend="offload", moe_cache_size=300)
    plan = resolve(config, builtin("flash"), facts)
    words = dict(word.split("=") for word in held_by_rank(plan).split())
    assert int(words["expert_slot_bytes"]) == 300 * 3 * 2048 * 4096 * 4 // 4
    assert int(words["expert_bank_bytes"]) == 11008 * 3 * 2048 * 4096 * 4 // 4


def test_without_offload_there_is_no_bank():
    facts = DeviceFacts(kind="cuda", cards=8, memory_bytes=80 << 30)
    plan = resolve(RuntimeConfig.from_flags(tp=8), builtin("flash"), facts)
    assert held_by_rank(plan).endswith("expert_bank_bytes=0")
