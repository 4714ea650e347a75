"""From settings to a running engine: plan, weights, pools, scheduler, executor."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import ftkernels
from ftruntime.checkpoint.index import how_to_load, num_shards
from ftruntime.checkpoint.loader import load_weights
from ftruntime.config import RuntimeConfig
from ftruntime.effective import effective_flags
from ftruntime.engine.agreement import digests, identity, require_alike
from ftruntime.engine.executor import DeviceExecutor, LeadingExecutor, Runs
from ftruntime.engine.expert_store import ExpertStore
from ftruntime.engine.graphs import GraphPool
from ftruntime.engine.loop import EngineLoop, MonotonicClock
from ftruntime.engine.ranks import RankProcesses, start_ranks
from ftruntime.engine.runner import BatchBuilder
from ftruntime.engine.tp import TensorParallel
from ftruntime.engine.warmup import padding_step, warm_up
from ftruntime.facts import probe
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.config import ModelConfig
from ftruntime.model.numerics import Numerics
from ftruntime.model.scratch import scratch_bytes
from ftruntime.model.transformer import Transformer
from ftruntime.plan import DeviceFacts, Plan, resolve
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import PAGE_TOKENS

Progress = Callable[[str, float], None]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """What one rank runs plans with."""

    plan: Plan
    shape: ModelConfig
    executor: DeviceExecutor
    experts: ExpertStore


def build_rank(
    config: RuntimeConfig, facts: DeviceFacts, parallel: TensorParallel | None, progress: Progress
) -> Rank:
    """Load one rank's share and make its pools; all ranks work by the same plan."""
    directory = Path(str(config.model))
    shape = ModelConfig.from_dir(directory)
    if parallel is not None:
        facts = agreed(parallel.collect(facts))
    plan = resolve(config, shape, facts)
    if parallel is not None:
        mine = identity(config, directory, plan)
        require_alike(parallel.collect(mine))
        _logger.info("ranks agree ranks=%d digest=%s plan=%s", parallel.size, *digests(mine))
    torch.set_num_threads(num_threads(plan.kind, 1 if parallel is None else parallel.local_size))
    numerics = Numerics.of(config.numerics)
    model, experts = load_model(directory, shape, numerics, plan, progress, config, parallel)
    executor = make_executor(
        model, plan, kv_format=config.kv_format, prefix_cache=config.cache_type == "radix",
        experts=experts,
    )  # fmt: skip
    if parallel is not None:
        parallel.collect(None)  # sums have a timeout, and others may still be loading
    return Rank(plan, shape, executor, experts)


def num_threads(kind: str, local_ranks: int) -> int:
    """Threads of one rank for work on the host: its share of the cores. On CPU one, with which
    sums have the same order on every machine."""
    return 1 if kind == "cpu" else max(1, len(os.sched_getaffinity(0)) // local_ranks)


def agreed(facts: Sequence[DeviceFacts]) -> DeviceFacts:
    """The least that any rank has."""
    hosts = [fact.host_bytes for fact in facts if fact.host_bytes is not None]
    return replace(
        facts[0], memory_bytes=min(fact.memory_bytes for fact in facts),
        host_bytes=min(hosts) if hosts else None,
    )  # fmt: skip


def build_engine(
    config: RuntimeConfig, progress: Progress, *, on_end: Callable[[str], None] = lambda text: None
) -> EngineLoop:
    """Load the checkpoint and make everything that serves it.

    Args:
        config: settings; without a model the trained demo is used.
        progress: called with a phase ("load weights", "warm up") and its share done, in [0, 1].

    Raises:
        ValueError: a setting contradicts the checkpoint or this machine, or the checkpoint is
        damaged.
        MemoryError: it does not fit.
    """
    config = config.with_model()
    directory = Path(str(config.model))
    facts = probe(config.device)
    parallel: TensorParallel | None = None
    processes: RankProcesses | None = None
    if config.tensor_parallel_size > 1:
        resolve(config, ModelConfig.from_dir(directory), facts)  # refuses before a rank is started
        parallel, processes = start_ranks(config, facts.kind, on_end)
    try:
        rank = build_rank(config, facts, parallel, progress)
        plan, shape, experts = rank.plan, rank.shape, rank.experts
        executor: Runs = rank.executor
        if parallel is not None:
            executor = LeadingExecutor(rank.executor, parallel, processes)
        progress("warm up", 0.0)
        warm_up(executor, plan, picked_tokens=4 * shape.index_topk, every=plan.kind == "cuda")
        executor.begin()
        progress("warm up", 1.0)
    except BaseException:
        if processes is not None:
            processes.close()
        if parallel is not None:
            parallel.close()
        raise
    load = how_to_load(config.expert_load, num_shards(directory))
    flags = effective_flags(config, plan, load)
    # what stands now stays: later collections need not walk it
    gc.freeze()
    _logger.info(
        "engine ready device=%s numerics=%s pages=%d window_pages=%d chunk_tokens=%d "
        "experts=%s expert_slots=%d of %d",
        plan.kind, config.numerics, plan.num_pages, plan.window_pages, plan.chunk_tokens,
        plan.moe_backend, plan.expert_slots, plan.num_experts,
    )  # fmt: skip
    if parallel is not None:
        _logger.info("each rank holds %s threads=%d", held_by_rank(plan), torch.get_num_threads())
    return EngineLoop(
        Scheduler(plan.scheduler_limits(config, shape)), executor, MonotonicClock(),
        info=_info(plan, shape, directory), decode_log_interval=config.decode_log_interval,
        extra_stats=lambda: {
            "policy": _policy(config), "experts": experts.stats(),
            "graphs": rank.executor.graph_stats(), "flags": flags,
        },
    )  # fmt: skip


def held_by_rank(plan: Plan) -> str:
    """A rank's share of weights, expert slots and experts in host memory, for a log line."""
    bank = plan.bytes["expert_bank"] or plan.host_bytes.get("expert_bank", 0) // plan.ranks
    return (
        f"ranks={plan.ranks} weights_bytes={plan.bytes['weights']} expert_slots={plan.expert_slots}"
        f" expert_slot_bytes={plan.bytes['experts']} expert_bank_bytes={bank}"
    )


def load_model(
    directory: Path, shape: ModelConfig, numerics: Numerics, plan: Plan, progress: Progress,
    config: RuntimeConfig, parallel: TensorParallel | None = None,
) -> tuple[Transformer, ExpertStore]:  # fmt: skip
    """The weights in the form this process computes with: codes where kernels run (on a card, or
    interpreted), dequantized where references do and under exact numerics."""
    codes, offload = _runs_kernels(plan) and numerics.round_trips, plan.moe_backend == "offload"
    # slots on the CPU stand beside the banks
    slot_bytes = plan.bytes["experts"] if plan.kind == "cpu" and offload else 0
    weights = load_weights(
        directory, shape, dequantize=None if codes else torch.float32, device=plan.kind,
        progress=lambda done, share: progress(f"load weights: {done}", share), pack=codes,
        expert_load=config.expert_load, expert_prefetch=config.expert_prefetch,
        extra_bytes=slot_bytes, rank=0 if parallel is None else parallel.rank,
        ranks=1 if parallel is None else parallel.size,
    )  # fmt: skip
    cache = None
    if offload:
        cache = ftkernels.ExpertCache(
            shape.num_hidden_layers, shape.n_routed_experts, plan.expert_slots, weights.experts,
            device=plan.kind,
        )  # fmt: skip
    model = Transformer(
        shape, weights, numerics, max_positions=plan.max_model_len, cache=cache,
        prefetch_layers=config.moe_prefetch_layers, parallel=parallel,
    )  # fmt: skip
    return model, ExpertStore(plan, cache, release=weights.release)


def make_executor(
    model: Transformer, plan: Plan, *, kv_format: str = "bf16", prefix_cache: bool = False,
    experts: ExpertStore | None = None,
) -> DeviceExecutor:  # fmt: skip
    """Pools, tables and executor of the sizes the plan names; page 0 of each pool is padding."""
    storage = KVStorage(
        model.config, num_pages=plan.num_pages + 1, window_pages=plan.window_pages,
        num_rows=plan.max_running + 1, dtype=model.numerics.dtype, kv_format=kv_format,
        prefix_cache=prefix_cache, device=model.device,
    )  # fmt: skip
    builder = BatchBuilder(
        num_rows=plan.max_running + 1, max_pages=-(-plan.max_model_len // PAGE_TOKENS),
        device=model.device, scratch=_scratch(model, plan), halves=plan.in_halves,
    )  # fmt: skip
    padding = padding_step(plan, model.config.num_hidden_layers)
    graphs = GraphPool(model, storage, builder, plan.graph_sizes, padding)
    return DeviceExecutor(model, storage, builder, experts, graphs)


def _runs_kernels(plan: Plan) -> bool:
    return plan.kind == "cuda" or ftkernels.backend.interpreted()


def _scratch(model: Transformer, plan: Plan) -> torch.Tensor | None:
    """One scratch for all steps, which run one after another; references take none."""
    if not _runs_kernels(plan):
        return None
    num_bytes = scratch_bytes(
        model.config, num_tokens=plan.chunk_tokens, num_seqs=plan.max_running,
        max_positions=plan.max_model_len, element_bytes=model.numerics.dtype.itemsize,
    )  # fmt: skip
    return torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)


def _policy(config: RuntimeConfig) -> dict[str, object]:
    """How prefill and decode share steps, as asked for."""
    names = ("decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups")
    return {name: getattr(config, name) for name in names}


def _info(plan: Plan, shape: ModelConfig, directory: Path) -> dict[str, object]:
    return {
        "model_path": str(directory),
        "max_model_len": plan.max_model_len,
        "vocab_size": shape.vocab_size,
        "num_tokens": plan.num_tokens,
        "chunk_tokens": plan.chunk_tokens,
        "window_pages": plan.window_pages,
        "reserved_window_pages": plan.reserved_window_pages,
        "limiting": plan.limiting,
    }
