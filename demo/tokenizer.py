"""The tokenizer of a training folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from demo import shape
from demo.files import replaced
from ftruntime.demo.vocabulary import build_tokenizer

FILE: Final = "tokenizer.json"


def tokenizer_of(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer in `folder`, trained on `texts` first if it is not there.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file is no tokenizer of this vocabulary, or the texts are too short for one.
    """
    file = folder / FILE
    if not file.exists():
        trained = build_tokenizer(shape.VOCAB_SIZE, texts).to_str(pretty=True)
        with replaced(file) as partial:
            partial.write_text(trained, encoding="utf-8")
    content = file.read_bytes()
    hint = "removed, it is trained again from the text"
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read as a tokenizer; {hint}") from error
    if tokenizer.get_vocab_size() != shape.VOCAB_SIZE:
        raise ValueError(
            f"{file} has {tokenizer.get_vocab_size()} ids, expected {shape.VOCAB_SIZE}; {hint}"
        )
    return tokenizer
