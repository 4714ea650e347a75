"""What a request that leaves `max_tokens` out may generate."""

from __future__ import annotations

import pytest

from ftruntime.server.errors import ApiError
from ftruntime.server.openai import ChatBody, CompletionBody
from ftruntime.server.params import ModelLimits, build_params

LIMITS = ModelLimits(max_model_len=100, vocab_size=512)


@pytest.mark.parametrize(
    ("prompt_tokens", "extra", "expected"),
    [(10, {}, 16), (90, {}, 10), (10, {"min_tokens": 30}, 30)],
)
def test_h14_a_completion_stops_at_sixteen_tokens_or_at_the_context(prompt_tokens, extra, expected):
    body = CompletionBody.model_validate({"prompt": "a", **extra})
    assert build_params(body, prompt_tokens, LIMITS).max_tokens == expected


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(10, 90), (90, 10)])
def test_h14_a_chat_runs_to_its_end_or_to_the_context(prompt_tokens, expected):
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}]})
    assert build_params(body, prompt_tokens, LIMITS).max_tokens == expected


def test_a_bias_key_of_thousands_of_digits_names_its_field():
    body = CompletionBody.model_validate({"prompt": "a", "logit_bias": {"9" * 5000: 1.0}})
    with pytest.raises(ApiError) as caught:
        build_params(body, 1, LIMITS)
    assert caught.value.message.startswith("logit_bias['9999")
    assert "a bias under a token id" in caught.value.message
