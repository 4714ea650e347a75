"""`LLM` with a user's flags against transformers: chunk limits, batches, greedy text."""

from __future__ import annotations

import pytest
import torch

from ftruntime import LLM, SamplingParams

LENGTHS = (5, 127, 128, 129, 300, 700)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=["small", "tiny"])
def case(request, demos, oracles):
    """Directory, prompts, and by prompt the oracle's log-probability of each token."""
    oracle = oracles[request.param]
    texts = prompts(oracle.config.vocab_size)
    expected = []
    for ids in texts:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0].double()
        picked = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        expected.append(picked[:, 0])
    return demos[request.param], texts, expected, oracle


def llm_of(directory, **flags):
    return LLM(
        model=directory, numerics="exact", num_tokens=4096, swa_full_tokens_ratio=1.0, **flags
    )


@pytest.mark.parametrize("limit", [128, 256, 8192])
def test_prompt_logprobs_under_chunk_limits(case, limit):
    """All prompts in one call, so that parts of several share a step."""
    directory, texts, expected, _ = case
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with llm_of(directory, max_prefill_length=limit) as llm:
        assert llm.stats()["chunk_tokens"] <= limit
        outs = llm.generate(texts, params)
    for ids, out, values in zip(texts, outs, expected, strict=True):
        assert out.prompt_logprobs[0] is None
        got = [entry[t] for entry, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
        assert (torch.tensor(got, dtype=torch.float64) - values).abs().max() < 1e-5


def test_greedy_tokens_are_the_oracles(case):
    directory, texts, _, oracle = case
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with llm_of(directory) as llm:
        outs = llm.generate(texts, params)
    for ids, out in zip(texts, outs, strict=True):
        with torch.no_grad():
            answer = oracle.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=40, min_new_tokens=40
            )
        assert out.outputs[0].token_ids == answer[0, len(ids) :].tolist()


def test_requests_alone_and_together_give_the_same_bits(case):
    directory, texts, _, _ = case
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    with llm_of(directory, max_running_requests=6) as llm:
        together = llm.generate(texts, params)
        alone = [llm.generate([ids], params)[0] for ids in texts]
    for a, b in zip(together, alone, strict=True):
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs, "bit for bit"


def test_the_smallest_context_starts(demos):
    with LLM(model=demos["tiny"], num_tokens=256, max_model_len=2) as llm:
        out = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1))[0]
    assert len(out.outputs[0].token_ids) == 1
    with pytest.raises(ValueError, match="--max-model-len is 1, expected"):
        LLM(model=demos["tiny"], max_model_len=1)
