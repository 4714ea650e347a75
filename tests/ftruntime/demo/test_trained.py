"""The trained demo checkpoint of the installation: what it is made of, and that it has learnt.

Mutants run, each noticed: random weights in its place, rows off the index, a window of half.
"""

from __future__ import annotations

import pytest

from ftruntime import LLM
from ftruntime.distribution import demo_directory
from ftruntime.evaluate.score import score_needles, score_text
from ftruntime.model.config import ModelConfig
from tests.support.files import files_of

# Genesis 27, which the training never saw; it scores near 1.1 bits a character, English near 4.4
# by its letters alone
PASSAGE = (
    "Genesis 27\n"
    "And it came to pass, that when Isaac was old, and his eyes were dim, so that he could "
    "not see, he called Esau his eldest son, and said unto him, My son: and he said unto him, "
    "Behold, here am I.\n"
    "And he said, Behold now, I am old, I know not the day of my death:\n"
    "Now therefore take, I pray thee, thy weapons, thy quiver and thy bow, and go out to the "
    "field, and take me some venison;\n"
    "And make me savoury meat, such as I love, and bring it to me, that I may eat; that my "
    "soul may bless thee before I die.\n"
    "And Rebekah heard when Isaac spake to Esau his son. And Esau went to the field to hunt "
    "for venison, and to bring it.\n"
    "And Rebekah spake unto Jacob her son, saying, Behold, I heard thy father speak unto Esau "
    "thy brother, saying,\n"
    "Bring me venison, and make me savoury meat, that I may eat, and bless thee before the "
    "LORD before my death.\n"
    "Now therefore, my son, obey my voice according to that which I command thee.\n"
    "Go now to the flock, and fetch me from thence two good kids of the goats; and I will "
    "make them savoury meat for thy father, such as he loveth:\n"
    "And thou shalt bring it to thy father, that he may eat, and that he may bless thee "
    "before his death.\n"
    "And Jacob said to Rebekah his mother, Behold, Esau my brother is a hairy man, and I am a "
    "smooth man:\n"
)


@pytest.fixture(scope="module")
def llm():
    with LLM(numerics="exact", num_tokens=8192, device="cpu") as llm:
        yield llm


def test_it_is_small_and_says_where_it_comes_from():
    files = files_of(demo_directory()).values()
    assert sum(file.stat().st_size for file in files) < 16_000_000
    assert "bible-kjv-text" in (demo_directory() / "NOTICE.md").read_text()
    config = ModelConfig.from_dir(demo_directory())
    assert set(config.compress_ratios) == {0, 4, 128}
    assert (config.n_routed_experts, config.n_shared_experts) == (16, 1)
    assert config.num_hash_layers >= 1
    assert config.moe_intermediate_size >= 256
    # eight ranks share it out
    assert config.num_attention_heads % 8 == config.o_groups % 8 == config.vocab_size % 8 == 0


def test_unseen_text_costs_it_few_bits(llm):
    score = score_text(llm, llm.tokenizer, PASSAGE, context=1024, together=1)
    assert score.bits_per_character < 1.4


def test_it_finds_what_was_said_before_its_window(llm):
    found = score_needles(
        llm, llm.tokenizer, PASSAGE * 4, trials=4, seed=1, longest=1000, together=4
    )
    assert [recall.distance for recall in found] == [300, 600]
    assert sum(recall.found for recall in found) >= 6, found
