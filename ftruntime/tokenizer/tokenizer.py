"""Byte-level BPE tokenizer of a checkpoint directory, with the bytes of every token.

`tokenizer.json` does the encoding. Decoding works on bytes, so that a text decoded at once and one
decoded token by token agree: see `detokenize`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from ftruntime.tokenizer import special

# tokens the completion parser needs to see, whatever flag a tokenizer file gives them
_VISIBLE = frozenset({special.THINK_OPEN, special.THINK_CLOSE, special.DSML})
_NAMED = (("bos_token", special.BOS), ("eos_token", special.EOS), ("pad_token", special.PAD))


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text and gives each token's bytes. Made by `from_dir`; immutable.

    Attributes:
        vocab_size: highest token id + 1; ids in between may be without an entry.
        bos_token_id: begin of sentence, the first token of a chat prompt.
        eos_token_id: end of sentence, what ends a completion.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    table: tuple[bytes, ...] = field(repr=False)  # bytes of every id
    special_ids: frozenset[int]
    bos_token_id: int
    eos_token_id: int

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json` and `tokenizer_config.json` of a checkpoint directory.

        Raises:
            ValueError: a file is missing or damaged, or without BOS or EOS; names the file.
        """
        file, config_file = path / "tokenizer.json", path / "tokenizer_config.json"
        _read_json(file)  # a clearer sentence than the library's for text that is not JSON
        config = _read_json(config_file)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file}: not a tokenizer file, {error}") from error
        backend.no_truncation()
        backend.no_padding()
        named = {}
        for name, default in _NAMED:
            text = _token_text(config, name, default, config_file)
            token_id = backend.token_to_id(text)
            if token_id is not None:
                named[name] = token_id
            elif name != "pad_token":
                raise ValueError(f"{file}: no token {text!r}, the {name} of {config_file.name}")
        added = backend.get_added_tokens_decoder()
        hidden = {i for i, t in added.items() if t.special and t.content not in _VISIBLE}
        hidden.update(named.values())
        return cls(
            backend=backend,
            table=_byte_table(backend.get_vocab(), {i: t.content for i, t in added.items()}),
            special_ids=frozenset(hidden),
            bos_token_id=named["bos_token"],
            eos_token_id=named["eos_token"],
        )

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def check_model(
        self, *, bos_token_id: int, eos_token_ids: Collection[int], vocab_size: int
    ) -> None:
        """Refuse to serve a model of other ids than these.

        Args:
            bos_token_id, eos_token_ids, vocab_size: of the checkpoint's config.json.

        Raises:
            ValueError: names the file and the id.
        """
        if self.bos_token_id != bos_token_id:
            raise ValueError(
                f"tokenizer.json: the bos_token has id {self.bos_token_id}, expected "
                f"{bos_token_id}, the bos_token_id of config.json"
            )
        if self.eos_token_id not in eos_token_ids:
            raise ValueError(
                f"tokenizer.json: the eos_token has id {self.eos_token_id}, expected "
                f"{' or '.join(map(str, eos_token_ids))}, the eos_token_id of config.json"
            )
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer.json: the highest token id is {self.vocab_size - 1}, expected ids "
                f"below {vocab_size}, the vocab_size of config.json"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. No BOS is added; added tokens in the text are recognised.

        Raises:
            ValueError: `text` holds a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at character {error.start}, expected valid Unicode"
            ) from None
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Invalid bytes become U+FFFD; a character cut off by the end is dropped."""
        data = b"".join(
            self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))
        )
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, an added one's text in UTF-8; `b""` for an id without an entry."""
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is never part of a completion's text: BOS, EOS, pad and their like."""
        return token_id in self.special_ids

    def token_to_id(self, text: str) -> int | None:
        """Id of the token whose text in the vocabulary is exactly `text`."""
        token_id: int | None = self.backend.token_to_id(text)
        return token_id


def _read_json(file: Path) -> Mapping[str, object]:
    # a pipe would wait for its writer
    if file.exists() and not file.is_file():
        raise ValueError(f"{file}: not a regular file, expected one in a checkpoint directory")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: missing, expected in a checkpoint directory") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read, {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON, {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _token_text(config: Mapping[str, object], name: str, default: str, file: Path) -> str:
    """Text of a named token: a string or an object with `content`; `default` if absent or null."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise ValueError(f"{file}: {name} is {value!r}, expected a token text")
    return value


def _byte_table(vocab: Mapping[str, int], added: Mapping[int, str]) -> tuple[bytes, ...]:
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    alphabet = _byte_of_character()
    for text, token_id in vocab.items():
        if token_id in added:
            table[token_id] = added[token_id].encode("utf-8")
        elif all(c in alphabet for c in text):
            table[token_id] = bytes(alphabet[c] for c in text)
        else:
            table[token_id] = text.encode("utf-8")
    return tuple(table)


def _byte_of_character() -> dict[str, int]:
    """Byte-level alphabet: printable Latin-1 stands for itself, other bytes from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table
