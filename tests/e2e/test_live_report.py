"""The command line of the report that started the project, on a machine without cards.

RUN_SLOW=1: its eight ranks, else two. Everything else is as it stands, but for the port.
"""

from __future__ import annotations

import os

import pytest

from tests.support.live import Launcher, children_of

RANKS = "8" if os.environ.get("RUN_SLOW") == "1" else "2"
REPORT = {
    "--tensor-parallel-size": RANKS, "--disable-pynccl": None, "--moe-backend": "offload",
    "--moe-cache-auto": None, "--kv-reserve-tokens": "327680", "--num-tokens": "327680",
    "--swa-full-tokens-ratio": "0.12", "--memory-ratio": "0.90", "--max-running-requests": "50",
    "--cuda-graph-max-bs": "64", "--max-prefill-length": "4096", "--expert-load": "parallel",
    "--expert-prefetch": "2", "--enable-cache-report": None, "--decode-log-interval": "20",
    "--decode-interleave-every": "8", "--served-model-name": "deepseek-v4-flash",
    "--host": "0.0.0.0", "--moe-prefill-hit-d2d": None,
}  # fmt: skip
# what a CPU makes of it: chunk of the contract, no graphs
BECAME = {"--max-prefill-length": 3456, "--cuda-graph-max-bs": 0}
NOTED = {
    "--disable-pynccl", "--kv-reserve-tokens", "--cuda-graph-max-bs", "--moe-prefill-hit-d2d",
    "--max-prefill-length",
}  # fmt: skip


def value_of(text: str | None) -> object:
    if text is None:
        return True
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def test_the_reports_command_line_starts_and_answers(launcher: Launcher) -> None:
    words = [word for pair in REPORT.items() for word in pair if word is not None]
    with launcher.serving(*words, "--device", "cpu") as live:
        (engine,) = live.engine_pids()
        assert len(children_of(engine)) == int(RANKS) - 1
        assert [model.id for model in live.openai.models.list()] == ["deepseek-v4-flash"]
        stream = live.openai.chat.completions.create(
            model="deepseek-v4-flash", messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        *_, last = stream
        assert last.usage.completion_tokens <= 8
        assert last.usage.prompt_tokens_details.cached_tokens == 0
        stats = live.wait_idle()
    flags = stats["flags"]
    for name, text in REPORT.items():
        given = value_of(text)
        assert flags[name]["given"] == given, name
        assert flags[name]["value"] == BECAME.get(name, given), name
        assert ("note" in flags[name]) == (name in NOTED), name
    assert flags["--device"] == {"given": "cpu", "value": "cpu"}
    assert flags["--cache-type"] == {"given": None, "value": "radix"}
    assert "--api-key" not in flags
    assert stats["chunk_tokens"] == 3456
    assert stats["limiting"] == "window_pages"
    assert flags["--moe-cache-size"]["value"] == stats["experts"]["num_slots"]


@pytest.mark.parametrize("flag", ["--max-prefill-length", "--expert-prefetch"])
def test_a_bad_value_in_it_is_named_before_anything_starts(launcher: Launcher, flag: str) -> None:
    words = [word for pair in {**REPORT, flag: "0"}.items() for word in pair if word is not None]
    live = launcher.spawn(*words, "--device", "cpu")
    assert live.process.wait(60) == 2
    (line,) = live.log().splitlines()
    assert f"{flag} is 0, expected" in line
