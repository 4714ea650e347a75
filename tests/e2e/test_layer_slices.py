"""Layer slices and the gap bound change when steps run and nothing they compute.

Mutants run, each noticed: the first layer of a slice skipped; a slice that begins with the
embedding; streams of aborted chunks kept.
"""

from __future__ import annotations

import random

import pytest
import torch

from ftruntime import LLM, SamplingParams

NUM_LAYERS = 6
# the first two decode while prompts of several chunks arrive; two short ones share a chunk
PROMPTS = ((9, 40), (300, 25), (5, 20), (600, 6), (17, 15), (400, 9), (128, 5))

SETTINGS = {
    "G=1": {"prefill_layer_groups": 1},
    "G=2": {"prefill_layer_groups": 2},
    "G=3": {"prefill_layer_groups": 3},
    "G=6": {"prefill_layer_groups": 6},
    "bound": {"max_decode_gap_ms": 60},
    "tight-bound": {"max_decode_gap_ms": 1},
    "bound-N-G": {
        "max_decode_gap_ms": 40, "decode_interleave_every": 2, "prefill_layer_groups": 2
    },
}  # fmt: skip


def make_llm(directory, **flags):
    return LLM(
        model=directory, numerics="exact", num_tokens=8192, max_running_requests=3,
        max_prefill_length=256, swa_full_tokens_ratio=1.0, cache_type="naive", **flags,
    )  # fmt: skip


def requests(seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(2, 512, (n,), generator=generator).tolist() for n, _ in PROMPTS]
    params = [
        SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=2,
            prompt_logprobs=1 if number % 3 == 1 else None,
        )
        for number, (_, count) in enumerate(PROMPTS)
    ]  # fmt: skip
    return texts, params


def answers(llm):
    texts, params = requests()
    outs = llm.generate(texts, params)
    best = [out.outputs[0] for out in outs]
    return [
        (x.token_ids, x.logprobs, out.prompt_logprobs) for x, out in zip(best, outs, strict=True)
    ]


@pytest.fixture(scope="module")
def whole(demos):
    with make_llm(demos["small"]) as llm:
        found = answers(llm)
        assert llm.stats()["interleaved_decode_steps"] == 0
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_log_probabilities_are_those_of_whole_chunks(name, demos, whole) -> None:
    with make_llm(demos["small"], **SETTINGS[name]) as llm:
        assert answers(llm) == whole
        stats, steps = llm.stats(), llm._require_loop().steps(0)["steps"]
    assert stats["integrity"] == "ok"
    slices = {tuple(s["layers"]) for s in steps if s["kind"] == "prefill"}
    groups = SETTINGS[name].get("prefill_layer_groups")
    if groups is not None:
        assert len(slices) == groups
    if groups != 1:
        assert stats["interleaved_decode_steps"] > 9, "decodes run between slices"


def test_aborts_between_slices_leave_the_others_alone(demos, whole) -> None:
    """P06: other prompts come and go at random; those that stay say the same."""
    rng = random.Random(3)
    texts, params = requests()
    with make_llm(demos["small"], prefill_layer_groups=3) as llm:
        loop = llm._require_loop()
        kept = {}
        for number, (text, param) in enumerate(zip(texts, params, strict=True)):
            request = llm._request(0, text, param)
            loop.submit(request)
            kept[request.request_id] = number
        tokens = {number: [] for number in kept.values()}
        passing: list[str] = []
        between = 0
        while loop.has_work:
            if len(passing) < 3 and rng.random() < 0.6:
                length = rng.choice((4, 40, 100, 200, 500))
                other = llm._request(0, rng.choices(range(2, 512), k=length), params[0])
                loop.submit(other)
                passing.append(other.request_id)
            for event in loop.step():
                if event.request_id in kept and event.token_id is not None:
                    tokens[kept[event.request_id]].append(event.token_id)
                if event.request_id in passing and event.finish_reason is not None:
                    passing.remove(event.request_id)
            last = loop.steps(loop.num_steps - 1)["steps"][0]
            if passing and rng.random() < 0.7:
                loop.cancel(passing.pop(rng.randrange(len(passing))))
                between += last["layers"][1] < NUM_LAYERS
            if not passing and all(len(t) == PROMPTS[n][1] for n, t in tokens.items()):
                break
        loop.idle()
        assert loop.stats()["integrity"] == "ok"
        assert loop.stats()["used_pages"] == loop.stats()["num_running"] == 0
    assert between > 10, "aborts fell between two slices"
    assert [tokens[number] for number in range(len(PROMPTS))] == [
        list(token_ids) for token_ids, _, _ in whole
    ]


def test_streams_of_a_chunk_that_everybody_left_are_dropped(demos) -> None:
    texts, params = requests()
    with make_llm(demos["small"], prefill_layer_groups=3) as llm:
        loop = llm._require_loop()
        pair = [llm._request(0, texts[number], params[0]) for number in (0, 2)]
        for request in pair:
            loop.submit(request)
        loop.step()
        assert list(loop._executor._kept) == [(0, 1)]
        for request in pair:
            loop.cancel(request.request_id)
        loop.submit(llm._request(0, texts[3], params[0]))
        loop.step()
        assert list(loop._executor._kept) == [(0,)]
