"""Bytes of a candidate plan, row by row, each with the numbers that make it. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ftruntime import memory
from ftruntime.kvcache.layout import ChunkBudget, chunk_budget, pages_for
from ftruntime.model.config import ModelConfig
from ftruntime.types import PAGE_TOKENS

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig
    from ftruntime.plan import DeviceFacts

_CPU_AUTO_TOKENS: Final = 65536
# interpreter, libraries and the buffers of a loader
_LOADING_BYTES: Final = 256 << 20
_UNITS: Final = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True)
class Row:
    """One line of the plan's table."""

    num_bytes: int
    why: str


class Sizer:
    """What settings take on a machine, for any number of KV tokens and expert slots.

    The weights are counted once; `changed` shares them.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        shape: ModelConfig,
        facts: DeviceFacts,
        weights: memory.WeightBytes | None = None,
    ) -> None:
        self.config, self.shape, self.facts = config, shape, facts
        self.ranks = config.tensor_parallel_size
        self.widened = facts.kind == "cpu" or config.numerics == "exact"
        self.weights = weights or memory.weight_bytes(shape, widened=self.widened, ranks=self.ranks)
        # ranks on CPU share one memory, ranks on cards have one each
        self.free = facts.memory_bytes // (self.ranks if facts.kind == "cpu" else 1)
        self.budget = int(self.free * config.memory_ratio)
        self.offload = False  # while it is asked whether all experts fit
        self.offload = self._offloads()

    def changed(self, name: str, value: object) -> Sizer:
        """The same with one setting changed that is none of the weights'."""
        config = dataclasses.replace(self.config, **{name: value})  # type: ignore[arg-type]
        return Sizer(config, self.shape, self.facts, self.weights)

    @property
    def sized(self) -> bool:
        """Whether a flag gives the number of expert slots."""
        return self.config.moe_cache_size is not None or self.config.moe_cache_rate is not None

    def _offloads(self) -> bool:
        if self.config.moe_backend != "auto":
            return self.config.moe_backend == "offload"
        if self.facts.kind == "cpu":
            return self.sized or self.config.moe_cache_auto
        return self.sized or not self.fits(self.least_tokens(), self.weights.num_experts)

    def expert_slots(self) -> int:
        """Slots as told, or what the memory holds behind the KV room that comes first."""
        config, every = self.config, self.weights.num_experts
        least = min_expert_slots(self.shape)
        if not self.offload:
            return every
        if config.moe_cache_size is not None:
            return config.moe_cache_size
        if config.moe_cache_rate is not None:
            return max(least, int(config.moe_cache_rate * every))
        layer, tokens = self.shape.n_routed_experts, self.least_tokens()
        # a pool that holds a layer needs no room for groups
        many, few = (
            (self.budget - self.need(tokens, slots)) // self.weights.expert + slots
            for slots in (layer, 0)
        )
        return max(least, min(every, many if many >= layer else few))

    def num_tokens(self, slots: int) -> int:
        """KV capacity as told; the room set aside when slots take the rest; else what is left."""
        explicit = self.explicit_tokens()
        if explicit is not None:
            return explicit
        if slots < self.weights.num_experts and not self.sized:
            return self.least_tokens()
        pages = largest(self.most_pages(), lambda n: self.fits(n * PAGE_TOKENS, slots))
        return pages * PAGE_TOKENS

    def explicit_tokens(self) -> int | None:
        if self.config.num_pages is not None:
            return self.config.num_pages * PAGE_TOKENS
        return self.config.num_tokens

    def least_tokens(self) -> int:
        """KV room that comes before expert slots: ``--num-tokens``, or ``--kv-reserve-tokens``."""
        reserve = max(1, pages_for(self.config.kv_reserve_tokens))
        return self.explicit_tokens() or PAGE_TOKENS * min(self.most_pages(), reserve)

    def most_pages(self) -> int:
        """KV pages that nothing could use more of, or that CPU does not exceed unasked."""
        context = self.config.max_model_len or self.shape.max_position_embeddings
        most = pages_for(context * self.config.max_running_requests)
        return min(most, _CPU_AUTO_TOKENS // PAGE_TOKENS) if self.facts.kind == "cpu" else most

    def context(self, num_tokens: int) -> int:
        wanted = self.config.max_model_len or self.shape.max_position_embeddings
        return min(wanted, self.shape.max_position_embeddings, num_tokens)

    def chunk(self, num_tokens: int, *, more_running: int = 0) -> ChunkBudget:
        """Window pool and chunk; with more running requests than asked for, what they would be."""
        return chunk_budget(
            max_prefill_length=self.config.max_prefill_length,
            num_tokens=num_tokens,
            max_running=self.config.max_running_requests + more_running,
            swa_ratio=self.config.swa_full_tokens_ratio,
            max_model_len=self.context(num_tokens),
            radix=self.config.cache_type == "radix",
        )

    def need(self, num_tokens: int, slots: int) -> int:
        return sum(row.num_bytes for row in self.rows(num_tokens, slots).values())

    def fits(self, num_tokens: int, slots: int) -> bool:
        return self.need(num_tokens, slots) <= self.budget

    def rows(self, num_tokens: int, slots: int) -> dict[str, Row]:
        """All of one rank's memory but the headroom."""
        chunk = self.chunk(num_tokens)
        form = "in fp32" if self.widened else "as in the checkpoint"
        return {
            "weights": Row(self.weights.dense, f"all but routed experts, {form}{self._shared()}"),
            **self._expert_rows(slots),
            **self._kv_rows(num_tokens, chunk),
            **self._step_rows(num_tokens, chunk.chunk_tokens),
            "expert_staging": self._staging(slots, chunk.chunk_tokens),
        }

    def host_rows(self) -> dict[str, Row]:
        """Host memory beside cards, all ranks of this machine together."""
        if self.facts.kind == "cpu" or not self.offload:
            return {}
        every, one = self.weights.num_experts, self.weights.expert * self.ranks
        bank = every * one
        return {
            "expert_bank": Row(bank, f"{every} experts x {amount(one)}, pinned"),
            "loading": Row(
                bank // 20 + _LOADING_BYTES, f"5 % of the bank and {amount(_LOADING_BYTES)}"
            ),
        }

    def _shared(self) -> str:
        return "" if self.ranks == 1 else f"; large matrices shared by {self.ranks} ranks"

    def _expert_rows(self, slots: int) -> dict[str, Row]:
        every, expert = self.weights.num_experts, self.weights.expert
        share = f" ({slots / every:.1%} of {every})" if self.offload else ", all resident"
        bank, where = 0, "not needed, all experts are resident"
        if self.offload:
            where = "in host memory beside the cards"
            if self.facts.kind == "cpu":
                bank, where = every * expert, f"{every} experts x {amount(expert)}"
        return {
            "experts": Row(slots * expert, f"{slots} slots x {amount(expert)}{share}"),
            "expert_bank": Row(bank, where),
        }

    def _kv_rows(self, num_tokens: int, chunk: ChunkBudget) -> dict[str, Row]:
        config, shape = self.config, self.shape
        form = {"kv_format": config.kv_format, "numerics": config.numerics}
        # page 0 and one carry row are padding
        pages, rows = num_tokens // PAGE_TOKENS + 1, config.max_running_requests + 1
        row_page = memory.row_page_bytes(shape, **form)
        window_page = memory.window_page_bytes(shape, **form)
        snapshot = memory.carry_snapshot_bytes(shape) if config.cache_type == "radix" else 0
        carry, context = memory.carry_bytes(shape), self.context(num_tokens)
        layers = shape.num_hidden_layers - shape.num_layers_of(0)
        return {
            "kv_rows": Row(
                pages * row_page,
                f"{num_tokens} tokens and a padding page: {layers} layers, "
                f"{row_page / PAGE_TOKENS:g} B a token",
            ),
            "kv_window": Row(
                chunk.window_pages * window_page,
                f"{chunk.window_pages} pages x {amount(window_page)}: {shape.num_hidden_layers} "
                f"layers of {PAGE_TOKENS} rows",
            ),
            "carry": Row(rows * carry, f"{rows} rows x {amount(carry)}, one of them padding"),
            "carry_snapshots": Row(
                chunk.window_pages * snapshot,
                f"{chunk.window_pages} window pages x {amount(snapshot)}, for prefix reuse"
                if snapshot
                else "no prefix reuse",
            ),
            "rope_tables": Row(
                memory.rope_table_bytes(shape, context), f"context of {context}, plain and YaRN"
            ),
        }

    def _step_rows(self, num_tokens: int, chunk_tokens: int) -> dict[str, Row]:
        config, shape = self.config, self.shape
        sizes, context = self.graph_sizes(), self.context(num_tokens)
        running, numerics = config.max_running_requests, config.numerics
        tokens = max(chunk_tokens, running)
        activations = memory.activation_bytes(
            shape, num_tokens=tokens, max_running=running, numerics=numerics, ranks=self.ranks
        )
        scratch = memory.scratch_bound(
            shape, num_tokens=tokens, max_running=running, numerics=numerics, ranks=self.ranks
        )
        graphs = memory.graph_bytes(
            shape, sizes=sizes, max_model_len=context, numerics=numerics, ranks=self.ranks
        )
        captured = f"decode of {', '.join(map(str, sizes))} rows, an estimate"
        return {
            "activations": Row(
                activations, f"largest chunk {chunk_tokens} tokens, {running} rows of logits"
            ),
            "scratch": Row(scratch, f"the most one op takes at {tokens} tokens"),
            "graphs": Row(graphs, captured if sizes else "none are captured"),
        }

    def graph_sizes(self) -> tuple[int, ...]:
        """Decode batches that are captured: 1, 2, 4 and so on, and the cap itself."""
        running, wanted = self.config.max_running_requests, self.config.cuda_graph_max_bs
        if why_no_graphs(self.facts.kind, self.config.numerics) is not None:
            return ()
        cap = min(running, running if wanted is None else wanted)
        return (*(1 << n for n in range((cap - 1).bit_length())), cap) if cap else ()

    def _staging(self, slots: int, chunk_tokens: int) -> Row:
        """The table of slots, and the routes of a chunk when a layer runs in groups."""
        if not self.offload:
            return Row(0, "no slots to look up")
        shape, layer = self.shape, self.shape.n_routed_experts
        table = 4 * self.weights.num_experts
        if slots >= layer:
            return Row(table, f"slot table; {slots} slots hold the {layer} experts of a layer")
        tokens = max(chunk_tokens, self.config.max_running_requests)
        element = memory.element_bytes(self.config.numerics)
        routed = tokens * shape.num_experts_per_tok * shape.hidden_size * element
        return Row(
            table + routed,
            f"slot table; a chunk runs in groups: {tokens} tokens x {shape.num_experts_per_tok} "
            f"routes x {shape.hidden_size}",
        )


def min_expert_slots(shape: ModelConfig) -> int:
    """The least expert slots, all layers together: what one token needs in one layer at once."""
    return shape.num_experts_per_tok


def amount(num_bytes: int) -> str:
    """Three digits and a decimal unit."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest good number in ``[1, most]``, 1 if none is; all below a good one are good."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def why_no_graphs(kind: str, numerics: str) -> str | None:
    """What keeps decode steps from being captured on such a device, whatever the flags of it."""
    if kind == "cpu":
        return "there are no CUDA graphs without a GPU"
    if numerics == "exact":
        return "--numerics exact runs references, which read on the host"
    return None
