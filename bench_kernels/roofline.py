"""Where the time of a decode step and of a prefill chunk of DeepSeek-V4-Flash can go, on N cards.

MODELLED: nothing here was timed. What a step calls is `bench_kernels/flash.py`; bytes and FLOPs of
each call come from its op's KernelSpec, ceilings of the loops of products from the committed
figures of the static model (RTX 4090). Terms, each of one card:

  bus         missing experts over the link to the host
  memory      useful bytes of every call over device memory
  compute     useful FLOPs of every call over the ceiling of its loops
  all-reduce  two of the tokens a layer through the host: a latency and a ring's share of the bytes
  launches    nodes of a captured graph, a fixed time each

`sum`: nothing overlaps. `overlapped`: in every call memory goes beside compute, and copies go
beside calls, one layer ahead; an all-reduce waits for its layer, and takes the same link. On
several cards a chunk runs in two halves: the all-reduces of one hide behind the calls of the other,
launches and all-reduces are twice as many, and weights are read twice. The two collectives at the
ends of a step, the sum of the embedding's rows and the join of the logits, count as nodes alone.
`static`: all calls by the static model of a launch, at the committed number of tokens nearest to
the step's, matrices of another size scaled by their bytes and the products of a chunk by their
FLOPs; it knows waves and latencies, the terms do not. A call for which that comes to less than its
memory or its compute, because its tokens are more, counts as the larger of these two.

Defaults are the server that the targets come from: 8 RTX 4090s, 50 rows, a chunk of 3456 tokens in
the middle of a prompt of 200,019, 9411 of 11008 experts on the cards, the decode hit rate of
bench_kernels/expert_trace.py at that share. Not in the model: the host's part of a step, copies
that share the host's memory, bytes of the logits, and every cache miss beyond the useful bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bench_kernels import committed, text
from bench_kernels.plot import check_drawable, draw
from bench_kernels.terms import TERMS, Assumed, StepTerms, Timed, by_cost, steps


def budget_text(found: Sequence[StepTerms], assumed: Assumed, top: int) -> str:
    """The terms of every step beside the reported times, and the dearest calls."""
    return "\n\n".join([*(_step_text(step, top) for step in found), _assumptions(assumed)])


def _step_text(step: StepTerms, top: int) -> str:
    reported = _ms(step.reported_s)
    rows: list[Sequence[text.Cell]] = []
    for name in (*TERMS, "sum", "overlapped", "static"):
        ms = _ms(getattr(step, f"{name}_s"))
        share = f"{ms / reported:.0%}" if ms is not None and reported else None
        what = _WHAT[name].format(nodes=step.nodes, calls=4 if step.halves else 2)
        if name == "overlapped" and step.halves:
            what += ", all-reduces beside the other half"
        rows.append((name, ms, share, what))
    head = f"{step.name}, context {step.context}: reported {_words(reported)}; modelled, no times"
    table = text.table(("term", "ms", "of the reported", "what"), rows)
    calls = [_call(x) for x in by_cost(step.calls)[:top]]
    names = ("part", "op", "stands_for", "times", "mb", "gflop", "memory_ms", "compute_ms",
             "static_ms")  # fmt: skip
    dearest = text.table(names, [[x[name] for name in names] for x in calls])
    return f"{head}\n{table}\n\n{dearest}" if calls else f"{head}\n{table}"


_WHAT = {
    "bus": "missing experts over the link",
    "memory": "useful bytes over device memory",
    "compute": "useful FLOPs over the ceilings of their loops",
    "all_reduce": "{calls} a layer, through the host",
    "launches": "{nodes} nodes of a graph, collectives among them",
    "sum": "nothing overlaps",
    "overlapped": "copies beside calls, memory beside compute",
    "static": "all calls by the static model of a launch, none below memory or compute",
}


def _assumptions(assumed: Assumed) -> str:
    return (
        f"modelled, nothing was timed; assumed: {assumed.cards} cards, "
        f"{assumed.link_gb_per_s:g} GB/s to the host each, {assumed.memory_gb_per_s:g} GB/s of "
        f"memory, all-reduces {assumed.reduce_gb_per_s:g} GB/s and {assumed.reduce_us:g} us each, "
        f"{assumed.node_us:g} us a node; hit rates {assumed.hit_rate:g} (1 row), "
        f"{assumed.rows_hit_rate:g} ({assumed.rows} rows), {assumed.chunk_hit_rate:g} (chunk)"
    )


def _call(x: Timed) -> dict[str, text.Cell]:
    return {
        "part": x.call.part, "op": x.call.op, "stands_for": x.call.committed,
        "times": x.call.times, "launches": x.call.launches, "mb": x.call.num_bytes / 1e6,
        "gflop": x.call.flops / 1e9, "memory_ms": _ms(x.memory_s), "compute_ms": _ms(x.compute_s),
        "static_ms": _ms(x.static_s),
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)


def _words(ms: float | None) -> str:
    return "nothing" if ms is None else f"{ms:g} ms"


def step_dict(step: StepTerms) -> dict[str, object]:
    """Milliseconds; the calls by what they cost, dearest first."""
    names = (*TERMS, "calls", "static", "sum", "overlapped", "reported")
    times = {name: _ms(getattr(step, f"{name}_s")) for name in names}
    return {
        "step": step.name, "tokens": step.tokens, "context": step.context, "nodes": step.nodes,
        "halves": step.halves, "ms": times, "calls": [_call(x) for x in by_cost(step.calls)],
    }  # fmt: skip


def as_dict(found: Sequence[StepTerms], assumed: Assumed) -> dict[str, object]:
    """The terms and what they assume."""
    return {
        "source": "modelled", "assumed": asdict(assumed),
        "steps": [step_dict(step) for step in found],
    }  # fmt: skip


_TOKENS = text.number(1, 1 << 20, whole=True)
_SHARE, _RATE, _TIME = text.number(0, 1), text.number(1e-3, 1e6), text.number(0, 1e9)


def _cards(word: str) -> int:
    if word not in ("1", "2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text.shown(word)}, expected 1, 2, 4 or 8")
    return int(word)


_FLAGS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "cards": (_cards, "cards: 1, 2, 4 or 8"),
    "rows": (text.number(1, 4096, whole=True), "rows of a full decode step"),
    "context": (_TOKENS, "tokens at which decode rows stand"),
    "chunk": (_TOKENS, "tokens of a prefill chunk"),
    "chunk_context": (_TOKENS, "tokens at which the chunk ends"),
    "hit_rate": (_SHARE, "experts found on the card, decode of one row"),
    "rows_hit_rate": (_SHARE, "same, decode of all rows"),
    "chunk_hit_rate": (_SHARE, "same, a chunk"),
    "link_gb_per_s": (_RATE, "pinned memory to a card"),
    "memory_gb_per_s": (_RATE, "memory of a card"),
    "reduce_gb_per_s": (_RATE, "bytes of an all-reduce, through the host"),
    "reduce_us": (_TIME, "latency of an all-reduce"),
    "node_us": (_TIME, "a node of a captured graph"),
    "decode_ms": (_TIME, "reported time of a decode step of one row, for the shares"),
    "chunk_ms": (_TIME, "reported time of a chunk, for the shares"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every assumption, with its default."""
    for field in fields(Assumed):
        kind, what = _FLAGS[field.name]
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="N",
            help=f"{what} ({field.default:g})",
        )  # fmt: skip


def assumed_by(args: argparse.Namespace) -> Assumed:
    """What a command line assumes.

    Raises:
        ValueError: a chunk that is longer than the context it ends at.
    """
    assumed = Assumed(**{field.name: getattr(args, field.name) for field in fields(Assumed)})
    if assumed.chunk > assumed.chunk_context:
        raise ValueError(
            f"--chunk is {assumed.chunk}, expected at most --chunk-context "
            f"({assumed.chunk_context})"
        )
    return assumed


def main(argv: Sequence[str] | None = None) -> int:
    parser = text.Parser(
        prog="python -m bench_kernels.roofline", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_flags(parser)
    parser.add_argument(
        "--top", type=text.number(0, 1000, whole=True), default=8, metavar="N",
        help="dearest calls to list (8)",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the terms (png, svg or pdf; matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON value instead of text")
    args = parser.parse_args(argv)
    try:
        if args.plot is not None:
            check_drawable(args.plot)
        assumed = assumed_by(args)
        found = steps(assumed, committed.read())
    except ValueError as error:
        parser.error(str(error))
    told = as_dict(found, assumed)
    print(json.dumps(told) if args.json else budget_text(found, assumed, args.top))
    if args.plot is None:
        return 0
    try:
        draw(args.plot, found, _assumptions(assumed))
    except OSError as error:
        sentence = f"--plot is {args.plot}, expected a file to write ({error.strerror})"
        print(sentence, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    text.run(main)
