"""`ftruntime inspect`: the worked numbers, the report's command line, and what it refuses.

Mutants tried and seen red: --cards not setting the ranks, GiB taken for GB, notes on stdout, the
refusal of serve not shown, reasons left out of the table, names or figures cut off at 80 columns,
hit rates told where nothing misses or left out where something does, a wrong reason for halves or
graphs, the latency of an all-reduce left out, the ranks named where --cards set them.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from ftruntime.cli import main
from ftruntime.demo.presets import demo_config

# the command line of the report that started the project, without the directory
_REPORT = (
    "--tensor-parallel-size 8 --disable-pynccl --moe-backend offload --moe-cache-auto "
    "--kv-reserve-tokens 327680 --num-tokens 327680 --swa-full-tokens-ratio 0.12 "
    "--memory-ratio 0.90 --max-running-requests 50 --cuda-graph-max-bs 64 "
    "--max-prefill-length 4096 --expert-load parallel --expert-prefetch 2 --enable-cache-report "
    "--decode-log-interval 20 --decode-interleave-every 8 "
    "--served-model-name deepseek-v4-flash --host 0.0.0.0 --port 1919 --moe-prefill-hit-d2d"
)
REPORT = _REPORT.split()


def inspect(*words: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *words])


def values(*words: str) -> dict[str, object]:
    result = inspect(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("ratio", "window", "chunk"), [("0.12", 308, 3456), ("0.02", 261, 384)])
def test_worked_chunk_numbers(ratio, window, chunk):
    plan = values(
        "flash", "--num-tokens", "327680", "--max-running-requests", "50",
        "--swa-full-tokens-ratio", ratio, "--max-prefill-length", "4096",
    )  # fmt: skip
    numbers = [plan[name] for name in ("window_pages", "reserved_window_pages", "chunk_tokens")]
    assert numbers == [window, 253, chunk]
    assert plan["limiting"] == "window_pages"


def test_the_command_line_of_the_report():
    plan = values("--model", "flash", *REPORT, "--cards", "8", "--card-gib", "24")
    assert (plan["chunk_tokens"], plan["window_pages"], plan["ranks"]) == (3456, 308, 8)
    assert (plan["num_tokens"], plan["min_expert_slots"]) == (327680, 6)
    # --decode-interleave-every 8: chunks of up to 3456 tokens and a decode step, modelled
    chunk_ms = plan["modelled"]["steps"]["prefill"]["sum_ms"]
    assert 8e-3 * chunk_ms < plan["max_decode_gap_s"] < 8e-3 * 3 * chunk_ms
    assert plan["budget_bytes"] == int(24 * 2**30 * 0.9)
    assert sum(plan["bytes"].values()) == plan["total_bytes"] == plan["budget_bytes"]
    assert plan["fits"] is True
    assert plan["source"] == "modelled"


def test_the_report_has_reasons_and_modelled_steps():
    plan = values("flash", *REPORT, "--cards", "8")
    assert set(plan["why"]) == set(plan["bytes"])
    assert plan["why"]["experts"].startswith(f"{plan['expert_slots']} slots x 1.67 MB")
    assert plan["moe_backend"] == "offload"
    assert plan["host_bytes"]["expert_bank"] == 43 * 256 * 13369344
    assert "NVIDIA GeForce RTX 4090" in plan["modelled"]["card"]
    assert set(plan["modelled"]["steps"]) == {"decode", "decode_full", "prefill"}
    assert 0 < plan["modelled"]["steps"]["decode"]["overlapped_ms"] < 1000


def test_nothing_is_modelled_for_a_cpu():
    assert values("flash", "--device", "cpu")["modelled"] is None
    assert "modelled ms a step" not in inspect("flash", "--device", "cpu").stdout


def test_a_plan_that_does_not_fit_says_so_and_what_would_help():
    words = ("flash", "--cards", "1", "--num-tokens", "1048576")
    plan = values(*words)
    assert (plan["fits"], plan["bytes"]["headroom"], plan["modelled"]) == (False, 0, None)
    assert sum(plan["bytes"].values()) == plan["total_bytes"] > plan["budget_bytes"]
    result = inspect(*words)
    assert " more than 23.2 GB, 0.9 of what is free" in result.stdout
    assert "plan does not fit needed_bytes=" in result.stderr
    sentence = "serve refuses to start with these flags: --num-tokens is 1048576, expected at most"
    assert sentence in result.stderr


def test_cards_set_the_ranks_unless_told():
    assert values("flash", "--cards", "8")["ranks"] == 8
    assert values("flash", "--cards", "8", "--tp", "4")["ranks"] == 4
    assert values("flash", "--card-gib", "140", "--tp", "2")["ranks"] == 2


def test_flags_that_serve_refuses_are_planned():
    plan = values("flash", "--tp", "2", "--max-decode-gap-ms", "500", "--prefill-layer-groups", "4")
    assert plan["ranks"] == 2


def test_json_says_what_serve_would_refuse():
    assert values("flash", "--cards", "1", "--card-gib", "80")["refusal"] is None
    sentence = values("flash", *REPORT, "--cards", "8", "--num-tokens", "16777216")["refusal"]
    assert sentence.startswith("--")
    assert "expected" in sentence


def test_pro():
    assert values("pro", "--cards", "8", "--card-gib", "80")["num_experts"] == 61 * 384


def test_the_table_holds_the_same_numbers_and_logs_stay_on_stderr():
    result = inspect("flash", *REPORT, "--cards", "8")
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    rows = dict(line for line in lines if len(line) == 2)
    assert rows["chunk_tokens"].strip() == "3456"
    assert rows["limiting"].strip() == "window_pages"
    assert rows["carry"].split()[1].isdigit()
    assert rows["kv_window"].split(maxsplit=2)[2].startswith("308 pages x 5.64 MB: 43 layers")
    assert rows["loading"].split(maxsplit=2)[2].startswith("5 % of the bank and 268 MB")
    assert rows["tokens"].split() == ["1", "50", "3456"]
    assert len(rows["tokens/s"].split(" to ")) == 4
    said = " ".join(result.stdout.split())
    assert "modelled, nothing was timed: 8 x NVIDIA GeForce RTX 4090" in said
    assert "both upper bounds: launches and what the host does are left out" in said
    assert "prefill chunk clamped" not in result.stdout
    assert "prefill chunk clamped chunk_tokens=3456" in result.stderr
    assert "served context is far below the model's max_model_len=327680" in result.stderr


def test_the_footer_has_units_and_hit_rates_only_where_something_misses():
    def footer(*words):
        return " ".join(inspect("flash", "--cards", "8", *words).stdout.split())

    rates = "assumed 25 GB/s to the host, 1008 GB/s of memory, all-reduces with 12 GB/s and 30 us"
    for words, misses in (([], False), (["--num-tokens", "327680"], True)):
        assert rates in footer(*words)
        assert (", hit rate 0." in footer(*words)) is misses
        assert ("hit rate" in footer(*words)) is misses
    every_slot = footer("--card-gib", "80", "--moe-backend", "offload", "--moe-cache-rate", "1")
    assert "hit rate" not in every_slot
    one_less = footer("--card-gib", "80", "--moe-backend", "offload", "--moe-cache-size", "11007")
    assert ", 0.9999 in prefill; assumed" in one_less
    steps = values("flash", "--cards", "8")["modelled"]
    assert (steps["all_reduce_gb_per_s"], steps["all_reduce_latency_us"]) == (12, 30)


EIGHT = ["--cards", "8"]
LAYER = ["--moe-backend", "offload", "--moe-cache-size"]


@pytest.mark.parametrize(("words", "halves", "graphs"), [
    (EIGHT, "chunks of 512 tokens or more run in two halves", "decode steps of so many rows"),
    ([*EIGHT, *LAYER, "256"], "chunks of 512 tokens or more", "decode steps of so many rows"),
    ([*EIGHT, *LAYER, "255", "--cuda-graph-max-bs", "0"],
     "the slots do not hold all experts of a layer", "none, --cuda-graph-max-bs is 0"),
    (["--device", "cpu"], "one rank has no all-reduce to hide", "none, there are no CUDA graphs"),
    ([*EIGHT, "--numerics", "exact", "--card-gib", "160"], "chunks of 512 tokens or more",
     "none, --numerics exact runs references"),
], ids=["eight", "a layer", "less", "cpu", "exact"])  # fmt: skip
def test_halves_and_graphs_have_a_reason(words, halves, graphs):
    said = " ".join(inspect("flash", *words).stdout.split())
    assert f" in_halves: {halves}" in said
    assert f" graph_sizes: {graphs}" in said


def test_a_narrow_screen_cuts_no_name_and_no_number(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = inspect("flash", *REPORT, "--cards", "8").stdout
    monkeypatch.setenv("COLUMNS", "80")
    out = inspect("flash", *REPORT, "--cards", "8").stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert sorted(out.split()) == sorted(whole.split())


def test_a_directory_needs_its_config_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(demo_config("tiny")))
    plan = values(str(tmp_path), "--device", "cpu", "--num-tokens", "1024")
    assert plan["num_experts"] == 6 * 16
    assert (plan["num_tokens"], plan["max_model_len"], plan["model"]) == (1024, 1024, str(tmp_path))


WRONG = [
    (["flash", "--cards", "0"], 2, "--cards is 0, expected an integer in [1, 1024] (nearest: 1)"),
    (["flash", "--cards", "many"], 2, "--cards is many, expected an integer in [1, 1024]"),
    (["flash", "--card-gib", "-1"], 2, "--card-gib is -1, expected a number in (0, 4096]"),
    (["flash", "--cards", "2", "--device", "cpu"], 2,
     "--cards is 2, expected it unset with --device cpu"),
    (["flash", "--cards", "4", "--tp", "8"], 2,
     "--tensor-parallel-size is 8, expected at most the 4 of --cards"),
    (["flash", "--tp", "3"], 2,
     "--tensor-parallel-size is 3, expected a divisor of num_attention_heads (64)"),
    (["flash", "--cards", "3"], 2, "--cards is 3, expected a divisor of num_attention_heads (64)"),
    (["flash", "--cards", "3", "--tp", "3"], 2,
     "--tensor-parallel-size is 3, expected a divisor of num_attention_heads (64)"),
    (["/nowhere"], 2, "--model is /nowhere, expected a checkpoint directory, flash or pro"),
    (["flash", "--model", "pro"], 2,
     "--model is pro, expected only one model, flash was given too"),
    (["flash", "--moe-backend", "fused", "--moe-cache-rate", "0.5"], 2,
     "--moe-cache-rate is 0.5, expected it unset with --moe-backend fused"),
    (["flash", "--moe-cache-size", "5"], 2, "--moe-cache-size is 5, expected 6 to 11008"),
    (["flash", "--max-model-len", "2000000"], 2,
     "--max-model-len is 2000000, expected at most the model's 1048576"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "sentence"), WRONG, ids=[" ".join(w[0]) or "-" for w in WRONG]
)
def test_wrong_input_is_one_sentence(words, code, sentence):
    result = inspect(*words)
    assert result.exit_code == code
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_broken_config_is_a_failure(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = inspect(str(tmp_path))
    assert result.exit_code == 1
    expected = f"{tmp_path}/config.json: model_type is 'llama', expected \"deepseek_v4\"\n"
    assert result.stderr == expected
