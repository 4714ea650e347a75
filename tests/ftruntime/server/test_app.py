"""The endpoints over ASGI with a scripted engine.

Mutants tried: usage on every chunk, usage chunk with choices, choice index always 0, one seed for
all choices, BOS doubled, tool_choice none still rendering tools, key check on /health only, 200
from /health while loading, no room left for output.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from ftruntime.server.bridge import Health
from ftruntime.types import RequestRejectedError
from tests.ftruntime.server.conftest import Site
from tests.ftruntime.server.fake_engine import MODEL

MakeSite = Callable[..., Site]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "temperature": 0} | changes


def text_body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "temperature": 0} | changes


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of a stream; asserts that it is framed right and ends with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    data = [b.removeprefix("data: ") for b in blocks[:-2] if not b.startswith(":")]
    assert "[DONE]" not in data
    return [json.loads(item) for item in data]


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_chat_answers_whole(site: Site) -> None:
    response = site.post(CHAT, chat_body())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there, sailor."}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    request_id, prompt, params = site.engine.started[0]
    text = site.engine.tokenizer.decode(prompt, skip_special=False)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    assert params.temperature == 0
    assert params.n == 1
    usage = body["usage"]
    num_tokens = len(site.engine.tokenizer.encode("Hello there, sailor.")) + 1
    assert usage == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(prompt) + num_tokens,
    }
    assert request_id.startswith(response.headers["x-request-id"])
    assert not site.engine.aborted
    assert not site.engine.running


def test_chat_streams_the_same(site: Site) -> None:
    chunks = events(site.post(CHAT, chat_body(stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "Hello there, sailor."
    assert len(deltas) > 4
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat_body), (TEXT, text_body)], ids=["chat", "text"]
)
def test_h01_one_usage_chunk_before_done(
    site: Site, path: str, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    chunks = events(site.post(path, asked))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == site.post(path, body()).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    for options in ({"include_usage": False}, None):
        chunks = events(site.post(path, body(stream=True, stream_options=options)))
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_text_completion(site: Site) -> None:
    body = site.post(TEXT, text_body()).json()
    (choice,) = body["choices"]
    assert body["object"] == "text_completion"
    assert choice == {
        "index": 0, "text": "Hello there, sailor.", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    chunks = events(site.post(TEXT, text_body(stream=True)))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello there, sailor."


def test_prompt_forms_and_bos(site: Site) -> None:
    tokenizer = site.engine.tokenizer
    ids = tokenizer.encode("Once")
    bos = tokenizer.bos_token_id
    with_bos = "<｜begin▁of▁sentence｜>Once"
    cases: list[tuple[object, list[tuple[int, ...]]]] = [
        ("Once", [(bos, *ids)]),
        (with_bos, [(bos, *ids)]),
        ("", [(bos,)]),
        (["Once", "x"], [(bos, *ids), (bos, *tokenizer.encode("x"))]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ]
    for prompt, expected in cases:
        site.engine.started.clear()
        body = site.post(TEXT, text_body(prompt=prompt, n=2)).json()
        assert [p for _, p, _ in site.engine.started] == [p for p in expected for _ in range(2)]
        assert [c["index"] for c in body["choices"]] == list(range(2 * len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(len(p) for p in expected)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat_body), (TEXT, text_body)], ids=["chat", "text"]
)
def test_h11_every_choice_has_its_index_and_seed(
    make_site: MakeSite, path: str, body: Callable[..., dict[str, Any]]
) -> None:
    site = make_site()
    words = ["zero", "one", "two"]
    encode = site.engine.tokenizer.encode
    site.engine.script = lambda request_id, _, __: encode(words[int(request_id[-1])] + " sailor")
    chunks = events(site.post(path, body(n=3, seed=41, stream=True)))
    assert sorted(params.seed for _, _, params in site.engine.started) == [41, 42, 43]
    texts, reasons = ["", "", ""], [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] += piece
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [word + " sailor" for word in words]
    assert reasons == [["stop"]] * 3
    whole = site.post(path, body(n=3, seed=41)).json()["choices"]
    assert [c["message"]["content"] if "message" in c else c["text"] for c in whole] == texts


def test_h10_chat_logprobs_are_the_same_streamed_and_whole(make_site: MakeSite) -> None:
    site = make_site(
        "Hello 日本 sailor, and a lot more of it. Stop here", engine={"vocab_size": 512}
    )
    asked = chat_body(logprobs=True, top_logprobs=3, stop="Stop", max_tokens=64)
    answer = site.post(CHAT, asked).json()["choices"][0]
    whole, text = answer["logprobs"]["content"], answer["message"]["content"]
    chunks = events(site.post(CHAT, asked | {"stream": True}))
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole
    data = b"".join(bytes(entry["bytes"]) for entry in whole)
    assert text == "Hello 日本 sailor, and a lot more of it. "
    # the last token may begin in the shown text and end in the stop string
    before_last = b"".join(bytes(entry["bytes"]) for entry in whole[:-1]).decode()
    assert data.decode().startswith(text)
    assert len(before_last) < len(text)
    for position, entry in enumerate(whole):
        assert entry["logprob"] == -0.125 - position
        assert [top["logprob"] for top in entry["top_logprobs"]] == [
            -0.25 - position - i for i in range(3)
        ]


def test_h10_text_logprobs_are_the_same_streamed_and_whole(make_site: MakeSite) -> None:
    site = make_site("Hello 日本 sailor")
    asked = text_body(logprobs=2)
    whole = site.post(TEXT, asked).json()["choices"][0]["logprobs"]
    chunks = events(site.post(TEXT, asked | {"stream": True}))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert [v for part in parts if part for v in part[name]] == whole[name]
    assert all(len(top) == 3 for top in whole["top_logprobs"])  # the token itself and two more
    assert whole["text_offset"][0] == 0
    assert whole["tokens"][0] == "Hello"
    assert any(token.startswith("bytes:\\x") for token in whole["tokens"])
    none = site.post(TEXT, text_body(logprobs=0)).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"][0] == {none["tokens"][0]: none["token_logprobs"][0]}


def test_h04_stop_strings_in_a_stream(make_site: MakeSite) -> None:
    site = make_site("ABCDEFGHIJKLMNOP")
    chunks = events(site.post(CHAT, chat_body(stream=True, stop="DEFGHIJ")))
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "ABC"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    # the engine was told that the reader has all it wanted: no abort
    assert len(site.engine.finished) == 1
    assert not site.engine.aborted
    assert not site.engine.running


def test_h14_default_output_fills_the_context(site: Site) -> None:
    site.engine.max_model_len = 30
    site.post(TEXT, text_body(prompt=[5] * 20))
    assert site.engine.started[-1][2].max_tokens == 10
    response = site.post(TEXT, text_body(prompt=[5] * 30))
    assert (response.status_code, error(response)["code"]) == (400, "context_length_exceeded")
    # g14: the sentence says what to change
    for part in ("30 tokens", "at most 29", "--max-model-len", "--num-tokens"):
        assert part in error(response)["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_h12_output_limits(site: Site, name: str) -> None:
    for value in (0, -1, "5", 1.5, 10**9, True):
        response = site.post(CHAT, chat_body(**{name: value}))
        assert response.status_code == 400, value
        assert error(response)["param"] == name
        assert error(response)["message"].startswith(f"{name} is {value!r}, expected ")
    assert site.engine.started == []
    body = site.post(CHAT, chat_body(**{name: 1})).json()
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


def test_reasoning_and_effort(make_site: MakeSite) -> None:
    site = make_site("I think so.</think>Yes.")
    ways: list[dict[str, Any]] = [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"thinking": True}},
        {"reasoning_effort": "max"},
    ]
    for way in ways:
        message = site.post(CHAT, chat_body(**way)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "I think so."
        assert message["content"] == "Yes."
        prompt = site.engine.tokenizer.decode(site.engine.started[-1][1], skip_special=False)
        assert prompt.endswith("<｜Assistant｜><think>")
    chunks = events(site.post(CHAT, chat_body(stream=True, reasoning_effort="high")))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think so."
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    plain = site.post(CHAT, chat_body(reasoning_effort="none")).json()["choices"][0]["message"]
    assert "reasoning_content" not in plain


def test_an_answer_after_a_system_message_has_no_reasoning(make_site: MakeSite) -> None:
    site = make_site("Yes.")
    messages = [{"role": "system", "content": "Say yes."}]
    body = chat_body(messages=messages, reasoning_effort="high")
    message = site.post(CHAT, body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes."}


CALL = (
    'Sure.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def test_tool_calls_whole_and_streamed(make_site: MakeSite) -> None:
    site = make_site(CALL, engine={"max_model_len": 2048})
    choice = site.post(CHAT, chat_body(tools=[WEATHER])).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Sure."
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert "index" not in call
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    chunks = events(site.post(CHAT, chat_body(tools=[WEATHER], stream=True)))
    parts = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", [])]
    assert all(part["index"] == 0 for part in parts)
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["weather"]
    assert len([part for part in parts if "id" in part]) == 1
    joined = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(joined) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_choice_none_hides_the_tools(make_site: MakeSite) -> None:
    site = make_site(CALL, engine={"max_model_len": 2048})
    body = site.post(CHAT, chat_body(tools=[WEATHER], tool_choice="none")).json()
    assert body["choices"][0]["message"]["content"] == CALL
    prompt = site.engine.tokenizer.decode(site.engine.started[-1][1])
    assert "weather" not in prompt


def test_g12_tokenize_counts_what_chat_uses(make_site: MakeSite) -> None:
    site = make_site(engine={"max_model_len": 4096})
    variants: list[dict[str, Any]] = [
        {},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "max"},
        {"chat_template_kwargs": {"thinking": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
    ]
    counts = []
    for variant in variants:
        counted = site.post("/v1/tokenize", {"messages": HI, **variant}).json()
        used = site.post(CHAT, chat_body(**variant)).json()["usage"]["prompt_tokens"]
        assert counted["count"] == used == len(counted["tokens"])
        assert tuple(counted["tokens"]) == site.engine.started[-1][1]
        assert counted["max_model_len"] == 4096
        counts.append(used)
    assert counts[0] == counts[2] == counts[-1]
    assert len(set(counts)) >= 4
    tokens = site.post("/v1/tokenize", {"prompt": "Once"}).json()["tokens"]
    assert tokens == [site.engine.tokenizer.bos_token_id, *site.engine.tokenizer.encode("Once")]


@pytest.mark.parametrize("header", [None, "text/plain", "application/json; charset=utf-8", "x/y"])
def test_h15_any_content_type(site: Site, header: str | None) -> None:
    headers = {} if header is None else {"content-type": header}
    raw = json.dumps(chat_body()).encode()
    response = site.post(CHAT, content=raw, headers=headers)
    assert response.status_code == 200
    response = site.post(CHAT, content=b"hello", headers=headers)
    assert response.status_code == 400
    assert "not valid JSON" in error(response)["message"]


def test_h21_nothing_before_ready(site: Site) -> None:
    site.engine.state = Health(False, "loading weights", 0.25, "the model is being loaded")
    health = site.get("/health")
    assert health.status_code == 503
    assert health.json()["phase"] == "loading weights"
    assert health.json()["progress"] == 0.25
    for response in (
        site.get("/v1/models"),
        site.post(CHAT, chat_body()),
        site.post(TEXT, text_body()),
        site.post("/v1/tokenize", {"prompt": "x"}),
        site.get("/v1/stats"),
        site.get("/v1/steps"),
    ):
        assert response.status_code == 503
        assert "phase loading weights, progress 25%" in error(response)["message"]
        assert response.headers["retry-after"] == "1"
    assert "ftruntime_engine_up 0.0" in site.get("/metrics").text
    site.engine.state = Health(True, "ready", 1.0)
    assert site.get("/health").status_code == 200
    assert site.post(CHAT, chat_body()).status_code == 200


def test_models(site: Site) -> None:
    (card,) = site.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["object"] == "model"
    assert card["max_model_len"] == 256
    assert site.get(f"/v1/models/{MODEL}").json() == card
    assert site.get("/v1/models/a/b").status_code == 404
    for path, body in ((CHAT, chat_body(model="x")), (TEXT, text_body(model="x"))):
        response = site.post(path, body)
        assert response.status_code == 404
        assert error(response) == {
            "message": f"model is 'x', expected '{MODEL}'",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }


def test_api_key(make_site: MakeSite) -> None:
    site = make_site(api_key="secret")
    wrong: list[dict[str, str]] = [
        {}, {"Authorization": "Bearer nope"}, {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
    ]  # fmt: skip
    for headers in wrong:
        for response in (
            site.get("/v1/models", headers=headers),
            site.post(CHAT, chat_body(), headers=headers),
            site.get("/metrics", headers=headers),
            site.get("/v1/stats", headers=headers),
        ):
            assert response.status_code == 401
            assert error(response)["code"] == "invalid_api_key"
            assert "secret" not in response.text
    assert site.get("/health").status_code == 200
    right = {"Authorization": "Bearer secret"}
    assert site.post(CHAT, chat_body(), headers=right).status_code == 200


def test_body_limit(make_site: MakeSite) -> None:
    site = make_site(max_body_bytes=1000)
    response = site.post(CHAT, chat_body(user="x" * 1000))
    assert response.status_code == 413
    assert "--max-body-mb" in error(response)["message"]
    assert site.post(CHAT, chat_body(user="x" * 500)).status_code == 200


def test_a_declared_length_over_the_limit_is_refused_unread(make_site: MakeSite) -> None:
    site = make_site(max_body_bytes=1000)
    read: list[int] = []

    async def content() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"x" * 1001

    def post(headers: dict[str, str]) -> httpx.Response:
        return site.run(lambda client: client.post(CHAT, content=content(), headers=headers))

    for length in ("1001", "9" * 4000):
        assert post({"Content-Length": length}).status_code == 413
        assert read == []
    assert post({}).status_code == 413  # in chunks
    assert read == [1]


def test_too_many_prompts_are_said_of_the_prompt(site: Site) -> None:
    response = site.post(TEXT, text_body(prompt=[[7]] * 1025))
    assert response.status_code == 400
    assert error(response)["param"] == "prompt"
    assert "at most 1024 prompts" in error(response)["message"]
    response = site.post(TEXT, text_body(prompt=[[7]] * 1024, n=2))
    assert error(response)["param"] == "n"


def test_a_path_cannot_write_log_lines(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ftruntime"):
        site.get("/%0afake%20line%1b[31m")
        site.get("/v1/models/%0afake%1b")
    lines = [record.getMessage() for record in caplog.records]
    refused = [line for line in lines if line.startswith("request refused")]
    assert len(refused) == 2
    assert all(line.isprintable() for line in refused)
    assert "fake line\\x1b[31m' status=404" in refused[0]


@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{MODEL}"])
def test_head_answers_as_get_without_a_body(site: Site, path: str) -> None:
    head, got = site.run(lambda client: client.head(path)), site.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


def test_request_ids(site: Site) -> None:
    given = site.post(CHAT, chat_body(), headers={"X-Request-Id": "my-id.1"})
    assert given.headers["x-request-id"] == "my-id.1"
    assert site.engine.started[-1][0].startswith("my-id.1.")
    for bad in ("a b", "x" * 200, "a\tb", '"'):
        made = site.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made != bad
        assert made.startswith("req-")
    assert site.post(CHAT, {}).headers["x-request-id"].startswith("req-")
    assert site.get("/nowhere").headers["x-request-id"].startswith("req-")


def test_unknown_paths_and_methods_are_error_objects(site: Site) -> None:
    assert "Not Found" in error(site.get("/nowhere"))["message"]
    response = site.get(CHAT)
    assert response.status_code == 405
    assert "GET" in error(response)["message"]


def test_g11_engine_refusals_keep_their_status(make_site: MakeSite) -> None:
    site = make_site()
    full = "waiting prompts hold 4096 tokens, expected at most 4096 (--max-waiting-tokens)"
    site.engine.reject = RequestRejectedError(full, code="queue_full", status=429)
    for body in (chat_body(), chat_body(stream=True), chat_body(n=3)):
        response = site.post(CHAT, body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error(response)["message"] == full
        assert error(response)["type"] == "rate_limit_error"
    site.engine.reject = None
    assert site.post(CHAT, chat_body()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_failing_step_is_a_500(make_site: MakeSite, stream: bool) -> None:
    site = make_site(engine={"fail_after": 0})
    response = site.post(CHAT, chat_body(stream=stream))
    assert response.status_code == 500
    assert "a step failed" in error(response)["message"]
    site.engine.fail_after = 3
    response = site.post(CHAT, chat_body(stream=stream))
    if stream:
        assert events(response)[-1]["error"]["code"] == "engine_error"
    else:
        assert response.status_code == 500


def test_engine_death(make_site: MakeSite) -> None:
    site = make_site(engine={"die_after": 3})
    response = site.post(CHAT, chat_body())
    assert response.status_code == 503
    assert "exit code 9" in error(response)["message"]
    last = events(site.post(CHAT, chat_body(stream=True)))[-1]
    assert last["error"]["code"] == "engine_dead"
    site.engine.stats_reply = None
    assert site.get("/v1/stats").status_code == 503
    assert "ftruntime_engine_up 0.0" in site.get("/metrics").text


def test_an_unforeseen_failure_is_a_500_without_a_traceback(make_site: MakeSite) -> None:
    site = make_site()

    def broken(*_: object) -> list[int]:
        raise KeyError("secret detail")

    site.engine.script = broken
    for body in (chat_body(), chat_body(stream=True)):
        response = site.post(CHAT, body)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert error(response)["code"] == "internal"
        assert response.headers["x-request-id"]


def test_cache_report(make_site: MakeSite) -> None:
    site = make_site(engine={"cached": 7}, enable_cache_report=True)
    usage = site.post(CHAT, chat_body(n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    plain = make_site(engine={"cached": 7})
    assert "prompt_tokens_details" not in plain.post(CHAT, chat_body()).json()["usage"]


def test_stats_steps_and_metrics(site: Site) -> None:
    site.engine.stats_reply = {
        "num_running": 3,
        "largest_gap_ms": 250.0,
        "limiting": "window_pages",
    }
    assert site.get("/v1/stats").json() == site.engine.stats_reply
    assert site.get("/v1/steps?since=17").json() == {"steps": [], "next": 17}
    assert site.get("/v1/steps").json()["next"] == 0
    response = site.get("/v1/steps?since=-1")
    assert error(response)["message"] == "since is '-1', expected an integer >= 0"
    site.post(CHAT, chat_body())
    site.post(CHAT, chat_body(n=0))
    lines = site.get("/metrics").text.splitlines()
    assert "ftruntime_running_requests 3.0" in lines
    assert "ftruntime_largest_decode_gap_seconds 0.25" in lines
    assert 'ftruntime_requests_total{outcome="ok"} 1.0' in lines
    assert 'ftruntime_requests_total{outcome="rejected"} 1.0' in lines
    num_tokens = len(site.engine.tokenizer.encode("Hello there, sailor.")) + 1
    assert f"ftruntime_generation_tokens_total {num_tokens}.0" in lines
    assert "ftruntime_time_to_first_token_seconds_count 1.0" in lines
    assert f"ftruntime_inter_token_gap_seconds_count {num_tokens - 1}.0" in lines


def test_sampling_parameters_reach_the_engine(site: Site) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -5, "max_tokens": 9,
        "min_tokens": 2, "stop": ["x", "y"], "stop_token_ids": [4, 5], "ignore_eos": True,
        "presence_penalty": 0.25, "frequency_penalty": -0.25, "repetition_penalty": 1.5,
    }  # fmt: skip
    assert site.post(CHAT, chat_body(**given, logit_bias={"42": -100, "7": 1.5})).status_code == 200
    params = site.engine.started[0][2]
    for name, value in given.items():
        wanted = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == wanted, name
    assert params.logit_bias == {42: -100.0, 7: 1.5}
    assert params.logprobs is None


def test_neutral_and_unknown_fields_are_ignored(site: Site) -> None:
    body = chat_body(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", nonsense={"x": 1},
        best_of=1, suffix=None, echo=False, parallel_tool_calls=True, modalities=["text"],
        audio=None, functions=[], function_call="auto", response_format={"type": "text"},
        tools=[], tool_choice="auto", logit_bias={}, stop=None, logprobs=False, n=None,
        length_penalty=1, guided_json=None, include_stop_str_in_output=False,
    )  # fmt: skip
    assert site.post(CHAT, body).status_code == 200
