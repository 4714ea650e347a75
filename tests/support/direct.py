"""Runs the model without scheduler and server: any cut of a prompt, every logit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ftruntime.checkpoint.loader import Weights, load_weights
from ftruntime.engine.runner import BatchBuilder
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.config import ModelConfig
from ftruntime.model.numerics import Numerics
from ftruntime.model.transformer import Transformer
from ftruntime.types import PAGE_TOKENS, SeqPlan, StepPlan

MAX_TOKENS = 2048


class Direct:
    """One model with pools for two sequences, rows 0 and 1."""

    def __init__(self, directory: Path, numerics: Numerics, *, quantized: bool = False) -> None:
        self.config = ModelConfig.from_dir(directory)
        dequantize = None if quantized else torch.float32
        self.weights: Weights = load_weights(directory, self.config, dequantize=dequantize)
        self.numerics = numerics
        self.reset()

    def reset(self) -> None:
        """Fresh model constants and pools, so that a changed formula takes part from the start."""
        self.model = Transformer(self.config, self.weights, self.numerics, max_positions=MAX_TOKENS)
        pages = 2 * MAX_TOKENS // PAGE_TOKENS + 1
        self.storage = KVStorage(
            self.config, num_pages=pages, window_pages=pages, num_rows=2,
            dtype=self.numerics.dtype,
        )  # fmt: skip
        self.builder = BatchBuilder(
            num_rows=2, max_pages=MAX_TOKENS // PAGE_TOKENS, device=torch.device("cpu")
        )

    def part(self, ids: Sequence[int], start: int, end: int, row: int = 0) -> SeqPlan:
        """Tokens ``start..end-1`` of a sequence; its pages are numbered backwards."""
        first = -(-start // PAGE_TOKENS)
        last = -(-end // PAGE_TOKENS)
        pages = tuple((p, 2 * p + 1 + row, 32 - 2 * p - row) for p in range(first, last))
        return SeqPlan(row, f"row{row}", start, tuple(ids[start:end]), pages, fresh=start == 0)

    @torch.inference_mode()
    def step(
        self, *parts: SeqPlan, kind: str = "prefill",
        watch: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Logits of every new token, ``[T, V]``; ``watch`` sees the streams after each layer."""
        layers = self.config.num_hidden_layers
        batch = self.builder.build(StepPlan(0, kind, parts, (0, layers)))
        streams = self.model.embed(batch)
        for layer in range(layers):
            streams = self.model.forward(streams, batch, self.storage, (layer, layer + 1))
            if watch is not None:
                watch(layer, streams)
        return self.model.logits(streams, batch)

    def logits(self, ids: Sequence[int], cuts: Sequence[int] = ()) -> torch.Tensor:
        """Logits of a whole prompt, prefilled in parts that end at ``cuts``."""
        bounds = [0, *cuts, len(ids)]
        parts = itertools.pairwise(bounds)
        return torch.cat([self.step(self.part(ids, a, b)) for a, b in parts if b > a])

    def decoded(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits of ``ids[start:]``, one decode step a token after a prefilled head."""
        if start:
            self.step(self.part(ids, 0, start))
        rows = [self.step(self.part(ids, p, p + 1), kind="decode") for p in range(start, len(ids))]
        return torch.cat(rows)
