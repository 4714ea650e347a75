"""Times of ops on the card that is there, as shares of what the card itself was measured to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench_kernels import others
from bench_kernels.committed import Committed
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing.timer import Calls, Timer, median_us, num_bytes, num_sets

IMPORTANT = (
    "mla_decode", "moe_gemv_fp4", "moe_gemm_fp4", "mla_prefill", "fp8_linear", "mixed_linear",
    "index_select", "grouped_linear", "hc_post_pre", "gate_topk", "append_kv", "compress_kv",
    "linear",
)  # fmt: skip
_GEMM, _COPY_BYTES = 8192, 1 << 29
_SOME_SLICE = re.compile(r"\btp[24]\b")
_SLOW_MS = 50.0  # a reference this slow is timed once


class Card(Timer, Protocol):
    """A timer that can also time what no graph holds."""

    def eager(self, calls: Calls) -> Callable[[], float]: ...


@dataclass(frozen=True)
class Ceilings:
    """What plain copies and products of the vendor's library reach on this card, measured."""

    copy_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None

    def tflops(self, *, fp8: bool) -> float:
        """The ceiling of an op's products."""
        return self.fp8_tflops if fp8 and self.fp8_tflops else self.bf16_tflops


def measured_ceilings(card: Card, *, size: int = _GEMM, copy_bytes: int = _COPY_BYTES) -> Ceilings:
    """Copy on the device, bytes read and written; products of square matrices in bf16 and FP8."""
    copy_us = _copy_us(card, copy_bytes)
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=card.device) for _ in range(2))
    flops = 2 * size**3
    bf16_us, _ = timed(card, [lambda: a @ b])
    x, y, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), a.new_ones(()).float()
    try:
        fp8_us, _ = timed(card, [
            lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16)
        ])  # fmt: skip
    except RuntimeError:  # a build or card without it
        fp8_us = None
    return Ceilings(
        2e-3 * copy_bytes / copy_us,
        1e-6 * flops / bf16_us,
        1e-6 * flops / fp8_us if fp8_us else None,
    )


def _copy_us(card: Card, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=card.device)
    copy = torch.empty_like(source)
    return timed(card, [lambda: copy.copy_(source)])[0]


def timed(card: Card, calls: Calls, *, replays: int = 20) -> tuple[float, str]:
    """Median microseconds of one of the calls, and how it was timed."""
    try:
        return median_us(card.graph(calls), len(calls), replays=replays), "graph"
    except RuntimeError:
        torch.cuda.synchronize()  # raises again where the card's context is lost
    return median_us(card.eager(calls), len(calls), replays=replays), "events"


def problems(specs: Sequence[KernelSpec], ops: Sequence[str]) -> list[tuple[KernelSpec, Case]]:
    """Flash cases at one card and eight, the important ops first: a case of each, then another."""
    named = [x for x in specs if x.kernel and (not ops or x.name in ops)]
    order = {name: i for i, name in enumerate(IMPORTANT)}
    named.sort(key=lambda spec: order.get(spec.name, len(order)))
    cases = [(spec, [case for case in spec.cases if _is_timed(case)]) for spec in named]
    rounds = max((len(found) for _, found in cases), default=0)
    return [(spec, found[i]) for i in range(rounds) for spec, found in cases if i < len(found)]


def _is_timed(case: Case) -> bool:
    name = str(case.get("name", ""))
    return name.startswith("flash") and not _SOME_SLICE.search(name)


@dataclass(frozen=True)
class Bench:
    """How ops are timed.

    Args:
        seconds: after which no further case is begun; `largest_bytes` of a case's inputs.
        references: whether the plain-torch references are timed too.
        packages: other engines, and whether they are installed.
    """

    card: Card
    ceilings: Ceilings
    figures: Committed
    seconds: float
    largest_bytes: float
    references: bool
    packages: Mapping[str, bool]

    def rows(
        self, work: Sequence[tuple[KernelSpec, Case]], now: Callable[[], float] = time.monotonic
    ) -> Iterator[dict[str, Any]]:
        """A row for each case as it is done; those left out say why under `left_out`."""
        begin = now()
        for spec, case in work:
            head = {"op": spec.name, "case": str(case["name"])}
            if now() - begin >= self.seconds:
                yield {**head, "left_out": f"after {self.seconds:g} s"}
            elif num_bytes(spec.inputs(case, device="meta", seed=0)) > self.largest_bytes:
                yield {**head, "left_out": f"inputs above {self.largest_bytes / 1e9:g} GB"}
            else:
                yield {**head, **self._row(spec, case)}

    def _row(self, spec: KernelSpec, case: Case) -> dict[str, Any]:
        try:
            sets = self._rotation(spec.inputs(case, device=self.card.device, seed=0))
            us, how = timed(self.card, [_call(spec.op, inputs) for inputs in sets])
        except Exception as error:  # what a card refuses is a row of the table, not its end
            check_alive()
            return {"error": _first_line(error)}
        row: dict[str, Any] = {"us": us, "timed": how, **self._rates(spec, case, us)}
        if self.references:
            row["reference_ratio"] = self._ratio(us, _call(spec.reference, sets[0]))
        row["others"] = self._others(spec.name, sets, us)
        return row

    def _rotation(self, first: Inputs) -> list[Inputs]:
        """The inputs and copies of them, together larger than the cache."""
        count = num_sets(num_bytes(first), self.card.l2_bytes)
        return [first, *(_copy(first) for _ in range(count - 1))]

    def _rates(self, spec: KernelSpec, case: Case, us: float) -> dict[str, float | None]:
        flops, moved = spec.flops(case), spec.bytes_moved(case)
        fp8 = self.figures.multiplies_fp8(spec.name, str(case["name"]))
        gb_per_s, tflops = 1e-3 * moved / us, 1e-6 * flops / us
        return {
            "gb_per_s": gb_per_s, "copy_share": gb_per_s / self.ceilings.copy_gb_per_s,
            "tflops": tflops if flops else None,
            "gemm_share": tflops / self.ceilings.tflops(fp8=fp8) if flops else None,
        }  # fmt: skip

    def _ratio(self, us: float, call: Callable[[], object]) -> float | None:
        """How many times as long the reference takes; None where it does not run."""
        try:
            once = self.card.eager([call])
            ms = once()
            slow = ms > _SLOW_MS
            return (1000 * ms if slow else median_us(once, 1, replays=5)) / us
        except RuntimeError:  # most often memory
            check_alive()
            return None

    def _others(self, op: str, sets: Sequence[Inputs], us: float) -> dict[str, float | str]:
        """Times of other engines' ops as ratios, or what is wrong with them."""
        every = [others.calls(op, *inputs, self.packages) for inputs in sets]
        found: dict[str, float | str] = {}
        for engine, call in every[0].items():
            try:
                if others.agrees(op, *sets[0], call):
                    found[engine] = timed(self.card, [calls[engine] for calls in every])[0] / us
                else:
                    found[engine] = "other values"
            except Exception as error:  # as above: theirs may not know the card
                check_alive()
                found[engine] = _first_line(error)
        return found


def _call(function: Callable[..., object], inputs: Inputs) -> Callable[[], object]:
    args, kwargs = inputs
    return lambda: function(*args, **kwargs)


def _copy(inputs: Inputs) -> Inputs:
    copied: Inputs = torch.utils._pytree.tree_map_only(torch.Tensor, _clone, inputs)
    return copied


def _clone(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides in memory of their own."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x) if 0 not in x.stride() else x.clone()


def check_alive() -> None:
    """Raises where the error was the card's own, after which no call works."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
