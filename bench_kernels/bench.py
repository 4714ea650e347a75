"""Times every op on the card that is there; without one, a static model of an RTX 4090 speaks.

On a card: the median time of a call in a CUDA graph (by events where no graph holds it), on inputs
in rotation that are together larger than the cache; GB/s and TFLOP/s of useful work, as shares of
what copies and products of the vendor's library are measured to reach on this card; the time of the
plain-torch reference and, where they are installed, of other engines' ops as ratios to ours. Cases
of DeepSeek-V4-Flash at one card and eight, the important ops first; what --seconds leaves out is
said.

Without a card: for each op and case the microseconds, the bound and the ceilings of the committed
static model, and without names of ops or with --step the terms of a whole step
(python -m bench_kernels.roofline): MODELLED, no times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import triton

from bench_kernels import card, committed, others, roofline, text
from bench_kernels.committed import Committed
from bench_kernels.terms import Assumed, steps
from ftkernels import backend, registry, target
from ftkernels.testing.timer import CudaTimer

_STATIC = (
    "op", "case", "launches", "modelled_us", "bound", "ceiling_tflops", "ceiling_gb_per_s",
    "useful_mb", "useful_gflop",
)  # fmt: skip
_MEASURED = (
    "op", "case", "us", "timed", "gb_per_s", "copy_share", "tflops", "gemm_share",
    "reference_ratio", "others",
)  # fmt: skip


def static_report(figures: Committed, ops: Sequence[str], *, step: bool) -> dict[str, Any]:
    """The static model's table, with `step` the terms of a step too."""
    assumed = Assumed()
    report = {
        "source": "modelled", "card": target.TARGETS[89].name, "triton": figures.triton,
        "rows": committed.static_table(figures, ops),
    }  # fmt: skip
    return {
        **report,
        **({"roofline": roofline.as_dict(steps(assumed, figures), assumed)} if step else {}),
    }


def static_text(report: Mapping[str, Any], figures: Committed) -> str:
    """The same in words."""
    head = (
        f"no card here: the static model of {report['card']}, Triton {report['triton']}; modelled, "
        "nothing was timed"
    )
    rows = [[row[name] for name in _STATIC] for row in report["rows"]]
    parts = [head, text.table(_STATIC, rows)]
    if "roofline" in report:
        assumed = Assumed()
        parts.append(roofline.budget_text(steps(assumed, figures), assumed, 0))
    return "\n\n".join(parts)


def measured_report(args: argparse.Namespace, figures: Committed) -> dict[str, Any]:
    """Times of the card; a card that is lost on the way ends the table there."""
    timer, packages = CudaTimer(), others.installed()
    bench = card.Bench(
        timer, card.measured_ceilings(timer), figures, args.seconds, 1e9 * args.largest_gb,
        not args.no_references, packages,
    )  # fmt: skip
    work = card.problems(registry(), args.ops)
    rows, lost = [], None
    with text.progress(sys.stderr) as tell:
        try:
            for row in bench.rows(work):
                rows.append(row)
                tell(f"{len(rows)}/{len(work)} {row['op']} {row['case']}")
        except RuntimeError as error:
            lost = str(error).splitlines()[0]
    return {
        "source": "measured", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "lost": lost,
        "ceilings": vars(bench.ceilings), "installed": packages, "rows": rows,
    }  # fmt: skip


def measured_text(report: Mapping[str, Any]) -> str:
    """The same in words, what is missing last."""
    ceilings, rows = report["ceilings"], report["rows"]
    fp8 = ceilings["fp8_tflops"]
    done = [row for row in rows if "us" in row]
    absent = ", ".join(name for name, there in report["installed"].items() if not there)
    lines = [
        f"measured on {report['device']}, torch {report['torch']}, CUDA {report['cuda']}, Triton "
        f"{report['triton']}",
        f"ceilings, measured: copy {ceilings['copy_gb_per_s']:.0f} GB/s, bf16 product "
        f"{ceilings['bf16_tflops']:.0f} TFLOP/s, FP8 product "
        + (f"{fp8:.0f} TFLOP/s" if fp8 else "not to be had (shares are of bf16)"),
        f"not installed: {absent or 'none'}",
        "",
        text.table(_MEASURED, [[_cell(row.get(name)) for name in _MEASURED] for row in done]),
    ]
    lines += [f"failed: {x['op']} {x['case']}: {x['error']}" for x in rows if "error" in x]
    lines += _left_out(rows)
    if report["lost"]:
        lines.append(f"the card stopped answering, the rest was left out: {report['lost']}")
    return "\n".join(lines)


def _cell(value: object) -> text.Cell:
    if isinstance(value, Mapping):
        told = (f"{k} {v if isinstance(v, str) else f'{v:.2f}'}" for k, v in value.items())
        return "; ".join(told) or None
    return value  # type: ignore[return-value]


def _left_out(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each reason, with the cases."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "left_out" in row:
            reasons.setdefault(row["left_out"], []).append(f"{row['op']} {row['case']}")
    return [f"left out, {why}: {len(x)} cases: {', '.join(x)}" for why, x in reasons.items()]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = text.Parser(
        prog="python -m bench_kernels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="these ops only")
    add("--seconds", type=text.number(0, 86400), default=100, metavar="N",
        help="begin no case after this long on a card (100)")  # fmt: skip
    add("--largest-gb", type=text.number(0, 1024), default=1, metavar="N",
        help="leave out cases with inputs above this (1)")  # fmt: skip
    add("--no-references", action="store_true", help="do not time the plain-torch references")
    add("--step", action="store_true", help="without a card, a whole step's terms beside named ops")
    add("--json", action="store_true", help="one JSON value instead of text")
    args = parser.parse_args(argv)
    known = {spec.name for spec in registry() if spec.kernel}
    for op in args.ops:
        if op not in known:
            parser.error(f"OP is {text.shown(op)}, expected the name of an op with kernels")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        figures = committed.read()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        report = static_report(figures, args.ops, step=args.step or not args.ops)
        print(json.dumps(report) if args.json else static_text(report, figures))
        return 0
    if backend.always_reference():
        print("FTKERNELS_BACKEND is 'reference', which runs no kernels, expected it unset",
              file=sys.stderr)  # fmt: skip
        return 1
    report = measured_report(args, figures)
    print(json.dumps(report) if args.json else measured_text(report))
    failed = any("error" in row for row in report["rows"])
    return 1 if failed or report["lost"] else 0
