"""P04: what a server reports as cached, on every endpoint, streamed or not; P01 over HTTP.

Mutants run, each noticed: reported without the flag; the engine's count not taken in.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live import MODEL, Json, Launcher, Live, Stream, greedy

FLAGS = (
    "--numerics", "exact", "--num-tokens", "4096", "--max-running-requests", "2",
    "--max-prefill-length", "512",
)  # fmt: skip
IDS = [3 + 7 * number % 480 for number in range(700)]
CHAT = [{"role": "user", "content": "Tell me of the harbour. " * 40}]


@pytest.fixture(scope="module")
def reporting(launcher: Launcher) -> Iterator[Live]:
    with launcher.serving(*FLAGS, "--enable-cache-report") as live:
        yield live


def cached(usage: Json) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def usage_of(server: Live, path: str, body: Json, stream: bool) -> Json:
    if not stream:
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])
    asked = {**body, "stream_options": {"include_usage": True}}
    events = Stream(server, asked, path=path).join().events
    return dict(events[-1]["usage"])


def test_p01_the_same_prompt_three_times(reporting: Live) -> None:
    answers = [reporting.complete(IDS, 12, logprobs=2) for _ in range(3)]
    assert [cached(answer["usage"]) for answer in answers] == [0, 640, 640]
    for answer in answers[1:]:
        assert (answer["text"], answer["logprobs"]) == (answers[0]["text"], answers[0]["logprobs"])
    stats = reporting.wait_idle()
    assert stats["cached_pages"] >= 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_p04_every_endpoint_reports_what_it_skipped(
    path: str, stream: bool, reporting: Live
) -> None:
    body: Json = {"model": MODEL, "messages": CHAT, "max_tokens": 3, "temperature": 0}
    if path == "/v1/completions":
        body = greedy(IDS[1:], 3)
    first, second = (usage_of(reporting, path, body, stream) for _ in range(2))
    whole = (first["prompt_tokens"] - 1) // 128 * 128
    assert whole >= 128
    assert cached(second) == whole
    before = reporting.stats()["prefill_steps"]
    assert cached(usage_of(reporting, path, body, stream)) == whole
    assert reporting.stats()["prefill_steps"] == before + 1


def test_p03_the_next_turn_starts_behind_the_prompt(reporting: Live) -> None:
    """The client echoes the answer: its tokens may be cut otherwise, the prompt's are not."""
    chat = [{"role": "user", "content": "What is a mole for? " * 40}]
    path, body = "/v1/chat/completions", {"max_tokens": 20, "temperature": 0}
    first = reporting.post(path, {**body, "messages": chat}).json()
    chat.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    chat.append({"role": "user", "content": "And a pier?"})
    usage = reporting.post(path, {**body, "messages": chat}).json()["usage"]
    assert cached(usage) >= first["usage"]["prompt_tokens"] // 128 * 128 > 0


def test_p04_nothing_is_reported_without_the_flag(server: Live) -> None:
    for _ in range(2):
        usage = server.complete(IDS, 1)["usage"]
        assert "prompt_tokens_details" not in usage
