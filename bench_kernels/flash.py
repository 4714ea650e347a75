"""A step of DeepSeek-V4-Flash as calls of ops, as one of N cards makes them.

Sizes are those of the op's `KernelSpec`, so that bytes, FLOPs and launches are counted there. Each
call also names the committed case that stands for it: the same slice of the matrices (that of one
card up to four cards), and the number of tokens that is nearest as a ratio.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ftkernels import registry
from ftkernels.spec import Case, KernelSpec

HIDDEN, HEADS, EXPERTS, TOPK, INTER, VOCAB = 4096, 64, 256, 6, 2048, 129280
LAYERS: Mapping[str, int] = {"csa": 21, "hca": 20, "swa": 2}
NUM_LAYERS = 43
EXPERT_BYTES = 3 * HIDDEN * INTER * 17 // 32  # 4-bit values, a scale byte for 32 of them
_INDEX_ROWS = 8192  # of the index queries' projection, which every card has whole
_TOKENS = ("T", "S", "pos0", "length")  # sizes that follow the tokens of a step
_MOST_TOKENS = 3456  # of cases whose name says none


@dataclass(frozen=True)
class Call:
    """Calls of one op with the same sizes.

    Args:
        part: "attention", "experts" or "ends" of the model.
        case: sizes of one sequence's share; `sequences` of them are one call.
        committed: the name of the case that stands for it.
        times: calls of a step; `launches` of each.
        touched: of the bytes of the case, the share that is read.
    """

    part: str
    op: str
    case: Case
    committed: str
    times: int
    sequences: int
    launches: int
    touched: float = 1.0

    @property
    def num_bytes(self) -> float:
        """Useful bytes of all calls."""
        each = self.sequences * _specs()[self.op].bytes_moved(self.case)
        return self.times * self.touched * each

    @property
    def flops(self) -> int:
        """Useful FLOPs of all calls."""
        return self.times * self.sequences * _specs()[self.op].flops(self.case)

    @property
    def committed_flops(self) -> int:
        """Useful FLOPs that as many calls of the committed case have."""
        return self.times * _specs()[self.op].flops(self._committed)

    @property
    def resized(self) -> float:
        """Bytes of the case as a multiple of the committed one's at the same tokens."""
        tokens = {name: self.case[name] for name in _TOKENS if name in self.case}
        bytes_moved = _specs()[self.op].bytes_moved
        return bytes_moved(self.case) / bytes_moved({**self._committed, **tokens})

    @property
    def _committed(self) -> Case:
        cases = _specs()[self.op].cases
        return next(case for case in cases if case["name"] == self.committed)


@dataclass(frozen=True)
class Step:
    """`tokens` decode rows that stand at `context`, or a prefill chunk that ends there."""

    tokens: int
    context: int
    cards: int
    decode: bool

    @property
    def touched(self) -> float:
        """Distinct experts of a layer that the tokens use, picked uniformly."""
        return EXPERTS * (1 - (1 - TOPK / EXPERTS) ** self.tokens)

    def calls(self) -> list[Call]:
        """Every call in the step; collectives are none of them."""
        calls = [*self._ends(), *self._hyper_connections(), *self._experts()]
        for kind, layers in LAYERS.items():
            calls += self._attention(kind, layers)
        return calls

    def _call(
        self, part: str, op: str, stem: str, times: int, *, tokens: int | None = None,
        sequences: int = 1, launches: int | None = None, touched: float = 1.0, **sizes: int,
    ) -> Call:  # fmt: skip
        rows = self.tokens if tokens is None else tokens
        spec, name = _specs()[op], committed_name(op, stem, rows)
        base = next(case for case in spec.cases if case["name"] == name)
        case = {**base, **({"T": rows} if "T" in base else {}), **sizes}
        each = spec.launches(case) if launches is None else launches
        return Call(part, op, case, name, times, sequences, each, touched)

    def _attention(self, kind: str, layers: int) -> list[Call]:
        cards, tp, wide = self.cards, self._slice, _INDEX_ROWS if kind == "csa" else 0

        def call(op: str, stem: str, **sizes: int) -> Call:
            return self._call("attention", op, stem, layers, **sizes)

        found = [call("fp8_linear", f"{tp}-wq_b", N=32768 // cards + wide)]
        latent = call("fp8_linear", "flash-tp1-latent")
        if kind == "swa":
            found += [latent, call("store_kv", "flash")]
        else:
            found += [call("mixed_linear", f"flash-{kind}")]
            if not self.decode:  # two launches there, each with a ceiling of its own
                found[-1:] = [latent, call("linear", f"flash-{kind}")]
            found += [call("append_kv", f"flash-{kind}", S=self._sequences, pos0=self._start)]
        if kind == "csa":
            found += [
                call("compress_kv", "flash-index", S=self._sequences, pos0=self._start),
                call("index_query", "flash"),
                call("index_select", "flash", pos0=self._start, **self._alone),
            ]
        return [
            *found, self._scores(kind, layers),
            call("grouped_linear", tp, G=max(1, 8 // cards)),
            call("fp8_linear", f"{tp}-wo_b", K=max(1, 8 // cards) * 1024),
        ]  # fmt: skip

    def _scores(self, kind: str, layers: int) -> Call:
        heads, stem = HEADS // self.cards, f"{self._slice}-{kind}"
        if self.decode:
            return self._call(
                "attention", "mla_decode", stem, layers, S=self.tokens, H=heads,
                length=self.context,
            )  # fmt: skip
        return self._call("attention", "mla_prefill", stem, layers, H=heads, pos0=self._start)

    def _experts(self) -> list[Call]:
        tp, inter, routes = self._slice, INTER // self.cards, TOPK * self.tokens

        def call(op: str, stem: str, **sizes: int) -> Call:
            return self._call("experts", op, stem, NUM_LAYERS, **sizes)

        def routed(op: str, stem: str, read: int, **sizes: int) -> Call:
            # a launch less than with dense rows: these come quantized
            return self._call(
                "experts", op, stem, NUM_LAYERS, launches=1, touched=self.touched / read, **sizes
            )

        shared = [
            call("gate_topk", "flash"), call("fp8_linear", tp, N=2 * inter),
            call("fp8_linear", f"{tp}-w2", K=inter),
        ]  # fmt: skip
        if self.decode:
            read = min(routes, EXPERTS)  # what the op's case counts
            return [
                *shared, call("count_missing", "flash"),
                routed("moe_gemv_fp4", tp, read, N=2 * inter),
                routed("moe_gemv_fp4", f"{tp}-w2", read, K=inter),
            ]  # fmt: skip
        return [
            *shared, call("moe_align", "flash"), call("moe_combine", "flash"),
            routed("moe_gemm_fp4", f"{tp}-m64", EXPERTS, N=2 * inter),
            routed("moe_gemm_fp4", f"{tp}-w2-m64", EXPERTS, K=inter, T=routes),
        ]  # fmt: skip

    def _hyper_connections(self) -> list[Call]:
        """Two a layer; the first has nothing before it, the last nothing after it."""
        return [
            self._call("attention", "hc_pre", "flash", 1),
            self._call("attention", "hc_post_pre", "flash", NUM_LAYERS - 1),
            self._call("experts", "hc_post_pre", "flash", NUM_LAYERS),
            self._call("experts", "hc_post", "flash", 1),
        ]

    def _ends(self) -> list[Call]:
        rows = self._sequences
        vocab = VOCAB // self.cards
        return [
            self._call("ends", "embed", "flash", 1, V=vocab),
            self._call("ends", "hc_head", "flash", 1, tokens=rows),
            self._call("ends", "linear", "flash-head", 1, tokens=rows, N=vocab),
            self._call("ends", "sample", "flash", 1, tokens=rows, S=rows),
        ]

    @property
    def _slice(self) -> str:
        return "flash-tp8" if self.cards == 8 else "flash-tp1"

    @property
    def _sequences(self) -> int:
        return self.tokens if self.decode else 1

    @property
    def _start(self) -> int:
        """Position of the first token."""
        return self.context - (1 if self.decode else self.tokens)

    @property
    def _alone(self) -> dict[str, int]:
        """Decode rows see rows of their own."""
        return {"tokens": 1, "sequences": self.tokens} if self.decode else {}


@cache
def _specs() -> Mapping[str, KernelSpec]:
    return {spec.name: spec for spec in registry()}


@cache
def committed_name(op: str, stem: str, tokens: int) -> str:
    """The case of an op whose name is `stem` with the nearest number of tokens.

    Raises:
        ValueError: the op has no such case.
    """
    pattern = re.compile(rf"{re.escape(stem)}(?:-[tc](\d+))?")
    found = {}
    for case in _specs()[op].cases:
        match = pattern.fullmatch(str(case.get("name", "")))
        if match is not None:
            found[str(case["name"])] = abs(math.log(int(match[1] or _MOST_TOKENS) / tokens))
    if not found:
        raise ValueError(f"committed_name: stem is {stem!r}, expected the start of a case of {op}")
    return min(found, key=lambda name: found[name])
