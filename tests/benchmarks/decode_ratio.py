"""Decode speed on the CPU beside transformers: same random demo weights, batch 1, a thread.

Runs of the two are interleaved, and what counts is the median of the ratios of neighbouring runs;
the absolute figures depend on the machine and on what else it does. Run it as
``make bench-decode`` or ``python -m tests.benchmarks.decode_ratio``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ftruntime import LLM, SamplingParams
from ftruntime.demo import make_demo
from tests.support.hf_model import build_hf

PROMPT = list(range(3, 35))


def ours(llm: LLM, num_tokens: int) -> float:
    """Decode steps a second: the time of a long answer less that of a one-token answer."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return time.perf_counter() - start

    return num_tokens / (seconds(num_tokens + 1) - seconds(1))


@torch.no_grad()
def theirs(model: torch.nn.Module, num_tokens: int) -> float:
    ids = torch.tensor([PROMPT])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count)  # type: ignore[operator]
        return time.perf_counter() - start

    return num_tokens / (seconds(num_tokens + 1) - seconds(1))


def measure(directory: Path, numerics: str, runs: int, num_tokens: int) -> dict[str, object]:
    oracle = build_hf(directory)
    pairs = []
    with LLM(model=directory, numerics=numerics, num_tokens=4096) as llm:
        ours(llm, 16), theirs(oracle, 16)
        for run in range(runs):
            pairs.append((ours(llm, num_tokens), theirs(oracle, num_tokens)))
            mine, other = pairs[-1]
            print(f"{numerics} run {run + 1}/{runs}: {mine:.1f} and {other:.1f} tokens/s, "
                  f"ratio {mine / other:.2f}", file=sys.stderr)  # fmt: skip
    return {
        "numerics": numerics,
        "tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "transformers_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "median_ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="decode steps of one run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "demo"
        make_demo(directory)
        rows = [measure(directory, name, args.runs, args.tokens) for name in ("exact", "official")]
    print(json.dumps({"torch": torch.__version__, "threads": 1, "rows": rows}))


if __name__ == "__main__":
    main()
