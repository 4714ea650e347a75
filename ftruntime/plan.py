"""What settings come to on a machine and a checkpoint: pools, chunk, context, experts, bytes.

`resolve` is pure: settings, shape and device facts in, `Plan` out. Nothing is measured and nothing
allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from ftruntime.gap_model import GapSource, decode_gap
from ftruntime.kvcache.layout import ChunkBudget
from ftruntime.model.config import ModelConfig
from ftruntime.refusals import NotEnoughMemoryError, check_fits, check_settings
from ftruntime.scheduler.policy import interleave_notice
from ftruntime.sizing import Row, Sizer, amount, min_expert_slots
from ftruntime.types import PAGE_TOKENS, Admission, SchedulerLimits

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig

__all__ = ["DeviceFacts", "NotEnoughMemoryError", "Plan", "min_expert_slots", "resolve"]


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the plan needs to know of a machine.

    ``memory_bytes`` is free memory of one card, or MemAvailable on CPU; ``host_bytes`` is
    MemAvailable, None unknown.
    """

    kind: Literal["cpu", "cuda"]
    cards: int
    memory_bytes: int
    host_bytes: int | None = None
    cards_from: str = "cards of this machine"  # as a refusal says it
    ranks_flag: str = "tensor_parallel_size"  # which has set the ranks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved numbers of one rank.

    ``bytes`` sum to ``total_bytes``; ``headroom`` among them is what is left unused.
    ``host_bytes`` is what all ranks together take of the host beside cards: the expert bank,
    pinned, and passing copies while it is loaded. Empty on CPU, where ``bytes`` hold the bank.
    ``why`` and ``host_why`` say what makes each of them.
    """

    kind: Literal["cpu", "cuda"]
    ranks: int
    chunk_tokens: int
    window_pages: int
    reserved_window_pages: int
    limiting: str
    num_tokens: int
    num_pages: int
    max_model_len: int
    max_running: int
    max_waiting_requests: int
    max_waiting_tokens: int
    moe_backend: Literal["fused", "offload"]
    num_experts: int
    expert_slots: int
    min_expert_slots: int
    graph_sizes: tuple[int, ...] = ()  # rows of the decode steps that are captured
    in_halves: bool = False  # large prefill batches, so that what one half computes hides sums
    max_decode_gap_s: float | None = None
    max_decode_gap_source: GapSource | None = None
    bytes: Mapping[str, int]
    why: Mapping[str, str]
    budget_bytes: int
    host_bytes: Mapping[str, int]
    host_why: Mapping[str, str]
    notes: tuple[str, ...] = ()  # log lines at info level
    warnings: tuple[str, ...] = ()  # log lines at warning level

    @property
    def total_bytes(self) -> int:
        """The memory ``--memory-ratio`` grants, or more when the plan does not fit."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, object]:
        """JSON values, in the order `inspect` prints them."""
        values = dataclasses.asdict(self)
        for name in ("bytes", "why", "host_bytes", "host_why"):
            values[name] = dict(getattr(self, name))
        values["notes"], values["warnings"] = list(self.notes), list(self.warnings)
        return {**values, "total_bytes": self.total_bytes, "fits": self.fits}

    def scheduler_limits(self, config: RuntimeConfig, shape: ModelConfig) -> SchedulerLimits:
        """The part of the plan that the scheduler works with."""
        gap_ms = config.max_decode_gap_ms
        return SchedulerLimits(
            num_pages=self.num_pages,
            window_pages=self.window_pages,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            num_layers=shape.num_hidden_layers,
            decode_interleave_every=config.decode_interleave_every,
            max_decode_gap_s=None if gap_ms is None else gap_ms / 1e3,
            prefill_layer_groups=config.prefill_layer_groups,
            prefix_cache=config.cache_type == "radix",
            admission=cast(Admission, config.admission),
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            eos_token_ids=shape.eos_token_ids,
        )


def resolve(
    config: RuntimeConfig, shape: ModelConfig, facts: DeviceFacts, *, strict: bool = True
) -> Plan:
    """Turn settings into numbers.

    Experts stay on the device if everything fits (``fused``). Otherwise they live in host memory
    and KV room is set aside, by ``--num-tokens`` or ``--kv-reserve-tokens``; expert slots take the
    rest. KV without a number of its own takes what is left: at most 65536 tokens on CPU, and never
    more than ``--max-running-requests`` full contexts.

    Args:
        strict: refuse a plan that does not fit; `inspect` shows it.

    Raises:
        ValueError: a setting that contradicts shape or machine, ``--flag is VALUE, expected ...``.
        NotEnoughMemoryError: the least plan does not fit, with ``strict``.
    """
    check_settings(config, shape, facts)
    sizer = Sizer(config, shape, facts)
    if strict:
        check_fits(sizer)
    slots = sizer.expert_slots()
    num_tokens = sizer.num_tokens(slots)
    context, host = sizer.context(num_tokens), sizer.host_rows()
    rows = _with_headroom(sizer, sizer.rows(num_tokens, slots))
    chunk = sizer.chunk(num_tokens)
    plan = Plan(
        kind=facts.kind,
        ranks=config.tensor_parallel_size,
        chunk_tokens=chunk.chunk_tokens,
        window_pages=chunk.window_pages,
        reserved_window_pages=chunk.reserved_window_pages,
        limiting=chunk.limiting,
        num_tokens=num_tokens,
        num_pages=num_tokens // PAGE_TOKENS,
        max_model_len=context,
        max_running=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens or 4 * num_tokens,
        moe_backend="offload" if sizer.offload else "fused",
        num_experts=sizer.weights.num_experts,
        expert_slots=slots,
        min_expert_slots=min_expert_slots(shape),
        graph_sizes=sizer.graph_sizes(),
        # the second half has to find a layer's experts, which the first brought in
        in_halves=config.tensor_parallel_size > 1
        and (not sizer.offload or slots >= shape.n_routed_experts),
        bytes={name: row.num_bytes for name, row in rows.items()},
        why={name: row.why for name, row in rows.items()},
        budget_bytes=sizer.budget,
        host_bytes={name: row.num_bytes for name, row in host.items()},
        host_why={name: row.why for name, row in host.items()},
        notes=_notes(config, sizer, chunk),
        warnings=_warnings(sizer, num_tokens, context, chunk.chunk_tokens),
    )
    gap = decode_gap(config, shape, plan)
    return dataclasses.replace(
        plan,
        max_decode_gap_s=gap.seconds,
        max_decode_gap_source=gap.source,
        notes=(*plan.notes, *([gap.note] if gap.note else [])),
        warnings=(*plan.warnings, *([gap.warning] if gap.warning else [])),
    )


def _with_headroom(sizer: Sizer, rows: dict[str, Row]) -> dict[str, Row]:
    left = sizer.budget - sum(row.num_bytes for row in rows.values())
    share = f"{amount(sizer.budget)}, {sizer.config.memory_ratio:g} of what is free"
    if sizer.facts.kind == "cpu" and sizer.ranks > 1:
        share += f" divided by the {sizer.ranks} ranks of one machine"
    why = f"left of {share}" if left >= 0 else f"{amount(-left)} more than {share}"
    return {**rows, "headroom": Row(max(0, left), why)}


def chunk_notes(config: RuntimeConfig, chunk: ChunkBudget | Plan) -> list[str]:
    """Why a chunk is smaller than ``--max-prefill-length``, as log lines; empty when it is not."""
    notes = []
    wanted = config.max_prefill_length // PAGE_TOKENS * PAGE_TOKENS
    if wanted != config.max_prefill_length:
        notes.append(
            f"prefill length rounded down max_prefill_length={config.max_prefill_length} "
            f"used={wanted} page_tokens={PAGE_TOKENS}"
        )
    if chunk.chunk_tokens < wanted:
        notes.append(
            f"prefill chunk clamped chunk_tokens={chunk.chunk_tokens} max_prefill_length={wanted} "
            f"limiting={chunk.limiting} window_pages={chunk.window_pages} "
            f"reserved_window_pages={chunk.reserved_window_pages}: raise --swa-full-tokens-ratio "
            f"(now {config.swa_full_tokens_ratio:g}) or --num-tokens for larger chunks"
        )
    return notes


def _notes(config: RuntimeConfig, sizer: Sizer, chunk: ChunkBudget) -> tuple[str, ...]:
    notes = chunk_notes(config, chunk)
    rate, every = config.moe_cache_rate, sizer.weights.num_experts
    if rate is not None and int(rate * every) < min_expert_slots(sizer.shape):
        notes.append(
            f"expert slots raised to the least moe_cache_rate={rate:g} "
            f"expert_slots={min_expert_slots(sizer.shape)}"
        )
    reserve, used = config.kv_reserve_tokens, sizer.least_tokens()
    if sizer.offload and sizer.explicit_tokens() is None and reserve > used:
        notes.append(
            f"kv reserve lowered to what can be used kv_reserve_tokens={reserve} used={used}"
        )
    return tuple(notes)


def _warnings(sizer: Sizer, num_tokens: int, context: int, chunk_tokens: int) -> tuple[str, ...]:
    """A context of half the model's or less that nobody asked for; a chunk that one more request
    would halve; an interleave that cannot act within one prompt."""
    config, warnings = sizer.config, []
    model = sizer.shape.max_position_embeddings
    if config.max_model_len is None and 2 * context <= model:
        more = f"--num-tokens (now {num_tokens}) or --memory-ratio (now {config.memory_ratio:g})"
        if sizer.explicit_tokens() is None and num_tokens == sizer.least_tokens():
            more = f"--kv-reserve-tokens (now {config.kv_reserve_tokens}) or --num-tokens"
        warnings.append(
            f"served context is far below the model's max_model_len={context} model={model}: "
            f"longer prompts are refused; raise {more}"
        )
    fewer = sizer.chunk(num_tokens, more_running=1).chunk_tokens
    if 2 * fewer < chunk_tokens:
        warnings.append(
            f"chunk would shrink by more than half with one more running request "
            f"chunk_tokens={chunk_tokens} then={fewer}: raise --swa-full-tokens-ratio "
            f"(now {config.swa_full_tokens_ratio:g}) before --max-running-requests"
        )
    every = config.decode_interleave_every
    if every is not None:
        notice = interleave_notice(every, chunk_tokens=chunk_tokens, max_model_len=context)
        if notice is not None:
            warnings.append(notice)
    return tuple(warnings)
