"""Requests that gave their pages up answer like undisturbed ones: `--admission optimistic`.

Expectations come from an engine with pages enough. What was generated before a retraction is
computed again by prefill, whose rows are those of decode within rounding: tokens are compared, and
log-probabilities to 1e-4. `exact`, since one rounding flip of `official` would be visible.
"""

from __future__ import annotations

import pytest
import torch

from ftruntime import LLM, SamplingParams

PROMPTS = {90: 300, 260: 180, 131: 260, 500: 150}  # tokens -> tokens to generate; 18 pages
FLAGS = {"max_running_requests": 4, "max_prefill_length": 256, "numerics": "exact"}


def tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


def answers(llm: LLM, **params: object):
    sampling = [
        SamplingParams(ignore_eos=True, logprobs=2, max_tokens=count, **params)
        for count in PROMPTS.values()
    ]
    outs = llm.generate([tokens(count) for count in PROMPTS], sampling)
    stats = llm.stats()
    assert stats["integrity"] == "ok"
    assert (stats["num_running"], stats["num_waiting"], stats["used_pages"]) == (0, 0, 0)
    assert stats["used_window_pages"] == 0
    return [out.outputs[0] for out in outs], stats


GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "seed": 11, "presence_penalty": 0.4, "top_p": 0.95}


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        (GREEDY, {"cache_type": "naive"}),
        (SAMPLED, {"decode_interleave_every": 1, "prefill_layer_groups": 2}),
    ],
    ids=["naive", "radix"],
)
def test_retracted_and_resumed_equal_to_undisturbed(params, flags, demos):
    with LLM(model=demos["tiny"], num_tokens=8192, **FLAGS) as llm:
        expected, stats = answers(llm, **params)
        assert stats["retractions"] == 0
    with LLM(model=demos["tiny"], admission="optimistic", num_tokens=1024, **FLAGS, **flags) as llm:
        got, stats = answers(llm, **params)
    assert stats["retractions"] >= 2
    for own, other in zip(got, expected, strict=True):
        assert own.token_ids == other.token_ids
        assert own.finish_reason == "length"
        for scores, wanted in zip(own.logprobs, other.logprobs, strict=True):
            assert scores == pytest.approx(wanted, abs=1e-4)
