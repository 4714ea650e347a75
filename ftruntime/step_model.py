"""Step times of a plan on cards of a known kind, modelled: bytes over links, FLOPs over ceilings.

Nothing here was timed. Left out: launches, latencies of kernels and copies, the host's part of a
step, and that cards share the host's memory when all copy at once. Tokens of a step pick experts
uniformly; the hit rate of a decode step is a simulated one, that of a chunk the resident share.

Terms of a step, each of one rank:

- bus: missing experts over the link to the host;
- memory: weights, touched experts, KV rows and residual streams once over device memory;
- compute: FLOPs over what the machine code of each kernel allows;
- all-reduce: two a layer through the host, a latency and a ring's share of the bytes.

Memory and compute overlap inside kernels. Misses of a layer can cross the bus while the layer
before computes. An all-reduce waits for its layer and takes the same link. Where a chunk runs in
halves it hides behind what the other half computes, and weights are read twice; else nothing does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ftruntime import memory
from ftruntime.checkpoint.names import expected_tensors, num_shares
from ftruntime.model.config import ModelConfig
from ftruntime.types import LEAST_HALF

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig
    from ftruntime.plan import Plan

_CONTEXT_TOKENS: Final = 32768
# decode hit rate by share of experts resident, simulated by bench_kernels/expert_trace.py: policy
# "scan-resistant", one request, mean of seeds 1, 2, 3 over decode steps 401 to 500
HIT_RATES: Final = (
    (0.0, 0.0), (0.05, 0.292), (0.1, 0.398), (0.2, 0.515), (0.3, 0.601), (0.5, 0.737),
    (0.65, 0.824), (0.8, 0.903), (0.95, 0.977), (1.0, 1.0),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Card:
    """Rates of one card and its link, per second.

    ``*_flops`` are the ceilings that the loops of our kernels reach on paper; ``slices`` are those
    of matrices cut over ranks.
    """

    name: str
    memory_bytes: float
    link_bytes: float
    reduce_bytes: float
    reduce_latency_s: float
    expert_flops: float
    expert_slices_flops: float
    fp8_flops: float
    bf16_flops: float
    attention_flops: float
    attention_few_heads_flops: float  # 8 heads or less
    index_flops: float


# ceilings: bench_kernels/README.md, "Experts and linears on sm_89" and "Attention on sm_89"; link
# rates and latency are assumed
RTX_4090: Final = Card(
    name="NVIDIA GeForce RTX 4090", memory_bytes=1008e9, link_bytes=25e9, reduce_bytes=12e9,
    reduce_latency_s=30e-6, expert_flops=324e12, expert_slices_flops=308e12, fp8_flops=318e12,
    bf16_flops=164e12, attention_flops=161e12, attention_few_heads_flops=138e12,
    index_flops=294e12,
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Terms of one step in seconds; `layers` is the depth of the pipeline of copies, and `halves`
    says that one half of the tokens computes while the other's sums are under way."""

    tokens: int
    layers: int
    bus_s: float
    memory_s: float
    compute_s: float
    all_reduce_s: float
    halves: bool = False

    @property
    def sum_s(self) -> float:
        """Nothing overlaps."""
        return self.bus_s + self.memory_s + self.compute_s + self.all_reduce_s

    @property
    def overlapped_s(self) -> float:
        """Everything that can overlap does: copies run one layer ahead of the products."""
        work = max(self.memory_s, self.compute_s)
        link = self.bus_s + self.all_reduce_s if self.halves else self.bus_s
        fill = min(link, work) / self.layers
        return max(link, work) + fill + (0.0 if self.halves else self.all_reduce_s)

    def to_dict(self) -> dict[str, float]:
        """Milliseconds, and tokens a second of both ends."""
        terms = {
            "bus_ms": self.bus_s, "memory_ms": self.memory_s, "compute_ms": self.compute_s,
            "all_reduce_ms": self.all_reduce_s, "sum_ms": self.sum_s,
            "overlapped_ms": self.overlapped_s,
        }  # fmt: skip
        return {
            "tokens": self.tokens,
            "halves": self.halves,
            **{name: round(1e3 * seconds, 3) for name, seconds in terms.items()},
            "tokens_per_s": round(self.tokens / self.sum_s, 1),
            "tokens_per_s_overlapped": round(self.tokens / self.overlapped_s, 1),
        }


def modelled(
    config: RuntimeConfig, shape: ModelConfig, plan: Plan, card: Card = RTX_4090
) -> dict[str, object] | None:
    """Steps of a plan for `inspect`: decode of one row and of all, and the largest chunk, which
    ends where the decode rows stand. None as of `step_model`.
    """
    model = step_model(config, shape, plan, card)
    if model is None:
        return None
    share = plan.expert_slots / plan.num_experts
    context = min(plan.max_model_len, _CONTEXT_TOKENS)
    chunk = min(plan.chunk_tokens, context)
    return {
        "card": card.name,
        "cards": plan.ranks,
        "link_gb_per_s": card.link_bytes / 1e9,
        "memory_gb_per_s": card.memory_bytes / 1e9,
        "all_reduce_gb_per_s": card.reduce_bytes / 1e9,
        "all_reduce_latency_us": round(1e6 * card.reduce_latency_s, 3),
        "context_tokens": context,
        "decode_hit_rate": round(hit_rate(share), 4),
        "decode_full_hit_rate": round(model.hit_rate(plan.max_running), 4),
        "prefill_hit_rate": round(share, 4),
        "steps": {
            "decode": model.decode(1, context).to_dict(),
            "decode_full": model.decode(plan.max_running, context).to_dict(),
            "prefill": model.prefill(chunk, context).to_dict(),
        },
    }


def step_model(
    config: RuntimeConfig, shape: ModelConfig, plan: Plan, card: Card = RTX_4090
) -> StepModel | None:
    """None without cards, under ``exact``, which no kernel is made for, and for a plan that does
    not fit.
    """
    if plan.kind != "cuda" or config.numerics == "exact" or not plan.fits:
        return None
    return StepModel(config, shape, plan, card)


def hit_rate(share: float) -> float:
    """Decode hit rate when this share of all experts is resident, linear between the points."""
    for (low, below), (high, above) in itertools.pairwise(HIT_RATES):
        if share <= high:
            return below + (above - below) * (share - low) / (high - low)
    return 1.0


class StepModel:
    """Step times of one plan on one kind of card."""

    def __init__(self, config: RuntimeConfig, shape: ModelConfig, plan: Plan, card: Card) -> None:
        self._shape, self._card, self._ranks = shape, card, plan.ranks
        self._expert = plan.bytes["experts"] // plan.expert_slots
        self._share = plan.expert_slots / plan.num_experts
        self._dense = plan.bytes["weights"] - looked_up_bytes(shape, plan.ranks)
        self._row = memory.kv_row_bytes(shape, kv_format=config.kv_format, numerics=config.numerics)
        self._linear = linear_flops(shape, ranks=plan.ranks)
        self._in_halves = plan.in_halves

    def decode(self, rows: int, context: int) -> StepTime:
        """One token for each of ``rows`` sequences of ``context`` tokens."""
        return self.step([(1, context - 1)] * rows, decode=True)

    def prefill(self, tokens: int, context: int) -> StepTime:
        """A chunk whose last token is number ``context`` of its prompt."""
        return self.step([(tokens, context - tokens)], decode=False)

    def hit_rate(self, rows: int) -> float:
        """Of the distinct experts of a decode step: the simulated one of a single row, falling to
        the resident share as the rows come to touch every expert."""
        one, touched = (experts_touched(self._shape, n) for n in (1, rows))
        every = self._shape.n_routed_experts
        kept = (every - touched) / (every - one) if every > one else 1.0
        return self._share + kept * (hit_rate(self._share) - self._share)

    def step(self, parts: Sequence[tuple[int, int]], *, decode: bool) -> StepTime:
        """One step of sequences ``(tokens, tokens before them)``. Of the experts that a chunk
        touches, what is not resident crosses the bus.
        """
        shape, card = self._shape, self._card
        layers, tokens = shape.num_hidden_layers, sum(count for count, _ in parts)
        halves = not decode and self._in_halves and tokens >= 2 * LEAST_HALF
        missing = 1 - (self.hit_rate(len(parts)) if decode else self._share)
        touched = layers * experts_touched(shape, tokens) * self._expert
        # two sites a layer read and write all streams
        streams = 2 * 2 * layers * tokens * shape.hc_mult * shape.hidden_size * 2
        rows = sum(
            self._kv_bytes(start + count, picks=shape.index_topk if decode else start + count)
            for count, start in parts
        )
        read = (self._dense + touched) * (2 if halves else 1) + rows + streams
        # a part's mean query stands for all of them
        products_s = sum(n * self._token_s(start + n - 1 - n // 2) for n, start in parts)
        return StepTime(
            tokens=tokens,
            layers=layers,
            bus_s=missing * touched / card.link_bytes,
            memory_s=read / card.memory_bytes,
            compute_s=products_s + len(parts) * self._head_s(),
            all_reduce_s=self._all_reduce_s(tokens, calls=2 if halves else 1),
            halves=halves,
        )

    def _token_s(self, position: int) -> float:
        shape, card, ranks = self._shape, self._card, self._ranks
        work = attention_flops(shape, position)
        sliced = card.expert_flops if ranks == 1 else card.expert_slices_flops
        heads = shape.num_attention_heads // ranks
        attention = card.attention_few_heads_flops if heads <= 8 else card.attention_flops
        experts = 6 * shape.num_hidden_layers * shape.num_experts_per_tok
        experts *= shape.hidden_size * shape.moe_intermediate_size
        return (
            self._linear["fp8"] / card.fp8_flops
            + self._linear["bf16"] / card.bf16_flops
            + experts / ranks / sliced
            + work["attention"] / ranks / attention
            + work["index"] / card.index_flops
        )

    def _head_s(self) -> float:
        shape = self._shape
        return 2 * shape.vocab_size * shape.hidden_size / self._ranks / self._card.bf16_flops

    def _kv_bytes(self, context: int, *, picks: int) -> int:
        """Rows of one sequence read once in all layers: windows, picks, index and the rest."""
        shape = self._shape
        csa, hca = shape.num_layers_of(4), shape.num_layers_of(128)
        rows = shape.num_hidden_layers * min(context, shape.sliding_window)
        rows += csa * min(picks, context // 4) + hca * (context // 128)
        return rows * self._row + csa * (context // 4) * shape.index_head_dim * 2

    def _all_reduce_s(self, tokens: int, *, calls: int = 1) -> float:
        """``calls``: of each sublayer, for its part of the tokens."""
        ranks, card = self._ranks, self._card
        if ranks == 1:
            return 0.0
        ring = 2 * (ranks - 1) / ranks * tokens * self._shape.hidden_size * 2
        sublayers = 2 * self._shape.num_hidden_layers
        return sublayers * (calls * card.reduce_latency_s + ring / card.reduce_bytes)


def experts_touched(shape: ModelConfig, tokens: int) -> float:
    """Distinct experts of a layer that this many tokens need under uniform routing."""
    every = shape.n_routed_experts
    return every * (1 - (1 - shape.num_experts_per_tok / every) ** tokens)


def looked_up_bytes(shape: ModelConfig, ranks: int) -> int:
    """Weights of which a step reads a few rows: embedding and routing tables."""
    embed = -(-2 * shape.vocab_size * shape.hidden_size // ranks)
    return embed + 8 * shape.num_hash_layers * shape.vocab_size * shape.num_experts_per_tok


@lru_cache(maxsize=64)  # walks every expert
def linear_flops(shape: ModelConfig, *, ranks: int) -> Mapping[str, float]:
    """FLOPs of one token on one rank in matrices that every token passes, by operand width: FP8,
    and bf16 activations (output groups, compressors, routers). The head is none of them.
    """
    flops = {"fp8": 0.0, "bf16": 0.0}
    for name, spec in expected_tensors(shape).items():
        if spec.dtype not in ("F8_E4M3", "BF16") or len(spec.shape) < 2:
            continue
        if name in ("embed.weight", "head.weight"):
            continue
        narrow = spec.dtype == "F8_E4M3" and ".attn.wo_a." not in name
        flops["fp8" if narrow else "bf16"] += 2 * spec.num_elements / num_shares(name, ranks)
    return flops


def attention_flops(shape: ModelConfig, position: int) -> Mapping[str, int]:
    """FLOPs of one query at a position in all layers, all heads: scores and values of the visible
    rows, and index scores.
    """
    window = min(position + 1, shape.sliding_window)
    rows = shape.num_hidden_layers * window
    rows += shape.num_layers_of(4) * min(shape.index_topk, (position + 1) // 4)
    rows += shape.num_layers_of(128) * ((position + 1) // 128)
    scores = shape.num_layers_of(4) * ((position + 1) // 4)
    return {
        "attention": 4 * shape.num_attention_heads * shape.head_dim * rows,
        "index": 2 * shape.index_n_heads * shape.index_head_dim * scores,
    }
