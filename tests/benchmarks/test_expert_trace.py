"""The simulated trace: its picks, its accounting, its policies and its command, in tiny sizes.

Mutants tried: picks with repetition; uniform exponents; a drift that copies instead of trading; no
drift; the wrong hundred steps before the burst; "first" taken from the sweeps on; misses counted as
hits; a decode step after every ninth sweep; keys of all layers alike; slots that are never
released; a means over policies together; 2Q without ghosts; S3-FIFO without promotion, and without
reinsertion; segmented LRU without protection; LRU by layer blind to layers; LRU of decode's uses
that lets prefill count; `--plot` without matplotlib going on.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trace():
    return importlib.import_module("bench_kernels.expert_trace")


def tiny(trace, **changed):
    sizes = {"layers": 3, "experts": 16, "topk": 3, "steps": 30, "sweeps": 17, "drift": 0.01}
    return trace.Sizes(**{**sizes, **changed})


def test_picks_are_distinct_and_seeded(trace):
    sizes = tiny(trace)
    chosen = trace.picks(sizes, 1)
    assert chosen.shape == (2 * 30 + 2, 3, 3)
    assert chosen.min() >= 0
    assert chosen.max() < 16
    assert all(len(set(layer)) == 3 for step in chosen.tolist() for layer in step)
    assert np.array_equal(chosen, trace.picks(sizes, 1))
    assert not np.array_equal(chosen, trace.picks(sizes, 2))


def test_picks_follow_zipf(trace):
    """One pick a step, no drift: frequencies by rank are ``rank ** -exponent``, 0.6 to 1.2."""
    sizes = tiny(trace, layers=6, experts=32, topk=1, steps=10_000, sweeps=0, drift=0)
    chosen = trace.picks(sizes, 4)
    exponents = []
    for layer in range(6):
        counts = np.sort(np.bincount(chosen[:, layer, 0], minlength=32))[::-1]
        exponents.append(-np.polyfit(np.log(np.arange(1, 17)), np.log(counts[:16]), 1)[0])
    assert min(exponents) > 0.5
    assert max(exponents) < 1.3
    assert max(exponents) - min(exponents) > 0.2


def test_drift_trades_places(trace):
    """Popularity moves on, and no expert is lost: over time all are picked about as often."""
    still = trace.picks(tiny(trace, steps=4000, sweeps=0, drift=0), 1)
    moving = trace.picks(tiny(trace, steps=4000, sweeps=0, drift=0.05), 1)
    for chosen, spread in ((still, (2, 50)), (moving, (1, 1.3))):
        counts = np.bincount(chosen[:, 0].ravel(), minlength=16)
        assert spread[0] < counts.max() / counts.min() < spread[1]


def test_everything_resident_misses_each_expert_once(trace):
    sizes = tiny(trace)
    chosen = trace.picks(sizes, 3)
    for policy in trace.NAMES:
        steps = list(trace.simulate(sizes, chosen, 1.0, policy))
        sweeps = [rate for phase, rate in steps if phase == "prefill"]
        warm = len({(layer, e) for layer in range(3) for e in chosen[:30, layer].ravel()})
        assert sweeps == [pytest.approx(warm / 48)] + [1.0] * 16
        assert all(rate == 1.0 for _, rate in steps[31:])


def test_order_of_the_steps(trace):
    sizes = tiny(trace)
    phases = [p[0] for p, _ in trace.simulate(sizes, trace.picks(sizes, 1), 0.5, "lru")]
    assert "".join(phases) == "d" * 30 + ("p" * 8 + "d") * 2 + "p" + "d" * 30


def test_lru_is_lru(trace):
    """Each step's rate from a list kept in order of use, for whole steps without sweeps."""
    sizes = tiny(trace, sweeps=0)
    chosen = trace.picks(sizes, 5)
    order, expected = [], []
    for step in chosen.tolist():
        hits = 0
        for layer, experts in enumerate(step):
            keys = [16 * layer + e for e in experts]
            hits += sum(k in order for k in keys)
            present = [k for k in keys if k in order]
            order = [k for k in order if k not in keys] + present
            order += [k for k in keys if k not in present]
            order = order[-24:]
        expected.append(hits / 9)
    assert [rate for _, rate in trace.simulate(sizes, chosen, 0.5, "lru")] == expected


def test_row_by_hand(trace):
    sizes = trace.Sizes(layers=1, experts=2, topk=1, steps=120, sweeps=16)
    steps = [("decode", 0.0)] * 20 + [("decode", 0.75)] * 100
    steps += [("prefill", 0.5)] * 8 + [("decode", 0.25)] + [("prefill", 0.0)] * 8
    steps += [("decode", 0.5)] + [("decode", 0.5)] * 20 + [("decode", 1.0)] * 100
    row = trace.summarize(sizes, "lru", 0.5, 7, steps)
    assert (row.before, row.during, row.first, row.prefill) == (0.75, 0.375, 0.5, 0.25)
    assert row.after == pytest.approx((20 * 0.5 + 100) / 120)
    assert row.lost == 25.0
    other = trace.summarize(sizes, "2q", 0.5, 7, [(p, 0.0) for p, _ in steps])
    twin = trace.summarize(sizes, "lru", 0.5, 8, [(p, x / 2) for p, x in steps])
    found = trace.means([row, other, twin])
    assert [(each["policy"], each["before"]) for each in found] == [("lru", 0.5625), ("2q", 0.0)]


def test_the_burst_costs_lru_and_not_the_shipped_policy(trace):
    sizes = trace.Sizes(layers=24, experts=48, topk=3, steps=120, sweeps=16, drift=0)
    rows = []
    for seed in (1, 2, 3):
        chosen = trace.picks(sizes, seed)
        for policy in trace.NAMES:
            steps = list(trace.simulate(sizes, chosen, 0.5, policy))
            rows.append(trace.summarize(sizes, policy, 0.5, seed, steps))
    found = {each["policy"]: each for each in trace.means(rows)}
    assert found["scan-resistant"]["lost"] < 2
    assert found["scan-resistant"]["prefill"] > 0.4
    assert found["lru"]["lost"] > 4
    assert found["lru"]["prefill"] < 0.05
    # filters keep something, and so does prefill that does not count
    for policy, during in (("s3-fifo", 3), ("2q", 3), ("segmented-lru", 15), ("decode-lru", 10)):
        assert found[policy]["during"] > found["lru"]["during"] + during / 100


def test_slots_of_one_step_are_enough(trace):
    """A layer's sweep of 16 experts goes in groups where there are 9 slots."""
    sizes = tiny(trace)
    for policy in trace.NAMES:
        steps = list(trace.simulate(sizes, trace.picks(sizes, 2), 9 / 48, policy))
        assert len(steps) == 2 * 30 + 2 + 17
        assert all(0 <= rate <= 1 for _, rate in steps)


def test_what_is_in_use(trace, monkeypatch):
    """A decode step's experts to its end; a prefill layer's while the next one gets its slots."""
    refused = []

    class Nosy:
        def __init__(self):
            self.keys = []

        def begin(self, phase):
            pass

        def insert(self, key, phase, *, hint):
            self.keys.append(key)

        def touch(self, key, phase):
            pass

        def remove(self, key):
            self.keys.remove(key)

        def victim(self, usable):
            refused.append({key for key in self.keys if not usable(key)})
            return next(key for key in self.keys if usable(key))

    monkeypatch.setattr(trace, "build", lambda *args, **kwargs: Nosy())
    slots = trace.Slots(tiny(trace), 9, "nosy")
    slots.step([[0, 1], [16, 17], [32, 33]], "decode")
    slots.step([[2, 3, 4, 5], [18, 19], [34]], "decode")
    assert refused[-1] == {2, 3, 4, 5, 18, 19}
    slots.step([[6, 7], [20, 21], [35]], "prefill")
    assert refused[-1] == {20, 21}


def test_layers_share_alike(trace):
    policy = trace.build("layer-lru", num_layers=3, num_experts=4, num_slots=6)
    for key in (0, 4, 5, 8, 6):
        policy.insert(key, "decode", hint=False)
    policy.touch(4, "decode")
    assert policy.victim(lambda key: True) == 5  # of the layer of three, used longest ago
    assert policy.victim(lambda key: key not in (4, 5, 6)) in (0, 8)


def test_decode_lru_does_not_see_prefill(trace):
    policy = trace.build("decode-lru", num_layers=1, num_experts=4, num_slots=3)
    for key in (0, 1):
        policy.insert(key, "decode", hint=False)
    policy.touch(0, "prefill")
    assert policy.victim(lambda key: True) == 0
    policy.touch(0, "decode")
    assert policy.victim(lambda key: True) == 1
    policy.insert(2, "prefill", hint=False)
    assert policy.victim(lambda key: True) == 2


SMALL = ["--layers", "2", "--experts", "8", "--topk", "2", "--steps", "12", "--sweeps", "8"]


def run(*flags):
    return subprocess.run(
        [sys.executable, "-m", "bench_kernels.expert_trace", *SMALL, *flags],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_command(trace, capsys):
    done = run("--seeds", "1", "2", "--resident", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["source"] == "simulated"
    assert len(result["rows"]) == 2 * len(trace.NAMES)
    assert [each["policy"] for each in result["means"]] == list(trace.NAMES)
    trace.main([*SMALL, "--seeds", "1", "2", "--resident", "0.5", "--json"])
    assert json.loads(capsys.readouterr().out) == result
    trace.main([*SMALL, "--seeds", "1", "--policies", "lru", "2q"])
    out = capsys.readouterr().out
    assert out.count("%") == 3 * 2 * 6
    assert "simulated" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--resident", "1.5"], "--resident is 1.5, expected a share above 0, at most 1"),
        (["--resident", "0"], "--resident is 0.0, expected a share above 0, at most 1"),
        (["--policies", "mru"], "--policies is mru, expected some of lru, s3-fifo, 2q"),
        (["--topk", "9"], "--topk is 9, expected at most --experts 8"),
        (["--steps", "0"], "--steps is 0, expected >= 1"),
        (["--sweeps", "-1"], "--sweeps is -1, expected >= 0"),
        (["--drift", "2"], "--drift is 2.0, expected between 0 and 1"),
        (["--seeds", "-1"], "--seeds is -1, expected >= 0"),
    ],
)
def test_refuses(trace, flags, sentence, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        trace.main([*SMALL, *flags])
    assert sentence in capsys.readouterr().err


def test_plot_says_what_it_needs(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"^2$"):
        trace.main([*SMALL, "--plot", "rates.png"])
    assert "--plot is rates.png, expected matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "rates.png").exists()


def test_plot(trace, tmp_path, capsys):
    trace.main([*SMALL, "--seeds", "1", "--plot", str(tmp_path / "rates.png")])
    assert (tmp_path / "rates.png").stat().st_size > 1000
