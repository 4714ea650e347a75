"""Keys, candidates, the rules that drop one, and the choice.

Mutants tried: each drop rule left out, equals taken in the order of their scores alone, the margin
ignored, the sum of microseconds in place of the mean ratio, a bucket's key handed to the default,
`--tp` ignored, a guess of the model believed, candidates in another order; without a sound default
the first candidate, the least sum, or its figures as those to compare with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import search
from autotune.search import Launch, Problem, Trial
from ftkernels import config
from tests.autotune.toy import HOST, PLAIN, TOY, Tile

LAUNCH = Launch("k", 64, 0, 1024, 16, True, "f32.bf16.bf16.f32", 4, 0.8)
DEFAULT, WIDE, NARROW = Tile(16, 4), Tile(64, 4), Tile(32, 8)


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(search, "registry", lambda: (TOY, HOST, PLAIN))


def _trial(*us: float, **changes: object) -> Trial:
    return Trial(us, (replace(LAUNCH, **changes),))  # type: ignore[arg-type]


def _problem(*others: Tile) -> Problem:
    return Problem("toy", (("I", 128), ("T", 512)), (("toy", {}),), (), (DEFAULT, *others))


def test_a_problem_is_a_bucket_of_one_op(toys):
    found = search.problems([TOY], arch=89)
    keys = [dict(x.key) for x in found]
    assert keys == [
        {"I": 128, "T": 1},
        {"I": 128, "T": 512},
        {"I": 16, "T": 512},
        {"I": 7, "T": 16},
    ]
    assert [[case["name"] for _, case in x.users] for x in found] == [
        ["flash-t1"], ["flash-tp1-t300", "flash-tp1-t400"], ["flash-tp8-t300"], ["flash-alone"],
    ]  # fmt: skip


def test_cases_inside_another_op_are_its_hosts(toys):
    found = {x.key: x for x in search.problems([TOY], arch=89)}
    inside = found[config.entry_key({"T": 512, "I": 128})]
    assert [(op, case["name"]) for op, case in inside.hosts] == [("host", "flash-tp1-inside")]
    alone = found[config.entry_key({"T": 16, "I": 7})]
    assert (alone.users[0][0], alone.hosts) == ("host", ())


def test_ops_without_their_own_lookups_have_no_problems(toys):
    assert search.problems([HOST], arch=89) == []
    assert search.problems([PLAIN], arch=89) == []


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ((1,), {"flash-t1", "flash-tp1-t300"}),
        ((8,), {"flash-t1", "flash-tp8-t300"}),
        ((), {"flash-t1"}),
    ],
    ids=["one rank", "eight ranks", "none"],
)  # fmt: skip
def test_ranks_choose_cases_and_leave_those_of_no_rank(ranks, names, toys):
    found = search.problems([TOY], arch=89, ranks=ranks)
    first = {x.users[0][1]["name"] for x in found}
    assert first - {"flash-alone"} == names


def test_candidates_are_the_default_then_the_others_in_order(toys):
    first, second, *_ = search.problems([TOY], arch=89)
    assert first.default == Tile(16, 4)
    # a lookup with 300 tokens, not one of the bucket's 512, is what the default is asked for
    assert second.default == Tile(64, 4)
    others = [Tile(16, 8), Tile(32, 4), Tile(32, 8), Tile(64, 4), Tile(64, 8)]
    assert list(first.candidates[1:]) == others
    assert len(set(first.candidates)) == 6


def test_real_ops_have_the_keys_of_their_flash_cases():
    from ftkernels import registry

    spec = next(x for x in registry() if x.name == "swiglu_clamp")
    found = search.problems([spec], arch=89, ranks=(1,))
    assert [dict(x.key) for x in found] == [{"I": 2048, "T": 4096}]
    wide = next(x for x in registry() if x.name == "moe_gemm_fp4")
    hosted = [x for x in search.problems([wide], arch=89) if x.users[0][0] == "moe_fp4"]
    assert {dict(x.key)["quantizes"] for x in hosted} == {1}


PTX = """
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };
  @%p1 cp.async.cg.shared.global [ %r3 + 0 ], [ %rd5 + 0 ], 0x10, %r7;
  cp.async.ca.shared.global [ %r3 + 0 ], [ %rd5 + 0 ], 4;
  cp.async.commit_group;
  @%p2 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
  ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd1 + 0 ];
  ld.global.b32 { %r1 }, [ %rd1 + 0 ];
  @%p3 ld.global.b8 { %rs1 }, [ %rd1 + 0 ];
  ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
"""


def test_traits_are_read_off_the_ptx():
    # 16 + 16 + 16 bytes at 16 a thread, and 4 + 4 + 1 at less
    assert search.traits(PTX) == ("f32.bf16.bf16.f32", 2, 48 / 57)
    assert search.traits("ret;") == (None, 0, 0.0)
    other = PTX.replace("bf16.bf16.f32 { %r1 }, { %r2 };", "tf32.tf32.f32;", 1)
    assert search.traits(other)[0] == "f32.bf16.bf16.f32+f32.tf32.tf32.f32"


RULES = {
    "does not fit": {"fits": False},
    "spills": {"spill_bytes": 4},
    "lost its MMA kind": {"mma": "f32.tf32.tf32.f32"},
    "lost pipelining": {"copies": 0},
    "lost 16-byte loads": {"wide": 0.78},
}


@pytest.mark.parametrize(("rule", "change"), RULES.items(), ids=RULES)
def test_each_rule_drops(rule, change):
    assert search.refusal(_trial(1.0, **change), _trial(1.0)) == rule
    choice = search.choose(
        _problem(WIDE), {DEFAULT: _trial(10.0), WIDE: _trial(1.0, **change)}, margin=0.03
    )
    assert choice is not None
    assert (choice.config, dict(choice.dropped), choice.ranking) == (DEFAULT, {rule: 1}, (DEFAULT,))


@pytest.mark.parametrize("change", [{"mma": None}, {"copies": 0}, {"wide": 0}], ids=str)
def test_what_the_default_lacks_nothing_can_lose(change):
    before = _trial(1.0, **change)
    assert search.refusal(before, before) == ""
    gained = search.refusal(_trial(1.0), before)
    assert gained == ("lost its MMA kind" if "mma" in change else "")


def test_a_hundredth_fewer_wide_loads_are_no_loss():
    assert search.refusal(_trial(1.0, wide=0.795), _trial(1.0)) == ""


def test_trials_that_failed_and_other_launches_are_dropped():
    assert search.refusal(Trial(error="does not compile"), _trial(1.0)) == "does not compile"
    two = Trial((1.0,), (LAUNCH, LAUNCH))
    assert search.refusal(two, _trial(1.0)) == "other launches"


@pytest.mark.parametrize(
    ("us", "chosen"), [(9.69, WIDE), (9.71, DEFAULT), (10.0, DEFAULT), (11.0, DEFAULT)], ids=str
)
def test_only_more_than_the_margin_displaces_the_default(us, chosen):
    trials = {DEFAULT: _trial(10.0), WIDE: _trial(us)}
    choice = search.choose(_problem(WIDE), trials, margin=0.03)
    assert choice is not None
    assert choice.config == chosen
    assert choice.gain == pytest.approx(1 - us / 10 if chosen == WIDE else 0)


def test_equals_go_in_the_order_of_the_candidates():
    for order in ((WIDE, NARROW), (NARROW, WIDE)):
        trials = {DEFAULT: _trial(10.0), NARROW: _trial(5.0), WIDE: _trial(5.0)}
        choice = search.choose(_problem(*order), trials, margin=0.03)
        assert choice is not None
        assert choice.config == order[0]
        assert choice.ranking == (*order, DEFAULT)
    same = {record: _trial(10.0) for record in (WIDE, NARROW, DEFAULT)}
    choice = search.choose(_problem(NARROW, WIDE), same, margin=0.0)
    assert choice is not None
    assert choice.ranking == (DEFAULT, NARROW, WIDE)


def test_each_case_counts_alike_however_long_it_takes():
    trials = {DEFAULT: _trial(1.0, 1000.0), WIDE: _trial(0.5, 1050.0), NARROW: _trial(1.0, 940.0)}
    choice = search.choose(_problem(NARROW, WIDE), trials, margin=0.03)
    assert choice is not None
    assert choice.config == WIDE  # 0.5 and 1.05 of the default; the other 1.0 and 0.94
    assert (choice.us, choice.default_us) == (1050.5, 1001.0)


@pytest.mark.parametrize("guess", [DEFAULT, WIDE], ids=str)
def test_where_the_model_guesses_the_default_stays(guess):
    trials = {DEFAULT: _trial(10.0), WIDE: _trial(1.0)}
    trials[guess] = replace(trials[guess], can_tell=False)
    choice = search.choose(_problem(WIDE), trials, margin=0.03)
    assert choice is not None
    assert choice.config == DEFAULT
    assert choice.ranking == (WIDE, DEFAULT)  # what a card would measure first


def test_a_default_at_the_bandwidth_or_a_guess_cannot_be_beaten(toys):
    problem = search.problems([TOY], arch=89)[1]  # 300 and 400 tokens of 128, 8 bytes each
    floors = [8 * t * 128 / 1008e3 for t in (300, 400)]
    for factor, gains in ((1.0, False), (1.02, False), (1.05, True)):
        default = Trial(tuple(factor * us for us in floors), (LAUNCH,))
        assert search.can_gain(problem, default, 89, margin=0.03) == gains
        guess = replace(default, can_tell=False)
        assert not search.can_gain(problem, guess, 89, margin=0.03)
    spilled = Trial(tuple(floors), (replace(LAUNCH, spill_bytes=8),))
    assert search.can_gain(problem, spilled, 89, margin=0.03)


def test_a_peak_that_no_config_passes_ends_the_search(toys, monkeypatch):
    heavy = replace(TOY, flops=lambda case: 33 * 10**9)  # 100 us at the card's 330 TFLOP/s
    monkeypatch.setattr(search, "registry", lambda: (heavy, HOST))
    problem = search.problems([heavy], arch=89)[0]
    assert not search.can_gain(problem, _trial(101.0), 89, margin=0.03)
    assert search.can_gain(problem, _trial(104.0), 89, margin=0.03)


UNSOUND = {"spills": _trial(1.0, 1.0, spill_bytes=8), "fails": Trial(error="does not compile")}


@pytest.mark.parametrize("default", UNSOUND.values(), ids=UNSOUND)
def test_without_a_sound_default_the_fastest_of_the_others_wins(default):
    # of the least of each case WIDE takes 3 and 1, NARROW 1 and 1.5: a mean of 2 and of 1.25
    trials = {DEFAULT: default, WIDE: _trial(3.0, 100.0), NARROW: _trial(1.0, 150.0)}
    for order in ((WIDE, NARROW), (NARROW, WIDE)):
        choice = search.choose(_problem(*order), trials, margin=0.03)
        assert choice is not None
        assert (choice.config, choice.us) == (NARROW, 151.0)
        assert choice.ranking == (NARROW, WIDE)
        assert (choice.default_us, choice.gain) == (None, None)


def test_without_a_sound_default_even_a_guess_is_chosen():
    trials = {DEFAULT: UNSOUND["fails"], WIDE: replace(_trial(2.0), can_tell=False)}
    choice = search.choose(_problem(WIDE), trials, margin=0.03)
    assert choice is not None
    assert choice.config == WIDE


def test_nothing_sound_is_no_choice():
    trials = {DEFAULT: UNSOUND["spills"], WIDE: UNSOUND["fails"]}
    assert search.choose(_problem(WIDE), trials, margin=0.03) is None
