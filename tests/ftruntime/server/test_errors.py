"""Mutants tried: the rename dropped, the field taken from mid-sentence, no shortening."""

from __future__ import annotations

import pytest

from ftruntime.server.errors import ApiError, bad_field, from_rejection, from_value_error
from ftruntime.types import RequestRejectedError, SamplingParams


def test_the_field_is_read_from_the_sentence() -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(logprobs=21)
    error = from_value_error(caught.value, rename={"logprobs": "top_logprobs"})
    assert error.message == "top_logprobs is 21, expected an integer in [0, 20]"
    assert (error.param, error.status) == ("top_logprobs", 400)
    nested = from_value_error(ValueError("messages[2].content[0].type is 5, expected 'text'"))
    assert nested.param == "messages[2].content[0].type"
    plain = from_value_error(ValueError("text has a lone surrogate, which is bad"))
    assert plain.param is None


def test_the_body_is_an_openai_error_object() -> None:
    error = bad_field("n", 0, "an integer >= 1", code="c")
    assert error.body() == {
        "error": {
            "message": "n is 0, expected an integer >= 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "c",
        }
    }
    kinds = {s: ApiError("x", status=s).body()["error"]["type"] for s in (401, 413, 418, 500, 502)}
    assert kinds == {
        401: "authentication_error",
        413: "invalid_request_error",
        418: "invalid_request_error",
        500: "server_error",
        502: "server_error",
    }


def test_refusals_keep_status_and_code() -> None:
    error = from_rejection(RequestRejectedError("queue is full", code="queue_full", status=429))
    assert (error.status, error.code, error.param) == (429, "queue_full", None)
    assert error.headers() == {"Retry-After": "1"}


def test_long_sentences_keep_both_ends() -> None:
    error = ApiError("stop is " + "x" * 5000 + ", expected less")
    assert error.message.startswith("stop is xxx")
    assert error.message.endswith("expected less")
    assert len(error.message) < 450
