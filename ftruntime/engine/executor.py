"""Executes plans on a device: batch, layers, logits, tokens."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

import torch

from ftruntime.engine import sampler
from ftruntime.engine.expert_store import ExpertStore
from ftruntime.engine.graphs import GraphPool
from ftruntime.engine.ranks import RankProcesses
from ftruntime.engine.runner import BatchBuilder
from ftruntime.engine.tp import TensorParallel
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.transformer import Transformer
from ftruntime.types import (
    EngineFailedError,
    Executor,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

LOGIT_ROWS = 256
_LOOK_S = 1.0  # for the end of the rank that was lost
# token and log-probabilities by row
_Drawn = dict[int, tuple[int, TokenLogprobs | None]]


@dataclass(frozen=True)
class _Kept:
    """A prefill chunk between two of its layer slices."""

    batch: ForwardBatch
    streams: torch.Tensor


class DeviceExecutor:
    """Runs one plan at a time; keeps a chunk's streams between its layer slices.

    Args:
        model, storage, builder: what a step runs, reads and is laid out by.
        experts: closed with the executor.
        graphs: of decode steps.
    """

    def __init__(
        self, model: Transformer, storage: KVStorage, builder: BatchBuilder,
        experts: ExpertStore | None = None, graphs: GraphPool | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._storage = storage
        self._builder = builder
        self._experts = experts
        self._graphs = graphs
        self._kept: dict[tuple[int, ...], _Kept] = {}

    def begin(self) -> None:
        """The warm-up is over: what came before does not count, decode steps are captured."""
        if self._graphs is not None:
            self._graphs.capture()
        if self._experts is not None:
            self._experts.begin()

    @property
    def num_layers(self) -> int:
        return self._model.config.num_hidden_layers

    def graph_stats(self) -> dict[str, object]:
        """As `GraphPool.stats`."""
        return {} if self._graphs is None else self._graphs.stats()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's layers; with the last one, draw the tokens it asks for."""
        self._drop(plan.drop)
        rows = tuple(seq.row for seq in plan.seqs)
        first, last = plan.layers
        graphs = self._graphs
        if graphs is not None and plan.kind == "decode" and graphs.holds(plan):
            return self._replay(plan, graphs)
        if first == 0:
            batch = self._builder.build(plan)
            resumed = self._builder.resumed(plan)
            if resumed is not None:
                self._storage.restore(*resumed)
            streams = self._model.embed(batch)
        else:
            kept = self._kept.pop(rows)
            batch, streams = kept.batch, kept.streams
        streams = self._model.forward(streams, batch, self._storage, plan.layers)
        if last < self.num_layers:
            self._kept[rows] = _Kept(batch, streams)
            return StepResult(plan.index, ())
        return StepResult(plan.index, self._results(plan, batch, streams))

    def check(self) -> None:
        """Between steps nothing is in use: every slot is accounted for.

        Raises:
            AssertionError: an invariant of the expert cache is broken.
        """
        if self._experts is not None:
            self._experts.check()

    def close(self) -> None:
        """Give graphs, the expert slots and the pinned bytes of their banks back."""
        if self._graphs is not None:
            self._graphs.close()
        if self._experts is not None:
            self._experts.close()

    def _drop(self, rows: tuple[int, ...]) -> None:
        gone = set(rows)
        for key in [key for key in self._kept if gone & set(key)]:
            del self._kept[key]

    def _results(
        self, plan: StepPlan, batch: ForwardBatch, streams: torch.Tensor
    ) -> tuple[SeqResult, ...]:
        ends, total = [], 0
        for seq in plan.seqs:
            total += len(seq.token_ids)
            ends.append(total)
        drawn = self._draw(plan, batch, streams, ends)
        results = []
        for seq, end in zip(plan.seqs, ends, strict=True):
            token, extra = drawn.get(seq.row, (None, None))
            before = self._prompt_logprobs(seq, batch, streams, end - len(seq.token_ids))
            results.append(SeqResult(seq.row, seq.request_id, token, extra, before))
        return tuple(results)

    def _draw(
        self, plan: StepPlan, batch: ForwardBatch, streams: torch.Tensor, ends: list[int]
    ) -> _Drawn:
        places = [
            end - 1 for seq, end in zip(plan.seqs, ends, strict=True) if seq.sample is not None
        ]
        if not places:
            return {}
        every = places == list(range(streams.shape[0]))
        return _drawn(plan, self._model.logits(streams if every else streams[places], batch))

    def _replay(self, plan: StepPlan, graphs: GraphPool) -> StepResult:
        drawn = _drawn(plan, graphs.replay(plan))
        results = (
            SeqResult(seq.row, seq.request_id, *drawn.get(seq.row, (None, None)))
            for seq in plan.seqs
        )
        return StepResult(plan.index, tuple(results))

    def _prompt_logprobs(
        self, seq: SeqPlan, batch: ForwardBatch, streams: torch.Tensor, begin: int
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow this part's tokens, block by block."""
        targets = seq.prompt_targets
        if not targets:
            return ()
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGIT_ROWS):
            part = targets[start : start + LOGIT_ROWS]
            rows = streams[begin + start : begin + start + len(part)]
            logits = self._model.logits(rows, batch)
            if logits is None:
                continue
            found += sampler.logprobs(logits, part, seq.num_prompt_logprobs)
        return tuple(found)


def _drawn(plan: StepPlan, logits: torch.Tensor | None) -> _Drawn:
    """What the rows that draw make of their logits, which rank 0 has."""
    seqs = [(seq.row, seq.sample) for seq in plan.seqs if seq.sample is not None]
    if logits is None:
        return {}
    tokens = sampler.draw(logits, [spec for _, spec in seqs])
    found: _Drawn = {}
    for number, ((row, spec), token) in enumerate(zip(seqs, tokens, strict=True)):
        extra = None
        if spec.num_logprobs is not None and token >= 0:
            own = logits[number : number + 1]
            extra = sampler.logprobs(own, [token], spec.num_logprobs)[0]
        found[row] = (token, extra)
    return found


class Runs(Executor, Protocol):
    """Runs plans, on one rank or on all."""

    @property
    def num_layers(self) -> int: ...

    def begin(self) -> None: ...


class LeadingExecutor:
    """Rank 0's: tells the other ranks each plan before it runs it."""

    def __init__(
        self, executor: DeviceExecutor, parallel: TensorParallel, processes: RankProcesses | None
    ) -> None:
        """
        Args:
            processes: of the other ranks, when this one started them.
        """
        self._executor, self._parallel, self._processes = executor, parallel, processes
        self._failed = False

    @property
    def num_layers(self) -> int:
        return self._executor.num_layers

    def begin(self) -> None:
        """The warm-up is over, on every rank."""
        self._parallel.tell("begin")
        self._executor.begin()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan on every rank.

        Raises:
            EngineFailedError: whatever goes wrong; the other ranks may stand in the middle of it.
        """
        try:
            self._parallel.tell(plan)
            return self._executor.execute(plan)
        except EngineFailedError as error:
            raise self._lost(error) from error
        except Exception as error:
            self._failed = True
            sentence = f"rank 0 failed in a step with {type(error).__name__}: {error}"
            raise EngineFailedError(sentence) from error

    def keep_alive(self) -> None:
        """Say something to the other ranks: one on another machine that is gone is noticed so.

        Raises:
            EngineFailedError: a rank is gone, or does not move.
        """
        try:
            self._parallel.tell("alive")
        except EngineFailedError as error:
            raise self._lost(error) from error

    def _lost(self, error: EngineFailedError) -> EngineFailedError:
        self._failed = True
        ended = self._processes and self._processes.ended(_LOOK_S)
        return EngineFailedError(ended or str(error))

    def check(self) -> None:
        """As `DeviceExecutor.check`, of this rank."""
        self._executor.check()

    def close(self) -> None:
        """End the other ranks, then this one's part."""
        if not self._failed:
            with contextlib.suppress(EngineFailedError):  # it has ended
                self._parallel.tell("end")
        if self._processes is not None:
            self._processes.close()
        self._executor.close()
        self._parallel.close()
