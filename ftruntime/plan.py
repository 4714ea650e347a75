"""What settings come to on a machine and a checkpoint: pools, chunk, context, experts, bytes.

`resolve` is pure: settings, shape and device facts in, `Plan` out. Nothing is measured and nothing
allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from ftruntime import memory
from ftruntime.flags import refuse
from ftruntime.kvcache.layout import ChunkBudget, chunk_budget
from ftruntime.model.config import ModelConfig
from ftruntime.scheduler.policy import interleave_notice
from ftruntime.types import PAGE_TOKENS, SchedulerLimits

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig

_CPU_AUTO_TOKENS: Final = 65536
_GIB: Final = 1 << 30
# interpreter, libraries and the buffers of a loader
_LOADING_BYTES: Final = 256 << 20


class NotEnoughMemoryError(ValueError):
    """The machine cannot hold weights and the least KV room; the sentence says what is missing."""


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved numbers of one rank.

    ``bytes`` sum to ``total_bytes``; ``headroom`` among them is what is left unused.
    ``host_bytes`` is what all ranks together take of the host beside cards: the expert bank,
    pinned, and passing copies while it is loaded. Empty on CPU, where ``bytes`` hold the bank.
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
    max_decode_gap_s: float | None
    bytes: Mapping[str, int]
    budget_bytes: int
    host_bytes: Mapping[str, int]
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
        values["bytes"], values["host_bytes"] = dict(self.bytes), dict(self.host_bytes)
        values["notes"], values["warnings"] = list(self.notes), list(self.warnings)
        return {**values, "total_bytes": self.total_bytes, "fits": self.fits}

    def scheduler_limits(self, config: RuntimeConfig, shape: ModelConfig) -> SchedulerLimits:
        """The part of the plan that the scheduler works with."""
        return SchedulerLimits(
            num_pages=self.num_pages,
            window_pages=self.window_pages,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            num_layers=shape.num_hidden_layers,
            decode_interleave_every=config.decode_interleave_every,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            eos_token_ids=shape.eos_token_ids,
        )


def min_expert_slots(shape: ModelConfig) -> int:
    """The least expert slots, all layers together: what one token needs in one layer at once."""
    return shape.num_experts_per_tok


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
    _check_against_shape(config, shape, facts)
    sizer = _Sizer(config, shape, facts)
    slots = _expert_slots(sizer)
    num_tokens = _num_tokens(sizer, slots)
    context = sizer.context(num_tokens)
    need = sizer.need(num_tokens, slots)
    host = sizer.host()
    if strict and sum(need.values()) > sizer.budget:
        _refuse_size(sizer, num_tokens, slots)
    if strict:
        _check_host(sizer, host)
    chunk = sizer.chunk(num_tokens)
    return Plan(
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
        max_decode_gap_s=None,
        bytes={**need, "headroom": max(0, sizer.budget - sum(need.values()))},
        budget_bytes=sizer.budget,
        host_bytes=host,
        notes=_notes(config, sizer, chunk, slots),
        warnings=_warnings(config, shape, num_tokens, context, chunk.chunk_tokens),
    )


class _Sizer:
    """Bytes of a candidate plan; the weights are counted once."""

    def __init__(self, config: RuntimeConfig, shape: ModelConfig, facts: DeviceFacts) -> None:
        self.config = config
        self.shape = shape
        self.facts = facts
        self.ranks = config.tensor_parallel_size
        widened = facts.kind == "cpu" or config.numerics == "exact"
        self.weights = memory.weight_bytes(shape, widened=widened, ranks=self.ranks)
        # ranks on CPU share one memory, ranks on cards have one each
        share = facts.memory_bytes // (self.ranks if facts.kind == "cpu" else 1)
        self.budget = int(share * config.memory_ratio)
        self.offload = self._offloads()

    def _offloads(self) -> bool:
        config = self.config
        sized = config.moe_cache_size is not None or config.moe_cache_rate is not None
        if config.moe_backend != "auto":
            return config.moe_backend == "offload"
        if self.facts.kind == "cpu":
            return sized or config.moe_cache_auto
        return sized or not self.fits(self.least_tokens(), self.weights.num_experts, offload=False)

    def least_tokens(self) -> int:
        """KV room that comes before expert slots: ``--num-tokens``, or ``--kv-reserve-tokens``."""
        most = PAGE_TOKENS * self.most_pages()
        return self.explicit_tokens() or min(most, _pages_up(self.config.kv_reserve_tokens))

    def host(self) -> dict[str, int]:
        """Bytes of the host beside cards, all ranks of this machine together."""
        if self.facts.kind == "cpu" or not self.offload:
            return {}
        bank = self.weights.expert * self.weights.num_experts * self.ranks
        return {"expert_bank": bank, "loading": bank // 20 + _LOADING_BYTES}

    def context(self, num_tokens: int) -> int:
        wanted = self.config.max_model_len or self.shape.max_position_embeddings
        return min(wanted, self.shape.max_position_embeddings, num_tokens)

    def chunk(self, num_tokens: int) -> ChunkBudget:
        return chunk_budget(
            max_prefill_length=self.config.max_prefill_length,
            num_tokens=num_tokens,
            max_running=self.config.max_running_requests,
            swa_ratio=self.config.swa_full_tokens_ratio,
            max_model_len=self.context(num_tokens),
            radix=self.config.cache_type == "radix",
        )

    def need(self, num_tokens: int, slots: int, *, offload: bool | None = None) -> dict[str, int]:
        config, shape = self.config, self.shape
        offload = self.offload if offload is None else offload
        bank = self.weights.num_experts if offload and self.facts.kind == "cpu" else 0
        chunk = self.chunk(num_tokens)
        form = {"kv_format": config.kv_format, "numerics": config.numerics}
        # page 0 and one carry row are padding
        pages = num_tokens // PAGE_TOKENS + 1
        return {
            "weights": self.weights.dense,
            "experts": slots * self.weights.expert,
            "expert_bank": bank * self.weights.expert,
            "kv_rows": pages * memory.row_page_bytes(shape, **form),
            "kv_window": chunk.window_pages * memory.window_page_bytes(shape, **form),
            "carry": (config.max_running_requests + 1) * memory.carry_bytes(shape),
            "rope_tables": memory.rope_table_bytes(shape, self.context(num_tokens)),
            "activations": memory.activation_bytes(
                shape, chunk_tokens=chunk.chunk_tokens, max_running=config.max_running_requests,
                numerics=config.numerics, ranks=self.ranks,
            ),
        }  # fmt: skip

    def fits(self, num_tokens: int, slots: int, *, offload: bool | None = None) -> bool:
        return sum(self.need(num_tokens, slots, offload=offload).values()) <= self.budget

    def explicit_tokens(self) -> int | None:
        if self.config.num_pages is not None:
            return self.config.num_pages * PAGE_TOKENS
        return self.config.num_tokens

    def most_tokens(self, slots: int) -> int:
        """The largest KV capacity that fits, at least one page."""
        return self.fitting_tokens(self.most_pages(), slots)

    def most_pages(self) -> int:
        """Pages of KV beyond which nothing could use them, or CPU does not take them unasked."""
        context = self.config.max_model_len or self.shape.max_position_embeddings
        most = -(-context * self.config.max_running_requests // PAGE_TOKENS)
        return min(most, _CPU_AUTO_TOKENS // PAGE_TOKENS) if self.facts.kind == "cpu" else most

    def fitting_tokens(self, most_pages: int, slots: int) -> int:
        fits = functools.partial(self._pages_fit, slots=slots)
        return PAGE_TOKENS * _largest(most_pages, fits)

    def _pages_fit(self, pages: int, slots: int) -> bool:
        return self.fits(pages * PAGE_TOKENS, slots)


def _largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest good number in ``[1, most]``, 1 if none is; all below a good one are good."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _expert_slots(sizer: _Sizer) -> int:
    config, every = sizer.config, sizer.weights.num_experts
    if not sizer.offload:
        return every
    least = min_expert_slots(sizer.shape)
    if config.moe_cache_size is not None:
        return config.moe_cache_size
    if config.moe_cache_rate is not None:
        return max(least, int(config.moe_cache_rate * every))
    spare = sizer.budget - sum(sizer.need(sizer.least_tokens(), 0).values())
    return max(least, min(every, spare // sizer.weights.expert))


def _num_tokens(sizer: _Sizer, slots: int) -> int:
    config, explicit = sizer.config, sizer.explicit_tokens()
    if explicit is not None:
        return explicit
    sized = config.moe_cache_size is not None or config.moe_cache_rate is not None
    if slots < sizer.weights.num_experts and not sized:
        return sizer.least_tokens()
    return sizer.most_tokens(slots)


def _pages_up(num_tokens: int) -> int:
    return max(1, -(-num_tokens // PAGE_TOKENS)) * PAGE_TOKENS


def _check_against_shape(config: RuntimeConfig, shape: ModelConfig, facts: DeviceFacts) -> None:
    ranks = config.tensor_parallel_size
    for name in ("num_attention_heads", "o_groups", "vocab_size", "moe_intermediate_size"):
        size = getattr(shape, name)
        if size % ranks:
            refuse("tensor_parallel_size", ranks, f"a divisor of {name} ({size})")
    if facts.kind == "cuda" and ranks > facts.cards:
        refuse("tensor_parallel_size", ranks, f"at most the {facts.cards} cards of this machine")
    if config.kv_format == "fp8" and (shape.head_dim, shape.qk_rope_head_dim) != (512, 64):
        expected = (
            "bf16: fp8 rows need head_dim 512 and qk_rope_head_dim 64, this model has "
            f"{shape.head_dim} and {shape.qk_rope_head_dim}"
        )
        refuse("kv_format", "fp8", expected)
    _check_context(config, shape)
    every = shape.num_hidden_layers * shape.n_routed_experts
    least, slots = min_expert_slots(shape), config.moe_cache_size
    if slots is not None and not least <= slots <= every:
        nearest = least if slots < least else every
        expected = f"{least} to {every}, all experts of all layers (nearest: {nearest})"
        refuse("moe_cache_size", slots, expected)


def _check_context(config: RuntimeConfig, shape: ModelConfig) -> None:
    wanted, model = config.max_model_len, shape.max_position_embeddings
    if wanted is None:
        return
    if wanted > model:
        refuse("max_model_len", wanted, f"at most the model's {model} (nearest: {model})")
    tokens = config.num_tokens
    if config.num_pages is not None:
        tokens = config.num_pages * PAGE_TOKENS
    if tokens is not None and wanted > tokens:
        expected = f"at most the KV capacity of {tokens} tokens (--num-tokens; nearest: {tokens})"
        refuse("max_model_len", wanted, expected)


def _refuse_size(sizer: _Sizer, num_tokens: int, slots: int) -> NoReturn:
    """One sentence for a plan larger than the memory: the flag that can give way, or what is
    missing.
    """
    config = sizer.config
    most = sizer.fitting_tokens(num_tokens // PAGE_TOKENS, slots)
    room = f"{sizer.budget / _GIB:.2f} GiB are free under --memory-ratio {config.memory_ratio}"
    if sizer.explicit_tokens() is not None and sizer.fits(most, slots):
        name, unit = ("num_pages", PAGE_TOKENS) if config.num_pages else ("num_tokens", 1)
        expected = f"at most what fits: {room} (nearest: {most // unit})"
        refuse(name, num_tokens // unit, expected)
    need = sizer.need(num_tokens, slots)
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in need.items() if size)
    raise NotEnoughMemoryError(
        f"the model needs {sum(need.values()) / _GIB:.2f} GiB a rank ({parts}), but only {room}"
    )


def _check_host(sizer: _Sizer, host: Mapping[str, int]) -> None:
    free, need = sizer.facts.host_bytes, sum(host.values())
    if free is not None and need > free:
        raise NotEnoughMemoryError(
            f"--moe-backend offload needs {need / _GIB:.2f} GiB of host memory (expert bank "
            f"{host['expert_bank'] / _GIB:.2f}), but {free / _GIB:.2f} GiB are free"
        )


def _notes(config: RuntimeConfig, sizer: _Sizer, chunk: ChunkBudget, slots: int) -> tuple[str, ...]:
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
    rate, every = config.moe_cache_rate, sizer.weights.num_experts
    if rate is not None and int(rate * every) < min_expert_slots(sizer.shape):
        notes.append(
            f"expert slots raised to the least moe_cache_rate={rate:g} "
            f"expert_slots={min_expert_slots(sizer.shape)}"
        )
    host, free = sum(sizer.host().values()), sizer.facts.host_bytes
    if free is not None and host > free:
        notes.append(f"expert bank exceeds host memory bytes={host} available={free}")
    return tuple(notes)


def _warnings(
    config: RuntimeConfig, shape: ModelConfig, num_tokens: int, context: int, chunk_tokens: int
) -> tuple[str, ...]:
    """A context of half the model's or less that nobody asked for; an interleave that cannot act
    within one prompt."""
    warnings = []
    model = shape.max_position_embeddings
    if config.max_model_len is None and 2 * context <= model:
        warnings.append(
            f"served context is far below the model's max_model_len={context} model={model}: "
            f"longer prompts are refused; raise --num-tokens (now {num_tokens}) or --memory-ratio "
            f"(now {config.memory_ratio:g})"
        )
    every = config.decode_interleave_every
    if every is not None:
        notice = interleave_notice(every, chunk_tokens=chunk_tokens, max_model_len=context)
        if notice is not None:
            warnings.append(notice)
    return tuple(warnings)
