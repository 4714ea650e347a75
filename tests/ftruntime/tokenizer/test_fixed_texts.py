"""Fixed texts are data: literals of the checkpoint's file, never its code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ftruntime.tokenizer import fixed_texts
from ftruntime.tokenizer.fixed_texts import FIXED_TEXTS_FILE, FixedTexts

WHOLE = 'TOOLS_TEMPLATE = "{tool_schemas}"\nresponse_format_template = "{schema}"\n'
EFFORT = 'REASONING_EFFORT_MAX = "much"\n'


def _write(path: Path, text: str | bytes) -> Path:
    (path / "encoding").mkdir()
    data = text.encode() if isinstance(text, str) else text
    (path / "encoding" / "encoding_dsv4.py").write_bytes(data)
    return path


def test_texts_are_read_and_substituted(chat_dir: Path) -> None:
    texts = FixedTexts.from_dir(chat_dir)
    assert texts.tools([{"name": "f"}, {"name": "é", "n": [1, 2]}]) == (
        "# Test gadgets\n"
        "Open with <｜DSML｜tool_calls>, braces {x}, in <think></think>.\n"
        '{"name": "f"}\n{"name": "é", "n": [1, 2]}\n'
        "END\n"
    )
    assert texts.response_format({"type": "json_object"}) == '# Test form\n{"type": "json_object"}'
    assert texts.effort_max() == "Test effort.\nMuch.\n\n"


def test_ends_do_not_depend_on_the_literals_line_feeds(tmp_path: Path) -> None:
    texts = FixedTexts.from_dir(_write(tmp_path, WHOLE + EFFORT))
    assert texts.tools([{"a": "{schema}"}]) == '{"a": "{schema}"}\n'  # values are not substituted
    assert texts.effort_max() == "much\n\n"


def test_without_the_folder_neutral_texts_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ftruntime"):
        texts = FixedTexts.from_dir(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path) in caplog.text
    tools = texts.tools([{"name": "f"}])
    assert tools.endswith('{"name": "f"}\n')
    for tag in (
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="',
        '<｜DSML｜parameter name="',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜tool_calls>",
    ):
        assert tag in tools
    assert texts.response_format({"type": "json_object"}).endswith('{"type": "json_object"}')
    assert texts.effort_max().strip()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (WHOLE, "no REASONING_EFFORT_MAX, expected it assigned as a string literal"),
        (WHOLE + 'REASONING_EFFORT_MAX = "a" * 3\n', "no REASONING_EFFORT_MAX"),
        (WHOLE + "def f():\n  " + EFFORT, "no REASONING_EFFORT_MAX"),
        (WHOLE + EFFORT + "(", "not valid Python"),
        ("x = " + "-" * 100_000 + "1\n" + WHOLE + EFFORT, "nested too deeply"),
        (b"\xff\xfe", "not valid Python"),
        (WHOLE.replace("{schema}", "{other}") + EFFORT, "placeholder 'other', which has no value"),
        (WHOLE.replace("{schema}", "{schema!r}") + EFFORT, "placeholder 'schema'"),
        (WHOLE.replace("{tool_schemas}", "{") + EFFORT, "Single '{' encountered"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        FixedTexts.from_dir(_write(tmp_path, content))
    assert "encoding_dsv4.py: " in str(error.value)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    os.mkfifo(tmp_path / "encoding" / "encoding_dsv4.py")
    with pytest.raises(ValueError, match=r"encoding_dsv4\.py: not a regular file"):
        FixedTexts.from_dir(tmp_path)


def _file_for_the_folder(path: Path) -> Path:
    (path / "encoding").write_text("x")
    return path / "encoding"


def _link_to_itself(path: Path) -> Path:
    (path / "encoding").symlink_to("encoding")
    return path / "encoding"


def _dangling_link(path: Path) -> Path:
    (path / "encoding").mkdir()
    (path / FIXED_TEXTS_FILE).symlink_to("gone")
    return path / FIXED_TEXTS_FILE


@pytest.mark.parametrize("damage", [_file_for_the_folder, _link_to_itself, _dangling_link])
def test_what_is_damaged_does_not_pass_for_absent(
    tmp_path: Path, damage: Callable[[Path], Path]
) -> None:
    named = damage(tmp_path)
    with pytest.raises(ValueError, match=rf"{named}: not a .*, expected one or none"):
        FixedTexts.from_dir(tmp_path)


def test_neutral_texts_that_are_missing_are_not_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_texts, "DEMO_DIRECTORY", tmp_path / "installed")
    with pytest.raises(ValueError, match=f"{tmp_path}/installed/{FIXED_TEXTS_FILE}: cannot be"):
        FixedTexts.from_dir(tmp_path)
    assert caplog.records == []
