"""Incremental decoding: no broken characters, the same text as decoding at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftruntime.tokenizer.detokenize import IncrementalDetokenizer
from ftruntime.tokenizer.tokenizer import Tokenizer


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Single-byte tokens, so that every character is split wherever it can be."""
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [of_byte[bytes([b])] for b in data]


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDetokenizer(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def test_h07_character_split_over_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "é你🙂".encode())
    assert _pieces(tokenizer, ids) == ["", "é", "", "", "你", "", "", "", "🙂", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_h07_character_cut_off_by_the_end_is_dropped(tokenizer: Tokenizer, cut: int) -> None:
    ids = _byte_ids(tokenizer, b"a" + "🙂".encode()[:cut])
    assert "".join(_pieces(tokenizer, ids)) == "a"


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xffa", ["\ufffd", "a", ""]),  # never a first byte
        (b"\x80", ["\ufffd", ""]),  # continuation without a start
        (b"\xe4\xbda", ["", "", "\ufffda", ""]),  # cut short by a letter
        (b"\xe0\x80", ["", "\ufffd\ufffd", ""]),  # overlong: invalid at the second byte
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),  # a surrogate: with its last byte
        (b"\xf0\x9f\xf0\x9f\x99\x82", ["", "", "\ufffd", "", "", "🙂", ""]),
    ],
)
def test_h07_invalid_bytes_are_shown_as_soon_as_they_are_certain(
    tokenizer: Tokenizer, data: bytes, pieces: list[str]
) -> None:
    assert _pieces(tokenizer, _byte_ids(tokenizer, data)) == pieces


def test_special_tokens_are_never_visible(tokenizer: Tokenizer) -> None:
    text = "<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜><｜▁pad▁｜><think>"
    ids = tokenizer.encode(text)
    assert "".join(_pieces(tokenizer, ids)) == "a<think>"
    shown = IncrementalDetokenizer(tokenizer, skip_special=False)
    assert "".join(shown.push(i) for i in ids) == text


def test_flush_forgets_the_cut_off_character(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDetokenizer(tokenizer)
    first, second = _byte_ids(tokenizer, "é".encode())
    assert decoder.push(first) == ""
    assert decoder.flush() == ""
    assert decoder.push(second) == "\ufffd"


@settings(deadline=None)
@given(data=st.data())
def test_equals_decoding_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_h07_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    ids = _byte_ids(tokenizer, text.encode())
    for end in range(len(ids) + 1):
        shown = "".join(_pieces(tokenizer, ids[:end]))
        assert text.startswith(shown)
