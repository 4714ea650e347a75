"""Hyper-connections: the residual streams around every sublayer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ftkernels
from ftruntime.checkpoint.loader import Weights
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import ModelConfig
from ftruntime.model.linear import Input, columns

Mixes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HyperConnection:
    """One site (``attn`` or ``ffn``) of one layer, with the norm of its sublayer's input.

    ``quantize``: the input is also given as FP8 products read it.
    """

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm: torch.Tensor
    quantize: bool
    config: ModelConfig

    @staticmethod
    def of(
        weights: Weights, layer: int, site: str, quantize: bool, config: ModelConfig
    ) -> HyperConnection:
        tensors, prefix = weights.tensors, f"layers.{layer}."
        return HyperConnection(
            tensors[f"{prefix}hc_{site}_fn"], tensors[f"{prefix}hc_{site}_scale"],
            tensors[f"{prefix}hc_{site}_base"], tensors[f"{prefix}{site}_norm.weight"], quantize,
            config,
        )  # fmt: skip

    def before(self, streams: torch.Tensor, batch: ForwardBatch) -> tuple[Input, Mixes]:
        """The sublayer's normed input, and what ``after`` needs."""
        x, post, comb, *fp8 = ftkernels.hc_pre(
            streams, self.fn, self.scale, self.base, hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps, sinkhorn_iters=self.config.hc_sinkhorn_iters,
            norm_weight=self.norm, quantize=self.quantize, scratch=batch.scratch,
        )  # fmt: skip
        return Input.of(x, fp8), (post, comb)

    def between(
        self, y: torch.Tensor, streams: torch.Tensor, mixes: Mixes, batch: ForwardBatch
    ) -> tuple[torch.Tensor, Input, Mixes]:
        """``after`` of the previous sublayer, whose output is ``y``, and ``before`` of this one."""
        streams, x, post, comb, *fp8 = ftkernels.hc_post_pre(
            y, streams, *mixes, self.fn, self.scale, self.base, hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps, sinkhorn_iters=self.config.hc_sinkhorn_iters,
            norm_weight=self.norm, quantize=self.quantize, scratch=batch.scratch,
        )  # fmt: skip
        return streams, Input.of(x, fp8), (post, comb)

    @staticmethod
    def after(
        y: torch.Tensor, streams: torch.Tensor, mixes: Mixes, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The streams with the sublayer's output mixed in, ``[T, hc, C]``."""
        return ftkernels.hc_post(y, streams, *mixes, out=out)


@dataclass(frozen=True)
class Head:
    """Streams to logits."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm: torch.Tensor
    weight: torch.Tensor
    config: ModelConfig

    @staticmethod
    def of(weights: Weights, config: ModelConfig) -> Head:
        t = weights.tensors
        return Head(
            t["hc_head_fn"], t["hc_head_scale"], t["hc_head_base"], t["norm.weight"],
            columns(t["head.weight"]), config,
        )  # fmt: skip

    def __call__(self, streams: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[T, hc, C]`` to fp32 logits ``[T, V]``."""
        hidden = ftkernels.hc_head(
            streams, self.fn, self.scale, self.base, hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps, norm_weight=self.norm, scratch=batch.scratch,
        )  # fmt: skip
        return ftkernels.linear(
            hidden, self.weight, out_dtype=torch.float32, path=batch.path, scratch=batch.scratch
        )
