"""`LLM` over a fake engine, with the demo's tokenizer.

Mutants that these tests catch: no cancel at an interrupt; an interrupt inside the bookkeeping, or
kept to the end; a full queue raised; BOS twice; generation going on after a stop string; the text
of a stop token shown; held text lost; a stop string before min_tokens; the token missing from its
own logprobs; prompt logprobs shifted; one seed for all choices.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ftruntime
from ftruntime import SamplingParams
from ftruntime import llm as llm_module
from ftruntime.config import RuntimeConfig
from ftruntime.demo.presets import demo_config
from ftruntime.demo.vocabulary import build_tokenizer, tokenizer_config
from ftruntime.engine.loop import EngineLoop, MonotonicClock
from ftruntime.llm import LLM
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import StepPlan, StepResult
from tests.ftruntime.engine.fake_engine import (
    FAIL,
    VOCAB,
    FakeExecutor,
    expected_tokens,
    make_limits,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tokenizer(512).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(8192)))
    (path / "config.json").write_text(json.dumps(demo_config("tiny")))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


Make = Callable[..., LLM]


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An `LLM` whose engine is made with the given settings of the fake."""

    def make_llm(**fake: object) -> LLM:
        def build(config: RuntimeConfig, progress: Callable[[str, float], None]) -> EngineLoop:
            progress("weights", 1.0)
            limits, info = make_limits(fake)
            info["model_path"] = str(model_dir)
            return EngineLoop(
                Scheduler(limits), FakeExecutor(), MonotonicClock(), info=info,
                decode_log_interval=config.decode_log_interval,
            )  # fmt: skip

        monkeypatch.setattr(llm_module, "build_engine", build)
        return LLM(str(model_dir), max_running_requests=4)

    return make_llm


def loop_of(llm: LLM) -> EngineLoop:
    assert llm._loop is not None
    return llm._loop


def range_of(count: int, *, without: int) -> list[int]:
    return [i for i in range(count) if i != without]


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    held = (stats["used_pages"], stats["num_running"], stats["num_waiting"])
    return held == (0, 0, 0) and stats["integrity"] == "ok"


def test_texts_and_token_ids_in_the_order_of_the_prompts(make: Make, tokenizer: Tokenizer) -> None:
    llm = make()
    outs = llm.generate(["Hello there", [1, 2, 3]], SamplingParams(temperature=0, max_tokens=16))
    ids = [tokenizer.bos_token_id, *tokenizer.encode("Hello there")]
    assert [out.prompt for out in outs] == ["Hello there", None]
    assert [out.prompt_token_ids for out in outs] == [ids, [1, 2, 3]]
    for out in outs:
        assert len(out.outputs) == 1
        assert out.outputs[0].token_ids == expected_tokens(out.prompt_token_ids, 16)
        assert out.outputs[0].text == tokenizer.decode(out.outputs[0].token_ids)
        assert out.outputs[0].finish_reason == "length"
        assert (out.outputs[0].logprobs, out.prompt_logprobs) == (None, None)
    assert is_idle(llm)


def test_every_form_of_prompts(make: Make, tokenizer: Tokenizer) -> None:
    llm, params = make(), SamplingParams(max_tokens=2)
    bos = tokenizer.bos_token_id
    with_bos = tokenizer.decode([bos], skip_special=False) + "hi"
    assert tokenizer.encode(with_bos)[0] == bos
    for prompts, expected in (
        ("hi", [[bos, *tokenizer.encode("hi")]]),
        (with_bos, [[bos, *tokenizer.encode("hi")]]),
        ("", [[bos]]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5], (6, 7)], [[5], [6, 7]]),
        ([], []),
    ):
        outs = llm.generate(prompts, params)
        assert [out.prompt_token_ids for out in outs] == expected
    assert len(llm.generate([1])[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("prompts", "params", "kind", "text"),
    [
        (5, None, TypeError, "prompts is a int, expected a text, a list of token ids"),
        (None, None, TypeError, "prompts is a NoneType"),
        ([["a"]], None, TypeError, r"prompts\[0\]\[0\] is 'a', expected a token id"),
        ([[1], [2.0]], None, TypeError, r"prompts\[1\]\[0\] is 2.0"),
        ([[True]], None, TypeError, r"prompts\[0\]\[0\] is True"),
        ([[1], 2], None, TypeError, r"prompts\[1\] is a int, expected a text or"),
        ([[]], None, ValueError, r"prompts\[0\]: prompt is empty"),
        ([[1], [503]], None, ValueError, r"prompts\[1\]: prompt holds token id 503"),
        ([-1], None, ValueError, r"prompts\[0\]: prompt holds token id -1"),
        ([1], SamplingParams(stop_token_ids=[503]), ValueError, r"\]: stop_token_ids is 503, exp"),
        ([1], SamplingParams(logit_bias={503: 1}), ValueError, r"\]: logit_bias is 503, expected"),
        (
            [1],
            SamplingParams(min_tokens=2, stop_token_ids=range_of(503, without=1)),
            ValueError,
            r"\]: stop_token_ids is 503 ids with the end of sentence",
        ),
        ("a", "greedy", TypeError, "sampling_params is 'greedy', expected a SamplingParams"),
        (["a", "b"], [SamplingParams()], ValueError, "1 entries, expected one for each of 2"),
        ([[1] * 1000], SamplingParams(max_tokens=25), ValueError, "needs 1025 tokens .* 1024"),
        ([[1] * 1024], SamplingParams(max_tokens=None), ValueError, "needs 1025 tokens .* 1024"),
    ],
)
def test_bad_prompts_and_parameters_are_sentences(
    make: Make, prompts: object, params: object, kind: type[Exception], text: str
) -> None:
    llm = make(num_tokens=1024, eos=(1,))
    with pytest.raises(kind, match=text):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert loop_of(llm).num_steps == 0
    assert len(llm.generate([1])) == 1


def test_max_tokens_none_goes_up_to_the_limit(make: Make) -> None:
    llm = make(num_tokens=1024)
    out = llm.generate([[1] * 1000], SamplingParams(max_tokens=None))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (24, "length")


def test_n_choices_have_seeds_one_apart(make: Make) -> None:
    llm = make()
    params = [
        SamplingParams(seed=2**63 - 2, n=3, max_tokens=4),
        SamplingParams(n=2, max_tokens=4, logprobs=0),
    ]
    outs = llm.generate([[1], [2]], params)
    assert [[o.index for o in out.outputs] for out in outs] == [[0, 1, 2], [0, 1]]
    assert [o.logprobs is None for out in outs for o in out.outputs] == [True] * 3 + [False] * 2
    executor = loop_of(llm)._executor
    assert isinstance(executor, FakeExecutor)
    seeds = {s.request_id: s.sample.seed for p in executor.plans for s in p.seqs if s.sample}
    first = [seeds[key] for key in ("llm-0", "llm-1", "llm-2")]
    assert first == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert seeds["llm-3"] != seeds["llm-4"]


def test_more_prompts_than_the_queue_takes(make: Make) -> None:
    llm = make(running=2, max_waiting=1)
    prompts = [[i] for i in range(12)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=5))
    assert [o.outputs[0].token_ids for o in outs] == [expected_tokens(p, 5) for p in prompts]


def test_logprobs_and_prompt_logprobs(make: Make) -> None:
    llm = make()
    params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1, n=2)
    out = llm.generate([[5, 6, 7] * 100], params)[0]
    drawn = expected_tokens([5, 6, 7] * 100, 2)
    # the fake says -1 for the token itself, -0.25 for the best one, and -0.5 for prompt tokens
    for choice in out.outputs:
        assert choice.logprobs == [{(t + 1) % VOCAB: -0.25, t: -1.0} for t in drawn]
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs == [None, *({t: -0.5} for t in ([5, 6, 7] * 100)[1:])]
    assert out.num_cached_tokens == 0
    zero = llm.generate([1, 2], SamplingParams(max_tokens=1, logprobs=0))[0].outputs[0]
    assert zero.logprobs == [{zero.token_ids[0]: -1.0}]


def test_a_stop_string_ends_text_and_generation(make: Make, tokenizer: Tokenizer) -> None:
    llm, prompt = make(), [17]
    full = expected_tokens(prompt, 200)
    text = tokenizer.decode(full)
    stop = text[20:23]
    at = text.index(stop)
    out = llm.generate(prompt, SamplingParams(max_tokens=200, stop=stop))[0].outputs[0]
    assert (out.text, out.finish_reason) == (text[:at], "stop")
    n = len(out.token_ids)
    assert out.token_ids == full[:n]
    assert stop in tokenizer.decode(out.token_ids)
    assert stop not in tokenizer.decode(out.token_ids[:-1])
    assert is_idle(llm)
    assert llm.stats()["aborted"] == 0


def test_a_stop_string_that_stays_incomplete_is_text(make: Make, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(expected_tokens([17], 30))
    params = SamplingParams(max_tokens=30, stop=text[-3:] + "\0never")
    assert make().generate([17], params)[0].outputs[0].text == text


def test_no_stop_string_counts_before_min_tokens(make: Make, tokenizer: Tokenizer) -> None:
    llm, prompt = make(), [17]
    text = tokenizer.decode(expected_tokens(prompt, 200))
    params = SamplingParams(max_tokens=200, min_tokens=200, stop=text[20:23])
    out = llm.generate(prompt, params)[0].outputs[0]
    assert len(out.token_ids) == 200


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(make: Make, tokenizer: Tokenizer) -> None:
    full = expected_tokens([3], 50)
    params = SamplingParams(max_tokens=50, stop=("never in it",))
    llm = make(eos=(full[9],))
    out = llm.generate([3], params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == (full[:10], "stop")
    assert out.text == tokenizer.decode(full[:9])


def test_k10_a_failing_step_raises_and_the_next_call_works(make: Make) -> None:
    llm = make(running=1)
    with pytest.raises(RuntimeError, match="ArithmeticError: the accelerator is on fire"):
        llm.generate([[1, FAIL], [2], [3]], SamplingParams(max_tokens=5))
    assert is_idle(llm)
    assert llm.generate([2])[0].outputs[0].token_ids == expected_tokens([2], 16)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler, also where the tests were started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_a_step_returns_every_page(make: Make) -> None:
    llm = make()
    executor = loop_of(llm)._executor
    execute, steps = executor.execute, [0]

    def interrupted(plan: StepPlan) -> StepResult:
        steps[0] += 1
        if steps[0] == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    executor.execute = interrupted  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 300, [2], [3] * 500], SamplingParams(max_tokens=100))
    assert steps[0] == 7
    assert signal.getsignal(signal.SIGINT) is before
    assert is_idle(llm)
    executor.execute = execute  # type: ignore[method-assign]
    assert llm.generate([2])[0].outputs[0].token_ids == expected_tokens([2], 16)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_bookkeeping_waits_for_the_end_of_the_step(make: Make) -> None:
    llm = make()
    scheduler = loop_of(llm)._scheduler
    commit, committed = scheduler.commit, [0]

    def interrupted(plan: StepPlan, result: StepResult, now: float) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        committed[0] += 1
        return commit(plan, result, now)

    scheduler.commit = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 300, [2]], SamplingParams(max_tokens=100))
    assert committed[0] == 1
    scheduler.commit = commit  # type: ignore[method-assign]
    assert is_idle(llm)


def test_generate_works_in_another_thread(make: Make) -> None:
    llm = make()
    results: list[list[int]] = []

    def work(prompt: list[int]) -> None:
        results.append(llm.generate(prompt)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=([i],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(expected_tokens([i], 16) for i in range(4))


def test_shutdown_closes_the_engine(make: Make) -> None:
    with make() as llm:
        executor = loop_of(llm)._executor
        assert llm.stats()["chunk_tokens"] == 128
    assert isinstance(executor, FakeExecutor)
    assert executor.closed == 1
    llm.shutdown()
    for call in (llm.stats, lambda: llm.generate("a")):
        with pytest.raises(RuntimeError, match="was shut down"):
            call()


def test_flags_are_checked_as_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="is not a setting, expected a flag of serve"):
        LLM("nowhere", max_runing_requests=3)
    with pytest.raises(ValueError, match="explicit is not a setting, expected a flag of serve"):
        LLM("nowhere", explicit=["num_tokens"])
    with pytest.raises(ValueError, match="only one of tp and tensor_parallel_size"):
        LLM("nowhere", tp=1, tensor_parallel_size=1)
    with pytest.raises(ValueError, match="only one of tensor_parallel_size and tp"):
        LLM("nowhere", tensor_parallel_size=1, tp=1)
    with pytest.raises(ValueError, match="--decode-log-interval is 0"):
        LLM("nowhere", decode_log_interval=0)
    with pytest.raises(ValueError, match="--tensor-parallel-size is 0"):
        LLM("nowhere", tensor_parallel_size=0)


def test_the_package_is_cheap_to_import() -> None:
    program = (
        "import sys, ftruntime; from ftruntime import SamplingParams; "
        "sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    assert ftruntime.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ftruntime.nothing  # noqa: B018


def test_a_missing_directory_is_a_sentence() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory, expected a check"):
        LLM("nowhere")


def test_a_tokenizer_of_another_model_is_refused_before_the_load(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "build_engine", lambda *_: pytest.fail("loaded"))
    shutil.copytree(model_dir, tmp_path / "other")
    config = {**demo_config("tiny"), "bos_token_id": 5}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="bos_token has id 0, expected 5, the bos_token_id of"):
        LLM(tmp_path / "other")
