"""The terms of a step's time: bytes over links and memory, FLOPs over ceilings; nothing is timed.

`bench_kernels/roofline.py` says what each term is and what is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench_kernels.committed import Committed
from bench_kernels.flash import EXPERT_BYTES, HIDDEN, NUM_LAYERS, Call, Step
from ftkernels.target import of_arch

# of a chunk that runs in halves, as the runtime's has
LEAST_TOKENS = 512
# the sum of the embedding's rows and the join of the logits, counted as nodes alone
_END_COLLECTIVES = 2
TERMS = ("bus", "memory", "compute", "all_reduce", "launches")


@dataclass(frozen=True)
class Assumed:
    """What the terms assume.

    Args:
        rows: of a full decode step; `context` the tokens at which its rows stand.
        chunk: tokens of a prefill chunk; `chunk_context` where it ends.
        hit_rate: share of the experts found on the card in a decode step of one row;
            `rows_hit_rate` of all rows, `chunk_hit_rate` of a chunk.
        link_gb_per_s: of each card to the host; `reduce_gb_per_s` of an all-reduce.
        node_us: of a node of a captured graph.
        decode_ms, chunk_ms: reported times that the terms of one row and of a chunk are held
            against; of more rows none is reported.
    """

    cards: int = 8
    rows: int = 50
    context: int = 4096
    chunk: int = 3456
    chunk_context: int = 100_010
    hit_rate: float = 0.93
    rows_hit_rate: float = 0.878
    chunk_hit_rate: float = 0.855
    link_gb_per_s: float = of_arch(89).link_gb_per_s
    memory_gb_per_s: float = of_arch(89).memory_gb_per_s
    reduce_gb_per_s: float = 12.0
    reduce_us: float = 30.0
    node_us: float = 1.5
    decode_ms: float = 16.8
    chunk_ms: float = 1350.0


@dataclass(frozen=True)
class Timed:
    """One call's share of a step in seconds; `static_s` None where nothing is committed."""

    call: Call
    memory_s: float
    compute_s: float
    static_s: float | None

    @classmethod
    def of(cls, call: Call, figures: Committed, memory_bytes: float, *, decode: bool) -> Timed:
        ceiling = figures.ceiling_tflops(call.op, call.committed)
        us = figures.us(call.op, call.committed)
        if us is not None:
            # latencies make a decode launch, products make one of a chunk
            by_flops = not decode and call.committed_flops
            us *= call.flops / call.committed_flops if by_flops else call.resized
        memory_s = call.num_bytes / memory_bytes
        compute_s = call.flops / (ceiling * 1e12) if ceiling else 0.0
        # a committed call of fewer tokens says less than those of this one take
        static_s = None if us is None else max(call.times * us / 1e6, memory_s, compute_s)
        return cls(call, memory_s, compute_s, static_s)


@dataclass(frozen=True)
class StepTerms:
    """Terms of one step in seconds, and its reported time if it has one; `nodes` of its graph;
    `halves`: one half of the tokens computes while the other's all-reduces are under way."""

    name: str
    tokens: int
    context: int
    reported_s: float | None
    bus_s: float
    memory_s: float
    compute_s: float
    all_reduce_s: float
    launches_s: float
    calls_s: float
    static_s: float | None
    nodes: int
    halves: bool
    calls: tuple[Timed, ...]

    @property
    def sum_s(self) -> float:
        return sum(float(getattr(self, f"{term}_s")) for term in TERMS)

    @property
    def overlapped_s(self) -> float:
        link = self.bus_s + self.all_reduce_s if self.halves else self.bus_s
        fill = min(link, self.calls_s) / NUM_LAYERS
        waits = 0.0 if self.halves else self.all_reduce_s
        return max(link, self.calls_s) + fill + waits + self.launches_s


def by_cost(calls: Sequence[Timed]) -> list[Timed]:
    """Dearest first."""
    return sorted(calls, key=lambda x: -max(x.memory_s, x.compute_s))


def terms(
    name: str, step: Step, hit_rate: float, reported_s: float | None, assumed: Assumed,
    figures: Committed,
) -> StepTerms:  # fmt: skip
    """The terms of one step under these assumptions."""
    memory_bytes = assumed.memory_gb_per_s * 1e9
    halves = step.cards > 1 and not step.decode and step.tokens >= LEAST_TOKENS
    timed = tuple(
        Timed.of(call, figures, memory_bytes, decode=step.decode)
        for call in (_in_halves(step) if halves else step.calls())
    )
    reduces = (4 if halves else 2) * NUM_LAYERS if step.cards > 1 else 0
    nodes = sum(x.call.times * x.call.launches for x in timed) + reduces
    nodes += _END_COLLECTIVES if step.cards > 1 else 0
    ring = 2 * (step.cards - 1) / step.cards * step.tokens * HIDDEN * 2
    missing = (1 - hit_rate) * step.touched * NUM_LAYERS * EXPERT_BYTES / step.cards
    known = [x.static_s for x in timed if x.static_s is not None]
    return StepTerms(
        name=name, tokens=step.tokens, context=step.context, reported_s=reported_s,
        bus_s=missing / (assumed.link_gb_per_s * 1e9),
        memory_s=sum(x.memory_s for x in timed), compute_s=sum(x.compute_s for x in timed),
        all_reduce_s=reduces * assumed.reduce_us / 1e6
        + (2 * NUM_LAYERS * ring / (assumed.reduce_gb_per_s * 1e9) if reduces else 0.0),
        launches_s=nodes * assumed.node_us / 1e6,
        calls_s=sum(max(x.memory_s, x.compute_s) for x in timed),
        static_s=sum(known) if len(known) == len(timed) else None,
        nodes=nodes, halves=halves, calls=timed,
    )  # fmt: skip


def _in_halves(step: Step) -> list[Call]:
    """The calls of a chunk whose layers run for each half of the tokens."""
    half = replace(step, tokens=step.tokens // 2)
    layers = (replace(x, times=2 * x.times) for x in half.calls() if x.part != "ends")
    return [*(x for x in step.calls() if x.part == "ends"), *layers]


def steps(assumed: Assumed, figures: Committed) -> list[StepTerms]:
    """Decode of one row and of all, and a chunk."""
    cards, context, reported = assumed.cards, assumed.context, assumed.decode_ms / 1e3
    of_rows = reported if assumed.rows == 1 else None
    one, rows = Step(1, context, cards, True), Step(assumed.rows, context, cards, True)
    chunk = Step(assumed.chunk, max(assumed.chunk, assumed.chunk_context), cards, False)
    return [
        terms("decode, 1 row", one, assumed.hit_rate, reported, assumed, figures),
        terms(f"decode, {assumed.rows} rows", rows, assumed.rows_hit_rate, of_rows, assumed,
              figures),
        terms(f"chunk of {assumed.chunk}", chunk, assumed.chunk_hit_rate, assumed.chunk_ms / 1e3,
              assumed, figures),
    ]  # fmt: skip
