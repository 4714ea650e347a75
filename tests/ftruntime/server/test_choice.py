"""Mutants tried: stop before parser, no hold-back, flush dropped at the end, EOS text shown, scores
copied or of cut text kept, min_tokens ignored, tool_calls reported on length."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftruntime.server.choice import Choice, Piece
from ftruntime.tokenizer import special
from ftruntime.tokenizer.detokenize import IncrementalDetokenizer
from ftruntime.tokenizer.parse import CompletionParser
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import TokenEvent
from tests.ftruntime.server.fake_engine import scores, write_tokenizer

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(write_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))))


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    end: str = "stop",
    *,
    stops: tuple[str, ...] = (),
    min_tokens: int = 0,
    parser: CompletionParser | None = None,
) -> tuple[Choice, list[Piece]]:
    """Feed ids one by one; `stop` ends with an EOS token, `length` with the last id."""
    choice = Choice(
        IncrementalDetokenizer(tokenizer), stops=stops, min_tokens=min_tokens, parser=parser
    )
    if end == "stop":
        ids = [*ids, tokenizer.eos_token_id]
    pieces = []
    for i, token_id in enumerate(ids):
        reason = end if i == len(ids) - 1 else None
        event = TokenEvent("r", token_id, reason, logprobs=scores(token_id, i, 2))
        pieces.append(choice.feed(event))
        if choice.finish_reason is not None:
            break
    return choice, pieces


def text(pieces: list[Piece], kind: str = "content") -> str:
    return "".join(d.text for p in pieces for d in p.deltas if d.kind == kind)


def bytes_of(tokenizer: Tokenizer, string: str) -> list[int]:
    """One token per byte, whatever merges the vocabulary has."""
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [table[bytes([b])] for b in string.encode()]


def test_h04_nothing_of_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    choice, pieces = run(tokenizer, bytes_of(tokenizer, ALPHABET), stops=("DEFGHIJ",))
    assert text(pieces) == "ABC"
    assert choice.finish_reason == "stop"
    assert choice.num_tokens == 10  # J completes it


def test_h04_a_cut_short_stop_string_is_flushed(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, ALPHABET)[:7]  # up to G
    choice, pieces = run(tokenizer, ids, "length", stops=("DEFGHIJ",))
    shown = [text([piece]) for piece in pieces]
    assert shown == ["A", "B", "C", "", "", "", "DEFG"]
    assert choice.finish_reason == "length"


def test_min_tokens_puts_stop_strings_off(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, "ab.cd.ef")
    assert text(run(tokenizer, ids, stops=(".",))[1]) == "ab"
    assert text(run(tokenizer, ids, stops=(".",), min_tokens=4)[1]) == "ab.cd"


def test_h06_stop_strings_leave_the_thinking_marker_alone(tokenizer: Tokenizer) -> None:
    answer = "x, then x,y or k</think>It is x, or <z."
    results = []
    for stops in ((), ("x,y",), ("k<", "/think>I", "</")):
        parser = CompletionParser(thinking=True, tools=False)
        _, pieces = run(tokenizer, bytes_of(tokenizer, answer), stops=stops, parser=parser)
        results.append((text(pieces, "reasoning"), text(pieces)))
    assert results == [("x, then x,y or k", "It is x, or <z.")] * 3


def test_h19_unclosed_thinking_is_reasoning_and_shows_no_end_token(tokenizer: Tokenizer) -> None:
    parser = CompletionParser(thinking=True, tools=False)
    choice, pieces = run(tokenizer, bytes_of(tokenizer, "still thinking"), parser=parser)
    assert (text(pieces, "reasoning"), text(pieces)) == ("still thinking", "")
    assert choice.finish_reason == "stop"
    choice, _ = run(
        tokenizer, bytes_of(tokenizer, "still"), "length",
        parser=CompletionParser(thinking=True, tools=False),
    )  # fmt: skip
    assert choice.finish_reason == "length"


def test_h07_no_broken_character_when_cut(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, "日本")
    _, pieces = run(tokenizer, ids[:5], "length")
    assert text(pieces) == "日"
    _, pieces = run(tokenizer, ids)
    assert text(pieces) == "日本"


def call_text(name: str, key: str, value: str) -> str:
    return (
        f'\n\n{special.TOOL_CALLS_OPEN}\n{special.INVOKE_START}{name}">\n'
        f'{special.PARAMETER_START}{key}" string="true">{value}{special.PARAMETER_CLOSE}\n'
        f"{special.INVOKE_CLOSE}\n{special.TOOL_CALLS_CLOSE}"
    )


def test_tool_call_ends_with_its_own_reason(tokenizer: Tokenizer) -> None:
    answer = "Let me see." + call_text("weather", "city", "Paris. Stop")
    parser = CompletionParser(thinking=False, tools=True)
    ids = bytes_of(tokenizer, answer)
    choice, pieces = run(tokenizer, ids, stops=("Stop",), parser=parser)
    assert choice.finish_reason == "tool_calls"
    assert text(pieces) == "Let me see."
    assert text(pieces, "tool_name") == "weather"
    assert text(pieces, "tool_arguments") == '{"city": "Paris. Stop"}'
    parser = CompletionParser(thinking=False, tools=True)
    choice, _ = run(tokenizer, ids[:-60], "length", parser=parser)
    assert choice.finish_reason == "length"


def test_content_held_for_a_stop_comes_before_the_call(tokenizer: Tokenizer) -> None:
    answer = "ab" + call_text("f", "k", "v")
    parser = CompletionParser(thinking=False, tools=True)
    _, pieces = run(tokenizer, bytes_of(tokenizer, answer), stops=("abc",), parser=parser)
    kinds = [delta.kind for piece in pieces for delta in piece.deltas]
    assert kinds[:2] == ["content", "tool_name"]
    assert text(pieces) == "ab"


def test_scores_follow_their_text(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, ALPHABET)
    _, pieces = run(tokenizer, ids, stops=("DEF",))
    scored = [s for p in pieces for s in p.scored]
    assert [s.scores for s in scored] == [scores(ids[i], i, 2) for i in range(3)]
    assert [s.offset for s in scored] == [0, 1, 2]
    _, pieces = run(tokenizer, ids[:5], "length", stops=("DEFG",))
    assert [s.scores.token_id for p in pieces for s in p.scored] == ids[:5]


def test_the_ending_token_has_no_scores(tokenizer: Tokenizer) -> None:
    choice, pieces = run(tokenizer, bytes_of(tokenizer, "ab"))
    assert choice.num_tokens == 3
    assert len([s for p in pieces for s in p.scored]) == 2


@settings(max_examples=60, deadline=None)
@given(
    answer=st.text(alphabet="ab</think>é. \n", max_size=40),
    stops=st.lists(st.text(alphabet="ab<é.", min_size=1, max_size=3), max_size=2),
    thinking=st.booleans(),
)
def test_visible_text_is_what_the_whole_says(
    tokenizer: Tokenizer, answer: str, stops: list[str], thinking: bool
) -> None:
    """Against the definition over the whole: split at the marker, cut at the first stop."""
    reasoning, content = "", answer
    if thinking:
        reasoning, _, content = answer.partition("</think>")
    ends = [(content.find(s) + len(s), content.find(s)) for s in stops if s in content]
    cut = content[: min(ends)[1]] if ends else content
    parser = CompletionParser(thinking=thinking, tools=False)
    _, pieces = run(tokenizer, bytes_of(tokenizer, answer), stops=tuple(stops), parser=parser)
    assert text(pieces) == cut
    assert text(pieces, "reasoning") == reasoning
