"""Executes plans on a device: batch, layers, logits, tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftruntime.engine import sampler
from ftruntime.engine.expert_store import ExpertStore
from ftruntime.engine.runner import BatchBuilder
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.transformer import Transformer
from ftruntime.types import SeqPlan, SeqResult, StepPlan, StepResult, TokenLogprobs

LOGIT_ROWS = 256


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
    """

    def __init__(
        self, model: Transformer, storage: KVStorage, builder: BatchBuilder,
        experts: ExpertStore | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._storage = storage
        self._builder = builder
        self._experts = experts
        self._kept: dict[tuple[int, ...], _Kept] = {}

    @property
    def num_layers(self) -> int:
        return self._model.config.num_hidden_layers

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's layers; with the last one, draw the tokens it asks for."""
        self._drop(plan.drop)
        rows = tuple(seq.row for seq in plan.seqs)
        first, last = plan.layers
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
        """Give the expert slots and the pinned bytes of their banks back."""
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
    ) -> dict[int, tuple[int, TokenLogprobs | None]]:
        """Token and log-probabilities by row, for the rows that draw."""
        wanted = [
            (seq.row, seq.sample, end - 1)
            for seq, end in zip(plan.seqs, ends, strict=True) if seq.sample is not None
        ]  # fmt: skip
        if not wanted:
            return {}
        places = [place for _, _, place in wanted]
        every = places == list(range(streams.shape[0]))
        logits = self._model.logits(streams if every else streams[places], batch)
        tokens = sampler.draw(logits, [spec for _, spec, _ in wanted])
        found: dict[int, tuple[int, TokenLogprobs | None]] = {}
        for number, ((row, spec, _), token) in enumerate(zip(wanted, tokens, strict=True)):
            extra = None
            if spec.num_logprobs is not None and token >= 0:
                own = logits[number : number + 1]
                extra = sampler.logprobs(own, [token], spec.num_logprobs)[0]
            found[row] = (token, extra)
        return found

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
            found += sampler.logprobs(logits, part, seq.num_prompt_logprobs)
        return tuple(found)
