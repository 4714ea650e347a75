"""Types of parameter values (case H20): by the markup, and by the schema where they disagree."""

from __future__ import annotations

import pytest

from ftruntime.tokenizer.values import tool_types, value_json


@pytest.mark.parametrize(
    ("text", "is_string", "types", "expected"),
    [
        ("42", True, None, '"42"'),
        ("42", False, None, "42"),
        ("42", None, None, "42"),
        ("a b", None, None, '"a b"'),
        ('say "é"\n', True, None, '"say \\"é\\"\\n"'),
        (' {"a": [1]} ', False, None, '{"a": [1]}'),
        ("not json", False, None, '"not json"'),
        ("NaN", False, None, '"NaN"'),
        ("[" * 100_000, False, None, '"' + "[" * 100_000 + '"'),
        # the schema decides a contradiction
        ("42", True, {"string"}, '"42"'),
        ("42", True, {"integer"}, "42"),
        ("42", True, {"number", "string"}, '"42"'),
        ("4.5", True, {"integer"}, '"4.5"'),
        ("true", True, {"boolean"}, "true"),
        ("true", True, {"number"}, '"true"'),
        ("[1]", True, {"array"}, "[1]"),
        ("x", True, {"integer"}, '"x"'),
        ("42", False, {"string"}, '"42"'),
        ("42", False, {"string", "integer"}, "42"),
        ("null", False, {"string", "null"}, "null"),
        ('"42"', False, {"string"}, '"42"'),
        ("42", False, {"boolean"}, "42"),
        ("42", None, {"string"}, '"42"'),
        ("42", None, {"integer"}, "42"),
        ("2.0", True, {"integer"}, "2.0"),
    ],
)
def test_h20_types_follow_markup_and_schema(
    text: str, is_string: bool | None, types: set[str] | None, expected: str
) -> None:
    allowed = None if types is None else frozenset(types)
    assert value_json(text, is_string, allowed) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/x"}]}, None),  # one unknown: all unknown
        ({"enum": ["a", 1.5]}, {"string", "number"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/x"}, None),
        ("junk", None),
    ],
)
def test_h20_types_of_a_schema(schema: object, types: set[str] | None) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}}}
    for tools in ([{"type": "function", "function": function}], [function]):
        assert tool_types(tools)["f"].get("p") == types


@pytest.mark.parametrize("tool", [{}, {"function": None}, {"function": {"name": "f"}}])
def test_tools_without_properties_say_nothing(tool: dict[str, object]) -> None:
    assert tool_types([tool]) == {}
