"""Encoding and bytes, against the `tokenizers` library's own decoder and worked texts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from ftruntime.tokenizer.tokenizer import Tokenizer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def test_named_ids_come_from_the_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_token_id == tokenizer.token_to_id(BOS) == 0
    assert tokenizer.eos_token_id == tokenizer.token_to_id(EOS) == 1
    assert tokenizer.token_to_id("no such token") is None


def test_encode_adds_nothing_even_if_the_file_would(copy: Path) -> None:
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    backend.enable_truncation(2)
    backend.save(str(copy / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(copy)
    assert tokenizer.encode("AAA") == [tokenizer.token_to_id("A")] * 3


def test_encode_adds_nothing_and_recognises_added_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{BOS}<｜User｜>A</think>")
    named = [tokenizer.token_to_id(t) for t in (BOS, "<｜User｜>", "A", "</think>")]
    assert ids == named
    assert tokenizer.encode("") == []
    assert tokenizer.encode("A") == [tokenizer.token_to_id("A")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A", b"A"), ("Ġ", b" "), ("Ċ", b"\n"), ("ł", b"\xa0"), ("Ń", b"\xad"), ("ÿ", b"\xff"),
        ("Ā", b"\x00"), ("¡", b"\xa1"), ("<think>", b"<think>"),
        ("｜DSML｜", "｜DSML｜".encode()),
    ],
)  # fmt: skip
def test_token_bytes_undo_the_byte_alphabet(
    tokenizer: Tokenizer, text: str, expected: bytes
) -> None:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == expected


def test_ids_without_an_entry_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""


def test_only_bos_eos_and_pad_are_special(tokenizer: Tokenizer) -> None:
    hidden = {i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
    assert hidden == {tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)}


def test_decode_skips_special_tokens_and_shows_the_others(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{BOS}<｜User｜>hi <think>{EOS}{PAD}")
    assert tokenizer.decode(ids) == "<｜User｜>hi <think>"
    assert tokenizer.decode(ids, skip_special=False) == f"{BOS}<｜User｜>hi <think>{EOS}{PAD}"


def test_decode_drops_a_cut_off_character_but_shows_invalid_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")  # four tokens of one byte each after the letter
    assert tokenizer.decode(ids[:-1]) == "a"
    assert tokenizer.decode([*ids[:-1], ids[0]]) == "a\ufffda"


@settings(deadline=None)
@given(text=TEXTS)
def test_encode_decode_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@settings(deadline=None)
@given(text=TEXTS)
def test_decode_agrees_with_the_library(
    tokenizer_dir: Path, tokenizer: Tokenizer, text: str
) -> None:
    backend = Backend.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text)) == backend.decode(tokenizer.encode(text))


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2, expected valid Unicode"):
        tokenizer.encode("ab\ud800")


@pytest.fixture
def copy(tokenizer_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_dir, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "missing"), ("{", "not valid JSON"), ("[1]", "expected an object")],
)
def test_bad_file_is_named(copy: Path, name: str, content: str | None, sentence: str) -> None:
    (copy / name).unlink() if content is None else (copy / name).write_text(content)
    with pytest.raises(ValueError, match=sentence) as error:
        Tokenizer.from_dir(copy)
    assert str(copy / name) in str(error.value)


def test_json_that_is_no_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file"):
        Tokenizer.from_dir(copy)


def test_unknown_eos_text_is_refused(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</nothing>"}))
    with pytest.raises(ValueError, match="no token '</nothing>', the eos_token of"):
        Tokenizer.from_dir(copy)
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": 7}))
    with pytest.raises(ValueError, match="eos_token is 7, expected a token text"):
        Tokenizer.from_dir(copy)


def test_names_fall_back_to_the_model_texts(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_dir(copy)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_think_tokens_stay_visible_whatever_their_flag(copy: Path) -> None:
    file = copy / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["special"] = True
    file.write_text(json.dumps(data), encoding="utf-8")
    tokenizer = Tokenizer.from_dir(copy)
    text = "<think>x</think><｜DSML｜tool_calls>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("<｜User｜>x")) == "x"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_is_refused_instead_of_waited_for(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(ValueError, match=f"{name}: not a regular file"):
        Tokenizer.from_dir(copy)


def test_ids_are_held_against_the_model(tokenizer: Tokenizer) -> None:
    fitting = {"bos_token_id": 0, "eos_token_ids": (7, 1), "vocab_size": tokenizer.vocab_size}
    tokenizer.check_model(**fitting)  # type: ignore[arg-type]
    highest = tokenizer.vocab_size - 1
    for change, text in (
        ({"bos_token_id": 2}, "bos_token has id 0, expected 2, the bos_token_id of config.json"),
        ({"eos_token_ids": (7, 8)}, "eos_token has id 1, expected 7 or 8, the eos_token_id of"),
        ({"vocab_size": highest}, f"highest token id is {highest}, expected ids below {highest}"),
    ):
        with pytest.raises(ValueError, match=text):
            tokenizer.check_model(**{**fitting, **change})  # type: ignore[arg-type]
