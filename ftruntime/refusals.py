"""What a plan refuses: settings against shape and machine, and what does not fit, in one sentence
that names the flag that helps.
"""

from __future__ import annotations

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
    """A setting that can give way: values by number, growing from 1 to ``most``."""

    name: str
    most: int
    value: Callable[[int], int | float]


def _refuse_size(sizer: Sizer) -> NoReturn:
    """Name the first setting that alone makes the plan fit, or say what is missing."""
    config = sizer.config
    room = f"{_gib(sizer.budget)} are free under --memory-ratio {config.memory_ratio:g}"
    if sizer.offload and sizer.facts.kind == "cpu" and not sizer.sized:
        fused = sizer.changed("moe_backend", "fused")
        if config.moe_backend == "offload" and _fits(fused):
            refuse("moe_backend", "offload", f"fused, without a second copy of experts: {room}")
    for lever in _levers(sizer):
        found = _largest_fitting(sizer, lever)
        if found is not None:
            expected = f"at most what fits: {room} (nearest: {found})"
            refuse(lever.name, getattr(config, lever.name), expected)
    slots = sizer.expert_slots()
    rows = sizer.rows(sizer.num_tokens(slots), slots)
    need = sum(row.num_bytes for row in rows.values())
    parts = ", ".join(
        f"{name} {row.num_bytes / _GIB:.2f}" for name, row in rows.items() if row.num_bytes
    )
    raise NotEnoughMemoryError(f"the model needs {_gib(need)} a rank ({parts}), but only {room}")


def _levers(sizer: Sizer) -> Iterator[_Lever]:
    """What was asked for first, then defaults; least harm first."""
    config, least = sizer.config, min_expert_slots(sizer.shape)
    page = PAGE_TOKENS
    # a capacity below the context that was asked for is refused itself
    skipped = -(-(config.max_model_len or 0) // page)
    if config.num_tokens is not None:
        most = config.num_tokens // page - 1
        low = max(0, skipped - 1)
        yield _Lever("num_tokens", most - low, lambda n: (low + n) * page)
    if config.num_pages is not None:
        low = max(0, skipped - 1)
        yield _Lever("num_pages", config.num_pages - 1 - low, lambda n: low + n)
    if config.moe_cache_size is not None:
        yield _Lever("moe_cache_size", config.moe_cache_size - least, lambda n: least + n - 1)
    if config.moe_cache_rate is not None:
        yield _Lever("moe_cache_rate", int(config.moe_cache_rate * 1000), lambda n: (n - 1) / 1000)
    if sizer.offload and sizer.explicit_tokens() is None and not sizer.sized:
        tokens = min(config.kv_reserve_tokens, sizer.least_tokens())
        yield _Lever("kv_reserve_tokens", tokens // page, lambda n: (n - 1) * page)
    chunk = sizer.chunk(sizer.num_tokens(sizer.expert_slots())).chunk_tokens
    yield _Lever("max_prefill_length", chunk // page - 1, lambda n: n * page)
    yield _Lever(
        "swa_full_tokens_ratio", int(config.swa_full_tokens_ratio * 1000 - 1e-9), lambda n: n / 1000
    )
    yield _Lever("max_running_requests", config.max_running_requests - 1, lambda n: n)


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
