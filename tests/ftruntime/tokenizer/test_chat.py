"""Prompts, written by hand from section 16.2 and 16.3 of the model specification."""

from __future__ import annotations

import pytest

from ftruntime.tokenizer.chat import ChatFormat

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
TOOL = {"type": "function", "function": {"name": "f", "description": "é"}}
TOOLS_TEXT = (
    "\n\n# Test gadgets\n"
    "Open with <｜DSML｜tool_calls>, braces {x}, in <think></think>.\n"
    '{"name": "f", "description": "é"}\n'
    "END\n"
)

Message = dict[str, object]


def user(text: object, **fields: object) -> Message:
    return {"role": "user", "content": text, **fields}


def says(text: str | None, reasoning: str | None = None, **fields: object) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **fields}


def result(text: object, call_id: str | None = None) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def call(name: str, arguments: str, call_id: str | None = None) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_one_question(chat: ChatFormat) -> None:
    assert chat.render([user("Hi")]) == f"{B}{U}Hi{A}</think>"
    assert chat.render([user("Hi")], thinking=True) == f"{B}{U}Hi{A}<think>"
    assert chat.render([user("Hi")], thinking=True, effort_max=True) == (
        f"{B}Test effort.\nMuch.\n\n{U}Hi{A}<think>"
    )


def test_several_roles(chat: ChatFormat) -> None:
    messages = [
        {"role": "system", "content": "S"},
        user("one"),
        says("1"),
        user("two"),
        {"role": "latest_reminder", "content": "R"},
        says("2", wo_eos=True),
        {"role": "developer", "content": "D"},
    ]
    assert chat.render(messages) == (
        f"{B}S{U}one{A}</think>1{E}{U}two{A}</think>{REMINDER}R2{U}D{A}</think>"
    )


def test_system_alone_opens_no_answer(chat: ChatFormat) -> None:
    assert chat.render([{"role": "system", "content": "S"}, says("x")]) == f"{B}Sx{E}"


def test_text_parts_and_following_user_texts_are_joined_by_two_line_feeds(chat: ChatFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.render([user(parts), user("c")]) == f"{B}{U}a\n\nb\n\nc{A}</think>"
    assert chat.render([user("")]) == f"{B}{U}{A}</think>"


REASONED = [user("q"), says("a1", "r1"), user("p"), says("a2", "r2")]


def test_reasoning_before_the_last_user_turn_is_dropped(chat: ChatFormat) -> None:
    assert chat.render(REASONED, thinking=True) == (
        f"{B}{U}q{A}</think>a1{E}{U}p{A}<think>r2</think>a2{E}"
    )


def test_drop_off_keeps_all_reasoning(chat: ChatFormat) -> None:
    assert chat.render(REASONED, thinking=True, drop=False) == (
        f"{B}{U}q{A}<think>r1</think>a1{E}{U}p{A}<think>r2</think>a2{E}"
    )


def test_chat_mode_shows_no_reasoning(chat: ChatFormat) -> None:
    expected = f"{B}{U}q{A}</think>a1{E}{U}p{A}</think>a2{E}"
    assert chat.render(REASONED) == expected
    assert chat.render(REASONED, drop=False) == expected


def test_tools_force_drop_off(chat: ChatFormat) -> None:
    assert chat.render(REASONED, thinking=True, tools=[TOOL]) == (
        f"{B}{TOOLS_TEXT}{U}q{A}<think>r1</think>a1{E}{U}p{A}<think>r2</think>a2{E}"
    )
    messages = [{"role": "system", "content": "S", "tools": [TOOL]}, *REASONED]
    assert chat.render(messages, thinking=True) == (
        f"{B}S{TOOLS_TEXT}{U}q{A}<think>r1</think>a1{E}{U}p{A}<think>r2</think>a2{E}"
    )


def test_developer_messages_before_the_last_are_removed_when_dropping(chat: ChatFormat) -> None:
    messages = [{"role": "developer", "content": "D"}, says("a", "r"), user("q")]
    assert chat.render(messages, thinking=True) == f"{B}a{E}{U}q{A}<think>"
    assert chat.render(messages, thinking=True, drop=False) == (
        f"{B}{U}D{A}<think>r</think>a{E}{U}q{A}<think>"
    )
    assert chat.render(messages) == f"{B}{U}D{A}</think>a{E}{U}q{A}</think>"


def test_developer_is_a_last_user_turn(chat: ChatFormat) -> None:
    messages = [user("q"), says("a", "r"), {"role": "developer", "content": "D"}]
    assert chat.render(messages, thinking=True) == f"{B}{U}q{A}</think>a{E}{U}D{A}<think>"


def test_without_any_user_turn_reasoning_stays(chat: ChatFormat) -> None:
    assert chat.render([says("a", "r")], thinking=True) == f"{B}r</think>a{E}"
    assert chat.render([says("a")], thinking=True) == f"{B}</think>a{E}"


@pytest.mark.parametrize(("thinking", "mark"), [(False, "</think>"), (True, "<think>")])
def test_action_task(chat: ChatFormat, thinking: bool, mark: str) -> None:
    messages = [user("q", task="action")]
    assert chat.render(messages, thinking=thinking) == f"{B}{U}q{A}{mark}<｜action｜>"


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_other_tasks(chat: ChatFormat, task: str) -> None:
    assert chat.render([user("q", task=task)], thinking=True) == f"{B}{U}q<｜{task}｜>"


def test_after_a_task_there_is_no_reasoning_and_no_merging(chat: ChatFormat) -> None:
    messages = [user("q", task="title"), says("T", "r"), user("p")]
    assert chat.render(messages, thinking=True, drop=False) == (
        f"{B}{U}q<｜title｜>T{E}{U}p{A}<think>"
    )
    # user text starts a turn of its own, a tool result does not
    messages = [user("q", task="title"), user("p")]
    assert chat.render(messages) == f"{B}{U}q{U}p{A}</think>"
    messages = [user("q", task="title"), result("R")]
    assert chat.render(messages) == f"{B}{U}q\n\n<tool_result>R</tool_result><｜title｜>"


def test_task_of_text_merged_into_a_turn_is_lost(chat: ChatFormat) -> None:
    assert chat.render([result("R"), user("q", task="title")]) == (
        f"{B}{U}<tool_result>R</tool_result>\n\nq{A}</think>"
    )


def test_tool_calls(chat: ChatFormat) -> None:
    arguments = '{"s": "a\\n<b>é", "n": 1.5, "o": {"k": [1,true]}, "z": null}'
    calls = [call("f", arguments, "c1"), call("g", "{}", "c2")]
    messages = [user("q"), says("text", "why", tool_calls=calls), result("R")]
    block = (
        "\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">a\n<b>é</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"k": [1, true]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="z" string="false">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    )
    assert chat.render(messages, thinking=True, drop=False) == (
        f"{B}{U}q{A}<think>why</think>text{block}{E}{U}<tool_result>R</tool_result>{A}<think>"
    )


@pytest.mark.parametrize("arguments", ["", "{bad", "[1]", '"x"'])
def test_arguments_that_are_no_object_are_carried_verbatim(
    chat: ChatFormat, arguments: str
) -> None:
    text = chat.render([says(None, tool_calls=[call("f", arguments)])])
    parameter = '<｜DSML｜parameter name="arguments" string="true">'
    assert f'name="f">\n{parameter}{arguments}</｜DSML｜parameter>\n</｜DSML｜invoke>' in text


def test_tool_results_and_following_text_share_a_turn(chat: ChatFormat) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url"}, {"type": "text", "text": "y"}]
    messages = [user("q"), says("a"), result("<b>"), result(parts), user("go on")]
    assert chat.render(messages) == (
        f"{B}{U}q{A}</think>a{E}{U}<tool_result><b></tool_result>\n\n"
        f"<tool_result>x\n\n[Unsupported image_url]\n\ny</tool_result>\n\ngo on{A}</think>"
    )


def _turn_after_calls(chat: ChatFormat, *following: Message) -> str:
    calls = [call("f", "{}", "c0"), call("f", "{}", "c1"), call("f", "{}", "c2")]
    return chat.render([says("", tool_calls=calls), *following]).split(U)[1].split(A)[0]


def test_tool_results_are_sorted_into_call_order_around_text(chat: ChatFormat) -> None:
    turn = _turn_after_calls(
        chat, result("2", "c2"), user("text"), result("0", "c0"), result("1", "c1")
    )
    assert turn == (
        "<tool_result>0</tool_result>\n\ntext\n\n<tool_result>1</tool_result>\n\n"
        "<tool_result>2</tool_result>"
    )


def test_unknown_call_ids_sort_first_and_stay_in_order(chat: ChatFormat) -> None:
    turn = _turn_after_calls(chat, result("1", "c1"), result("x", "?"), result("y"))
    assert turn == (
        "<tool_result>x</tool_result>\n\n<tool_result>y</tool_result>\n\n"
        "<tool_result>1</tool_result>"
    )


def test_results_after_calls_without_ids_keep_their_order(chat: ChatFormat) -> None:
    calls = [call("f", "{}"), call("g", "{}")]
    text = chat.render([says("", tool_calls=calls), result("b", "1"), result("a", "0")])
    assert "<tool_result>b</tool_result>\n\n<tool_result>a</tool_result>" in text


def test_results_follow_the_last_answer_that_had_calls(chat: ChatFormat) -> None:
    following = (result("1", "c1"), result("0", "c0"))
    ordered = "<tool_result>0</tool_result>\n\n<tool_result>1</tool_result>"
    assert _turn_after_calls(chat, says("done"), *following) == ordered
    newer = says("", tool_calls=[call("f", "{}", "d0"), call("f", "{}", "d1")])
    kept = "<tool_result>1</tool_result>\n\n<tool_result>0</tool_result>"
    assert _turn_after_calls(chat, newer, *following) == kept


def test_request_tools_and_format_join_the_first_system_message(chat: ChatFormat) -> None:
    form: Message = {"type": "json_object"}
    form_text = '\n\n# Test form\n{"type": "json_object"}'
    messages = [user("q"), {"role": "system", "content": "S"}, {"role": "system", "content": "T"}]
    assert chat.render(messages, tools=[TOOL], response_format=form) == (
        f"{B}{U}qS{TOOLS_TEXT}{form_text}T"
    )
    assert chat.render([user("q")], response_format=form) == f"{B}{form_text}{U}q{A}</think>"
    plain = chat.render([user("q")])
    assert chat.render([user("q")], tools=[], response_format={"type": "text"}) == plain


def test_request_tools_follow_those_of_the_message(chat: ChatFormat) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    messages = [{"role": "system", "content": "S", "tools": [TOOL]}]
    text = chat.render(messages, tools=[other])
    assert '\n{"name": "f", "description": "é"}\n{"name": "g"}\nEND\n' in text


def test_a_developer_message_takes_the_same_suffixes(chat: ChatFormat) -> None:
    messages = [{"role": "developer", "content": "D", "tools": [TOOL]}]
    assert chat.render(messages) == f"{B}{U}D{TOOLS_TEXT}{A}</think>"


def test_messages_are_not_changed(chat: ChatFormat) -> None:
    messages = [user("q"), result("r", "1")]
    chat.render(messages, tools=[TOOL])
    assert messages == [user("q"), result("r", "1")]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is [], expected a non-empty list"),
        ("hi", "messages is 'hi', expected a non-empty list"),
        (["hi"], "messages[0] is 'hi', expected an object"),
        ([{"content": "x"}], "messages[0].role is None, expected one of system, developer, user"),
        ([user("a"), {"role": "oracle"}], "messages[1].role is 'oracle', expected one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role is ['user'], expected one of"),
        ([user(None)], "messages[0].content is None, expected a string or a list of text parts"),
        ([user("a"), user("b"), {"role": "tool"}], "messages[2].content is None, expected"),
        ([says(None)], "messages[0].content is None, expected"),
        ([user([IMAGE])], "messages[0].content[0].type is 'image_url', expected 'text'"),
        ([user(["x"])], "messages[0].content[0] is 'x', expected an object"),
        ([user([{"type": "text"}])], "messages[0].content[0].text is None, expected a string"),
        ([result([{}])], "messages[0].content[0].type is None, expected 'text'"),
        ([result("x", 3)], "messages[0].tool_call_id is 3, expected a string"),  # type: ignore[arg-type]
        ([user("x", task="sing")], "messages[0].task is 'sing', expected one of action, query"),
        ([says("x", 7)], "messages[0].reasoning_content is 7, expected a string"),  # type: ignore[arg-type]
        ([says("x", wo_eos=1)], "messages[0].wo_eos is 1, expected true or false"),
        ([says("x", tool_calls={})], "messages[0].tool_calls is {}, expected a list"),
        ([says("x", tool_calls=[{}])], "messages[0].tool_calls[0].function is None, expected"),
        (
            [says("x", tool_calls=[{"function": {"name": "f"}}])],
            "messages[0].tool_calls[0].function.arguments is None, expected a string",
        ),
        (
            [{"role": "system", "content": "", "tools": [{"type": "x"}]}],
            "messages[0].tools[0].type is 'x', expected 'function'",
        ),
    ],
)
def test_invalid_messages_name_the_field(
    chat: ChatFormat, messages: list[Message], sentence: str
) -> None:
    with pytest.raises(ValueError) as error:
        chat.render(messages)
    assert str(error.value).startswith(sentence)


def test_invalid_request_fields_are_named(chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match=r"tools\[0\]\.function\.name is None, expected a string"):
        chat.render([user("x")], tools=[{"type": "function", "function": {}}])
    with pytest.raises(ValueError, match="effort_max is True without thinking"):
        chat.render([user("x")], effort_max=True)
    form = {"type": "json_object"}
    system = {"role": "system", "content": "", "response_format": form}
    with pytest.raises(ValueError, match="response_format is given both by"):
        chat.render([system], response_format=form)


def test_an_answer_cut_off_while_reasoning_can_be_sent_back(chat: ChatFormat) -> None:
    messages = [user("q"), says(None, "half a th")]
    assert chat.render(messages, thinking=True) == f"{B}{U}q{A}<think>half a th</think>{E}"
