"""Defaults that are resolved before a request reaches the engine, and what is refused there."""

from __future__ import annotations

import pytest

from ftruntime.engine.request import choice_params, make_request
from ftruntime.types import Request, RequestRejectedError, SamplingParams


def make(num_prompt: int, params: SamplingParams) -> Request:
    return make_request(
        "r", [7] * num_prompt, params, max_model_len=100, vocab_size=8, arrival_s=1.5
    )


def test_open_ends_are_resolved() -> None:
    request = make(30, SamplingParams(max_tokens=None, min_tokens=70))
    assert request.prompt_token_ids == (7,) * 30
    assert (request.params.max_tokens, request.arrival_s) == (70, 1.5)
    seeds = {make(1, SamplingParams()).params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert None not in seeds
    assert make(1, SamplingParams(seed=0)).params.seed == 0


@pytest.mark.parametrize(
    ("num_prompt", "params", "text"),
    [
        (
            90,
            SamplingParams(max_tokens=11),
            r"needs 101 tokens \(90 in the prompt, 11 to generate\)",
        ),
        (100, SamplingParams(max_tokens=None), r"needs 101 tokens \(100 in the prompt, 1 to gen"),
        (90, SamplingParams(max_tokens=None, min_tokens=20), r"needs 110 tokens .* is 100 tokens"),
    ],
    ids=["asked", "open", "at least"],
)
def test_s08_beyond_the_context_says_both_numbers(
    num_prompt: int, params: SamplingParams, text: str
) -> None:
    with pytest.raises(RequestRejectedError, match=text) as caught:
        make(num_prompt, params)
    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)


def test_s11_a_request_that_fits_exactly_is_taken() -> None:
    assert make(90, SamplingParams(max_tokens=10)).params.max_tokens == 10


def test_one_sequence_a_request() -> None:
    with pytest.raises(ValueError, match="n is 2, expected 1"):
        make(1, SamplingParams(n=2))


def test_choices_differ_in_their_seed_alone() -> None:
    params = SamplingParams(n=3, seed=5, prompt_logprobs=2, top_k=4)
    choices = [choice_params(params, i) for i in range(3)]
    assert [c.seed for c in choices] == [5, 6, 7]
    assert [c.prompt_logprobs for c in choices] == [2, None, None]
    assert {(c.n, c.top_k) for c in choices} == {(1, 4)}
    assert choice_params(SamplingParams(n=2), 1).seed is None


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(stop_token_ids=(3, 8)), r"stop_token_ids is 8, expected .* \[0, 8\)"),
        (SamplingParams(logit_bias={7: 1.0, 99: 0.0}), r"logit_bias is 99, expected .* \[0, 8\)"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams, text: str) -> None:
    with pytest.raises(RequestRejectedError, match=text) as caught:
        make(1, params)
    assert caught.value.status == 400
    assert make(1, SamplingParams(stop_token_ids=(7,), logit_bias={7: 1.0}))


def test_an_id_must_be_left_to_draw_before_min_tokens() -> None:
    def ask(num_stops: int, eos: tuple[int, ...], **fields: object) -> Request:
        params = SamplingParams(stop_token_ids=tuple(range(num_stops)), **fields)  # type: ignore[arg-type]
        return make_request(
            "r", [7], params, max_model_len=100, vocab_size=8, arrival_s=0, eos_token_ids=eos
        )

    for num_stops, eos in ((8, ()), (7, (7,)), (8, (1,))):
        with pytest.raises(RequestRejectedError, match=r"is 8 ids .* min_tokens is 2") as caught:
            ask(num_stops, eos, min_tokens=2)
        assert caught.value.status == 400
    assert ask(8, (1,), min_tokens=0)
    assert ask(7, (1,), min_tokens=2)
    assert ask(7, (7,), min_tokens=2, ignore_eos=True)
