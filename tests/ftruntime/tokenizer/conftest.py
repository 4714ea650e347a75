"""A small byte-level tokenizer with the model's special tokens, and fixed texts of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer

SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
ADDED = [
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>",
    "<｜extracted_url｜>", "<｜read_url｜>",
]  # fmt: skip

ENCODING = '''
"""Texts of a test checkpoint."""
import os  # never executed: os.missing would raise
BROKEN = os.missing

dsml_token: str = "｜DSML｜"
noun = "gadgets"
COMPUTED = "a" + noun

TOOLS_TEMPLATE = """# Test {noun}
Open with <{dsml_token}tool_calls>, braces {{x}}, in {thinking_start_token}{thinking_end_token}.
{tool_schemas}
END
"""

response_format_template: str = (
    "# Test form\\n"
    "{schema}"
)
REASONING_EFFORT_MAX = (
    "Test effort.\\n"
    "Much.\\n\\n"
)
'''


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat said the word there 你好 hello hello"] * 9, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tokenizer_dir)


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    (path / "encoding").mkdir()
    (path / "encoding" / "encoding_dsv4.py").write_text(ENCODING, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chat(chat_dir: Path) -> ChatFormat:
    return ChatFormat.from_dir(chat_dir)
