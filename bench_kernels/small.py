"""Runs every op once in its small cases, for a memory checker around it: `make test-gpu`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from bench_kernels import text
from ftkernels import registry
from ftkernels.spec import Case, KernelSpec

_LARGE = ("flash", "pro", "exact")  # of a model's sizes


def small_cases() -> list[tuple[KernelSpec, Case]]:
    """Every case that is no model's, a first one of each op before the others."""
    cases = [
        [(spec, case) for case in spec.cases if not str(case.get("name")).startswith(_LARGE)]
        for spec in registry()
        if spec.kernel
    ]
    return [x for found in cases for x in found[:1]] + [x for found in cases for x in found[1:]]


def run(
    device: str, seconds: float, now: Callable[[], float] = time.monotonic
) -> tuple[int, list[str]]:
    """How many cases ran, and those that were left out when the seconds were over."""
    begin, done, left_out = now(), 0, []
    for spec, case in small_cases():
        if now() - begin >= seconds:
            left_out.append(f"{spec.name} {case['name']}")
            continue
        args, kwargs = spec.inputs(case, device=device, seed=0)
        spec.op(*args, **kwargs)
        done += 1
    return done, left_out


def main(argv: Sequence[str] | None = None) -> int:
    parser = text.Parser(prog="python -m bench_kernels.small", description=__doc__)
    parser.add_argument(
        "--seconds", type=text.number(0, 86400), default=60, metavar="N",
        help="begin no case after this long (60)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_kernels.small needs a CUDA card, and there is none here", file=sys.stderr)
        return 1
    done, left_out = run("cuda", args.seconds)
    torch.cuda.synchronize()
    print(f"{done} small cases ran; left out: {', '.join(left_out) or 'none'}")
    return 0


if __name__ == "__main__":
    text.run(main)
