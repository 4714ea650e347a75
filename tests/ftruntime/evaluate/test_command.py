"""``ftruntime eval``: its refusals, and its figures against transformers.

Mutants run, each noticed in this folder: windows without BOS, one window fewer, characters counted
in bytes; devices read, room for needles checked late or not, no word of special tokens.
"""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from ftruntime import cli, llm
from ftruntime.cli.evaluate import table
from ftruntime.demo import make_demo
from ftruntime.demo.presets import demo_config
from ftruntime.evaluate.settings import eval_specs
from ftruntime.flags import flag_name
from ftruntime.tokenizer import special
from tests.support.hf_model import build_hf

TEXT = "The lamp in the window burned until the morning caf\u00e9. " * 8


def invoke(*words):
    return CliRunner().invoke(cli.main, ["eval", *map(str, words)])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("eval") / "demo"
    make_demo(directory, preset="tiny")
    return directory


def test_the_help_has_sections_with_what_changes_the_figures():
    text = CliRunner().invoke(cli.main, ["eval", "--help"], terminal_width=300).stdout
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings[1:] == [
        "What is asked:", "What computes it (flags of serve):",
        "Every other flag of `serve` is accepted too: `ftruntime serve --help` lists them.",
    ]  # fmt: skip
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    assert {flag_name(name) for name in eval_specs()} | {"--needles", "--json"} <= listed
    assert {"--numerics", "--kv-format", "--moe-cache-rate"} <= listed
    assert not {"--port", "--api-key", "--max-decode-gap-ms"} & listed


def test_bits_are_those_of_transformers(demo, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    done = invoke(
        demo, "--text", file, "--context", 130, "--numerics", "exact", "--num-tokens", 1024,
        "--max-running-requests", 2, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    ids = Tokenizer.from_file(str(demo / "tokenizer.json")).encode(TEXT).ids
    nats = 0.0
    model = build_hf(demo)
    for start in range(0, len(ids), 129):
        row = torch.tensor([[0, *ids[start : start + 129]]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(row).logits[0, :-1], dim=-1)
        nats -= float(logprobs.gather(1, row[0, 1:, None]).double().sum())
    assert values["windows"] == math.ceil(len(ids) / 129) >= 2
    assert (values["tokens"], values["characters"]) == (len(ids), len(TEXT))
    assert values["bits_per_character"] == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-5)
    assert values["needles"] is None
    assert values["flags"] == {
        "numerics": "exact", "num_tokens": 1024, "max_running_requests": 2
    }  # fmt: skip
    shown = table({**values, "needles": [{"distance": 300, "found": 2, "trials": 3}]})
    assert f"bits per character  {values['bits_per_character']:.4f}" in shown
    assert "     300  2 of 3" in shown
    assert shown.splitlines()[:2] == [
        f"model               {demo}",
        "flags               --max-running-requests 2 --num-tokens 1024 --numerics exact",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "--text is missing, expected a UTF-8 file"),
        (("--text", "BAD"), "--text is BAD, expected a UTF-8 file (invalid start byte at byte 1)"),
        (("--text", "EMPTY"), "--text is EMPTY, expected a file that is not empty"),
        (("--text", "GOOD", "--context", "1"), "--context is 1, expected"),
        (("--text", "GOOD", "--context", "x"), "--context is x, expected"),
        (("--text", "GOOD", "--num-tokens", "1024", "--context", "1024"),
         "--context is 1024, expected at most 1023, one less than the longest sequence served"),
        (("--text", "GOOD", "--trials", "0"), "--trials is 0, expected"),
        (("--text", "NONE"),
         "--text is NONE, expected a file that can be read (No such file or directory)"),
        (("--text", "/dev/null"), "--text is /dev/null, expected a file or a pipe"),
        (("--text", "GOOD", "--max-model-len", "2"), "--max-model-len is 2, expected at least 3"),
    ],
)  # fmt: skip
def test_refusals(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(demo_config("tiny")))
    (tmp_path / "BAD").write_bytes(b"a\xff")
    (tmp_path / "EMPTY").write_bytes(b"")
    (tmp_path / "GOOD").write_text("good")
    done = invoke(tmp_path, *words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(sentence)


def test_needles_without_room_are_refused_before_the_model_is_loaded(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "build_engine", None)
    (tmp_path / "short").write_text("in the end " * 20)
    done = invoke(demo, "--text", tmp_path / "short", "--needles")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(
        r"--text has \d+ tokens, expected more than 340 to hide needles in\n", done.stderr
    )
    done = invoke(demo, "--text", tmp_path / "short", "--needles", "--max-model-len", 449)
    assert done.exit_code == 2
    assert done.stderr.startswith("--max-model-len is 449, expected at least 450 for needles")


def test_distances_left_out_are_told(demo, tmp_path, monkeypatch):
    class Loaded(Exception):
        pass

    def load(*args):
        raise Loaded

    monkeypatch.setattr(llm, "build_engine", load)
    (tmp_path / "text").write_text("in the end " * 400)
    done = invoke(demo, "--text", tmp_path / "text", "--needles", "--max-model-len", 1600)
    assert isinstance(done.exception, Loaded)
    told = r"no needles 1500, 2000, 3000 tokens back: --text has \d+ tokens and --max-model-len"
    assert re.search(told, done.stderr)


def test_special_tokens_that_are_spelled_out_are_told(demo, tmp_path):
    (tmp_path / "text").write_text(f"a {special.BOS} b {special.THINK_OPEN} c")
    done = invoke(demo, "--text", tmp_path / "text", "--num-tokens", 1024, "--json")
    assert done.exit_code == 0, done.output
    sentence = f"--text spells out 2 special tokens such as {special.BOS}: each is scored as one"
    assert done.stderr.count(sentence) == 1
