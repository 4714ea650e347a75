"""Sampling parameters that must not reach a step."""

from __future__ import annotations

import pytest

from ftruntime.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", True),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**31), ("top_k", 1.5),
        ("min_p", 2.0), ("seed", 2**63), ("max_tokens", 0), ("max_tokens", "5"), ("min_tokens", -1),
        ("stop", 5), ("stop", b"x"), ("stop", {"a": 1}), ("stop", [""]), ("stop", ["a"] * 17),
        ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("ignore_eos", 1),
        ("presence_penalty", 3.0), ("frequency_penalty", float("inf")),
        ("repetition_penalty", 1e-300), ("repetition_penalty", 0.0), ("logit_bias", 5),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101.0}), ("logprobs", 21),
        ("prompt_logprobs", -1), ("n", 0), ("n", 129),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_is_one_sentence_naming_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*, expected ") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_min_tokens_within_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens is 5, expected at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_forms_that_clients_use():
    params = SamplingParams(stop="x", stop_token_ids=[3], logit_bias=None, top_k=2**31 - 1)
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {}
