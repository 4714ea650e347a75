"""`ftruntime simulate`: the stall experiment against arithmetic on its numbers, and the command.

The expectations are a few lines of arithmetic: chunk costs by the formula, decode steps where the
policy owes one, sums of both between two decodes. No scheduler code takes part.

Mutants tried and seen red: a decode after N + 1 chunks, a victim that waits for its own prefill, a
preset that keeps the report's `--decode-interleave-every`, an attacker whose wall begins at 0, a
serve flag that does not override the preset, the first policy's report printed for all, victims one
chunk after another, gaps of one victim only, noise that costs nothing, a gap bound without margin,
a seed that asks for a trace beside noise, a plot without the other victims, no retractions told,
the preset's context warned of or no other, a plot drawn first, no check of optimistic victims or
one without the attacker, a list of N bounded from below only, an attacker after the end, noise left
out of that end, clients below the summary, defaults of `serve` in the help, no check of lengths or
none of the victims', one token more or less, its output or the context's limit left out, the other
flag named for it, a seed that asks for a trace or is taken where nothing is drawn or refused where
a trace is, a trace beside flags of a random one, a preset silent of what it was cut from, a prompt
told to be shorter that fits alone or where none would fit.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import matplotlib
import pytest
from click.testing import CliRunner, Result

from ftruntime import cli
from ftruntime.flags import flag_name
from ftruntime.sim.settings import simulate_specs

FIELDS = [
    "policy", "prefill_chunks", "attacker_wall_s", "victim_wall_s", "victim_tokens",
    "victim_alone_wall_s", "max_gap_s", "gaps_over_5s", "gaps_over_20s",
    "interleaved_decode_steps", "victim_tokens_during_prefill", "source",
]  # fmt: skip
SEED_COST = (0.262, 0.200e-3, 1.08e-9, 0.0168)


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["simulate", *map(str, words)])


def simulate(*words: object) -> dict[str, object]:
    result = invoke("--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def by_hand(
    every: int | None = None, *, cost: tuple[float, ...] = SEED_COST, prompt: int = 200_019,
    chunk: int = 3456, victim: int = 699, attack_after: float = 6.0,
) -> dict[str, object]:  # fmt: skip
    """The experiment for a victim that outlives the prefill: its token times, one after another."""
    a, b, d, decode = cost
    chunks = [
        a + min(chunk, prompt - x) * (b + d * x) for x in range(0, prompt, chunk)
    ]  # fmt: skip
    # the step under way when the prompt arrives is a decode
    num_before = max(1, math.ceil(attack_after / decode)) if attack_after else 0
    times = [number * decode for number in range(num_before + 1)]
    begin = now = times[-1]
    for done, seconds in enumerate(chunks, 1):
        now += seconds
        if every is not None and done % every == 0 and done < len(chunks):
            now += decode
            times.append(now)
    end, during = now, len(times) - num_before - 1
    while len(times) <= victim:
        now += decode
        times.append(now)
    gaps = [late - early for early, late in pairwise(times)]
    assert times[num_before] == begin
    return {
        "prefill_chunks": len(chunks),
        "attacker_wall_s": end + 2 * decode - attack_after,
        "victim_wall_s": times[-1],
        "victim_tokens": victim,
        "victim_alone_wall_s": victim * decode,
        "max_gap_s": max(gaps),
        "gaps_over_5s": sum(gap > 5 for gap in gaps),
        "gaps_over_20s": sum(gap > 20 for gap in gaps),
        "interleaved_decode_steps": during,
        "victim_tokens_during_prefill": during,
    }


def of_all(report: dict[str, object], num_victims: int) -> dict[str, object]:
    """What victims that decode together come to: counts of all, walls and gaps of each."""
    counts = ("victim_tokens", "gaps_over_5s", "gaps_over_20s", "victim_tokens_during_prefill")
    return {
        name: value * num_victims if name in counts else value for name, value in report.items()
    }


def without_policy(report: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in report.items() if name not in ("policy", "source")}


@pytest.fixture(scope="module")
def table() -> dict[int | None, dict[str, object]]:
    """The preset's reports by N, from one command."""
    result = CliRunner().invoke(cli.main, ["simulate", "--json", "--table", "1,2,4,8,16"])
    assert result.exit_code == 0, result.output
    return {
        report["policy"]["decode_interleave_every"]: report for report in json.loads(result.stdout)
    }


@pytest.mark.parametrize("every", [None, 1, 2, 4, 8, 16])
def test_the_preset_is_what_arithmetic_says(table, every):
    assert list(table[every]) == FIELDS
    assert table[every]["source"] == "simulated"
    assert without_policy(table[every]) == pytest.approx(by_hand(every), abs=1e-5)


def test_unset_freezes_the_victim_once(table):
    report = table[None]
    assert report["prefill_chunks"] == 58
    assert report["gaps_over_20s"] == report["gaps_over_5s"] == 1
    assert report["max_gap_s"] == pytest.approx(76.4, abs=0.5)
    assert report["victim_wall_s"] == pytest.approx(88.2, abs=0.5)
    assert report["interleaved_decode_steps"] == 0
    assert report["policy"] == {
        "decode_interleave_every": None, "max_decode_gap_ms": None, "prefill_layer_groups": None,
        "chunk_tokens": 3456,
    }  # fmt: skip


def test_eight_lets_seven_decodes_through(table):
    report, unset = table[8], table[None]
    assert report["interleaved_decode_steps"] == report["gaps_over_5s"] == 7
    assert report["max_gap_s"] == pytest.approx(12.96, abs=0.1)
    for name in ("victim_wall_s", "attacker_wall_s"):
        assert report[name] == pytest.approx(unset[name], abs=0.5)


def test_one_run_is_the_same_as_its_column(table):
    assert simulate("--preset", "seed", "--decode-interleave-every", 8) == table[8]


LARGE = ("--swa-full-tokens-ratio", "0.15", "--max-prefill-length", "6912")


@pytest.mark.parametrize(
    ("words", "gap_s", "wall_ratio"),
    [
        (("--max-decode-gap-ms", 1500), 1.5, 1.035),
        (("--max-decode-gap-ms", 900), 0.9, 1.05),
        (("--max-decode-gap-ms", 1500, "--decode-interleave-every", 8), 1.5, 1.035),
        ((*LARGE, "--prefill-layer-groups", 4), 0.8, 0.95),
        ((*LARGE, "--prefill-layer-groups", 8), 0.45, 1.0),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_bounded_gaps_at_a_bounded_price(table, words, gap_s, wall_ratio):
    report, unset = simulate(*words), table[None]
    assert report["max_gap_s"] <= gap_s
    assert report["attacker_wall_s"] <= wall_ratio * unset["attacker_wall_s"]
    assert report["victim_tokens_during_prefill"] == report["interleaved_decode_steps"] > 0


def test_slices_by_hand():
    # chunks of 384 tokens cost 0.1 + 0.384 s; two slices of 22 and 21 of 43 layers, each followed
    # by a decode of 0.02 s as long as prefill is left
    words = ("--swa-full-tokens-ratio", 0.02, "--prompt-tokens", 768, "--attack-after", 1.99,
             "--cost", "0.1,0.001,0,0.02", "--prefill-layer-groups", 2)  # fmt: skip
    found = simulate(*words)
    assert found["prefill_chunks"] == 2
    assert found["interleaved_decode_steps"] == 3
    assert found["max_gap_s"] == pytest.approx(0.484 * 22 / 43 + 0.02, abs=1e-5)
    assert found["attacker_wall_s"] == pytest.approx(0.01 + 2 * 0.484 + 5 * 0.02, abs=1e-5)


def test_another_cost_by_hand():
    # chunks of 3456, 3456 and 3088 tokens: 4.456 + 4.456 + 4.088 = 13 s. The victim decodes at 1.1
    # when the prompt of 1.05 begins
    words = ("--cost", "1,0.001,0,0.1", "--prompt-tokens", 10_000, "--victim-tokens", 50,
             "--attack-after", 1.05)  # fmt: skip
    unset, one = simulate(*words), simulate(*words, "--decode-interleave-every", 1)
    assert unset["prefill_chunks"] == one["prefill_chunks"] == 3
    assert unset["attacker_wall_s"] == pytest.approx(0.05 + 13 + 0.2)
    assert one["attacker_wall_s"] == pytest.approx(0.05 + 13 + 0.2 + 0.2)
    assert unset["victim_wall_s"] == one["victim_wall_s"] == pytest.approx(50 * 0.1 + 13)
    assert unset["victim_alone_wall_s"] == pytest.approx(5.0)
    assert unset["max_gap_s"] == pytest.approx(13.1)
    assert one["max_gap_s"] == pytest.approx(4.556)
    assert (unset["interleaved_decode_steps"], one["interleaved_decode_steps"]) == (0, 2)
    assert (unset["gaps_over_5s"], one["gaps_over_5s"]) == (1, 0)
    assert unset["victim_tokens"] == one["victim_tokens"] == 50


@pytest.mark.parametrize("every", [None, 3])
def test_serve_flags_override_the_preset(every):
    # the ratio leaves window pages for chunks of 384 tokens
    words = ["--swa-full-tokens-ratio", 0.02, "--prompt-tokens", 20_000, "--attack-after", 5.99]
    words += ["--cost", "0.1,0.001,1e-9,0.02"]
    if every is not None:
        words += ["--decode-interleave-every", every]
    found = simulate(*words)
    assert found["policy"]["chunk_tokens"] == 384
    wanted = by_hand(
        every, cost=(0.1, 0.001, 1e-9, 0.02), prompt=20_000, chunk=384, attack_after=5.99
    )
    assert without_policy(found) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("num_victims", "every"), [(2, None), (8, 8), (49, 1)])
def test_victims_decode_in_one_batch(num_victims, every):
    words = () if every is None else ("--decode-interleave-every", every)
    found = simulate("--victims", num_victims, *words)
    assert list(found) == FIELDS
    assert without_policy(found) == pytest.approx(of_all(by_hand(every), num_victims), abs=1e-5)


def test_more_victims_than_pages_of_a_chunk():
    # chunks of 384 tokens are three pages
    words = ("--swa-full-tokens-ratio", 0.02, "--prompt-tokens", 5000, "--attack-after", 5.99,
             "--cost", "0.1,0.001,1e-9,0.02", "--decode-interleave-every", 2)  # fmt: skip
    wanted = by_hand(2, cost=(0.1, 0.001, 1e-9, 0.02), prompt=5000, chunk=384, attack_after=5.99)
    found = simulate("--victims", 5, *words)
    assert without_policy(found) == pytest.approx(of_all(wanted, 5), abs=1e-5)


def test_one_victim_and_no_noise_is_the_default():
    words = ("--prompt-tokens", 9000, "--max-decode-gap-ms", 900)
    plain, same = invoke(*words), invoke(*words, "--victims", 1, "--noise", 0, "--seed", 5)
    assert plain.exit_code == 0
    assert same.stdout_bytes == plain.stdout_bytes


def test_noise_scatters_the_steps_about_their_cost():
    share, decode = 0.5, 0.0168
    words = ("--prompt-tokens", 5000, "--attack-after", 17.6, "--noise", share)
    found = simulate(*words)
    # 699 uniform factors: mean 1, standard deviation share / sqrt(3), the largest near 1 + share
    mean = found["victim_alone_wall_s"] / (699 * decode)
    assert 0 < abs(mean - 1) < 4 * share / math.sqrt(3 * 699)
    assert 1 + 0.97 * share < found["max_gap_s"] / decode <= 1 + share
    assert simulate(*words, "--seed", 1) != found


@pytest.mark.parametrize("every", [None, 4])
def test_noise_keeps_every_gap_in_proportion(every, table):
    words = () if every is None else ("--decode-interleave-every", every)
    found, exact = simulate("--noise", 0.2, *words), table[every]
    for name in ("max_gap_s", "attacker_wall_s", "victim_wall_s", "victim_alone_wall_s"):
        assert 0.8 < found[name] / exact[name] < 1.2
        assert found[name] != exact[name]
    same = ("prefill_chunks", "interleaved_decode_steps", "victim_tokens_during_prefill")
    assert [found[name] for name in same] == [exact[name] for name in same]


@pytest.mark.parametrize(("share", "most_over", "largest"), [(0.0, 0.0, 1.0), (0.1, 0.02, 1.05)])
def test_only_stray_gaps_pass_a_bound_under_noise(share, most_over, largest):
    # the preset's costs scaled so that 900 ms become the 5 s above which gaps are counted
    scale, bound_s = 5 / 0.9, 5.0
    cost = ",".join(str(scale * number) for number in SEED_COST)
    num_over = num_gaps = 0
    for seed in range(2 if share else 1):
        found = simulate("--cost", cost, "--max-decode-gap-ms", 5000, "--noise", share,
                         "--seed", seed)  # fmt: skip
        num_over += found["gaps_over_5s"]
        num_gaps += found["interleaved_decode_steps"]
        assert found["max_gap_s"] / bound_s <= largest
    assert num_gaps > 80
    assert num_over / num_gaps <= most_over


def test_noise_of_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 10, "max_tokens": 500}\n')
    words = ("--trace", path, "--noise", 0.5)
    (client,) = simulate(*words, "--seed", 3)["per_client"]
    assert client["gap_s"]["p50"] == pytest.approx(0.0168, rel=0.05)
    assert 1.45 < client["gap_s"]["max"] / 0.0168 <= 1.5
    assert simulate(*words)["per_client"] != [client]


@pytest.mark.parametrize("total", ["sum", "overlapped"])
def test_the_steps_that_inspect_models(total):
    words = ("--cost", total, "--victim-tokens", 20000, "--max-prefill-length", 2048)
    result = CliRunner().invoke(cli.main, [
        "inspect", "flash", "--json", "--tp", "8", "--cards", "8", "--moe-backend", "offload",
        "--num-tokens", "327680", "--max-prefill-length", "2048",
        "--swa-full-tokens-ratio", "0.12", "--max-running-requests", "50",
    ])  # fmt: skip
    (chunk_ms, tokens) = (
        json.loads(result.stdout)["modelled"]["steps"]["prefill"][name]
        for name in (f"{total}_ms", "tokens")
    )
    assert tokens == 2048
    # a prompt of one chunk at the context that inspect prints takes the chunk's time longer than
    # one that ends a chunk earlier
    long, short = (
        simulate(*words, "--prompt-tokens", prompt)["attacker_wall_s"]
        for prompt in (32768, 32768 - 2048)
    )
    assert long - short == pytest.approx(chunk_ms / 1e3, rel=0.02)
    assert "as `inspect` models them" in invoke(*words, "--prompt-tokens", 100).stdout


def test_steps_that_are_not_modelled():
    result = invoke("--cost", "sum", "--numerics", "exact")
    assert result.exit_code == 2
    assert result.stderr == (
        "--cost is sum, expected four numbers with --numerics exact, whose steps are not modelled\n"
    )


def test_a_flag_replaces_the_one_of_its_group():
    assert simulate("--num-pages", 2560, "--prompt-tokens", 1000)["policy"]["chunk_tokens"] == 3456


def test_an_attacker_at_once_and_one_that_comes_too_late():
    at_once = simulate("--attack-after", 0, "--prompt-tokens", 5000)
    wanted = by_hand(prompt=5000, attack_after=0.0)
    assert without_policy(at_once) == pytest.approx(wanted, abs=1e-5)
    # just before the last of 699 tokens
    late = simulate("--attack-after", 699 * 0.0168 - 1e-6, "--prompt-tokens", 5000)
    assert late["max_gap_s"] == pytest.approx(0.0168)
    assert late["victim_wall_s"] == late["victim_alone_wall_s"]


def test_costless_steps_end_too():
    found = simulate("--cost", "0,0,0,0", "--prompt-tokens", 5000, "--attack-after", 0)
    assert found["max_gap_s"] == found["attacker_wall_s"] == 0
    for flags in (("--max-decode-gap-ms", 900), ("--prefill-layer-groups", 4)):
        for cost in ("0,0,0,0", "0,0,1e-9,0.01"):
            found = simulate("--cost", cost, "--prompt-tokens", 5000, "--attack-after", 0, *flags)
            assert found["victim_tokens"] == 699


def test_the_text_says_what_it_is():
    result = invoke("--prompt-tokens", 5000, "--table", "1,2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["simulated", "unset", "N=1", "N=2"]
    assert [line.split()[0] for line in lines[1:11]] == FIELDS[1:-1]
    assert lines[-1] == (
        "simulated, nothing was timed: flash on 8 x 24 GiB, chunks of 3456 tokens, "
        "step cost 0.262,0.0002,1.08e-09,0.0168 s (whatever the other flags)"
    )
    more = invoke("--prompt-tokens", 5000, "--victims", 3, "--noise", 0.25, "--seed", 7)
    assert more.stdout.splitlines()[-1] == lines[-1] + (
        " times factors in [0.75, 1.25], seed 7; 3 victims, walls and longest gap of the worst, "
        "counts of all"
    )


def test_the_help_has_sections_and_the_defaults_of_the_preset():
    text = CliRunner().invoke(cli.main, ["simulate", "--help"], terminal_width=300).stdout
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings[1:] == [
        "Experiment:", "Long prompt beside running streams:",
        "Trace of many clients, in place of it:", "Policy (flags of serve):",
        "Every other flag of `serve` is accepted too: `ftruntime serve --help` lists them.",
    ]  # fmt: skip
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    assert lines["--max-prefill-length"].endswith("[default: 4096, by the preset]")
    # 4096 and what the window pages leave of it, as the preset's own run has it
    assert "--max-prefill-length 4096 to chunks of 3456 tokens" in lines["--preset"]
    assert lines["--admission"].endswith("[default: reserve]")
    assert not {"--port", "--help"} & lines.keys()
    assert "--trace" in lines
    # every option of its own is listed
    assert {flag_name(name) for name in simulate_specs()} <= lines.keys()


def test_the_summary_of_a_trace_comes_last():
    lines = invoke("--requests", 3, "--seed", 1).stdout.splitlines()
    assert lines[0].split()[:2] == ["client", "arrival_s"]
    assert [line.split()[0] for line in lines[1:4]] == [f"client-{i}" for i in range(3)]
    assert lines[5].split() == ["simulated", "unset"]
    assert lines[-1].startswith("simulated, nothing was timed: ")


def test_a_trace_of_many_clients(tmp_path):
    words = ("--requests", 40, "--arrivals", "poisson:2", "--prompt-lengths", "uniform:1:9000",
             "--output-lengths", "fixed:30", "--seed", 5)  # fmt: skip
    found = simulate(*words)
    assert found == simulate(*words)
    assert (found["clients"], found["refused"]) == (40, 0)
    assert [client["tokens"] for client in found["per_client"]] == [30] * 40
    # first come, first served: first tokens come in order of arrival
    clients = found["per_client"]
    firsts = [round(client["arrival_s"] + client["first_token_s"], 5) for client in clients]
    assert firsts == sorted(firsts)
    for name in ("first_token_s", "wall_s"):
        assert all(client[name] > 0 for client in clients)
    assert found["gap_s"]["max"] == max(client["gap_s"]["max"] for client in clients)
    path = tmp_path / "trace.jsonl"
    keys = ("arrival_s", "prompt_tokens")
    lines = [{**{key: client[key] for key in keys}, "max_tokens": 30} for client in clients]
    path.write_text("\n".join(map(json.dumps, lines)))
    replayed = simulate("--trace", path)
    assert replayed["first_token_s"] == pytest.approx(found["first_token_s"], abs=1e-4)
    assert replayed["wall_s"] == pytest.approx(found["wall_s"], abs=1e-4)


def test_optimistic_admission_retracts_where_the_pool_is_short(tmp_path):
    # 12 pages for two requests that come to 9 each: with 641 tokens drawn of both they fill 6 each,
    # the newer one leaves, and comes back when the other one has drawn its last 383
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 128, "max_tokens": 1024}\n' * 2)
    words = ("--trace", path, "--num-tokens", 12 * 128, "--max-running-requests", 2,
             "--cache-type", "naive", "--cost", "0.25,0.001,0,0.02")  # fmt: skip
    found = simulate(*words, "--admission", "optimistic")
    assert found["retractions"] == 1
    chunks = math.ceil((128 + 641) / found["policy"]["chunk_tokens"])
    assert (found["prefill_steps"], found["decode_steps"]) == (1 + chunks, 1023 + 382)
    assert [client["tokens"] for client in found["per_client"]] == [1024, 1024]
    gaps = [client["gap_s"]["max"] for client in found["per_client"]]
    resumed_s = 383 * 0.02 + chunks * 0.25 + (128 + 641) * 0.001
    assert gaps == pytest.approx([0.02, resumed_s], abs=1e-5)
    reserved = simulate(*words)
    assert reserved["retractions"] == 0
    assert reserved["per_client"][1]["first_token_s"] > reserved["per_client"][0]["wall_s"]


def test_a_client_that_cannot_be_served_is_counted(tmp_path):
    path = tmp_path / "trace.jsonl"
    small = '{"arrival_s": 0, "prompt_tokens": 10, "max_tokens": 2}'
    large = '{"arrival_s": 1, "prompt_tokens": 400000, "max_tokens": 2}'
    path.write_text(f"{small}\n{large}\n")
    found = simulate("--trace", path)
    assert (found["clients"], found["refused"]) == (2, 1)
    assert "400002 tokens" in found["per_client"][1]["refusal"]
    text = invoke("--trace", path).stdout
    assert "client-1" in text


OPTIMISTIC = ("--admission", "optimistic", "--victims", 4, "--max-running-requests", 5,
              "--prompt-tokens", 200, "--attack-after", 0)  # fmt: skip


def test_optimistic_victims_that_just_fit_decode_together():
    # 4 pages of prompts and a page more for each, and 2 pages of the attacker
    found = simulate(*OPTIMISTIC, "--num-tokens", 10 * 128, "--victim-tokens", 50)
    assert found["victim_alone_wall_s"] == pytest.approx(50 * 0.0168)
    assert found["victim_tokens"] == 200
    # a step of the attacker and no more, whether or not it meets the victims' prompts
    assert found["victim_wall_s"] < 51 * 0.0168 + 0.262 + 200 * 0.0002


@pytest.mark.parametrize(("words", "num_lines"), [
    (("--memory-ratio", 0.8), 0), (("--num-tokens", 320_000), 1), (("--num-pages", 2500), 1),
    (("--model", "pro"), 1), (("--decode-interleave-every", 99), 1),
])  # fmt: skip
def test_warnings_are_about_what_was_given(words, num_lines):
    result = invoke("--prompt-tokens", 9, "--victim-tokens", 1, "--attack-after", 0, *words)
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if " warning ftruntime.cli: " in line]
    assert len(lines) == num_lines


@pytest.mark.parametrize("cost", ["1e6,1e6,1e6,1e6", "1e6,1e6,1e6,1e-300"])
def test_the_largest_costs_end_in_finite_numbers(cost):
    words = ("--cost", cost, "--max-decode-gap-ms", 900, "--noise", 0.9, "--victim-tokens", 9)
    result = invoke("--json", *words, "--prompt-tokens", 20_000, "--attack-after", 0)
    assert result.exit_code == 0
    assert not re.search("NaN|Infinity", result.stdout)


def test_the_result_is_printed_before_the_plot_fails(tmp_path, monkeypatch):
    path = tmp_path / "plot.svg"

    def draw(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("ftruntime.timeline.draw", draw)
    result = invoke("--json", "--prompt-tokens", 500, "--plot", path)
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)) == FIELDS
    assert result.stderr == f"{path} cannot be opened or written (No space left on device)\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--cost", "1,2"), "--cost is 1,2, expected four numbers in [0, 1000000], seconds: "),
        (("--preset", "best"), "--preset is best, expected one of seed"),
        (("--prompt-tokens", 0), "--prompt-tokens is 0, expected an integer in "),
        (("--victim-tokens", "x"), "--victim-tokens is x, expected an integer in "),
        (("--attack-after", -1), "--attack-after is -1, expected a number >= 0"),
        (
            ("--attack-after", 600),
            "--attack-after is 600, expected below 11.7432, when the victims have their 699 tokens",
        ),
        (("--attack-after", 11.75), "--attack-after is 11.75, expected below 11.7432, when "),
        (("--attack-after", 8, "--victim-tokens", 476), "--attack-after is 8, expected below 7.99"),
        (("--attack-after", 13, "--noise", 0.1), "--attack-after is 13, expected below 12.9175, "),
        (("--table", "1,0"), "--table is 1,0, expected integers in [1, 2^40) with commas"),
        (("--table", 2**40), f"--table is {2**40}, expected integers in [1, 2^40) with commas"),
        (("--cost", "1e308,0,0,0"), "--cost is 1e308,0,0,0, expected four numbers in [0, 1000000]"),
        (("--table", "1", "--decode-interleave-every", 2), "--table is 1, expected only one of "),
        (("--requests", 2, "--table", "1"), "--table is 1, expected it unset with a trace"),
        (("--seed", 2), "--seed is 2, expected it unset without --noise or a random trace (--req"),
        (("--trace", "x", "--seed", 1), "--seed is 1, expected it unset without --noise or a"),
        (("--trace", "x", "--arrivals", "y"), "--arrivals is y, expected it unset with --trace"),
        (("--trace", "/none"), "--trace is /none, expected a file that can be read (No such file"),
        (("--trace", "x", "--requests", 1, "--noise", 0.1), "--requests is 1, expected it unset"),
        (("--requests", 2, "--victims", 2), "--victims is 2, expected it unset with a trace"),
        (("--victims", 0), "--victims is 0, expected an integer in [1, 1024]"),
        (("--victims", 50), "--max-running-requests is 50, expected at least 51, a row for each "),
        (
            ("--victims", 129, "--max-running-requests", 200, "--max-prefill-length", 128),
            "--victims is 129, expected at most 128, the tokens of a chunk",
        ),
        (
            ("--victims", 49, "--victim-tokens", 5000),
            "--num-tokens is 327680, expected at least 450944, what victims and attacker reserve ",
        ),
        (
            # a victim of 128 and 601 tokens takes 6 of 2560 pages
            ("--prompt-tokens", 327_678, "--victim-tokens", 600),
            "--prompt-tokens is 327678, expected at most 326909 beside the victims, or "
            "--num-tokens of 328576",
        ),
        (
            # its prompt, and a page for its next token
            ("--prompt-tokens", 327_678, "--admission", "optimistic"),
            "--prompt-tokens is 327678, expected at most 327424 beside the victims, or "
            "--num-tokens of 327936",
        ),
        (
            # no prompt would fit beside the victim
            ("--prompt-tokens", 327_678, "--victim-tokens", 400_000),
            "--num-tokens is 327680, expected at least 728064, what victims and attacker reserve ",
        ),
        (
            ("--num-tokens", 128, "--prompt-tokens", 10, "--victim-tokens", 400),
            "--num-tokens is 128, expected at least 768, what victims and attacker reserve ",
        ),
        (
            ("--prompt-tokens", 998, "--max-model-len", 1000),
            "--prompt-tokens is 998, expected at most 997, what --max-model-len 1000 holds ",
        ),
        (
            # its own prompt is a page, and the token of time 0 is not among those asked for
            ("--prompt-tokens", 9, "--max-model-len", 1000, "--victim-tokens", 872),
            "--victim-tokens is 872, expected at most 871, what --max-model-len 1000 holds beside "
            "129 other tokens of the request",
        ),
        (
            ("--prompt-tokens", 9, "--max-model-len", 129, "--victim-tokens", 1, "--victims", 2),
            "--max-model-len is 129, expected at least 130, the least that the victim takes",
        ),
        (
            (*OPTIMISTIC, "--num-tokens", 9 * 128, "--victim-tokens", 1),
            "--num-tokens is 1152, expected at least 1280, what victims and attacker hold ",
        ),
        (("--noise", 1), "--noise is 1, expected a number in [0, 1)"),
        (("--noise", -0.1), "--noise is -0.1, expected a number in [0, 1)"),
        (("--plot", ""), "--plot is '', expected a non-empty string"),
        (("--plot", "/none/a.svg"), "--plot is /none/a.svg, expected a file that can be written"),
        (("--plot", "a.gif"), "--plot is a.gif, expected a file name that ends in "),
        (("--tp", 3), "--tensor-parallel-size is 3, expected a divisor of "),
        (("--decode-interleave-every", 0), "--decode-interleave-every is 0, expected "),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words, sentence):
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_the_longest_requests_that_fit_run():
    words = ("--prompt-tokens", 997, "--max-model-len", 1000, "--victim-tokens", 871)
    found = simulate(*words, "--attack-after", 0)
    assert (found["prefill_chunks"], found["victim_tokens"]) == (1, 871)


def test_a_victim_that_the_queue_turns_away_is_said():
    result = invoke("--victims", 3, "--max-waiting-tokens", 1)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("the victim is refused: the queue is full: ")


def test_a_seed_asks_for_no_trace():
    words = ("--prompt-tokens", 5000, "--attack-after", 1, "--noise", 0.1, "--seed", 2)
    assert list(simulate(*words)) == FIELDS


def test_the_plot_shows_victim_and_prefill(tmp_path):
    path = tmp_path / "plot.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        simulate("--prompt-tokens", 5000, "--plot", path)
    text = path.read_text()
    assert "unset: victim" in text
    assert "attacker's prefill" in text.replace("&#x27;", "'").replace("&apos;", "'")


def test_the_plot_shows_every_victim(tmp_path):
    path = tmp_path / "plot.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        simulate("--prompt-tokens", 5000, "--victims", 3, "--table", 2, "--plot", path)
    text = path.read_text()
    assert text.count("unset: victim 0 and 2 more") == text.count("N=2: victim 0 and 2 more") == 1
