"""The command line: generated options, the order of start-up, and one sentence for every failure.

Mutants tried and seen red: the platform check dropped, the key sent to the engine, click's
usage lines left in, exit code 1 for a usage error, the port claimed after the tokenizer is read,
a demo copied unread, `inspect` without the demo, modes and byte code copied, an engine's
end not told.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ftruntime import cli, distribution
from ftruntime.cli import make_demo, serve
from ftruntime.cli.group import FAILED, Failure, refusals
from ftruntime.config import RuntimeConfig, flag_specs
from ftruntime.demo.presets import PRESETS, demo_config
from ftruntime.options import flag_sections
from ftruntime.tokenizer.fixed_texts import FIXED_TEXTS_FILE
from ftruntime.types import EngineFailedError
from tests.support.files import files_of

_REPORT = (
    "--disable-pynccl --moe-backend offload --moe-cache-auto --kv-reserve-tokens 327680 "
    "--num-tokens 327680 --swa-full-tokens-ratio 0.12 --memory-ratio 0.90 "
    "--max-running-requests 50 --cuda-graph-max-bs 64 --max-prefill-length 4096 "
    "--expert-load parallel --expert-prefetch 2 --enable-cache-report --decode-log-interval 20 "
    "--decode-interleave-every 8 --served-model-name deepseek-v4-flash --host 127.0.0.1 "
    "--moe-prefill-hit-d2d"
)
REPORT = _REPORT.split()


def invoke(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(words), env=env)


def one_sentence(result: Result, code: int) -> str:
    """The only line of stderr of a run that ended with `code`."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.rstrip("\n")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(demo_config("tiny")))
    return tmp_path


@pytest.fixture
def started(monkeypatch) -> list[dict[str, object]]:
    """Replaces everything behind the hand-over; holds what each start was given."""
    from ftruntime.server import bridge, serve
    from ftruntime.tokenizer import chat, tokenizer

    starts: list[dict[str, object]] = []

    class Bridge:
        def __init__(
            self, config: dict[str, object], *, stall_timeout_s: float, end_stalled: bool
        ) -> None:
            self.config, self.stall_timeout_s = config, stall_timeout_s
            assert end_stalled is (config["tensor_parallel_size"] != 1)

    def run_server(config, client, tokenizer, chat, *, listener) -> int:
        address = listener.getsockname()
        listener.close()
        starts.append(
            {"config": config, "engine": client.config, "stall": client.stall_timeout_s,
             "tokenizer": tokenizer, "chat": chat, "address": address}
        )  # fmt: skip
        return 0

    monkeypatch.setattr(bridge, "Bridge", Bridge)
    monkeypatch.setattr(serve, "run_server", run_server)

    class Fitting(tuple):
        def check_model(self, **ids: object) -> None:
            assert ids["vocab_size"] in (512, 1024)  # of a random demo, and of the trained one
            assert (ids["bos_token_id"], ids["eos_token_ids"]) == (0, (1,))

    monkeypatch.setattr(tokenizer.Tokenizer, "from_dir", lambda path: Fitting(("tokenizer", path)))
    monkeypatch.setattr(chat.ChatFormat, "from_dir", lambda path: ("chat", path))
    return starts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_serve_hands_over_what_was_said(checkpoint, started):
    port = free_port()
    result = invoke("serve", str(checkpoint), *REPORT, "--port", str(port), "--api-key", "s3cret")
    assert result.exit_code == 0, result.output
    (start,) = started
    config = start["config"]
    assert (config.model, config.port, config.api_key) == (str(checkpoint), port, "s3cret")
    assert (config.num_tokens, config.decode_interleave_every) == (327680, 8)
    assert start["address"] == ("127.0.0.1", port)
    assert start["tokenizer"] == ("tokenizer", checkpoint)
    assert start["chat"] == ("chat", checkpoint)
    assert start["stall"] == 120.0
    engine = RuntimeConfig.from_flags(**start["engine"])
    assert engine.api_key is None
    assert engine == RuntimeConfig.from_dict({**config.to_dict(), "api_key": None})
    assert "moe_cache_auto" in engine.explicit
    assert "s3cret" not in result.output


def test_k07_s10_the_start_log_says_chunk_and_reason(checkpoint, started):
    result = invoke("serve", str(checkpoint), *REPORT, "--port", str(free_port()))
    assert "plan ready chunk_tokens=3456 limiting=window_pages window_pages=308" in result.stderr
    assert "prefill chunk clamped chunk_tokens=3456 max_prefill_length=4096" in result.stderr
    assert "device=cpu moe_backend=offload expert_slots=96 num_experts=96" in result.stderr
    idle = ("--kv-reserve-tokens", "--cuda-graph-max-bs", "--moe-prefill-hit-d2d")
    for flag in (*idle, "--disable-pynccl"):
        assert result.stderr.count(f"flag without effect {flag}=") == 1
    assert "--decode-interleave-every" not in result.stderr


def test_s08_the_start_log_warns_of_a_short_context(checkpoint, started):
    result = invoke("serve", str(checkpoint), "--num-tokens", "1024", "--port", str(free_port()))
    (line,) = [text for text in result.stderr.splitlines() if " warning " in text]
    assert "served context is far below the model's max_model_len=1024 model=65536" in line
    assert "--num-tokens (now 1024)" in line


def test_the_key_comes_from_the_environment(checkpoint, started):
    words = ("serve", "--model", str(checkpoint), "--port", str(free_port()))
    assert invoke(*words, env={"FTRUNTIME_API_KEY": "from-env"}).exit_code == 0
    assert invoke(*words, env={"FTRUNTIME_API_KEY": ""}).exit_code == 0
    assert [start["config"].api_key for start in started] == ["from-env", None]


def test_without_a_model_the_trained_demo_is_served(started):
    assert invoke("serve", "--port", str(free_port())).exit_code == 0
    expected = str(Path(cli.__file__).parents[1] / "demo" / "demo-kjv")
    assert [start["config"].model for start in started] == [expected]
    shown = json.loads(invoke("inspect", "--device", "cpu", "--json").stdout)
    assert (shown["model"], shown["num_experts"]) == (expected, 4 * 16)


def test_an_installation_without_the_demo_is_one_sentence(tmp_path, monkeypatch, started):
    monkeypatch.setattr(distribution, "DEMO_DIRECTORY", tmp_path / "gone")
    for command in ("serve", "inspect"):
        result = invoke(command)
        assert (result.exit_code, started) == (1, [])
        assert result.stderr.splitlines()[-1] == (
            f"{tmp_path}/gone is missing, expected the demo checkpoint of this installation: name "
            "a model"
        )


def test_an_unreadable_file_is_one_sentence(tmp_path):
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    sentence = one_sentence(invoke("inspect", str(tmp_path)), 1)
    assert sentence == f"{tmp_path}/config.json cannot be read (Input/output error)"


def test_make_demo_where_nothing_can_be_written():
    sentence = one_sentence(invoke("make-demo", "/proc/demo"), 1)
    assert sentence.startswith("/proc/")
    assert sentence.endswith("cannot be opened or written (No such file or directory)")


def test_a_taken_port_is_known_before_anything_is_read(checkpoint, started, monkeypatch):
    from ftruntime.tokenizer.tokenizer import Tokenizer

    monkeypatch.setattr(Tokenizer, "from_dir", lambda path: pytest.fail("read before the port"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("serve", str(checkpoint), "--port", str(port))
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"--port is {port}, already in use")
    assert started == []


def test_a_checkpoint_that_cannot_be_read_is_one_sentence(checkpoint, started, monkeypatch):
    from ftruntime.tokenizer.tokenizer import Tokenizer

    def missing(path: Path) -> None:
        raise FileNotFoundError(f"{path}/tokenizer.json does not exist, expected a tokenizer")

    monkeypatch.setattr(Tokenizer, "from_dir", missing)
    result = invoke("serve", str(checkpoint), "--port", str(free_port()))
    assert result.exit_code == 1
    sentence = f"{checkpoint}/tokenizer.json does not exist, expected a tokenizer"
    assert result.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in result.output


USAGE = [
    (["serve", "--tp", "3"], "--tensor-parallel-size is 3, expected a divisor of "),
    (["serve", "--tensor-parallel-size", "0"], "--tensor-parallel-size is 0, expected"),
    (["serve", "/nowhere"], "--model is /nowhere, expected a checkpoint directory"),
    (["serve", "a", "--model", "b"], "--model is b, expected only one model, a was given too"),
    (["serve", "--num-tokens=128", "--num-pages=1"], "--num-pages is 1, expected only one of"),
    (["serve", "--max-running-request", "4"], "No such option '--max-running-request'."),
    (["serve", "--port"], "Option '--port' requires an argument."),
    (["serve", "a", "b"], "Got unexpected extra argument (b)"),
    (["server"], "No such command 'server'."),
    (["make-demo"], "Missing argument 'DIR'."),
    (["make-demo", "x", "--random", "--seed", "-1"],
     "--seed is -1, expected an integer >= 0 (nearest: 0)"),
    (["make-demo", "x", "--seed", "1"], "--seed is 1, expected it unset without --random"),
    (["make-demo", "x", "--preset", "tiny"],
     "--preset is tiny, expected it unset without --random"),
    (["make-demo", "x", "--random", "--preset", "huge"],
     "--preset is huge, expected one of small, tiny"),
    (["--verbose"], "No such option '--verbose'."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), USAGE, ids=[" ".join(u[0]) for u in USAGE])
def test_usage_errors_are_one_sentence_and_exit_2(words, sentence):
    assert one_sentence(invoke(*words), 2).startswith(sentence)


def test_settings_against_the_checkpoint_are_usage_errors(checkpoint):
    result = invoke("serve", str(checkpoint), "--max-model-len", "70000")
    assert one_sentence(result, 2).startswith(
        "--max-model-len is 70000, expected at most the model's 65536"
    )
    result = invoke("serve", str(checkpoint), "--kv-format", "fp8")
    assert one_sentence(result, 2).startswith("--kv-format is fp8, expected bf16: fp8 rows need")


def test_a_broken_checkpoint_is_a_failure(tmp_path):
    assert "config.json does not exist" in one_sentence(invoke("serve", str(tmp_path)), 1)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in one_sentence(invoke("serve", str(tmp_path)), 1)


def test_too_little_memory_is_a_failure(checkpoint):
    result = invoke("serve", str(checkpoint), "--memory-ratio", "0.0000001")
    assert one_sentence(result, 1).startswith("the model needs 0.")


def test_another_platform_is_one_sentence(checkpoint, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    sentence = one_sentence(invoke("serve", str(checkpoint)), 1)
    assert sentence == "this machine is Darwin arm64, expected Linux x86_64"


def test_a_missing_package_is_named(checkpoint, monkeypatch):
    monkeypatch.setattr(
        serve, "_front", lambda: (_ for _ in ()).throw(ModuleNotFoundError(name="uvicorn"))
    )
    result = invoke("serve", str(checkpoint), "--port", str(free_port()))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "uvicorn is not installed, expected: pip install 'ftkernels[serve]'"
    )


def test_make_demo(tmp_path, monkeypatch):
    import ftruntime.demo

    calls: list[dict[str, object]] = []
    monkeypatch.setattr(
        ftruntime.demo, "make_demo", lambda path, **options: calls.append({"path": path, **options})
    )
    words = ("--random", "--seed", "3", "--preset", "tiny", "--force")
    result = invoke("make-demo", str(tmp_path / "d"), *words)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/d\n")
    assert calls == [
        {"path": tmp_path / "d", "seed": 3, "preset": "tiny", "force": True, "progress": None}
    ]


def contents(directory):
    return {name: path.read_bytes() for name, path in files_of(directory).items()}


def test_make_demo_copies_the_trained_one(tmp_path):
    for force in ([], ["--force"]):
        result = invoke("make-demo", str(tmp_path / "d"), *force)
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/d\n")
        copied, source = contents(tmp_path / "d"), contents(distribution.demo_directory())
        assert copied == source
    assert {"config.json", "tokenizer.json", "NOTICE.md", FIXED_TEXTS_FILE} < set(copied)
    assert sum(map(len, copied.values())) < 16_000_000


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The demo of an installation that a test may damage."""
    copy = tmp_path / "installed"
    shutil.copytree(distribution.demo_directory(), copy)
    monkeypatch.setattr(distribution, "DEMO_DIRECTORY", copy)
    return copy


@pytest.mark.parametrize(
    "part", ["model-00002-of-00003.safetensors", "tokenizer.json", FIXED_TEXTS_FILE]
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("x = (")])
def test_make_demo_does_not_copy_half_an_installation(tmp_path, installed, part, damage):
    damage(installed / part)
    sentence = one_sentence(invoke("make-demo", str(tmp_path / "d")), 1)
    assert f"{installed}/{part}" in sentence
    assert sorted(tmp_path.iterdir()) == [installed]


def test_make_demo_copies_files_of_a_demo_and_no_modes(tmp_path, installed):
    (installed / "encoding" / "__pycache__").mkdir()
    (installed / "encoding" / "__pycache__" / "encoding_dsv4.pyc").write_bytes(b"")
    expected = contents(distribution.demo_directory()).keys()
    for folder in (installed / "encoding", installed):
        folder.chmod(0o555)
    for force in ([], ["--force"]):
        assert invoke("make-demo", str(tmp_path / "d"), *force).exit_code == 0
        assert contents(tmp_path / "d").keys() == expected - {
            "encoding/__pycache__/encoding_dsv4.pyc"
        }
    folders = [tmp_path / "d", tmp_path / "d" / "encoding"]
    assert all(folder.stat().st_mode & 0o700 == 0o700 for folder in folders)


def test_an_engine_that_ends_is_one_sentence():
    with pytest.raises(Failure, match="rank 1 is gone") as failure, refusals(2):
        raise EngineFailedError("rank 1 is gone")
    assert failure.value.exit_code == FAILED


def test_presets_are_those_of_the_generator():
    assert make_demo.PRESET.choices == PRESETS


def test_make_demo_does_not_overwrite(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    sentence = one_sentence(invoke("make-demo", str(tmp_path)), 2)
    assert str(tmp_path) in sentence


@pytest.mark.parametrize("command", ["serve", "inspect"])
def test_help_shows_every_flag_with_its_default(command):
    wide = CliRunner().invoke(cli.main, [command, "--help"], terminal_width=300)
    text = " ".join(wide.stdout.split())
    for name, spec in flag_specs().items():
        assert "--" + name.replace("_", "-") in text
        assert spec.help_line in text
    assert "--tensor-parallel-size, --tp N" in text
    headings = [line for line in wide.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[-len(flag_sections()):] == [f"{name}:" for name in flag_sections()]
    listed = [name for names in flag_sections().values() for name in names]
    assert sorted(listed) == sorted(flag_specs())


def test_version_and_help_need_no_torch_and_no_server():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from ftruntime.cli import main\n"
        "result = CliRunner().invoke(main, ['serve', '--help'])\n"
        "assert result.exit_code == 0\n"
        "print([m for m in ('torch', 'uvicorn', 'fastapi', 'tokenizers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_dash_m(tmp_path):
    command = [sys.executable, "-m", "ftruntime", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"ftruntime, version {distribution.version()}\n"
    wrong = subprocess.run(
        [*command[:3], "serve", "--port=0"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr == "--port is 0, expected an integer in [1, 65535] (nearest: 1)\n"


@pytest.mark.parametrize("words", [("inspect", "flash"), ("inspect", "--help"), ("--version",)])
def test_a_full_disk_behind_stdout_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ftruntime", *words], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if " ftruntime." not in line]
    assert lines == ["stdout cannot be written (No space left on device)"]


def test_make_demo_below_a_file():
    sentence = one_sentence(invoke("make-demo", "/etc/passwd/x"), 2)
    assert sentence == "/etc/passwd is a file, expected a directory to write /etc/passwd/x"


def test_an_interrupt_is_quiet(checkpoint, monkeypatch):
    def interrupted(config: RuntimeConfig, shape: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_run", interrupted)
    result = invoke("serve", str(checkpoint))
    assert result.exit_code == 130
    assert "Traceback" not in result.output


@pytest.fixture(autouse=True)
def _quiet_logs():
    """Handlers that hold a finished run's stderr must not stay behind."""
    yield
    for name in ("ftruntime", "ftkernels"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
