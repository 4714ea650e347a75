"""The experiment against a server that is not ours: what it sees, what stays null, how it ends.

The stall is the server's own sleep, so the longest wait is that, less what the piece before it was
late. Mutants tried and seen red: the wait of a timeout restarted by an empty event,
`asyncio.wait_for` on Python 3.11, events without text counted, usage dropped, pieces taken for
tokens, a stream's early end accepted, refused fields not left out, two refusals of one field at
once, lines split at every separator, tasks of a failed run left alone, no wait before the attack,
one prompt for all victims, the key not sent, only transport errors or ValueErrors caught, counts of
any size taken, a foreign policy taken whole, victims one after another taken for short ones, the
server's context not asked for, a host name not decoded before the run, no login sent.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ftruntime import cli
from ftruntime.bench import stall
from ftruntime.bench.client import within
from ftruntime.bench.report import wall
from ftruntime.bench.settings import BenchError, StallSettings
from ftruntime.bench.stall import StallResult, run_stall
from ftruntime.cli import bench_stall
from tests.ftruntime.bench.foreign import Behaviour, Foreign, serving

ROOT = Path(__file__).parents[3]
TOKENS = 40
LONG = 600
DEEP = 100_000 * b"["
NESTED = 950 * b"[" + 950 * b"]"
PREFILL_S = 0.2
LEAST_GAP_S = 0.7 * PREFILL_S


def measure(url: str, **flags: Any) -> StallResult:
    given = {"victim_tokens": TOKENS, "attacker_tokens": LONG, "attack_after": 0.05} | flags
    settings = StallSettings(base_url=url, **given)
    return asyncio.run(asyncio.wait_for(run_stall(settings), 20))


def run(**flags: Any) -> tuple[StallResult, Foreign]:
    names = set(Behaviour.__dataclass_fields__)
    how = Behaviour(**{name: value for name, value in flags.items() if name in names})
    with serving(how) as (url, foreign):
        given = {name: value for name, value in flags.items() if name not in names}
        return measure(url, **given), foreign


def failure(**flags: Any) -> str:
    """The sentence that ends a run, without the server's address."""
    names = set(Behaviour.__dataclass_fields__)
    how = Behaviour(**{name: value for name, value in flags.items() if name in names})
    with serving(how) as (url, foreign):
        given = {name: value for name, value in flags.items() if name not in names}
        with pytest.raises(BenchError) as caught:
            measure(url, **given)
        sentence = str(caught.value)
        assert sentence.startswith(url)
        assert "\n" not in sentence
        deadline = time.monotonic() + 5
        while foreign.open_streams:
            assert time.monotonic() < deadline, "streams are left open"
            time.sleep(0.01)
    return sentence.removeprefix(url).removeprefix(":").strip()


def test_what_a_client_sees_and_what_it_does_not():
    result, foreign = run(prefill_s=PREFILL_S)
    report = result.report
    unseen = (report.policy, report.prefill_chunks, report.interleaved_decode_steps)
    assert unseen == (None, None, None)
    assert LEAST_GAP_S < report.max_gap_s < PREFILL_S + 3
    assert report.attacker_wall_s >= PREFILL_S
    assert report.victim_wall_s == wall(result.victims[0].piece_s) > report.max_gap_s
    assert report.victim_alone_wall_s == wall(result.alone[0].piece_s)
    assert result.alone[0].piece_s[-1] < result.victims[0].piece_s[0]
    waited_s = result.attacker.sent_s - result.victims[0].piece_s[0]
    assert waited_s >= 0.05
    assert report.victim_tokens == TOKENS
    assert report.victim_tokens_during_prefill in range(TOKENS // 3)
    assert (report.gaps_over_5s, report.gaps_over_20s) == (0, 0)
    assert abs(result.attacker_prompt_tokens - LONG) <= 3
    assert result.victims[0].text == result.alone[0].text == "x" * TOKENS
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in foreign.bodies)
    assert [body["max_tokens"] for body in foreign.streamed] == [TOKENS, TOKENS, 3]
    assert {body["model"] for body in foreign.bodies} == {"other"}
    assert "stream_options" not in foreign.bodies[0]


def test_many_victims_with_a_prompt_each_that_is_the_same_in_both_runs():
    result, foreign = run(victims=5, prefill_s=PREFILL_S)
    assert result.report.victim_tokens == 5 * TOKENS
    assert result.report.max_gap_s > LEAST_GAP_S
    prompts = [body["prompt"] for body in foreign.streamed]
    alone, together, attacker = set(prompts[:5]), set(prompts[5:10]), prompts[10]
    assert alone == together
    assert len(alone) == 5
    assert attacker not in alone
    times = result.timeline()
    assert list(times) == [f"victim {number}" for number in range(5)]
    assert min(series[0] for series in times.values()) == 0
    start_s, end_s = result.prefill_span()
    assert end_s - start_s >= PREFILL_S


def test_the_long_prompt_is_another_one_each_time_unless_seeded():
    def attackers(**flags: Any) -> set[str]:
        found = set()
        for _ in range(2):
            _, foreign = run(prefill_s=0.0, victim_tokens=24, **flags)
            found.add(foreign.streamed[-1]["prompt"])
        return found

    assert len(attackers()) == 2
    assert len(attackers(seed=3)) == 1


def test_several_tokens_a_piece_are_counted_by_usage_alone():
    result, _ = run(tokens_per_piece=4, piece_s=0.01)
    assert result.report.victim_tokens == TOKENS
    assert len(result.victims[0].piece_s) == TOKENS / 4
    assert result.report.victim_tokens_during_prefill is None


def test_without_usage_in_the_stream_token_counts_are_unknown():
    result, _ = run(stream_usage=False)
    assert result.report.victim_tokens is None
    assert result.report.victim_tokens_during_prefill is None
    assert result.report.max_gap_s > LEAST_GAP_S
    assert result.attacker_prompt_tokens is None


def test_comments_roles_and_line_ends_of_other_servers():
    result, foreign = run(
        comments=True, role_chunk=True, newline="\r\n", endpoint="chat",
        delta_field="reasoning_content", piece="\u2028\x85", model="mine",
    )  # fmt: skip
    (victim,) = result.victims
    assert victim.text == "\u2028\x85" * TOKENS
    assert len(victim.piece_s) == victim.num_tokens == TOKENS
    assert set(foreign.paths) == {"/v1/chat/completions"}
    assert {body["model"] for body in foreign.bodies} == {"mine"}
    assert foreign.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize("status", [400, 422])
def test_fields_that_are_refused_are_left_out(status, caplog):
    fields = ("ignore_eos", "seed", "stream_options")
    with caplog.at_level(logging.WARNING, logger="ftruntime"):
        result, foreign = run(refused_fields=fields, refused_status=status, victims=3)
    assert result.report.victim_tokens is None
    assert not any(name in body for body in foreign.bodies for name in fields)
    for name in fields:
        assert [r.getMessage().endswith(f"={name}") for r in caplog.records].count(True) == 1


def test_a_victim_that_ends_early_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="ftruntime"):
        result, _ = run(stop_after=30, prefill_s=0.0)
    assert result.report.victim_tokens == 30
    line = "victim ended early who='the victim' tokens=30 asked=40 finish_reason=stop"
    assert line in caplog.text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"long_answer": (400, {"error": {"message": "the context is 8192 tokens"}})},
         "refused the long prompt with status 400: the context is 8192 tokens"),
        ({"long_answer": (429, {"message": "the queue is full"})},
         "refused the long prompt with status 429: the queue is full"),
        ({"long_answer": (500, {})}, "refused the long prompt with status 500: {}"),
        ({"refused_fields": ("model",)},
         "refused a short prompt with status 400: unknown argument: model"),
        ({"refused_fields": ("temperature",), "refused_status": 404},
         "refused a short prompt with status 404: unknown argument: temperature (--endpoint chat "
         "asks at another place)"),
        ({"probe_usage": False}, "answered a short prompt without usage.prompt_tokens"),
        ({"tokens_per_word": 0},
         "usage.prompt_tokens is 7 for a prompt of 36 words and 7 for one of 108, expected to "
         "grow"),
        ({"end_after": 20}, "broke off the victim after 20 pieces, without its end"),
        ({"end_after": 0}, "broke off the victim after 0 pieces, without its end"),
        ({"error_after": 9}, "ended the victim after 9 pieces with an error: out of memory"),
        ({"stall_after": 5, "timeout_s": 0.4},
         "sent nothing for 0.4 s (--timeout-s) to the victim after 5 pieces"),
        ({"stall_after": 0, "timeout_s": 0.4},
         "sent nothing for 0.4 s (--timeout-s) to the victim after 0 pieces"),
        ({"attack_after": 5.0},
         "ended the victim after 40 pieces, before the long prompt would arrive, expected a larger "
         "--victim-tokens than 40 or a smaller --attack-after than 5"),
        ({"stop_after": 0}, "ended the victim after 0 pieces, before the long prompt would arrive"),
        ({"victims": 4, "max_running": 2},
         "ended victim "),
        ({"victims": 4, "max_running": 2, "attack_after": 0.0},
         "ended victim "),
        ({"max_model_len": LONG + 2},
         f"holds {LONG + 2} tokens for prompt and output of a request, expected --attacker-tokens "
         f"of at most {LONG - 1}, it is {LONG}"),
        ({"max_model_len": 1000, "attacker_tokens": 998, "model": "other"},
         "holds 1000 tokens for prompt and output of a request"),
        ({"raw_models": (200, {}, b'{"data": [{"id": "\\ud800"}, {"id": "a\\nb"}, {"id": ""}]}')},
         "lists no model at /v1/models, expected --model"),
        ({"raw_models": (200, {}, DEEP)}, "lists no model at /v1/models, expected --model"),
        ({"raw_models": (200, {"content-type": "text/html; charset=hex"}, b"{}")},
         "lists no model at /v1/models, expected --model"),
        ({"raw_models": (302, {"location": "http://xn--/"}, b"")}, "lost the list of models ("),
        ({"raw_probe": (200, {}, DEEP)}, "answered a short prompt without usage.prompt_tokens"),
        ({"raw_probe": (500, {}, b'{"error": ' + NESTED + b"}")},
         "refused a short prompt with status 500: "),
        ({"raw_probe": (200, {"content-encoding": "gzip"}, b"{}")},
         "lost a short prompt (DecodingError: "),
        ({"raw_probe": (200, {}, b'{"usage": {"prompt_tokens": 1' + 400 * b"0" + b"}}")},
         "answered a short prompt without usage.prompt_tokens"),
        ({"raw_event": DEEP}, f"sent {'[' * 300} ... to the victim after 0 pieces, expected JSON"),
        ({"models": ()}, "lists no model at /v1/models, expected --model"),
        ({"key": "right"}, "refused the list of models with status 401: who are you?"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_a_server_does_wrong_is_one_sentence(flags, sentence):
    assert failure(**flags).startswith(sentence)


@pytest.mark.parametrize("attack_after", [0.0, 9.0])
def test_victims_that_do_not_run_at_once_are_said(attack_after):
    sentence = failure(victims=3, max_running=2, attack_after=attack_after)
    assert re.fullmatch(
        r"ended victim (\d) before victim (?!\1)\d had its first piece, so not all streams run at "
        r"once, expected a smaller --victims than 3 or a larger --victim-tokens than 40", sentence
    )  # fmt: skip


def test_an_attacker_that_just_fits_is_sent():
    result, _ = run(max_model_len=LONG + 3, prefill_s=0.0)
    assert result.report.victim_tokens == TOKENS


def test_a_named_model_needs_no_list_of_models():
    result, _ = run(raw_models=(403, {}, b"no"), model="mine", prefill_s=0.0)
    assert (result.model, result.report.victim_tokens) == ("mine", TOKENS)


def test_the_named_model_is_asked_of_several():
    result, foreign = run(models=("other", "mine"), model="mine", prefill_s=0.0)
    assert result.model == "mine"
    assert {body["model"] for body in foreign.bodies} == {"mine"}


def test_odd_statistics_and_counts_are_unknown(caplog):
    policy = b'{"decode_interleave_every": 8, "max_decode_gap_ms": 1e999, "x": NaN, "y\\ud800": 1}'
    with caplog.at_level(logging.WARNING, logger="ftruntime"):
        result, _ = run(
            stats=b'{"policy": ' + policy + b', "chunk_tokens": ' + 400 * b"1" + b"}",
            cached_tokens=10**400, prefill_s=0.0,
        )  # fmt: skip
    assert result.report.policy == {
        "decode_interleave_every": 8, "max_decode_gap_ms": None, "prefill_layer_groups": None,
        "chunk_tokens": None,
    }  # fmt: skip
    assert "cached_tokens" not in caplog.text


def test_a_prompt_from_a_prefix_cache_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="ftruntime"):
        run(cached_tokens=256, prefill_s=0.0)
    assert "long prompt came from a prefix cache in part cached_tokens=256" in caplog.text


def test_a_connection_that_breaks_is_one_sentence():
    sentence = failure(break_after=7, victims=2)
    assert sentence.startswith("lost victim ")
    assert "after 7 pieces (RemoteProtocolError: " in sentence


def test_a_failure_of_one_stream_ends_the_others():
    start_s = time.monotonic()
    sentence = failure(error_after=3, victims=3, victim_tokens=10_000)
    assert re.fullmatch(r"ended victim \d after 3 pieces with an error: out of memory", sentence)
    assert time.monotonic() - start_s < 15


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(BenchError, match=r"^http://127.0.0.1:1 cannot be reached .*, expected a"):
        measure("http://127.0.0.1:1")


def test_the_key_is_sent():
    result, _ = run(key="right", api_key="right", prefill_s=0.0)
    assert result.report.victim_tokens == TOKENS


def test_a_cancellation_that_meets_a_result_is_not_lost():
    async def main() -> None:
        result = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(result, 10))
        await asyncio.sleep(0)
        result.set_result(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await within(asyncio.sleep(0, "value"), 10) == "value"
        with pytest.raises(asyncio.TimeoutError):
            await within(asyncio.sleep(5), -1)

    asyncio.run(main())


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench-stall", *words])


SHORT = ("--victim-tokens", str(TOKENS), "--attacker-tokens", str(LONG), "--attack-after", "0.05")


def test_the_command_prints_one_json_value_or_a_table():
    with serving(Behaviour()) as (url, _):
        result = invoke("--base-url", url, *SHORT, "--json")
        table = invoke("--base-url", f"{url}/v1", *SHORT)
    assert (result.exit_code, table.exit_code) == (0, 0), result.output + table.output
    value = json.loads(result.stdout)
    assert value["victim_tokens"] == TOKENS
    assert value["policy"] is None
    assert "long prompt ready words=" in result.stderr
    assert f"measured by the client of {url}, model other; long prompt of" in table.stdout


def test_a_login_is_sent_and_never_shown():
    with serving(Behaviour()) as (url, foreign):
        named = url.replace("//", "//some:s%40cret@")
        result = invoke("--base-url", named, *SHORT)
    assert result.exit_code == 0
    token = base64.b64encode(b"some:s@cret").decode()
    assert foreign.authorizations == {f"Basic {token}"}
    away = invoke("--base-url", "http://some:s%40cret@127.0.0.1:1", *SHORT)
    assert away.stderr.startswith("http://127.0.0.1:1 cannot be reached")
    for shown in (result.output, away.output):
        assert "cret" not in shown


def test_the_plot_gets_every_victim_and_the_prefill(monkeypatch, tmp_path):
    drawn: list[Any] = []
    monkeypatch.setattr(bench_stall, "check_drawable", drawn.append)
    monkeypatch.setattr(stall, "draw", lambda *args, **kwargs: drawn.append((args, kwargs)))
    path = tmp_path / "a.svg"
    with serving(Behaviour()) as (url, _):
        result = invoke("--base-url", url, *SHORT, "--victims", "2", "--plot", str(path))
    assert result.exit_code == 0, result.output
    checked, ((target, series, title), named) = drawn
    assert checked == target == path
    assert {name: len(times) for name, times in series.items()} == {
        "victim 0": TOKENS, "victim 1": TOKENS,
    }  # fmt: skip
    start_s, end_s = named["spans"]["long prompt"]
    assert 0 < start_s < end_s < series["victim 0"][-1]
    assert title.endswith("measured")


def test_a_failure_of_the_command_is_one_sentence_and_exit_1():
    result = invoke("--base-url", "http://127.0.0.1:1", *SHORT)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("http://127.0.0.1:1 cannot be reached")
    assert result.stderr.count("\n") == 1


def test_a_wrong_command_line_is_one_sentence_and_exit_2():
    for words, sentence in (
        ((), "--base-url is missing, expected"),
        (("--base-url", "http://h", "--victims", "x"), "--victims is x, expected an integer"),
        (("--base-url", "http://h", "--plot", "a.txt"), "--plot is a.txt, expected a file name"),
        (("--base-url", "http://h", "--plot", ""), "--plot is '', expected a non-empty string"),
        (("--base-url", "http://xn--/"), "--base-url is http://xn--/, expected the URL of a serv"),
        (("--base-url", "http://u:p@a" + 70_000 * "a"), "--base-url is http://***@aaa"),
    ):
        result = invoke(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(sentence)
        assert result.stderr.count("\n") == 1


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in ("stall", "client", "steps"):
        monkeypatch.delitem(sys.modules, f"ftruntime.bench.{name}", raising=False)
    monkeypatch.delattr("ftruntime.bench.stall", raising=False)
    result = invoke("--base-url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr == "httpx is not installed, expected: pip install 'ftkernels[bench]'\n"


def test_ctrl_c_closes_the_streams():
    with serving(Behaviour()) as (url, foreign):
        process = subprocess.Popen(
            [sys.executable, "-m", "ftruntime", "bench-stall", "--base-url", url,
             "--victims", "3", "--victim-tokens", "100000", "--attacker-tokens", "600"],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # also where the tests were started with interrupts ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while foreign.open_streams < 3:
            assert time.monotonic() < deadline, "the streams do not start"
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, out) == (130, "")
        assert "Traceback" not in err
        while foreign.open_streams:
            assert time.monotonic() < deadline, "streams are left open"
            time.sleep(0.02)
