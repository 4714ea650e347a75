"""Random weights in the official storage formats, chosen so that no formula of the model can hide.

Every tensor draws from its own stream, seeded by the checkpoint seed and the tensor's name, so a
tensor does not depend on the order of writing. Learned gains, biases and mixes are away from their
neutral values, and block scales differ from block to block.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ftruntime.checkpoint.names import (
    DRAFT_PREFIX,
    FP4_GROUP,
    FP8_BLOCK,
    TensorSpec,
    block_tensors,
    expected_tensors,
    fp8_tensors,
)
from ftruntime.demo.write import fp4_pair, fp8_pair, in_blocks
from ftruntime.model.config import ModelConfig

_EMBED_STD = 0.5
# logits have a standard deviation of about this: lively at temperature 1, far from ties when greedy
_LOGIT_STD = 0.75
# rows of tokens that should not be chosen: their logits stay near 0, the best readable one is near
# 8
_QUIET_GAIN = 0.02
# below 1 the attention is softer; at 1 and above greedy text tends to repeat what it has just said
_KV_GAIN = 0.7


@dataclass(frozen=True)
class DemoWeights:
    """Draws the tensors of one checkpoint."""

    config: ModelConfig
    seed: int
    readable: frozenset[int]  # token ids that greedy text is made of

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, one draft layer included, in the order of the layers."""
        specs = expected_tensors(self.config) | dict(_draft_tensors(self.config))
        for name, spec in specs.items():
            if name.endswith(".scale"):
                continue  # comes with its weight
            if spec.dtype == "F8_E4M3":
                rows, columns = spec.shape
                yield from _fp8_pair(name, self._matrix(name, rows, columns))
            elif spec.dtype == "I8":
                rows, half = spec.shape
                yield from _fp4_pair(name, self._matrix(name, rows, 2 * half))
            else:
                yield name, self._plain(name, spec)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def _normal(
        self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0
    ) -> torch.Tensor:
        values = self._rng(name).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values).mul_(std).add_(mean)

    def _matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._normal(name, (rows, columns), 1 / math.sqrt(columns))

    def _plain(self, name: str, spec: TensorSpec) -> torch.Tensor:
        if spec.dtype == "I64":
            return self._hash_table(name, spec.shape[0], spec.shape[1])
        std, mean = _moments(name, self.config)
        values = self._normal(name, spec.shape, std, mean)
        if name == "head.weight":
            quiet = [i for i in range(spec.shape[0]) if i not in self.readable]
            values[quiet] *= _QUIET_GAIN
        return values.to(torch.bfloat16) if spec.dtype == "BF16" else values

    def _hash_table(self, name: str, vocab: int, topk: int) -> torch.Tensor:
        """Distinct experts for every token id, `[vocab, topk]` int64."""
        scores = self._rng(name).random((vocab, self.config.n_routed_experts))
        return torch.from_numpy(scores.argsort(axis=1)[:, :topk].astype(np.int64))


def _draft_tensors(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """The draft layer that published checkpoints carry; it is there to be ignored."""
    prefix = f"{DRAFT_PREFIX}0"
    hidden, streams = config.hidden_size, config.hc_mult
    yield from block_tensors(config, prefix, ratio=0, hash_routed=False)
    for name in ("e_proj", "h_proj"):
        yield from fp8_tensors(f"{prefix}.{name}", hidden, hidden)
    for name in ("enorm", "hnorm", "norm"):
        yield f"{prefix}.{name}.weight", TensorSpec("BF16", (hidden,))
    yield f"{prefix}.hc_head_fn", TensorSpec("F32", (streams, streams * hidden))
    yield f"{prefix}.hc_head_base", TensorSpec("F32", (streams,))
    yield f"{prefix}.hc_head_scale", TensorSpec("F32", (1,))


def _moments(name: str, config: ModelConfig) -> tuple[float, float]:
    """Standard deviation and mean of the unquantized float tensor `name`."""
    fan_in = 1 / math.sqrt(config.hidden_size)
    rules: Iterable[tuple[str, tuple[float, float]]] = (
        ("embed.weight", (_EMBED_STD, 0.0)),
        ("head.weight", (_LOGIT_STD * fan_in, 0.0)),
        ("kv_norm.weight", (0.15 * _KV_GAIN, _KV_GAIN)),
        ("norm.weight", (0.15, 1.0)),  # also q_norm, kv_norm, attn_norm, ffn_norm, enorm, hnorm
        ("_fn", (fan_in / math.sqrt(config.hc_mult), 0.0)),
        ("_base", (0.5, 0.0)),
        ("_scale", (0.3, 1.0)),
        ("attn_sink", (1.0, 1.0)),
        ("ape", (1.0, 0.0)),
        ("gate.bias", (0.1, 0.0)),
        (".weight", (fan_in, 0.0)),  # router, compressor and index projections
    )
    return next(moments for suffix, moments in rules if name.endswith(suffix))


def _fp8_pair(name: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantized in 128 x 128 blocks that differ in size; `matrix` is fp32 `[N, K]`."""
    rows, columns = matrix.shape
    tall, wide = in_blocks(matrix).shape[:2]
    octaves = _ramp(tall * wide, 3).view(tall, wide)
    octaves = octaves.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    yield from fp8_pair(name, matrix * octaves[:rows, :columns])


def _fp4_pair(name: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantized in groups of 32 input channels that differ in size; `matrix` is fp32 `[N, K]`."""
    rows, columns = matrix.shape
    octaves = _ramp(rows * columns // FP4_GROUP, 5).repeat_interleave(FP4_GROUP)
    yield from fp4_pair(name, matrix * octaves.view(rows, columns))


def _ramp(count: int, period: int) -> torch.Tensor:
    """Factors that step through `period` half octaves around 1, so that neighbouring block scales
    differ."""
    steps = torch.arange(count, dtype=torch.float32) % period - (period - 1) / 2
    return torch.exp2(steps / 2)
