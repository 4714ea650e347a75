"""A byte-level BPE tokenizer, trained on a short text of our own unless another is given.

Ids: BOS 0, EOS 1, pad 2, then 256 byte tokens and the merges, then the role, thinking and markup
tokens. As in the official tokenizer only BOS, EOS and pad carry the special flag, and nothing adds
a BOS by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
PAD: Final = "<｜▁pad▁｜>"
SPECIAL_TOKENS: Final = (BOS, EOS, PAD)
ADDED_TOKENS: Final = (
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>",
    "<｜extracted_url｜>", "<｜read_url｜>",
)  # fmt: skip

_TEXT: Final = """
The harbour was quiet when the first boats came home. A thin fog lay over the water, and the lamps
along the quay burned yellow in the grey morning. An old man stood by the rail and counted the masts
as they passed the light. He knew every one of them by name, and he knew the people who sailed in
them. There had been a time when he would have been out there too, but now he was content to watch
and to wait for the news they brought.

What did they bring today? Some had fish, some had rope and timber from the north, and one had
nothing at all but a story. The captain told it in the kitchen, while the kettle was singing and the
children were listening at the door. "We saw an island," he said, "where there should have been only
water. It had a hill, a river and a small white house. Nobody answered when we called. In the
evening a lamp was lit in the window, and in the morning the island was gone." The others laughed,
but they asked him to tell it again, and then once more before they went to sleep.

The next day the weather changed. The wind came from the west and the clouds were moving quickly
over the hills. In the town the shops opened early. The baker was putting bread in the window, the
teacher was walking to the school with her books under her arm, and the doctor was looking for his
hat. Everything that happens in a small place is known to everyone, and so by noon they had all
heard about the island with the white house and the lamp.

Some thought that it was a good sign, and others thought that it was not. "When the sea shows you
something," the teacher said, "it is because you have been looking at it for a long time. Look at
the stars instead, or at a page of a good book, and you will see other things." She wrote the story
on the board, so that the children could learn the words, and she asked them to draw the house.
There were thirty drawings, and no two of them were the same.

Years later one of those children became a sailor and then a captain. She had kept her drawing in a
box, together with a pencil, a shell and a letter. One night, far from the coast, she saw a light
where there should have been only water. She did not call, and she did not tell anyone. She put the
lamp in her own window and let it burn until the morning, because it seemed to her that somebody
over there might be counting, and would like to know that the boats were on their way home. Then she
turned the wheel, found the wind and went on with her work.
"""


def build_tokenizer(vocab_size: int, texts: Iterable[str] = (_TEXT,)) -> Tokenizer:
    """Train a demo tokenizer on `texts`; it has exactly `vocab_size` ids and is the same every
    time.

    Raises:
        ValueError: the text is too short for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at most {tokenizer.get_vocab_size()}: "
            "the training text yields no more merges"
        )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The `tokenizer_config.json` beside it."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def readable_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text alone is printable (line feed included) and that are no special or added
    token."""
    reserved = set(SPECIAL_TOKENS) | set(ADDED_TOKENS)
    texts = {
        token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        for token, token_id in tokenizer.get_vocab().items()
        if token not in reserved
    }
    return sorted(
        token_id
        for token_id, text in texts.items()
        if "\ufffd" not in text and text.replace("\n", " ").isprintable()
    )
