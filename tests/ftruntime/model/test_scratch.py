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
from ftruntime.model.attention import scratch_bytes
from ftruntime.model.config import builtin

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


@pytest.mark.parametrize("ranks", [1, 2, 8], ids=str)
@pytest.mark.parametrize("model", ["flash", "pro"])
@each_step
def test_the_plan_has_room_for_it(num_tokens, num_seqs, pages, model, ranks):
    shape = builtin(model)
    heads = shape.num_attention_heads // ranks
    own = dataclasses.replace(shape, num_attention_heads=heads, o_groups=shape.o_groups // ranks)
    given = scratch_bytes(own, num_tokens=num_tokens, num_seqs=num_seqs, max_positions=128 * pages)
    assert given <= memory._scratch_bytes(shape, max_running=num_seqs, ranks=ranks)
