"""Hit rates of expert replacement policies on one seeded trace, simulated: no tensors, no card.

The trace: every decode step picks distinct experts in each layer by Zipf's law, its exponent drawn
per layer from 0.6 to 1.2, over an order of popularity that drifts: at each decode step every rank
trades places, with probability --drift, with a rank drawn at random. After --steps decode steps
come --sweeps prefill sweeps that use all experts of every layer, with one decode step after every
eighth, then --steps decode steps again.

The policies run inside the cache's own slot map. Experts of a decode step stay in use to its end,
those of a prefill layer until the next layer has its slots: its misses stream in meanwhile.

Columns, shares of experts found in their slots: "before" the last 100 decode steps ahead of the
sweeps; "during" the decode steps between them; "first 20" and "after" the decode steps behind
them; "prefill" all sweeps. "lost" is "before" less "first 20", in points.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from bench_kernels import text
from bench_kernels.expert_policies import NAMES, build
from bench_kernels.plot import check_drawable
from ftkernels.moe.slot_map import SlotMap

EXPONENTS = (0.6, 1.2)
SWEEPS_A_DECODE = 8
BEFORE_STEPS, FIRST_STEPS = 100, 20
RATES = ("before", "during", "first", "after", "prefill")


@dataclass(frozen=True)
class Sizes:
    """The shape of a trace; ``topk`` of ``experts`` are picked, ``steps`` before and after."""

    layers: int = 43
    experts: int = 256
    topk: int = 6
    steps: int = 500
    sweeps: int = 58
    drift: float = 0.01

    @property
    def decodes(self) -> int:
        return 2 * self.steps + self.sweeps // SWEEPS_A_DECODE


@dataclass(frozen=True)
class Row:
    """What one policy did on one trace; rates are shares, "lost" is in points."""

    policy: str
    resident: float
    seed: int
    before: float
    during: float
    first: float
    after: float
    prefill: float
    lost: float


def picks(sizes: Sizes, seed: int) -> np.ndarray:
    """``[decodes, layers, topk]``, the experts that each decode step uses."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(*EXPONENTS, size=(sizes.layers, 1))
    log_weights = -exponents * np.log(np.arange(1, sizes.experts + 1))
    order = rng.permuted(np.tile(np.arange(sizes.experts), (sizes.layers, 1)), axis=1)
    chosen = []
    for _ in range(sizes.decodes):
        moves = rng.random(order.shape) < sizes.drift
        targets = rng.integers(sizes.experts, size=order.shape)
        for layer, rank in zip(*np.nonzero(moves), strict=True):
            pair = [rank, targets[layer, rank]]
            order[layer, pair] = order[layer, pair[::-1]]
        # the largest of weights under Gumbel noise are a draw without replacement
        noisy = log_weights + rng.gumbel(size=order.shape)
        ranks = np.argpartition(-noisy, sizes.topk - 1, axis=1)[:, : sizes.topk]
        chosen.append(np.take_along_axis(order, ranks, axis=1))
    return np.stack(chosen)


class Slots:
    """A slot map driven as the cache drives it, without copies."""

    def __init__(self, sizes: Sizes, num_slots: int, policy: str) -> None:
        self._policy = build(
            policy, num_layers=sizes.layers, num_experts=sizes.experts, num_slots=num_slots
        )
        self._map = SlotMap(sizes.layers * sizes.experts, num_slots, self._policy)
        self._held: deque[int] = deque()

    def step(self, layers: Sequence[Sequence[int]], phase: str) -> int:
        """One step over the keys of each layer; how many were resident."""
        self._policy.begin(phase)
        hits = 0
        for keys in layers:
            before = len(self._held)
            hits += self._layer(keys, phase)
            if phase == "prefill":
                self._release(min(before, len(self._held)))
        self._release(len(self._held))
        return hits

    def _layer(self, keys: Sequence[int], phase: str) -> int:
        hits = [key for key in keys if self._map.slot(key) >= 0]
        for key in hits:
            self._map.touch(key, phase)
            self._hold(self._map.slot(key))
        resident = set(hits)
        for key in keys:
            if key not in resident:
                self._hold(self._place(key, phase))
        return len(hits)

    def _place(self, key: int, phase: str) -> int:
        placed = self._map.place(key, phase)
        while placed is None:  # a layer in groups: the oldest have run
            self._release(1)
            placed = self._map.place(key, phase)
        self._map.ready(placed.slot)
        return placed.slot

    def _hold(self, slot: int) -> None:
        self._map.hold(slot)
        self._held.append(slot)

    def _release(self, count: int) -> None:
        for _ in range(count):
            self._map.release(self._held.popleft())


def simulate(
    sizes: Sizes, chosen: np.ndarray, resident: float, policy: str
) -> Iterator[tuple[str, float]]:
    """The hit rate of each step, in order, with its phase."""
    slots = Slots(sizes, max(1, round(resident * sizes.layers * sizes.experts)), policy)
    first_keys = sizes.experts * np.arange(sizes.layers)
    decodes = iter((chosen + first_keys[:, None]).tolist())
    sweep = (first_keys[:, None] + np.arange(sizes.experts)).tolist()

    def decode() -> tuple[str, float]:
        return "decode", slots.step(next(decodes), "decode") / (sizes.layers * sizes.topk)

    for _ in range(sizes.steps):
        yield decode()
    for number in range(1, sizes.sweeps + 1):
        yield "prefill", slots.step(sweep, "prefill") / (sizes.layers * sizes.experts)
        if number % SWEEPS_A_DECODE == 0:
            yield decode()
    for _ in range(sizes.steps):
        yield decode()


def summarize(
    sizes: Sizes, policy: str, resident: float, seed: int, steps: Sequence[tuple[str, float]]
) -> Row:
    """The rates of a run; a part without steps has rate nan."""
    decode = np.array([rate for phase, rate in steps if phase == "decode"])
    prefill = np.array([rate for phase, rate in steps if phase == "prefill"])
    first = len(decode) - sizes.steps
    parts = (
        decode[max(0, sizes.steps - BEFORE_STEPS) : sizes.steps], decode[sizes.steps : first],
        decode[first : first + FIRST_STEPS], decode[first:], prefill,
    )  # fmt: skip
    rates = [float(part.mean()) if len(part) else float("nan") for part in parts]
    lost = 100 * (rates[0] - rates[2])
    return Row(policy, resident, seed, **dict(zip(RATES, rates, strict=True)), lost=lost)


def means(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For each share and policy, in order of appearance, the means over seeds."""
    found = []
    for resident, policy in dict.fromkeys((row.resident, row.policy) for row in rows):
        own = [asdict(r) for r in rows if (r.resident, r.policy) == (resident, policy)]
        rates = {name: float(np.mean([row[name] for row in own])) for name in (*RATES, "lost")}
        found.append({"policy": policy, "resident": resident, **rates})
    return found


def table(title: str, found: Sequence[dict[str, object]]) -> Table:
    drawn = Table(title=title)
    drawn.add_column("resident", justify="right")
    drawn.add_column("policy")
    for name in (*RATES, "lost"):
        drawn.add_column("first 20" if name == "first" else name, justify="right")
    last = None
    for row in found:
        if last not in (None, row["resident"]):
            drawn.add_section()
        last = row["resident"]
        rates = [f"{100 * float(str(row[name])):.1f} %" for name in RATES]
        drawn.add_row(
            f"{100 * float(str(last)):g} %", str(row["policy"]), *rates, f"{row['lost']:.1f}"
        )
    return drawn


def plot(path: Path, curves: dict[tuple[float, str], list[list[float]]], sizes: Sizes) -> None:
    """Decode hit rate by step, the mean over seeds; one panel for each share."""
    from matplotlib.figure import Figure

    shares = list(dict.fromkeys(resident for resident, _ in curves))
    figure = Figure(figsize=(5 * len(shares), 4), layout="constrained")
    for panel, share in zip(figure.subplots(1, len(shares), squeeze=False)[0], shares, strict=True):
        panel.set(title=f"{100 * share:g} % resident", xlabel="decode step", ylim=(0, 1))
        panel.axvspan(sizes.steps, sizes.decodes - sizes.steps, color="0.8", label="sweeps")
        for (resident, policy), runs in curves.items():
            if resident == share:
                panel.plot(np.mean(runs, axis=0), label=policy, linewidth=0.8)
    figure.axes[0].set_ylabel("decode hit rate, simulated")
    figure.axes[0].legend()
    figure.savefig(path)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Sizes()
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one trace each (1 2 3)")
    add("--resident", type=float, nargs="+", default=[0.5, 0.8, 0.95], metavar="SHARE",
        help="slots as a share of all experts, above 0, at most 1 (0.5 0.8 0.95)")  # fmt: skip
    add("--policies", nargs="+", default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    for name in ("layers", "experts", "topk", "steps", "sweeps"):
        add(f"--{name}", type=int, default=getattr(default, name), metavar="N",
            help=f"of the trace ({getattr(default, name)})")  # fmt: skip
    add("--drift", type=float, default=default.drift, metavar="SHARE",
        help="chance of a rank to trade places at a decode step (0.01)")  # fmt: skip
    add("--json", action="store_true", help="rows and means as JSON instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw the decode hit rate by step (matplotlib)")
    args = parser.parse_args(argv)

    def require(condition: bool, flag: str, value: object, expected: str) -> None:
        if not condition:
            parser.error(f"--{flag} is {value}, expected {expected}")

    for seed in args.seeds:
        require(seed >= 0, "seeds", seed, ">= 0")
    for share in args.resident:
        require(0 < share <= 1, "resident", share, "a share above 0, at most 1")
    for name in args.policies:
        require(name in NAMES, "policies", name, "some of " + ", ".join(NAMES))
    for name in ("layers", "experts", "topk", "steps"):
        require(getattr(args, name) >= 1, name, getattr(args, name), ">= 1")
    require(args.topk <= args.experts, "topk", args.topk, f"at most --experts {args.experts}")
    require(args.sweeps >= 0, "sweeps", args.sweeps, ">= 0")
    require(0 <= args.drift <= 1, "drift", args.drift, "between 0 and 1")
    sizes = Sizes(args.layers, args.experts, args.topk, args.steps, args.sweeps, args.drift)
    if args.plot is not None:
        try:
            check_drawable(args.plot)
        except ValueError as error:
            parser.error(str(error))
    return args, sizes


def main(argv: Sequence[str] | None = None) -> int:
    args, sizes = parse(argv)
    rows: list[Row] = []
    curves: dict[tuple[float, str], list[list[float]]] = {}
    runs = len(args.seeds) * len(args.resident) * len(args.policies)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("runs", total=runs)
        for seed in args.seeds:
            chosen = picks(sizes, seed)
            for resident in args.resident:
                for policy in args.policies:
                    steps = list(simulate(sizes, chosen, resident, policy))
                    rows.append(summarize(sizes, policy, resident, seed, steps))
                    decode = [rate for phase, rate in steps if phase == "decode"]
                    curves.setdefault((resident, policy), []).append(decode)
                    progress.advance(task)
    found = means(rows)
    if args.json:
        print(json.dumps({
            "source": "simulated", "sizes": asdict(sizes), "seeds": args.seeds,
            "rows": [asdict(row) for row in rows], "means": found,
        }))  # fmt: skip
    else:
        seeds = ", ".join(map(str, args.seeds))
        Console(width=None if sys.stdout.isatty() else 100).print(
            table(f"hit rates, simulated, mean over seeds {seeds}", found)
        )
    if args.plot is not None:
        plot(args.plot, curves, sizes)
    return 0


if __name__ == "__main__":
    text.run(main)
