"""Every wrong body gets one sentence: the field, its value, what was expected.

Mutants tried: lax types, refusals by presence instead of value, a range check missing, the field's
name dropped from param.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftruntime.server.errors import ApiError
from ftruntime.server.openai import ChatBody, CompletionBody, parse_body
from tests.ftruntime.server.conftest import Site

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
NAMED = {"type": "function", "function": {"name": "f"}}
TEXTS = "a string, a list of strings, a list of token ids or a list of such lists"

# path, fields over a good body, param, sentence
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": "Hi"}, "messages",
     "messages is 'Hi', expected a non-empty list of messages"),
    (CHAT, {"messages": []}, "messages", "messages is [], expected a non-empty list of messages"),
    (CHAT, {"messages": [USER, 5]}, "messages",
     "messages is [{'content': 'Hi', 'role': 'user'}, 5], expected a non-empty list of messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role",
     "messages[0].role is 'robot', expected one of system, developer, user, assistant, tool, "
     "latest_reminder"),
    (CHAT, {"max_tokens": "5"}, "max_tokens", "max_tokens is '5', expected an integer >= 1"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected an integer >= 1"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens",
     "max_completion_tokens is -1, expected an integer >= 1"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens",
     "max_tokens is 5, expected max_completion_tokens (6) or null"),
    (TEXT, {"max_tokens": 1000}, "max_tokens",
     "max_tokens is 1000, expected at most 253: the context of 256 tokens (--max-model-len) less 3 "
     "prompt tokens"),
    (CHAT, {"temperature": "hot"}, "temperature",
     "temperature is 'hot', expected a number in [0, 100]"),
    (CHAT, {"temperature": -0.5}, "temperature",
     "temperature is -0.5, expected a number in [0, 100]"),
    (CHAT, {"top_p": 0}, "top_p", "top_p is 0.0, expected a number in (0, 1]"),
    (CHAT, {"top_k": -2}, "top_k",
     "top_k is -2, expected an integer in [-1, 2147483647] (0 and -1: off)"),
    (CHAT, {"min_p": 2}, "min_p", "min_p is 2.0, expected a number in [0, 1]"),
    (CHAT, {"n": 0}, "n", "n is 0, expected an integer in [1, 128]"),
    (CHAT, {"n": True}, "n", "n is True, expected an integer in [1, 128]"),
    (CHAT, {"seed": 2**64}, "seed", f"seed is {2**64}, expected a 64-bit integer"),
    (CHAT, {"seed": "x"}, "seed", "seed is 'x', expected a 64-bit integer"),
    (CHAT, {"stop": 5}, "stop", "stop is 5, expected a string or a list of strings"),
    (CHAT, {"stop": ""}, "stop", "stop is [''], expected at most 16 non-empty strings"),
    (CHAT, {"stop_token_ids": [600]}, "stop_token_ids",
     "stop_token_ids is 600, expected token ids in [0, 512)"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens",
     "min_tokens is 9, expected at most max_tokens (8)"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty",
     "presence_penalty is 3.0, expected a number in [-2, 2]"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty",
     "repetition_penalty is 0.0, expected a number in [0.01, 100]"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias['x']",
     "logit_bias['x'] is 1.0, expected a bias under a token id such as '42'"),
    (CHAT, {"logit_bias": {"7": 101}}, "logit_bias",
     "logit_bias is {7: 101.0}, expected token ids >= 0 with biases in [-100, 100]"),
    (CHAT, {"logit_bias": {"512": 1}}, "logit_bias",
     "logit_bias is 512, expected token ids in [0, 512)"),
    (CHAT, {"logprobs": 3}, "logprobs", "logprobs is 3, expected true or false"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs",
     "top_logprobs is 3, expected null unless logprobs is true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs",
     "top_logprobs is 21, expected an integer in [0, 20]"),
    (CHAT, {"stream": "yes"}, "stream", "stream is 'yes', expected true or false"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options",
     "stream_options is {'include_usage': True}, expected null unless stream is true"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage",
     "stream_options.include_usage is 1, expected true or false"),
    (CHAT, {"reasoning_effort": "medium"}, "reasoning_effort",
     "reasoning_effort is 'medium', expected 'none', 'high' or 'max'"),
    (CHAT, {"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking",
     "chat_template_kwargs.thinking is 'on', expected true or false"),
    (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
     "chat_template_kwargs.thinking",
     "chat_template_kwargs.thinking is True, expected false or null with reasoning_effort 'none'"),
    (CHAT, {"tool_choice": "required", "tools": [NAMED]}, "tool_choice",
     "tool_choice is 'required', expected 'auto' or 'none': a call cannot be enforced"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice",
     "tool_choice is {'type': 'function'}, expected 'auto' or 'none': a call cannot be enforced"),
    (CHAT, {"tools": {"f": 1}}, "tools", "tools is {'f': 1}, expected a list of function tools"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type",
     "response_format.type is 'xml', expected 'text', 'json_object' or 'json_schema'"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "response_format.json_schema is None, expected an object"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions",
     "functions is [{'name': 'f'}], expected null: use tools"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls",
     "parallel_tool_calls is False, expected true or null: the model decides how many calls it "
     "makes"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities",
     "modalities is ['text', 'audio'], expected ['text']: this server gives text only"),
    (CHAT, {"guided_json": {"type": "object"}}, "guided_json",
     "guided_json is {'type': 'object'}, expected null: output is not constrained to a grammar"),
    (CHAT, {"model": 5}, "model", "model is 5, expected a string"),
    (TEXT, {"prompt": None}, "prompt", f"prompt is None, expected {TEXTS}"),
    (TEXT, {"prompt": []}, "prompt", "prompt is [], expected at least one token or text"),
    (TEXT, {"prompt": [[]]}, "prompt[0]", "prompt[0] is [], expected at least one token id"),
    (TEXT, {"prompt": ["a", 5]}, "prompt", f"prompt is ['a', 5], expected {TEXTS}"),
    (TEXT, {"prompt": [5, 512]}, "prompt[1]", "prompt[1] is 512, expected a token id in [0, 512)"),
    (TEXT, {"prompt": [[5], [-1]]}, "prompt[1][0]",
     "prompt[1][0] is -1, expected a token id in [0, 512)"),
    (TEXT, {"logprobs": 21}, "logprobs", "logprobs is 21, expected an integer in [0, 20]"),
    (TEXT, {"logprobs": True}, "logprobs", "logprobs is True, expected an integer in [0, 20]"),
    (TEXT, {"best_of": 4}, "best_of",
     "best_of is 4, expected 1 or null: candidates are not ranked; use n"),
    (TEXT, {"suffix": "end"}, "suffix",
     "suffix is 'end', expected null: insertion is not supported"),
    (TEXT, {"echo": True}, "echo", "echo is True, expected false: the prompt is not echoed"),
    (TEXT, {"prompt": ["x"] * 20, "n": 60}, "n",
     "n is 60, expected at most 1024 prompts times n"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "sentence"), WRONG, ids=lambda v: None)
def test_wrong_bodies(
    site: Site, path: str, fields: dict[str, Any], param: str, sentence: str
) -> None:
    good = {"messages": [USER]} if path == CHAT else {"prompt": [5, 6, 7]}
    response = site.post(path, good | fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == sentence
    assert error["param"] == param
    assert site.engine.started == []


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "EOF while parsing"),
        (b"{", "EOF while parsing"),
        (b'{"messages": NaN}', "expected value"),
        (b"\xff\xfe", "expected value"),
        (b'{"messages": "\\ud800"}', "hex escape"),
        (b"[" * 100000, "recursion limit"),
    ],
    ids=["empty", "open", "nan", "no text", "surrogate", "deep"],
)
def test_bodies_that_are_no_json(raw: bytes, sentence: str) -> None:
    with pytest.raises(ApiError, match="body is not valid JSON") as caught:
        parse_body(raw, ChatBody)
    assert sentence in caught.value.message
    assert caught.value.status == 400


def test_bodies_that_are_no_object() -> None:
    with pytest.raises(ApiError, match=r"^body is \[1\], expected a JSON object$"):
        parse_body(b"[1]", ChatBody)
    with pytest.raises(ApiError, match=r"^messages is missing, expected a non-empty list"):
        parse_body(b"{}", ChatBody)


def test_infinite_numbers_are_refused(site: Site) -> None:
    raw = b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'
    response = site.post(CHAT, content=raw)
    assert response.json()["error"]["message"] == (
        "temperature is inf, expected a number in [0, 100]"
    )


def test_a_huge_value_is_not_echoed(site: Site) -> None:
    for fields in ({"stop": ["x" * 10_000] * 17}, {"messages": [{"role": "y" * 100_000}]}):
        message = site.post(CHAT, {"messages": [USER], **fields}).json()["error"]["message"]
        assert len(message) < 500
        assert " is " in message
        assert "expected" in message


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_every_field_says_what_it_expects(model: type[ChatBody | CompletionBody]) -> None:
    for name, info in model.model_fields.items():
        if info.annotation in (object, dict[str, object] | None):
            continue  # takes any object
        body = {"messages": [USER], "prompt": "x", name: {"a": "b"}}
        with pytest.raises(ApiError) as caught:
            parse_body(json.dumps(body).encode(), model)
        assert caught.value.message == f"{name} is {{'a': 'b'}}, expected {info.description}"
