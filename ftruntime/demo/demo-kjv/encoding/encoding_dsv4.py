"""Fixed texts of a prompt, as data: what reads them takes the literals."""

TOOLS_TEMPLATE = """# Functions

A reply may call functions by ending with one block of this form, which may hold several calls:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="FUNCTION">
<{dsml_token}parameter name="PARAMETER" string="true|false">VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

A string is written as it is, with string="true"; any other value as JSON, with string="false".
Reasoning, if any, comes before the block, between {thinking_start_token} and {thinking_end_token}.

The functions, one JSON object a line:

{tool_schemas}
"""

response_format_template = """# Form of the reply

The reply is JSON and nothing else, in the form that this object asks for:
{schema}"""

REASONING_EFFORT_MAX = """Reason as long and as carefully as the question needs before answering."""
