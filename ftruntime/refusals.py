"""What a plan refuses: settings against shape and machine, and what does not fit, in one sentence
that names the flag that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from ftruntime.flags import refuse
from ftruntime.model.config import ModelConfig
from ftruntime.sizing import Sizer, largest, min_expert_slots
from ftruntime.types import PAGE_TOKENS

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig
    from ftruntime.plan import DeviceFacts

_GIB: Final = 1 << 30


class NotEnoughMemoryError(ValueError):
    """No single setting makes the plan fit; the sentence says what is missing."""


def check_settings(config: RuntimeConfig, shape: ModelConfig, facts: DeviceFacts) -> None:
    """Settings that contradict the model or the machine.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
    """
    ranks = config.tensor_parallel_size
    for name in ("num_attention_heads", "o_groups", "vocab_size", "moe_intermediate_size"):
        size = getattr(shape, name)
        if size % ranks:
            refuse(facts.ranks_flag, ranks, f"a divisor of {name} ({size})")
    if facts.kind == "cuda" and ranks > facts.cards:
        refuse("tensor_parallel_size", ranks, f"at most the {facts.cards} {facts.cards_from}")
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


def check_fits(sizer: Sizer) -> None:
    """The plan fits its memory, largest chunk included, and the bank that of the host.

    Raises:
        ValueError: one setting can make it fit; names it and the nearest value that does.
        NotEnoughMemoryError: none can.
    """
    slots = sizer.expert_slots()
    if not sizer.fits(sizer.num_tokens(slots), slots):
        _refuse_size(sizer)
    host, free = sizer.host_rows(), sizer.facts.host_bytes
    need = sum(row.num_bytes for row in host.values())
    if free is None or need <= free:
        return
    missing = f"the expert bank needs {_gib(need)} of host memory, {_gib(free)} are free"
    fused = sizer.changed("moe_backend", "fused") if not sizer.sized else None
    if fused is not None and _fits(fused):
        refuse("moe_backend", sizer.config.moe_backend, f"fused: {missing}")
    raise NotEnoughMemoryError(f"--moe-backend offload cannot act: {missing}")


@dataclass(frozen=True)
class _Lever:
    """A setting that can give way: below ``base``, which acts now, values by number from 1 on."""

    name: str
    base: float
    most: int
    value: Callable[[int], int | float]


def _refuse_size(sizer: Sizer) -> NoReturn:
    """Name a setting that alone makes the plan fit, or say what is missing."""
    config = sizer.config
    room = f"{_gib(sizer.budget)} are free under --memory-ratio {config.memory_ratio:g}"
    # held once, experts need less than as a bank and slots of the same memory
    twice = sizer.facts.kind == "cpu" and config.moe_backend == "offload" and not sizer.sized
    if twice and _fits(sizer.changed("moe_backend", "fused")):
        refuse("moe_backend", "offload", f"fused, which holds experts once: {room}")
    found = []
    for lever in _levers(sizer):
        value = _largest_fitting(sizer, lever)
        if value is not None:
            found.append((lever.name in config.explicit, value / lever.base, lever.name, value))
    if found:
        # of what was asked for, else of the defaults, the one that has to give least
        _, _, name, value = max(found)
        refuse(name, getattr(config, name), f"at most what fits: {room} (nearest: {value})")
    slots = sizer.expert_slots()
    rows = sizer.rows(sizer.num_tokens(slots), slots)
    need = sum(row.num_bytes for row in rows.values())
    parts = ", ".join(
        f"{name} {row.num_bytes / _GIB:.2f}" for name, row in rows.items() if row.num_bytes
    )
    raise NotEnoughMemoryError(f"the model needs {_gib(need)} a rank ({parts}), but only {room}")


def _levers(sizer: Sizer) -> Iterator[_Lever]:
    config, page = sizer.config, PAGE_TOKENS
    every, least = sizer.weights.num_experts, min_expert_slots(sizer.shape)
    tokens = sizer.num_tokens(sizer.expert_slots())
    pages, chunk = tokens // page, sizer.chunk(tokens).chunk_tokens
    # a capacity below the context that was asked for is refused itself
    low = max(0, -(-(config.max_model_len or 0) // page) - 1)
    if config.num_tokens is not None:
        yield _Lever("num_tokens", tokens, pages - 1 - low, lambda n: (low + n) * page)
    elif config.num_pages is not None:
        yield _Lever("num_pages", pages, pages - 1 - low, lambda n: low + n)
    elif sizer.offload and not sizer.sized:
        yield _Lever("kv_reserve_tokens", tokens, pages - 1, lambda n: n * page)
    size, rate = config.moe_cache_size, config.moe_cache_rate
    if size is not None:
        yield _Lever("moe_cache_size", size, size - least, lambda n: least + n - 1)
    if rate is not None:
        yield _Lever("moe_cache_rate", max(rate, least / every), int(rate * 1000), _thousandths)
    ratio, running = config.swa_full_tokens_ratio, config.max_running_requests
    yield _Lever("max_prefill_length", chunk, chunk // page - 1, lambda n: n * page)
    yield _Lever("swa_full_tokens_ratio", ratio, math.ceil(ratio * 1000) - 1, _thousandths)
    yield _Lever("max_running_requests", running, running - 1, lambda n: n)


def _thousandths(number: int) -> float:
    return number / 1000


def _largest_fitting(sizer: Sizer, lever: _Lever) -> int | float | None:
    if lever.most < 1:
        return None

    def good(number: int) -> bool:
        return _fits(sizer.changed(lever.name, lever.value(number)))

    number = largest(lever.most, good)
    return lever.value(number) if good(number) else None


def _fits(sizer: Sizer) -> bool:
    slots = sizer.expert_slots()
    return sizer.fits(sizer.num_tokens(slots), slots)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
