"""Wrong flags, bodies and checkpoints against the real command and a real server.

Each gets one sentence that names what is wrong, its value and what was expected, none gets a
traceback, and the server answers afterwards. `pytest -s` prints every sentence.
Mutants tried: exit code 1 for a flag, the key accepted without its scheme.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ftruntime import LLM
from tests.support.live import ROOT, Json, Launcher, Live, cli, free_port, greedy

HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Flags:
    """Flags of `serve`, and what its only line of stderr is."""

    given: Json
    sentence: str
    code: int = 2
    in_llm: bool = True  # `LLM(**given)` raises the same sentence

    def words(self) -> list[str]:
        out: list[str] = []
        for name, value in self.given.items():
            out += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return out


FLAGS = (
    Flags({"num_tokens": 100},
          "--num-tokens is 100, expected a multiple of 128 >= 128 (nearest: 128)"),
    Flags({"num_tokens": 1000},
          "--num-tokens is 1000, expected a multiple of 128 >= 128 (nearest: 896, 1024)"),
    Flags({"num_tokens": 1 << 39}, "--num-tokens is 549755813888, expected at most what fits"),
    Flags({"num_tokens": 128, "num_pages": 1}, "expected only one of --num-tokens and --num-pages"),
    Flags({"max_running_requests": 0}, "--max-running-requests is 0, expected an integer >= 1"),
    Flags({"decode_interleave_every": 0}, "--decode-interleave-every is 0, expected an integer"),
    Flags({"decode_interleave_every": -8}, "--decode-interleave-every is -8, expected an integer"),
    Flags({"decode_interleave_every": "two"}, "--decode-interleave-every is two, expected an int"),
    Flags({"decode_log_interval": 0.5}, "--decode-log-interval is 0.5, expected an integer >= 1"),
    Flags({"port": 70000}, "--port is 70000, expected an integer in [1, 65535] (nearest: 65535)"),
    Flags({"swa_full_tokens_ratio": 1.5}, "--swa-full-tokens-ratio is 1.5, expected a number in"),
    Flags({"memory_ratio": 0}, "--memory-ratio is 0, expected a number in (0, 1)"),
    Flags({"memory_ratio": 1e-6}, "the model needs ", code=1),
    Flags({"max_prefill_length": 64}, "--max-prefill-length is 64, expected an integer >= 128"),
    Flags({"numerics": "exakt"}, "expected one of official, exact (nearest: exact)"),
    Flags({"device": "tpu"}, "--device is tpu, expected one of auto, cuda, cpu"),
    Flags({"tensor_parallel_size": 3}, "--tensor-parallel-size is 3, expected a divisor of num_at"),
    Flags({"moe_cache_size": 2}, "--moe-cache-size is 2, expected 4 to 96"),
    Flags({"moe_cache_auto": True, "moe_cache_rate": 0.5}, "expected only one of --moe-cache-auto"),
    Flags({"max_model_len": 100_000}, "--max-model-len is 100000, expected at most the model's 65"),
    Flags({"max_model_len": 4096, "num_tokens": 2048}, "expected at most the KV capacity of 2048"),
    Flags({"kv_format": "fp8"}, "--kv-format is fp8, expected bf16: fp8 rows need head_dim 512"),
    Flags({"kv_format": "fp8", "numerics": "exact"}, "expected bf16 with --numerics exact"),
    Flags({"prefill_layer_groups": 0}, "--prefill-layer-groups is 0, expected"),
    Flags({"max_decode_gap_ms": 0}, "--max-decode-gap-ms is 0, expected"),
    Flags({"stall_timeout_s": "nan"}, "--stall-timeout-s is nan, expected a number in (0, "),
    Flags({"served_model_name": ""}, "--served-model-name is '', expected a non-empty string"),
    Flags({"no_such_flag": 1}, "--no-such-flag", in_llm=False),
    Flags({"host": "300.1.1.1"}, "--host is '300.1.1.1', expected an address", code=1,
          in_llm=False),
)  # fmt: skip


def one_line(process: subprocess.CompletedProcess[str], code: int) -> str:
    """What a refused command said last; lines before it are the log's."""
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert all(" ftruntime." in line for line in lines[:-1]), lines
    print(f"\n  {lines[-1]}")
    return lines[-1]


def serve(launcher: Launcher, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*cli(), "serve", str(model), *words], cwd=ROOT, env=launcher.env(), timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: " ".join(row.words())[:40])
def test_a_wrong_flag_ends_the_command_with_one_sentence(launcher: Launcher, row: Flags) -> None:
    line = one_line(serve(launcher, launcher.demo, *row.words()), row.code)
    assert row.sentence in line
    assert len(line) < 400


@pytest.mark.parametrize(
    "row", [row for row in FLAGS if row.in_llm], ids=lambda row: " ".join(row.words())[:40]
)
def test_llm_raises_the_same_sentence(launcher: Launcher, row: Flags) -> None:
    with pytest.raises(ValueError) as refused:
        LLM(launcher.demo, **row.given)
    assert row.sentence in str(refused.value)


@dataclass(frozen=True)
class Post:
    """A request, and its answer's status and sentence."""

    fields: object  # laid over a good body of the path; bytes are sent as they are
    sentence: str
    status: int = 400
    path: str = "completions"
    headers: Json = field(default_factory=dict)


POSTS = (
    Post(b"{", "body is not valid JSON"),
    Post(b"", "body is not valid JSON"),
    Post(b"\xff\xfe", "body is not valid JSON"),
    Post(b"[1]", "body is [1], expected a JSON object"),
    Post(b"[" * 100_000, "body is not valid JSON"),
    Post(b'{"prompt": "Hi", "temperature": NaN}', "body is not valid JSON"),
    Post({"prompt": None}, "prompt is None, expected a string, a list of strings, a list of token"),
    Post({"prompt": []}, "prompt is [], expected at least one token or text"),
    Post({"prompt": [1, 512]}, "prompt[1] is 512, expected a token id in [0, 512)"),
    Post({"prompt": [-1]}, "prompt[0] is -1, expected a token id"),
    Post({"prompt": [["a"]]}, "prompt is [['a']], expected"),
    Post({"prompt": {"a": 1}}, "prompt is {'a': 1}, expected"),
    Post({"max_tokens": 0}, "max_tokens is 0, expected an integer >= 1"),
    Post({"max_tokens": "5"}, "max_tokens is '5', expected an integer >= 1"),
    Post({"max_tokens": 10**30}, "max_tokens is 10000000000"),
    Post({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, expected at most max_tokens (8)"),
    Post({"temperature": -1}, "temperature is -1"),
    Post({"temperature": "hot"}, "temperature is 'hot', expected a number in [0, 100]"),
    Post({"top_p": 0}, "top_p is 0"),
    Post({"top_k": -2}, "top_k is -2, expected an integer in [-1, 2147483647]"),
    Post({"min_p": 2}, "min_p is 2"),
    Post({"seed": 2**63}, "seed is 9223372036854775808, expected a 64-bit integer"),
    Post({"n": 0}, "n is 0, expected an integer in [1, 128]"),
    Post({"n": 129}, "n is 129, expected an integer in [1, 128]"),
    Post({"stop": [""]}, "stop is [''], expected at most 16 non-empty strings"),
    Post({"stop": ["a"] * 17}, "expected at most 16 non-empty strings"),
    Post({"stop_token_ids": [512]}, "stop_token_ids is 512, expected token ids in [0, 512)"),
    Post({"min_tokens": 2, "stop_token_ids": [i for i in range(512) if i != 1]},
         "stop_token_ids is 512 ids with the end of sentence, the whole vocabulary, expected"),
    Post({"min_tokens": 2, "stop_token_ids": list(range(512)), "stream": True},
         "stop_token_ids is 512 ids with the end of sentence, the whole vocabulary, expected"),
    Post({"prompt": [[7]] * 100_000}, "prompt is [[7], [7]"),
    Post({"logit_bias": {"9" * 5000: 1}}, "logit_bias['99999"),
    Post({"logit_bias": {"x": 1}}, "logit_bias['x'] is 1"),
    Post({"logit_bias": {"5": 101}}, "logit_bias is {5: 101"),
    Post({"logprobs": 21}, "logprobs is 21, expected an integer in [0, 20]"),
    Post({"repetition_penalty": 0}, "repetition_penalty is 0"),
    Post({"presence_penalty": 3}, "presence_penalty is 3"),
    Post({"stream": 1}, "stream is 1, expected true or false"),
    Post({"stream_options": {"include_usage": True}}, "stream_options is {'include_usage': True}"),
    Post({"echo": True}, "echo is True, expected false: the prompt is not echoed"),
    Post({"best_of": 3}, "best_of is 3, expected 1 or null"),
    Post({"guided_regex": "a+"}, "guided_regex is 'a+', expected null"),
    Post({"model": "gpt-4"}, "model is 'gpt-4', expected 'demo'", 404),
    Post({"prompt": "x " * 40_000}, "expected at most 16383: the context is 16384 tokens"),
    Post({"messages": []}, "messages is [], expected", path="chat/completions"),
    Post({"messages": "Hi"}, "messages is 'Hi', expected", path="chat/completions"),
    Post({"messages": [{"role": "king"}]}, "messages[0]", path="chat/completions"),
    Post({"messages": [{"role": "user"}]}, "messages[0]", path="chat/completions"),
    Post({"messages": [{"role": "user", "content": 5}]}, "messages[0]", path="chat/completions"),
    Post({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]",
         path="chat/completions"),
    Post({"messages": [{"role": "user", "content": "\ud800"}]}, "body is not valid JSON",
         path="chat/completions"),
    Post({"tools": [{"type": "function"}]}, "tools[0]", path="chat/completions"),
    Post({"tools": "hammer"}, "tools is 'hammer', expected", path="chat/completions"),
    Post({"tool_choice": "required"}, "tool_choice is 'required', expected 'auto' or 'none'",
         path="chat/completions"),
    Post({"reasoning_effort": "huge"}, "reasoning_effort is 'huge', expected 'none', 'high' or",
         path="chat/completions"),
    Post({"response_format": {"type": "xml"}}, "response_format.type is 'xml', expected",
         path="chat/completions"),
    Post({"top_logprobs": 3}, "top_logprobs is 3, expected null unless logprobs is true",
         path="chat/completions"),
    Post({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21, expected an integer in",
         path="chat/completions"),
    Post({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is 3, expected",
         path="chat/completions"),
    Post({"prompt": "a", "messages": HI}, "prompt is 'a', expected one of prompt and messages",
         path="tokenize"),
    Post({}, "expected one of prompt and messages", path="tokenize"),
    Post({}, "POST /v1/nothing: Not Found", 404, path="nothing"),
    Post({}, "POST /v1/models: Method Not Allowed", 405, path="models"),
)  # fmt: skip

GOOD: dict[str, Json] = {
    "completions": {"prompt": "Hi", "max_tokens": 2},
    "chat/completions": {"messages": HI, "max_tokens": 2},
}


@pytest.mark.parametrize("row", POSTS, ids=lambda row: f"{row.path} {row.fields!r:.40}")
def test_a_wrong_body_gets_an_openai_error(server: Live, row: Post) -> None:
    body = GOOD.get(row.path, {})
    content = row.fields if isinstance(row.fields, bytes) else json.dumps(body | row.fields)
    answer = server.http.post(f"/v1/{row.path}", content=content, headers=row.headers)
    error = answer.json()["error"]
    print(f"\n  {answer.status_code} {error['message']}")
    assert answer.status_code == row.status
    assert row.sentence in error["message"]
    assert len(error["message"]) < 450
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_after_all_of_it_the_server_answers(server: Live) -> None:
    for row in POSTS[:12]:  # also at once, from one connection
        content = row.fields if isinstance(row.fields, bytes) else json.dumps(row.fields)
        server.http.post("/v1/completions", content=content)
    assert server.http.get("/health").status_code == 200
    assert server.complete("Hi", 2)["finish_reason"] == "length"
    server.wait_idle()
    assert "Traceback" not in server.log()


@pytest.fixture(scope="module")
def strict(launcher: Launcher) -> Iterator[Live]:
    flags = ("--num-tokens", "1024", "--api-key", "sesame", "--max-body-mb", "0.01",
             "--request-timeout-s", "0.3")  # fmt: skip
    with launcher.serving(*flags) as live:
        yield live


@pytest.mark.parametrize("header", [None, "sesame", "Basic sesame", "Bearer open", "Bearer"])
def test_a_wrong_key_is_401(strict: Live, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = strict.post("/v1/completions", greedy("Hi", 1), headers=headers)
    assert answer.status_code == 401
    assert "expected 'Bearer' and the API key" in answer.json()["error"]["message"]
    assert strict.http.get("/v1/stats", headers=headers).status_code == 401
    assert strict.http.get("/health").status_code == 200


def test_an_oversize_body_and_an_overlong_request_are_refused(strict: Live) -> None:
    key = {"Authorization": "Bearer sesame"}
    answer = strict.post("/v1/completions", greedy("x" * 20_000, 1), headers=key)
    assert answer.status_code == 413
    assert "--max-body-mb" in answer.json()["error"]["message"]
    answer = strict.post("/v1/completions", greedy("Hi", 900), headers=key)
    assert answer.status_code == 408
    assert "longer than 0.3 s (--request-timeout-s)" in answer.json()["error"]["message"]
    assert strict.post("/v1/completions", greedy("Hi", 1), headers=key).status_code == 200
    assert "sesame" not in strict.log()


def edit_json(name: str, change: Callable[[Json], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / name
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return damage


def edit_header(change: Callable[[Json], None]) -> Callable[[Path], None]:
    """Change the first shard's header; its tensors stay where they are."""

    def damage(directory: Path) -> None:
        file = min(directory.glob("*.safetensors"))
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def truncate(directory: Path) -> None:
    file = max(directory.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])


def main_norm(header: Json) -> Json:
    return next(v for k, v in header.items() if k.endswith("layers.0.attn_norm.weight"))


def reshape(header: Json) -> None:
    main_norm(header)["shape"].insert(0, 1)


def retype(header: Json) -> None:
    main_norm(header)["dtype"] = "F16"


def rename_type(header: Json) -> None:
    main_norm(header)["dtype"] = "F3_E1M1"


def drop_tensor(index: Json) -> None:
    del index["weight_map"]["norm.weight"]


def lead_out(index: Json) -> None:
    index["weight_map"]["norm.weight"] = "../elsewhere.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    name: str
    damage: Callable[[Path], Any]
    sentence: str
    code: int = 1


CHECKPOINTS = (
    Checkpoint("no directory", shutil.rmtree, ", expected a checkpoint directory", 2),
    Checkpoint("no config", lambda d: (d / "config.json").unlink(), "config.json"),
    Checkpoint("torn config", lambda d: (d / "config.json").write_text("{"), "config.json"),
    Checkpoint("another model", edit_json("config.json", lambda c: c.update(model_type="llama")),
               "model_type is 'llama', expected"),
    Checkpoint("a size missing", edit_json("config.json", lambda c: c.pop("hidden_size")),
               "hidden_size"),
    Checkpoint("ratios too few", edit_json("config.json", lambda c: c.update(compress_ratios=[0])),
               "compress_ratios"),
    Checkpoint("no tokenizer", lambda d: (d / "tokenizer.json").unlink(),
               "tokenizer.json: missing, expected in a checkpoint directory"),
    Checkpoint("torn tokenizer", lambda d: (d / "tokenizer.json").write_text("[]"),
               "tokenizer.json: holds a JSON list, expected an object"),
    Checkpoint("no index", lambda d: (d / "model.safetensors.index.json").unlink(),
               "holds neither model.safetensors.index.json nor model.safetensors"),
    Checkpoint("no shard", lambda d: min(d.glob("*.safetensors")).unlink(),
               "does not exist, expected the shard that"),
    Checkpoint("torn shard", truncate, "what the file holds (is it truncated?)"),
    Checkpoint("wrong shape", edit_header(reshape),
               "tensor layers.0.attn_norm.weight is BF16 [1, "),
    Checkpoint("wrong type", edit_header(retype),
               "tensor layers.0.attn_norm.weight is F16 ["),
    Checkpoint("unknown type", edit_header(rename_type), "F3_E1M1"),
    Checkpoint("tensor not in index", edit_json("model.safetensors.index.json", drop_tensor),
               "tensor norm.weight is missing, expected"),
    Checkpoint("index leads out", edit_json("model.safetensors.index.json", lead_out),
               "the shard of norm.weight is '../elsewhere.safetensors', expected a file name"),
)  # fmt: skip


@pytest.mark.parametrize("row", CHECKPOINTS, ids=lambda row: row.name)
def test_q04_a_damaged_checkpoint_is_refused_in_one_sentence(
    launcher: Launcher, tmp_path: Path, row: Checkpoint
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(launcher.demo, directory)
    row.damage(directory)
    line = one_line(serve(launcher, directory, "--port", str(free_port())), row.code)
    assert row.sentence in line
    assert str(directory) in line
