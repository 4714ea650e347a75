"""Values of tool parameters as JSON: the markup's `string` attribute and the tool's schema.

The markup decides. Only where it contradicts a known schema and the text fits the schema, the
schema decides: a value marked as string for a parameter that is no string, or the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Types = frozenset[str]
ToolTypes = Mapping[str, Mapping[str, Types]]

_ANY_OF = ("anyOf", "oneOf")


def tool_types(tools: Sequence[Mapping[str, object]]) -> ToolTypes:
    """JSON types of every parameter of every tool, as far as the schemas say.

    Args:
        tools: OpenAI tools (`{"type": "function", "function": {...}}`) or their inner objects.
    """
    found: dict[str, dict[str, Types]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            known = {str(key): _schema_types(schema) for key, schema in properties.items()}
            found[function["name"]] = {key: types for key, types in known.items() if types}
    return found


def needs_whole_text(is_string: bool | None, types: Types | None) -> bool:
    """Whether a value can be judged only when complete; otherwise it is streamed as a string."""
    return not is_string or (types is not None and "string" not in types)


def value_json(text: str, is_string: bool | None, types: Types | None) -> str:
    """A complete value as JSON text.

    Args:
        text: value as it stands in the markup.
        is_string: the `string` attribute; None when it is missing.
        types: JSON types the schema allows; None when unknown.
    """
    kinds = _json_kinds(text)
    allowed = types if types is not None else frozenset()
    if is_string:
        plain = not types or "string" in types or not kinds & allowed
    elif is_string is None:
        plain = not kinds or "string" in allowed
    else:
        plain = not kinds or ("string" in allowed and not kinds & allowed)
    return json.dumps(text, ensure_ascii=False) if plain else text.strip()


def _json_kinds(text: str) -> Types:
    """JSON schema types that `text` has as JSON; none when it is not valid JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return frozenset()
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    if value is None:
        return frozenset({"null"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _schema_types(schema: object) -> Types:
    """Types a schema names, also by `anyOf`, `oneOf`, `enum` and `const`; empty when unknown."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(t for t in named if isinstance(t, str))
    for key in _ANY_OF:
        options = schema.get(key)
        if isinstance(options, list):
            parts = [_schema_types(option) for option in options]
            return frozenset().union(*parts) if all(parts) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(values, list):
        return frozenset()
    return frozenset().union(*(_json_kinds(json.dumps(v)) for v in values))
