"""``ftruntime eval``: its refusals, and its figures against transformers.

Mutants run, each noticed in this folder: windows without BOS, one window fewer, characters counted
in bytes; devices read, room for needles checked late or not, no word of special tokens; a switch
shown with a value, a key shown, told from the environment or among the flags, flags that do not act
shown or not told, those of the plan or of ranks forgotten, those of decode always or never left
out, needles' flags taken without needles; a byte order mark kept, or one that shifts where a byte
is wrong; distances left out not in the values, or with a reason that does not bind, one window in
the plural; another flag named for a length than the one that limits it, tokens told as pages.
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
from ftruntime.config import DeviceFacts, RuntimeConfig, flag_specs, resolve
from ftruntime.demo import make_demo
from ftruntime.demo.presets import demo_config
from ftruntime.evaluate import score
from ftruntime.evaluate.settings import eval_specs, help_sections, unused_flags
from ftruntime.flags import flag_name
from ftruntime.model.config import builtin
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
        "Every other flag of `serve` is accepted too, and named where it has no effect: "
        "`ftruntime serve --help` lists them.",
    ]  # fmt: skip
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    assert lines["--text"].endswith("[default: none, required]")
    least, tokens = score.DISTANCES[0] + 40, round(sum(score.DISTANCES) * 1.05, -3)
    assert f"more than {least} tokens" in lines["--needles"]
    assert f"about {tokens:.0f} tokens more a trial" in lines["--needles"]
    assert "{} to {} tokens later".format(*score.DISTANCES[::5]) in lines["--needles"]
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
    needles = [
        {"distance": 300, "found": 2, "trials": 3}, {"distance": 600, "found": 0, "trials": 0},
    ]  # fmt: skip
    shown = table({**values, "needles": needles})
    assert f"bits per character  {values['bits_per_character']:.4f}" in shown
    assert f" in {values['windows']} windows of up to 130" in shown
    assert " in 1 window of up to 9" in table({**values, "windows": 1, "context": 9})
    assert shown.splitlines()[-2:] == ["     300  2 of 3", "     600  left out"]
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
         "--context is 1024, expected at most 1023, one less than the longest sequence by "
         "--num-tokens 1024"),
        (("--text", "GOOD", "--num-pages", "8", "--context", "1024"),
         "--context is 1024, expected at most 1023, one less than the longest sequence by "
         "--num-pages 8"),
        (("--text", "GOOD", "--num-pages", "8", "--context", "900", "--max-model-len", "900"),
         "--context is 900, expected at most 899, one less than the longest sequence by "
         "--max-model-len 900"),
        (("--text", "GOOD", "--needles", "--trials", "0"), "--trials is 0, expected an integer in"),
        (("--text", "GOOD", "--trials", "10"),
         "--trials is 10, expected it unset without --needles"),
        (("--text", "GOOD", "--seed", "0"), "--seed is 0, expected it unset without --needles"),
        (("--text", "MARK"), "--text is MARK, expected a file that is not empty"),
        (("--text", "MARKED"),
         "--text is MARKED, expected a UTF-8 file (invalid start byte at byte 4)"),
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
    (tmp_path / "MARK").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "MARKED").write_bytes(b"\xef\xbb\xbfa\xff")
    done = invoke(tmp_path, *words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(sentence)


class Loaded(Exception):
    """Nothing was refused."""


@pytest.fixture
def until_loaded(demo, tmp_path, monkeypatch):
    """The end of `eval` on the demo with a text and more words, where the model would be loaded."""

    def load(*args):
        raise Loaded

    monkeypatch.setattr(llm, "build_engine", load)

    def evaluate(text, *words):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        return invoke(demo, "--text", tmp_path / "text", *words)

    return evaluate


def test_needles_without_room_are_refused_before_the_model_is_loaded(until_loaded, tmp_path, demo):
    path = re.escape(str(tmp_path / "text"))
    done = until_loaded("in the end " * 20, "--needles")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"--text is {path} with \d\d+ tokens, expected more than 340 with --needles\n", done.stderr
    )
    done = until_loaded("a", "--needles")
    assert re.match(rf"--text is {path} with 1 token, expected", done.stderr)
    # 340 tokens of text, and 110 around them
    for flag, value, least in (
        ("--max-model-len", 449, 450), ("--num-tokens", 384, 512), ("--num-pages", 3, 4),
    ):  # fmt: skip
        done = until_loaded("in the end " * 20, "--needles", flag, value)
        assert done.exit_code == 2
        expected = f"{flag} is {value}, expected at least {least} with --needles"
        assert done.stderr.splitlines()[-1].endswith(expected)
        allowed = until_loaded("in the end " * 200, "--needles", flag, least)
        assert isinstance(allowed.exception, Loaded)


@pytest.mark.parametrize(
    ("repeats", "words", "told"),
    [
        (9000, ("--max-model-len", 2000),
         ["no needles 2000, 3000 tokens back: --max-model-len is 2000, too few"]),
        (300, ("--num-tokens", 8192),
         ["no needles 1500, 2000, 3000 tokens back: --text has N tokens, too few"]),
        (300, ("--max-model-len", 1600),
         ["no needles 1500, 2000, 3000 tokens back: --text has N tokens and --max-model-len is "
          "1600, too few"]),
        (300, ("--max-model-len", 2000),
         ["no needles 1500 tokens back: --text has N tokens, too few",
          "no needles 2000, 3000 tokens back: --text has N tokens and --max-model-len is 2000, "
          "too few"]),
        (9000, ("--num-pages", 16),
         ["no needles 2000, 3000 tokens back: --num-pages is 16, too few"]),
        (9000, ("--num-tokens", 8192), []),
    ],
)  # fmt: skip
def test_distances_left_out_are_told_with_what_binds(repeats, words, told, until_loaded):
    done = until_loaded("in the end " * repeats, "--needles", *words)
    assert isinstance(done.exception, Loaded)
    lines = [line.split(": ", 1)[1] for line in done.stderr.splitlines()]
    assert [re.sub(r"has \d{4} tokens", "has N tokens", line) for line in lines] == told


def test_a_distance_that_is_left_out_has_no_trials(demo, tmp_path):
    (tmp_path / "text").write_text("in the end " * 150)
    words = ("--needles", "--trials", 2, "--max-model-len", 460, "--num-tokens", 1024, "--json")
    done = invoke(demo, "--text", tmp_path / "text", *words)
    assert done.exit_code == 0, done.output
    asked, *others = json.loads(done.stdout)["needles"]
    assert (asked["distance"], asked["trials"]) == (300, 2)
    assert others == [
        {"distance": distance, "trials": 0, "found": 0, "recall": None}
        for distance in score.DISTANCES[1:]
    ]


SERVING = (
    "--port", 8080, "--host", "::1", "--served-model-name", "x", "--max-body-mb", 1,
    "--enable-cache-report", "--max-waiting-tokens", 9, "--max-waiting-requests", 9,
    "--request-timeout-s", 1, "--shutdown-timeout-s", 1, "--decode-log-interval", 3,
)  # fmt: skip


def test_flags_without_effect_are_told_and_not_shown(demo, tmp_path):
    (tmp_path / "text").write_text("in the end")
    acting = ("--num-tokens", 1024, "--moe-backend", "offload", "--moe-cache-auto")
    idle = (*SERVING, "--api-key", "hush-hush", "--disable-pynccl", "--decode-interleave-every", 8,
            "--max-decode-gap-ms", 900, "--stall-timeout-s", 9)  # fmt: skip
    names = {word for word in idle if str(word).startswith("--")}
    done = invoke(demo, "--text", tmp_path / "text", *acting, *idle)
    assert done.exit_code == 0, done.output
    assert "hush" not in done.output
    told = [line.split(": ", 1)[1] for line in done.stderr.splitlines()]
    assert all(line.startswith("flag without effect --") for line in told)
    assert sorted(line.split()[3].split("=")[0] for line in told) == sorted(names)
    assert "flag without effect --api-key=***: eval serves no clients" in told
    assert "flag without effect --port=8080: eval serves no clients" in told
    assert done.stdout.splitlines()[1] == (
        "flags               --moe-backend offload --moe-cache-auto --num-tokens 1024"
    )
    # a key of the environment is meant for a server
    quiet = CliRunner(env={"FTRUNTIME_API_KEY": "hush-hush"}).invoke(
        cli.main, ["eval", str(demo), "--text", str(tmp_path / "text"), "--num-tokens", "1024",
                   "--json"],
    )  # fmt: skip
    assert quiet.exit_code == 0, quiet.output
    assert json.loads(quiet.stdout)["flags"] == {"num_tokens": 1024}
    assert quiet.stderr == ""


def test_what_acts_depends_on_needles_and_ranks():
    config = RuntimeConfig.from_flags(
        decode_interleave_every=8, max_decode_gap_ms=900, stall_timeout_s=9, admission="optimistic"
    )
    alone = unused_flags(config, needles=False)
    assert list(alone) == ["decode_interleave_every", "max_decode_gap_ms", "stall_timeout_s"]
    assert list(unused_flags(config, needles=True)) == ["stall_timeout_s"]
    ranks = RuntimeConfig.from_flags(tensor_parallel_size=2, stall_timeout_s=9, port=1919)
    assert unused_flags(ranks, needles=True) == {"port": "eval serves no clients"}


# another value than the default of each flag that is left out
OTHERS = {
    "served_model_name": "x", "host": "::1", "port": 80, "api_key": "x", "max_waiting_requests": 9,
    "max_waiting_tokens": 9, "request_timeout_s": 9, "shutdown_timeout_s": 9, "max_body_mb": 9,
    "enable_cache_report": True, "decode_log_interval": 9, "decode_interleave_every": 9,
    "max_decode_gap_ms": 900, "stall_timeout_s": 9,
}  # fmt: skip
_QUEUE_AND_GAP = {
    "max_waiting_requests", "max_waiting_tokens", "max_decode_gap_s", "max_decode_gap_source",
    "notes", "warnings",
}  # fmt: skip


def test_what_is_left_out_changes_no_plan_and_the_help_lists_none_of_it():
    facts = DeviceFacts(kind="cuda", cards=1, memory_bytes=24 << 30)

    def planned(**flags):
        config = RuntimeConfig.from_flags(num_tokens=8192, **flags)
        values = resolve(config, builtin("flash"), facts, strict=False).to_dict()
        return {name: value for name, value in values.items() if name not in _QUEUE_AND_GAP}

    assert list(unused_flags(RuntimeConfig.from_flags(**OTHERS), needles=False)) == sorted(OTHERS)
    bare = planned()
    assert all(planned(**{name: value}) == bare for name, value in OTHERS.items())
    listed = help_sections()["What computes it (flags of serve)"]
    assert set(listed) <= flag_specs().keys() - OTHERS.keys()


def test_a_byte_order_mark_is_no_text(demo, tmp_path):
    found = []
    for start in ("", "\ufeff"):
        (tmp_path / "text").write_text(start + "in the end", encoding="utf-8")
        done = invoke(demo, "--text", tmp_path / "text", "--num-tokens", 1024, "--json")
        values = json.loads(done.stdout)
        found.append((values["characters"], values["tokens"], values["bits_per_character"]))
    assert found[0] == found[1]


def test_special_tokens_that_are_spelled_out_are_told(demo, tmp_path):
    (tmp_path / "text").write_text(f"a {special.BOS} b {special.THINK_OPEN} c")
    done = invoke(demo, "--text", tmp_path / "text", "--num-tokens", 1024, "--json")
    assert done.exit_code == 0, done.output
    sentence = f"--text spells out 2 special tokens such as {special.BOS}: each is scored as one"
    assert done.stderr.count(sentence) == 1
    (tmp_path / "text").write_text(f"a {special.BOS} b")
    done = invoke(demo, "--text", tmp_path / "text", "--num-tokens", 1024, "--json")
    assert "--text spells out 1 special token such as" in done.stderr
