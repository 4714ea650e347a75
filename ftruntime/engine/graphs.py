"""Decode steps as CUDA graphs: captured once, then launched again with other inputs.

A step whose experts all stand on the device is one graph. With experts in host memory it is one
graph a layer and one more: between them the host reads which experts the layer chose, and copies
those that are missing.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ftruntime.engine.runner import BatchBuilder
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.transformer import Transformer
from ftruntime.types import StepPlan

_logger = logging.getLogger(__name__)


class Graph(Protocol):
    """What was launched between two calls, to launch again."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class Graphs(Protocol):
    """Makes the graphs of one device."""

    def capturing(self) -> AbstractContextManager[None]:
        """Everything that is captured is captured within this."""
        ...

    def graph(self) -> Graph: ...


class CudaGraphs:
    """Graphs that share one pool of memory, as they run one after another."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        torch.cuda.synchronize()
        # nothing is given back to the driver while a stream is captured
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def graph(self) -> Graph:
        return _CudaGraph(self._pool)


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        # other threads of this process, such as that of NCCL, may call the driver meanwhile
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class Pieces:
    """A step in graphs, with calls of the host between them; a `Tape` while it is captured."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._pieces: list[Graph] = []
        self._is_open = False  # the last piece takes down what is launched
        self._contexts: list[Callable[[], AbstractContextManager[None]]] = []

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Take down what is launched within."""
        self._begin()
        try:
            yield
        except BaseException:
            # what went wrong first is what is told
            with suppress(Exception):
                self._end()
            raise
        self._end()

    def around(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._end()
        self._contexts.append(context)
        self._begin()

    def replay(self) -> None:
        first, *others = self._pieces
        first.replay()
        for context, piece in zip(self._contexts, others, strict=True):
            with context():
                piece.replay()

    def _begin(self) -> None:
        piece = self._graphs.graph()
        piece.begin()
        self._pieces.append(piece)
        self._is_open = True

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pieces[-1].end()


@dataclass(frozen=True)
class _Captured:
    batch: ForwardBatch
    pieces: Pieces
    logits: torch.Tensor | None


class GraphPool:
    """Captured decode steps of one rank.

    Args:
        model, storage, builder: what a step runs, reads and is laid out by.
        sizes: rows that are captured, ascending; a step of fewer is filled up.
        padding: a decode step of one row that is nobody's.
        graphs: of the device; CUDA's when omitted.
    """

    def __init__(
        self, model: Transformer, storage: KVStorage, builder: BatchBuilder, sizes: Sequence[int],
        padding: StepPlan, *, graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        self._sizes, self._why = list(sizes), "--cuda-graph-max-bs captures no larger one"
        most = model.most_rows_at_once
        if most is not None and sizes and most < sizes[-1]:
            self._sizes = [*(n for n in sizes if n < most), most]
            self._why = f"the expert slots hold what {most} rows choose in a layer"
        self._model, self._storage, self._builder = model, storage, builder
        self._padding, self._graphs = padding, graphs
        self._num_layers = model.config.num_hidden_layers
        self._captured: dict[int, _Captured] = {}
        self._num_replayed = self._num_missed = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, whose memory the others then share.

        Raises:
            RuntimeError: the device refuses; in one sentence.
        """
        if not self._sizes:
            return
        start = time.monotonic()
        graphs = self._graphs or CudaGraphs()
        for size in reversed(self._sizes):
            batch = self._builder.fixed(size)
            self._builder.refill(batch, self._padding)
            # what is launched first must not be launched while a stream is captured
            self._model.logits(self._forward(batch), batch)
            try:
                self._captured[size] = self._capture(batch, graphs)
            except RuntimeError as error:
                raise RuntimeError(
                    f"a decode step of {size} rows cannot be captured ({error}); "
                    "--cuda-graph-max-bs 0 serves without CUDA graphs"
                ) from error
        _logger.info(
            "decode steps captured rows=%s seconds=%.1f",
            ",".join(map(str, self._sizes)), time.monotonic() - start,
        )  # fmt: skip

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        streams = self._model.embed(batch)
        return self._model.forward(streams, batch, self._storage, (0, self._num_layers))

    def _capture(self, batch: ForwardBatch, graphs: Graphs) -> _Captured:
        pieces = Pieces(graphs)
        taped = replace(batch, tape=pieces)
        layers = (0, self._num_layers)
        with graphs.capturing(), pieces.captured():
            streams = self._model.run(self._model.embed(taped), taped, self._storage, layers)
            logits = self._model.logits(streams, taped)
        return _Captured(batch, pieces, logits)

    def holds(self, plan: StepPlan) -> bool:
        """Whether a decode step is captured; warns the first time one is too large."""
        num_rows = len(plan.seqs)
        if self._captured and num_rows <= self._sizes[-1]:
            return plan.layers == (0, self._num_layers)
        if self._captured:
            self._num_missed += 1
            if self._num_missed == 1:
                _logger.warning(
                    "decode of %d rows runs without a CUDA graph, expected at most %d: %s",
                    num_rows, self._sizes[-1], self._why,
                )  # fmt: skip
        return False

    def replay(self, plan: StepPlan) -> torch.Tensor | None:
        """Run a decode step; logits ``[rows, V]`` that are good until the next, on rank 0."""
        num_rows = len(plan.seqs)
        size = next(n for n in self._sizes if n >= num_rows)
        captured = self._captured[size]
        self._builder.refill(captured.batch, plan)
        with self._model.step(captured.batch):
            captured.pieces.replay()
        self._num_replayed += 1
        return None if captured.logits is None else captured.logits[:num_rows]

    def stats(self) -> dict[str, object]:
        """Captured rows, steps that ran from a graph, and those that were too large."""
        sizes = list(self._sizes) if self._captured else []
        return {"rows": sizes, "replayed": self._num_replayed, "missed": self._num_missed}

    def close(self) -> None:
        """Let go of the graphs and their memory."""
        self._captured.clear()
