"""The scheduler's own cost, in small sizes: what it must not grow with.

Mutants tried and seen red: a decode that walks the waiting queue, a plan that copies its tokens.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.benchmarks import scheduler_cost


@pytest.mark.parametrize(("waiting", "context"), [(3000, 200), (0, 20_000)])
def test_a_decode_step_grows_with_neither_queue_nor_context(waiting, context):
    small = median(scheduler_cost.decode_steps(8, 0, 200, 60))
    large = median(scheduler_cost.decode_steps(8, waiting, context, 60))
    assert large < 3 * small


@pytest.mark.parametrize("policy", [policy for _, policy in scheduler_cost.POLICIES[1:]])
def test_prompts_go_through_beside_streams(policy):
    found = scheduler_cost.mixed_steps(policy, 40)
    assert min(len(values) for values in found.values()) >= 2
