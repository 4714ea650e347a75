"""Text of a completion, token by token, never with a broken character.

Byte-level tokens may end inside a character. Its bytes are kept until the character is complete;
bytes that can no longer become one are shown as U+FFFD at once; what the end of generation cuts off
is dropped.
"""

from __future__ import annotations

import codecs

from ftruntime.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decoder of one completion. The pushed texts together equal `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text completed by this token: empty for a special token or inside a character."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the completion: an incomplete character is dropped, so the rest is always empty."""
        self._decoder.reset()
        return ""
