"""Prompts that start behind kept pages give the same tokens and log-probabilities, bit for bit.

Expectations come from an engine without the cache, `--cache-type naive`. P01: the same long prompt
three times (7 700 tokens with RUN_SLOW=1, else 1 700). Rows that a decode step computed are those
of prefill within rounding only, so behind an answer tokens are compared and log-probabilities to
1e-4.
Mutants run, each noticed: the carry not restored; the carry of the page before; snapshots of the
main or of the index compressor not kept; none kept by decode steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from ftruntime import LLM, SamplingParams

FLAGS = {"num_tokens": 8192, "max_running_requests": 3, "max_prefill_length": 256}
GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 2}
Answer = tuple[list[int], list[dict[int, float]]]


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


def ask(
    llm: LLM, prompts: Sequence[list[int]], count: int = 3, **params: object
) -> tuple[list[Answer], list[int]]:
    """Answers and cached tokens of prompts that are asked together."""
    outs = llm.generate(list(prompts), SamplingParams(**{**GREEDY, "max_tokens": count, **params}))
    assert llm.stats()["integrity"] == "ok"
    answers = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs]
    return answers, [out.num_cached_tokens for out in outs]


def engine(demos, numerics: str = "exact", **flags: object) -> LLM:
    return LLM(model=demos["tiny"], numerics=numerics, **{**FLAGS, **flags})


@pytest.fixture(scope="module")
def cold(demos):
    """Answers without a cache; the same prompts are asked once."""
    with engine(demos, cache_type="naive") as llm:
        known: dict[tuple[object, ...], Answer] = {}

        def answer(prompt: list[int], count: int = 3) -> Answer:
            key = (count, *prompt)
            if key not in known:
                (known[key],), cached = ask(llm, [prompt], count)
                assert cached == [0]
            return known[key]

        yield answer


@pytest.fixture
def llm(demos):
    with engine(demos) as model:
        yield model


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_p01_the_same_long_prompt_three_times(numerics, demos):
    prompt = tokens(7700 if os.environ.get("RUN_SLOW") == "1" else 1700, 1)
    whole = (len(prompt) - 1) // 128 * 128
    with engine(demos, numerics, max_prefill_length=2048) as llm:
        (first,), cached = ask(llm, [prompt], 20)
        assert cached == [0]
        steps = llm.stats()["prefill_steps"]
        for _ in range(2):
            (again,), cached = ask(llm, [prompt], 20)
            assert again == first
            assert cached == [whole]
        # what is reported was not computed: a step a prompt
        assert llm.stats()["prefill_steps"] == steps + 2
        assert llm.stats()["cached_pages"] >= whole // 128


@pytest.mark.parametrize("edge", [128, 640])
def test_lengths_around_page_edges(edge, llm, cold):
    text = tokens(900, 2)
    ask(llm, [text])
    for length in (edge - 1, edge, edge + 1, edge + 4):
        (got,), cached = ask(llm, [text[:length]])
        assert cached == [(length - 1) // 128 * 128]
        assert got == cold(text[:length])


def test_p03_a_chat_that_grows(llm, cold):
    chat = tokens(200, 3)
    for turn in range(3):
        (got,), cached = ask(llm, [chat], 60)
        wanted = cold(chat, 60)
        assert got[0] == wanted[0]
        for mine, theirs in zip(got[1], wanted[1], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        # the answer's last token was never computed
        known = len(chat) - 40 - 1 if turn else 0
        assert cached == [known // 128 * 128]
        chat = chat + got[0] + tokens(40, 30 + turn)


def test_prompts_that_share_five_pages(llm, cold):
    """A shared head of 700 tokens, different questions; hits do not lengthen with the question."""
    head = tokens(700, 4)
    questions = [head + tokens(count, 40 + count) for count in (30, 300, 5, 400)]
    for number, prompt in enumerate(questions):
        (got,), cached = ask(llm, [prompt])
        assert got == cold(prompt)
        assert cached == [640 if number else 0]
    together, cached = ask(llm, questions)
    assert together == [cold(prompt) for prompt in questions]
    assert cached == [(len(prompt) - 1) // 128 * 128 for prompt in questions]


def test_hits_while_others_decode(demos, cold):
    """Rows join and leave; a prompt starts behind pages that a running one has just filled."""
    head = tokens(500, 5)
    prompts = [head + tokens(n, 50 + n) for n in (100, 3, 130, 1, 260, 14)] + [head] * 2
    with engine(demos, decode_interleave_every=1) as llm:
        got, cached = ask(llm, prompts, 12)
        assert llm.stats()["interleaved_decode_steps"] > 0
    assert sorted(cached)[-1] == 384
    assert sum(count > 0 for count in cached) >= 3
    assert got == [cold(prompt, 12) for prompt in prompts]


def test_eviction_under_pressure(demos, cold):
    """Room for two prompts and their window pages; seven are asked over and over."""
    heads = [tokens(400, 6), tokens(300, 7)]
    prompts = [heads[n % 2] + tokens(150 * (n % 3), 60 + n) for n in range(7)]
    hits = 0
    flags = {"num_tokens": 1536, "max_running_requests": 2, "swa_full_tokens_ratio": 0.01}
    with engine(demos, **flags) as llm:
        for turn in range(3):
            for part in (prompts[: turn + 1], prompts[turn + 1 :]):
                got, cached = ask(llm, part)
                assert got == [cold(prompt) for prompt in part]
                hits += sum(count > 0 for count in cached)
        stats = llm.stats()
        assert stats["used_pages"] == stats["used_window_pages"] == 0
        assert 0 < stats["cached_pages"] <= 12
    assert hits >= 5


def test_prompt_logprobs_take_no_hit(llm):
    prompt = tokens(300, 8)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert ask(llm, [prompt])[1] == [256], "its pages are there for others"


def test_naive_keeps_nothing(demos):
    prompt = tokens(300, 9)
    with engine(demos, cache_type="naive") as llm:
        assert [ask(llm, [prompt])[1] for _ in range(2)] == [[0], [0]]
        assert llm.stats()["cached_pages"] == 0
