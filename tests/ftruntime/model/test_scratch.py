"""The scratch of a server serves every step it may take, and its plan has room for it.

Mutants tried: sized for window layers alone, without row selection, for one sequence, a selection
that asks more of a smaller step; the plan's bound for one sequence, for 8 heads a block, without
the split results.
"""

from __future__ import annotations

import dataclasses

import pytest

import ftkernels
from ftruntime import memory
from ftruntime.model.config import builtin
from ftruntime.model.scratch import scratch_bytes

each_step = pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "pages"),
    [(t, s, p) for t in (128, 256, 3456) for s in (1, 4, 50) for p in (64, 2560, 8192)],
)


def _flash(heads):
    return dataclasses.replace(builtin("flash"), num_attention_heads=heads)


@pytest.mark.parametrize("heads", [8, 64], ids=str)
@each_step
def test_every_smaller_step_fits(num_tokens, num_seqs, pages, heads):
    given = scratch_bytes(
        _flash(heads), num_tokens=num_tokens, num_seqs=num_seqs, max_positions=128 * pages
    )
    tables = {min(used, pages) for used in (1, 2, 7, 100, 511, 512, 1000, 2048, 4096, pages)}
    steps = {min(n, num_tokens) for n in (1, 2, 3, 16, 50, 64, 127, 128, 129, 200, num_tokens)}
    for used in tables:
        rows = 32 * used
        for tokens in steps:
            assert ftkernels.scratch_bytes("index_select", T=tokens, rows=rows, topk=512) <= given
        for picks, most in ((0, 0), (512, rows), (0, used)):
            for seqs in {1, num_seqs}:
                need = ftkernels.scratch_bytes(
                    "mla_decode", S=seqs, H=heads, D=512, topk=picks, rows=most
                )
                assert need <= given


def _rank(shape, ranks):
    """What one of ``ranks`` cards computes."""
    return dataclasses.replace(
        shape, num_attention_heads=shape.num_attention_heads // ranks,
        o_groups=shape.o_groups // ranks,
        moe_intermediate_size=shape.moe_intermediate_size // ranks,
    )  # fmt: skip


@pytest.mark.parametrize("numerics", ["official", "exact"])
@pytest.mark.parametrize("ranks", [1, 2, 8], ids=str)
@pytest.mark.parametrize("model", ["flash", "pro"])
@each_step
def test_the_plan_has_room_for_it(num_tokens, num_seqs, pages, model, ranks, numerics):
    shape = builtin(model)
    given = scratch_bytes(
        _rank(shape, ranks), num_tokens=num_tokens, num_seqs=num_seqs, max_positions=128 * pages,
        element_bytes=memory.element_bytes(numerics),
    )  # fmt: skip
    bound = memory.scratch_bound(
        shape, num_tokens=max(num_tokens, num_seqs), max_running=num_seqs, numerics=numerics,
        ranks=ranks,
    )  # fmt: skip
    assert given <= bound


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_every_smaller_step_of_the_products_fits(model):
    config = builtin(model)
    given = scratch_bytes(config, num_tokens=3456, num_seqs=50, max_positions=128)
    inter, hidden, topk = (
        config.moe_intermediate_size, config.hidden_size, config.num_experts_per_tok,
    )  # fmt: skip
    for tokens in (1, 3, 63, 64, 65, 127, 128, 1000, 3456):
        for need in (
            ftkernels.scratch_bytes(
                "moe_fp4", T=tokens, topk=topk, I=inter, C=hidden, E=config.n_routed_experts
            ),
            ftkernels.scratch_bytes("fp8_linear", T=tokens, N=2 * inter, K=hidden),
            ftkernels.scratch_bytes("gate_topk", T=tokens, E=config.n_routed_experts, C=hidden),
            ftkernels.scratch_bytes("hc_post_pre", T=tokens, hc=config.hc_mult, C=hidden),
            ftkernels.scratch_bytes("linear", T=min(tokens, 50), N=config.vocab_size, K=hidden),
        ):
            assert need <= given, tokens
