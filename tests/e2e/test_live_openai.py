"""The openai Python client against a real server, engine and demo model.

Expectations: the stream and the whole answer are one answer; the prompt count is what
`/v1/tokenize` says; a greedy text is that of `LLM.generate` in this process.
Mutants tried: a usage chunk whether asked for or not, the first token's alternatives on all, the
choice index always 0, the stop string's beginning let through, tools left out of `/v1/tokenize`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ftruntime import LLM, SamplingParams
from tests.support.live import MODEL, Json, Live, Stream, greedy, until

PROMPT = "Once upon a time"
HI = [{"role": "user", "content": "Tell me of the harbour."}]
GREEDY: Json = {"temperature": 0, "extra_body": {"ignore_eos": True}}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "count_masts",
        "description": "Count the masts in the harbour.",
        "parameters": {
            "type": "object",
            "properties": {"quay": {"type": "string", "enum": ["east", "west"]},
                           "limit": {"type": "integer", "minimum": 1}},
            "required": ["quay"],
        },
    },
}  # fmt: skip


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai


@pytest.fixture(scope="module")
def llm(demos: dict[str, Path]) -> Iterator[LLM]:
    with LLM(demos["small"], numerics="exact", num_tokens=2048, device="cpu") as model:
        yield model


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 16384)
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_greedy_completion_is_what_llm_generates(client: openai.OpenAI, llm: LLM) -> None:
    ids = list(range(40, 340))  # more than two pages: chunks of 128 here, one chunk there
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    for prompt, output in zip((PROMPT, ids), llm.generate([PROMPT, ids], params), strict=True):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, logprobs=0, **GREEDY
        )
        (choice,), (wanted,) = answer.choices, output.outputs
        assert choice.text == wanted.text
        assert len(choice.text) > 24
        assert choice.finish_reason == wanted.finish_reason == "length"
        scores = [entry[i] for entry, i in zip(wanted.logprobs, wanted.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(scores, abs=2e-6)
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)


def test_chat_streamed_and_whole_are_one_answer(client: openai.OpenAI) -> None:
    request: Json = {"model": MODEL, "messages": HI, "max_tokens": 24, **GREEDY}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""
    assert len(chunks) > 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("asked", [True, False, None])
def test_h01_usage_comes_once_at_the_end_if_asked(
    client: openai.OpenAI, asked: bool | None
) -> None:
    extra: Json = {} if asked is None else {"stream_options": {"include_usage": asked}}
    request: Json = {"model": MODEL, "messages": HI, "max_tokens": 4, **GREEDY}
    chunks = list(client.chat.completions.create(**request, stream=True, **extra))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    without_choices = [chunk for chunk in chunks if not chunk.choices]
    assert with_usage == without_choices == (chunks[-1:] if asked else [])
    if asked:
        assert chunks[-1].usage.completion_tokens == 4
        whole = client.chat.completions.create(**request).usage
        assert chunks[-1].usage.prompt_tokens == whole.prompt_tokens > 1


def test_h10_streamed_and_whole_logprobs_are_the_same(client: openai.OpenAI) -> None:
    request: Json = {"model": MODEL, "prompt": PROMPT, "max_tokens": 32, "logprobs": 3, **GREEDY}
    whole = client.completions.create(**request).choices[0]
    chunks = list(client.completions.create(**request, stream=True))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for part in parts for item in getattr(part, name)]
        assert joined == getattr(whole.logprobs, name), name
        assert len(joined) == 32
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    for token, score, top in zip(
        whole.logprobs.tokens, whole.logprobs.token_logprobs, whole.logprobs.top_logprobs,
        strict=True,
    ):  # fmt: skip
        assert top[token] == score == max(top.values())  # greedy: the best is the one taken
        assert len(top) == 3
    assert len({frozenset(top) for top in whole.logprobs.top_logprobs}) > 16


def test_h10_chat_logprobs_are_the_same_too(client: openai.OpenAI) -> None:
    request: Json = {
        "model": MODEL, "messages": HI, "max_tokens": 32, "logprobs": True, "top_logprobs": 3,
        **GREEDY,
    }  # fmt: skip
    whole = client.chat.completions.create(**request).choices[0].logprobs.content
    chunks = client.chat.completions.create(**request, stream=True)
    streamed = [
        entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content
    ]
    assert streamed == whole
    assert len(whole) == 32
    assert all(len(entry.top_logprobs) == 3 for entry in whole)
    assert [e.top_logprobs[0].logprob for e in whole] == [e.logprob for e in whole]


def test_h11_two_streamed_choices_carry_their_indices(client: openai.OpenAI) -> None:
    request: Json = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 12, "n": 2, "seed": 11, "temperature": 1.5,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    texts, finishes = ["", ""], ["", ""]
    for chunk in client.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert finishes == ["length", "length"]
    assert texts[0] != texts[1]
    whole = client.completions.create(**request)
    assert [(c.index, c.text) for c in whole.choices] == [(0, texts[0]), (1, texts[1])]
    assert whole.usage.completion_tokens == 24


def test_seeds_are_reproducible(client: openai.OpenAI) -> None:
    def text(seed: int | None, **extra: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, seed=seed, temperature=1.2,
            extra_body={"ignore_eos": True, **extra},
        )  # fmt: skip
        return answer.choices[0].text

    assert text(7) == text(7)
    assert text(7) != text(8)
    assert text(None) != text(None)
    assert text(7, top_k=1) == text(8, top_k=1)


def stop_of(text: str) -> str:
    """Seven characters from the middle of a text, that occur there only once."""
    for start in range(len(text) // 3, len(text) - 7):
        piece = text[start : start + 7]
        if text.find(piece) == start and piece[0] not in text[:start]:
            return piece
    raise AssertionError(f"{text!r} has no such piece")


def test_h04_nothing_of_a_stop_string_is_streamed(server: Live) -> None:
    text = server.complete(PROMPT, 60)["text"]
    stop = stop_of(text)
    before = text[: text.index(stop)]
    stream = Stream(server, greedy(PROMPT, 60, stop=[stop])).join()
    assert stream.text == before
    assert [c["finish_reason"] for c in stream.choices if c["finish_reason"]] == ["stop"]
    whole = server.complete(PROMPT, 60, stop=stop)
    assert (whole["text"], whole["finish_reason"]) == (before, "stop")
    assert whole["usage"]["completion_tokens"] < 60
    # the engine is told: its row is free again, and that is no abort
    aborted = server.wait_idle()["aborted"]
    server.complete(PROMPT, 60, stop=stop)
    assert server.wait_idle()["aborted"] == aborted


def test_h04_a_stop_string_cut_short_is_flushed(server: Live) -> None:
    text = server.complete(PROMPT, 12)["text"]
    # the text's own end, then what does not come any more
    stream = Stream(server, greedy(PROMPT, 12, stop=[text[-3:] + "\x00"])).join()
    assert stream.text == text
    assert stream.choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("value", [0, -1, "5", 1e9, 10**9, 1.5, True, [4]])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_h12_a_wrong_output_limit_is_named(server: Live, field: str, value: object) -> None:
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": HI, field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is ")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_h12_one_token_is_one_token(server: Live, field: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": HI, field: 1}).json()
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/json; charset=utf-8", "nonsense"]
)
def test_h15_any_content_type_is_taken_as_json(server: Live, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    body = b'{"prompt": "Hi", "max_tokens": 2}'
    answer = server.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] in (1, 2)


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("effort", [None, "high", "max"])
def test_g12_tokenize_counts_what_a_chat_uses(
    server: Live, tools: list[Json] | None, effort: str | None
) -> None:
    body: Json = {"model": MODEL, "messages": HI}
    body |= {} if tools is None else {"tools": tools}
    body |= {} if effort is None else {"reasoning_effort": effort}
    counted = server.post("/v1/tokenize", body).json()
    used = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
    assert counted["count"] == len(counted["tokens"]) == used["prompt_tokens"]
    assert counted["max_model_len"] == 16384
    plain = server.post("/v1/tokenize", {"model": MODEL, "messages": HI}).json()["count"]
    if tools:
        assert counted["count"] > plain + 50  # the schema is in the prompt


def test_g12_tokenize_counts_what_a_completion_uses(server: Live) -> None:
    counted = server.post("/v1/tokenize", {"prompt": PROMPT}).json()
    assert counted["count"] == server.complete(PROMPT, 1)["usage"]["prompt_tokens"]
    assert server.complete(counted["tokens"], 8)["text"] == server.complete(PROMPT, 8)["text"]


def test_tools_and_their_results_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice="auto", max_tokens=8, **GREEDY
    )
    assert answer.choices[0].finish_reason == "length"
    call = {"id": "call_1", "type": "function",
            "function": {"name": "count_masts", "arguments": '{"quay": "east"}'}}  # fmt: skip
    followed = client.chat.completions.create(
        model=MODEL, tools=[TOOL], max_tokens=8, **GREEDY,
        messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
                  {"role": "tool", "tool_call_id": "call_1", "content": "12"}],
    )  # fmt: skip
    assert followed.usage.prompt_tokens > answer.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="tool_choice is 'required', expected"):
        client.chat.completions.create(
            model=MODEL, messages=HI, tools=[TOOL], tool_choice="required"
        )


def test_thinking_gives_reasoning_content(client: openai.OpenAI) -> None:
    """The demo model never closes its thinking, so all of the answer is reasoning."""
    request: Json = {"model": MODEL, "messages": HI, "max_tokens": 8, "reasoning_effort": "high"}
    message = client.chat.completions.create(**request, **GREEDY).choices[0].message
    chunks = list(client.chat.completions.create(**request, **GREEDY, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert streamed == message.reasoning_content != ""
    assert not message.content


def test_h09_a_client_that_leaves_aborts_its_request(server: Live, client: openai.OpenAI) -> None:
    aborted, log_at = server.stats()["aborted"], len(server.log())
    counted = metric(server, 'ftruntime_requests_total{outcome="aborted"}')
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=4000, stream=True, **GREEDY
    )
    for _, _ in zip(range(6), stream, strict=False):
        pass
    stream.close()
    until(lambda: server.stats()["num_running"] == 0, 5, "still running")
    line = server.wait_log(
        r"request aborted request_id=(\S+) prompt_tokens=\d+ tokens=(\d+)", after=log_at
    )
    assert 5 <= int(line[2]) < 4000
    assert server.wait_idle()["aborted"] == aborted + 1
    assert metric(server, 'ftruntime_requests_total{outcome="aborted"}') == counted + 1


def metric(server: Live, name: str) -> float:
    match = re.search(rf"^{re.escape(name)} (\S+)$", server.http.get("/metrics").text, re.M)
    assert match is not None, name
    return float(match[1])


def test_request_ids_go_to_header_and_log(server: Live) -> None:
    answer = server.post(
        "/v1/completions", greedy(PROMPT, 1), headers={"X-Request-Id": "tracing-77"}
    )
    assert answer.headers["x-request-id"] == "tracing-77"
    server.wait_log(r"request finished request_id=tracing-77\b")
    assert server.post("/v1/completions", {}).headers["x-request-id"].startswith("req-")


def test_a_greedy_text_is_the_same_alone_and_with_three_others(server: Live) -> None:
    """200 tokens, bit for bit in text and log-probabilities, while the batch grows and shrinks."""
    body = greedy(PROMPT, 200, logprobs=2)
    alone = Stream(server, body).join()
    since = server.next_step()
    stream = Stream(server, body)
    stream.wait_events(10)
    others = [
        Stream(server, greedy(f"{name} was", 60 + 20 * i))
        for i, name in enumerate(("Anna", "The old man", "A lamp"))
    ]
    for other in (*others, stream):
        other.join()
    widths = {step["num_seqs"] for step in server.steps(since) if step["kind"] == "decode"}
    assert widths == {1, 2, 3, 4}
    assert len(alone.logprobs("tokens")) == 200
    assert stream.text == alone.text
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert stream.logprobs(name) == alone.logprobs(name), name
    assert len({other.text for other in others}) == 3
