"""Completion parser: the same answer for every split, tolerant of everything a model may write."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.parse import (
    CompletionParser,
    Delta,
    Parsed,
    ParsedToolCall,
    collect,
    parse_completion,
)
from ftruntime.tokenizer.stop import StopMatcher

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
END = "</｜DSML｜invoke>"


def invoke(name: str) -> str:
    return f'<｜DSML｜invoke name="{name}">'


def param(key: str, value: str, string: str = "true") -> str:
    return f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>'


def block(*invokes: str) -> str:
    return f"\n\n{OPEN}\n" + "\n".join(invokes) + f"\n{CLOSE}"


ONE_CALL = block(f"{invoke('f')}\n{param('x', 'a')}\n{END}")
F = ParsedToolCall("f", '{"x": "a"}')


def _merged(pieces: list[str], *, thinking: bool, tools: bool = True) -> list[Delta]:
    """All deltas, neighbours of the same kind joined."""
    parser = CompletionParser(thinking=thinking, tools=tools)
    deltas = [d for piece in pieces for d in parser.push(piece)] + parser.finish()
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        joins = (
            last
            and delta.kind != "tool_name"
            and (last.kind, last.index) == (delta.kind, delta.index)
        )
        if last and joins:
            out[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        else:
            out.append(delta)
    return out


def _parse(text: str, *, thinking: bool = False, tools: bool = True) -> Parsed:
    return parse_completion(text, thinking=thinking, tools=tools)


def test_plain_answers() -> None:
    assert _parse("hello\n\n") == Parsed("", "hello\n\n", ())
    assert _parse("why</think>\nbecause", thinking=True) == Parsed("why", "\nbecause", ())
    assert _parse("", thinking=True) == Parsed("", "", ())


def test_only_the_first_close_marker_counts_and_only_when_thinking() -> None:
    assert _parse("a</think>b</think>c", thinking=True) == Parsed("a", "b</think>c", ())
    assert _parse("a</think>b") == Parsed("", "a</think>b", ())


def test_tool_calls_after_reasoning_and_content() -> None:
    calls = block(
        f"{invoke('f')}\n{param('s', 'x')}\n{param('n', '4', 'false')}\n{END}",
        f"{invoke('g')}\n\n{END}",
    )
    assert _merged([f"r</think>c{calls}"], thinking=True) == [
        Delta("reasoning", "r"),
        Delta("content", "c"),
        Delta("tool_name", "f", 0),
        Delta("tool_arguments", '{"s": "x", "n": 4}', 0),
        Delta("tool_name", "g", 1),
        Delta("tool_arguments", "{}", 1),
    ]


def test_without_tools_the_markup_is_content() -> None:
    assert _parse("c" + ONE_CALL, tools=False) == Parsed("", "c" + ONE_CALL, ())
    assert _parse("r" + ONE_CALL, thinking=True, tools=False) == Parsed("r" + ONE_CALL, "", ())


@pytest.mark.parametrize(
    ("before", "content"),
    [("", ""), ("\n", ""), ("\n\n", ""), ("c\n\n", "c"), ("c\n\n\n", "c\n"), ("c ", "c ")],
)
def test_up_to_two_line_feeds_before_the_marker_belong_to_it(before: str, content: str) -> None:
    assert _parse(before + ONE_CALL.lstrip()) == Parsed("", content, (F,))


def test_h18_tool_marker_inside_unclosed_thinking_ends_it_at_every_split() -> None:
    text = "let me see" + ONE_CALL
    expected = [
        Delta("reasoning", "let me see"),
        Delta("tool_name", "f", 0),
        Delta("tool_arguments", '{"x": "a"}', 0),
    ]
    for cut in range(len(text) + 1):
        assert _merged([text[:cut], text[cut:]], thinking=True) == expected
    assert _merged(list(text), thinking=True) == expected


def test_h19_without_a_close_marker_everything_is_reasoning() -> None:
    assert _parse("all of it </thi", thinking=True) == Parsed("all of it </thi", "", ())
    assert _parse("all of it", thinking=False) == Parsed("", "all of it", ())


def test_h06_markers_are_found_whatever_stop_strings_hold_back() -> None:
    text = "think, x,</think>say x, then"
    plain = _parse(text, thinking=True)
    matcher, parser = StopMatcher(["x,y"]), CompletionParser(thinking=True, tools=True)
    deltas: list[Delta] = []
    shown = ""
    for character in text:  # the parser reads the raw text, stop strings see content only
        for delta in parser.push(character):
            deltas.append(delta)
            if delta.kind == "content":
                shown += matcher.push(delta.text)[0]
    deltas += parser.finish()
    assert collect(deltas) == plain == Parsed("think, x,", "say x, then", ())
    assert shown + matcher.flush() == plain.content


def test_h20_types_follow_the_markup() -> None:
    parameters = [
        param("a", "42"),
        param("b", "42", "false"),
        param("c", '{"k": {"deep": [1, null]}}', "false"),
        param("arguments", '{"not": "unwrapped"}'),
        param("d", ""),
    ]
    body = "\n".join(parameters)
    (call,) = _parse(block(f"{invoke('f')}\n{body}\n{END}")).tool_calls
    assert json.loads(call.arguments) == {
        "a": "42",
        "b": 42,
        "c": {"k": {"deep": [1, None]}},
        "arguments": '{"not": "unwrapped"}',
        "d": "",
    }
    (empty,) = _parse(block(f"{invoke('f')}\n\n{END}")).tool_calls
    assert empty.arguments == "{}"


def test_h20_schema_decides_where_the_markup_contradicts_it() -> None:
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }
    body = param("n", "42") + param("s", "42", "false")
    text = block(invoke("f") + body + END, invoke("g") + body + END)
    calls = parse_completion(text, thinking=False, tools=True, tool_schemas=[tool]).tool_calls
    assert [c.arguments for c in calls] == ['{"n": 42, "s": "42"}', '{"n": "42", "s": 42}']


def test_a_long_string_value_is_streamed() -> None:
    parser = CompletionParser(thinking=False, tools=True)
    parser.push(f"{OPEN}{invoke('f')}")
    start = parser.push('<｜DSML｜parameter name="x" string="true">one')
    assert start == [Delta("tool_arguments", '{"x": "one', 0)]
    assert parser.push(' "two"\n</') == [Delta("tool_arguments", ' \\"two\\"\\n', 0)]
    assert parser.push("x") == [Delta("tool_arguments", "</x", 0)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"{OPEN}{invoke('f')}", ""),
        (f"{OPEN}{invoke('f')}{param('x', 'a')}", '{"x": "a"'),
        (f'{OPEN}{invoke("f")}<｜DSML｜parameter name="x" string="true">a</｜DSM', '{"x": "a'),
        (f'{OPEN}{invoke("f")}<｜DSML｜parameter name="x" string="false">[1', ""),
        (f"{OPEN}{invoke('f')}<｜DSML｜parameter nam", ""),
        (f"{OPEN}{invoke('f')}{param('x', 'a')}{END}", '{"x": "a"}'),
        (f"{OPEN}{invoke('f')}{param('x', 'a')}{CLOSE}", '{"x": "a"}'),
    ],
)
def test_a_cut_off_block_gives_what_was_parsed(text: str, arguments: str) -> None:
    assert _parse("c" + text) == Parsed("", "c", (ParsedToolCall("f", arguments),))


@pytest.mark.parametrize(
    "false_block",
    [
        f"\n\n{OPEN}",
        f"\n\n{OPEN}\n \n",
        f"\n\n{OPEN}\nno markup",
        f"{OPEN}\n<｜DSML｜invo",
        f'{OPEN}<｜DSML｜invoke name="f',
        f'{OPEN}<｜DSML｜invoke nme="f">{END}{CLOSE}',
        f'{OPEN}<｜DSML｜invoke name="f" x>{END}{CLOSE}',
        f"{OPEN}{param('x', 'a')}{CLOSE}",
    ],
)
def test_a_block_without_any_call_is_text(false_block: str) -> None:
    assert _parse(f"c{false_block}") == Parsed("", f"c{false_block}", ())
    # it interrupted the reasoning, which goes on
    assert _parse(f"r{false_block}") == Parsed("", f"r{false_block}", ())
    assert _parse(f"r{false_block}", thinking=True) == Parsed(f"r{false_block}", "", ())


def test_a_real_block_after_a_false_one_is_read() -> None:
    text = f"write {OPEN} like so{ONE_CALL}"
    assert _parse(text) == Parsed("", f"write {OPEN} like so", (F,))
    assert _parse(text, thinking=True) == Parsed(f"write {OPEN} like so", "", (F,))
    broken = f'{OPEN}<｜DSML｜invoke name="f" x>{END}{CLOSE}'  # never a whole tag
    assert _parse(broken + ONE_CALL) == Parsed("", broken, (F,))


def test_a_false_block_in_the_reasoning_does_not_hide_its_end() -> None:
    text = f"they write {OPEN} here</think>answer"
    assert _parse(text, thinking=True) == Parsed(f"they write {OPEN} here", "answer", ())


def test_an_empty_block_is_no_call() -> None:
    assert _parse(f"c{block()}") == Parsed("", "c", ())


def test_sloppy_markup_is_read() -> None:
    text = (
        f"{OPEN}{CLOSE}"
        f'{OPEN} \n<｜DSML｜invoke name="f" >'
        + "chatter <b> "
        + '<｜DSML｜parameter name="x">a b</｜DSML｜parameter>'  # no string attribute
        + '<｜DSML｜parameter name="y">[1]</｜DSML｜parameter>'
        + param("x", "second one")  # a repeated name
        + param("z", "not json", "false")
        + '<｜DSML｜parameter nam="q" string="true">lost</｜DSML｜parameter>'
        + '<｜DSML｜parameter name="q" x>lost</｜DSML｜parameter>'
        + invoke("g")  # the end of f was forgotten
        + param('quo"te', "v")
        + f"{END} chatter {invoke('h')}{END}"
        + f"{CLOSE}\n\nafter{ONE_CALL}\n"
    )
    assert _parse(text) == Parsed(
        "",
        "after",
        (
            ParsedToolCall("f", '{"x": "a b", "y": [1], "z": "not json"}'),
            ParsedToolCall("g", '{"quo\\"te": "v"}'),
            ParsedToolCall("h", "{}"),
            F,
        ),
    )


FRAGMENTS = [
    "\n", " ", "a", '"', ">", "<", "</think>", "</", "think>", "｜DSML｜", "｜", "é🙂",
    OPEN, CLOSE, OPEN[:-3], END, invoke("f"), '<｜DSML｜invoke name="',
    param("x", "1"), param("y", "[1]", "false"), "</｜DSML｜parameter>",
    '<｜DSML｜parameter name="x" string="true">', '<｜DSML｜parameter name="k">', ONE_CALL,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, thinking=st.booleans(), tools=st.booleans())
@example(text=ONE_CALL + "\n\n after", thinking=False, tools=True)
@example(text="\n\n\n" + OPEN + "\n" + ONE_CALL, thinking=True, tools=True)
def test_h18_every_split_gives_the_same_deltas(text: str, thinking: bool, tools: bool) -> None:
    whole = _merged([text], thinking=thinking, tools=tools)
    assert _merged(list(text), thinking=thinking, tools=tools) == whole
    for cut in range(1, len(text), max(1, len(text) // 40)):
        assert _merged([text[:cut], text[cut:]], thinking=thinking, tools=tools) == whole


@settings(deadline=None)
@given(text=TEXTS, thinking=st.booleans())
def test_without_tools_no_text_is_lost(text: str, thinking: bool) -> None:
    parsed = _parse(text, thinking=thinking, tools=False)
    if thinking and "</think>" in text:
        assert parsed.reasoning + "</think>" + parsed.content == text
    else:
        assert (parsed.reasoning or parsed.content) == text


@settings(deadline=None)
@given(text=TEXTS, thinking=st.booleans())
def test_arguments_are_json_or_a_beginning_of_it(text: str, thinking: bool) -> None:
    calls = _parse(text, thinking=thinking).tool_calls
    for call in calls[:-1]:  # only the last can be cut off
        assert isinstance(json.loads(call.arguments), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text("ab\"é", max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.text("abcXYZ_-09é ", min_size=1, max_size=8)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=4)), min_size=1, max_size=3)
WORDS = st.text("ab .\né", max_size=12)


@settings(deadline=None)
@given(calls=CALLS, content=WORDS, reasoning=WORDS)
def test_p03_a_rendered_answer_is_parsed_and_rendered_back(
    chat: ChatFormat, calls: list[tuple[str, dict[str, object]]], content: str, reasoning: str
) -> None:
    """Echoing what was parsed renders the generated text again, so that its cache is reused."""
    tool_calls = [
        {"type": "function", "id": str(i), "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]
    prompt = chat.render([{"role": "user", "content": "q"}], thinking=True)

    def generated(message: dict[str, object]) -> str:
        text = chat.render([{"role": "user", "content": "q"}, message], thinking=True)
        assert text.startswith(prompt)
        return text.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")

    text = generated(
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            "tool_calls": tool_calls,
        }
    )
    parsed = _parse(text, thinking=True)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == calls
    echo = [
        {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in parsed.tool_calls
    ]
    assert text == generated(
        {
            "role": "assistant",
            "content": parsed.content,
            "reasoning_content": parsed.reasoning,
            "tool_calls": echo,
        }
    )
