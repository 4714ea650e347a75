"""Reads a validated checkpoint into tensors, one tensor at a time, straight into its final place.

Files are mapped, not read: only the tensor being copied occupies memory twice. FP8 and FP4 weights
stay codes with uint8 UE8M0 scales, or are dequantized once; both are exact in bf16 and fp32.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

import ftkernels
from ftkernels import ExpertBank
from ftruntime.checkpoint.header import TensorEntry
from ftruntime.checkpoint.index import CheckpointIndex, open_checkpoint
from ftruntime.checkpoint.memory import (
    DEQUANTIZE_DTYPES,
    GIB,
    available_bytes,
    estimate,
    require_memory,
)
from ftruntime.checkpoint.names import FP4_GROUP, FP8_BLOCK, expected_tensors, expert_name
from ftruntime.model.config import ModelConfig

_logger = logging.getLogger(__name__)
# UE8M0 scales are codes everywhere: copied as numbers they would be off by orders of magnitude
_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "I8": torch.uint8, "I64": torch.int64,
}  # fmt: skip
_NAN_SCALE: Final = 255

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class LinearWeight:
    """One FP8 matrix, `weight [N, K]`.

    Either e4m3 codes with uint8 `scale [ceil(N/128), ceil(K/128)]`, or dequantized, scale None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """A loaded checkpoint, under the official names.

    Args:
        tensors: everything stored unquantized, by full name, as `"layers.0.attn_norm.weight"`.
        linears: FP8 matrices by name without suffix, as `"layers.0.attn.wq_a"`.
        experts: routed experts, one bank a layer, on the host (pinned when the device is CUDA).
    """

    tensors: dict[str, torch.Tensor]
    linears: dict[str, LinearWeight]
    experts: list[ExpertBank]


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    *,
    dequantize: torch.dtype | None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    rank: int = 0,
    ranks: int = 1,
    pack: bool = False,
    expert_load: str = "auto",
    expert_prefetch: int = 2,
    threads: int | None = None,
    extra_bytes: int = 0,
) -> Weights:
    """Validate the whole checkpoint, check host memory, then read it.

    Args:
        directory: holds `model.safetensors.index.json` and its shards, or one `model.safetensors`.
        config: the shape every tensor is checked against.
        dequantize: None keeps FP8 and FP4 codes; `torch.bfloat16` or `torch.float32` dequantizes at
            load. With fp32 every floating tensor becomes fp32.
        device: where `tensors` and `linears` go.
        progress: called with what is done so far, as "3.20 of 6.00 GiB, 1.90 GB/s", and the share
            of bytes read, in [0, 1].
        rank, ranks: the experts' slice that is read: rows `[rank * I / ranks, ...)` of w1 and w3
            and those columns of w2; everything else is read whole.
        pack: put FP4 experts into the kernels' order (`ftkernels.pack_fp4`); scales are folded
            where those of all layers fold.
        expert_load: "serial" places experts in file order; "parallel" by several threads; "auto" is
            parallel with more than one core and more than one shard.
        expert_prefetch: shards that the parallel loader reads ahead of placement, at least 1.
        threads: of the parallel loader; cores / ranks when None.
        extra_bytes: host memory that others will hold beside the weights.

    Raises:
        FileNotFoundError: as `open_checkpoint`.
        ValueError: as `open_checkpoint`; a scale that is NaN; a `tid2eid` entry that is no expert;
            host memory that does not suffice (nothing was read then).
    """
    if dequantize is not None and dequantize not in DEQUANTIZE_DTYPES:
        raise ValueError(
            f"dequantize is {dequantize}, expected None, torch.bfloat16 or torch.float32"
        )
    device = torch.device(device)
    index = open_checkpoint(directory, config)
    needed = estimate(config, dequantize).host_bytes(on_device=device.type != "cpu")
    available = available_bytes()
    _logger.info(
        "checkpoint memory needed=%.2fGiB available=%s stored=%.2fGiB dequantize=%s",
        needed / GIB,
        "unknown" if available is None else f"{available / GIB:.2f}GiB",
        index.num_bytes / GIB,
        dequantize,
    )
    require_memory(needed, what=f"checkpoint {directory}", available=available)
    return _Loader(index, config, dequantize, device, progress).load()


@dataclass
class _Loader:
    index: CheckpointIndex
    config: ModelConfig
    dequantize: torch.dtype | None
    device: torch.device
    progress: Progress | None
    maps: dict[Path, mmap.mmap] = field(default_factory=dict)
    total_bytes: int = 1
    read_bytes: int = 0

    def load(self) -> Weights:
        expected = expected_tensors(self.config)
        self.total_bytes = sum(spec.num_bytes for spec in expected.values())
        tensors: dict[str, torch.Tensor] = {}
        linears: dict[str, LinearWeight] = {}
        for name, spec in expected.items():
            if ".ffn.experts." in name or name.endswith(".scale"):
                continue
            if spec.dtype == "F8_E4M3":
                base = name.removesuffix(".weight")
                linears[base] = self._linear(base)
            else:
                tensors[name] = self._tensor(name)
        experts = [self._bank(f"layers.{layer}") for layer in range(self.config.num_hidden_layers)]
        return Weights(tensors, linears, experts)

    def _tensor(self, name: str) -> torch.Tensor:
        value = self._view(name)
        if name.endswith(".tid2eid"):
            self._check_table(name, value)
        widen = self.dequantize == torch.float32 and value.is_floating_point()
        kept = torch.empty(value.shape, dtype=torch.float32 if widen else value.dtype)
        kept.copy_(value)
        self._advance(name)
        return kept.to(self.device)

    def _linear(self, name: str) -> LinearWeight:
        weight, scale = self._view(f"{name}.weight"), self._scale(f"{name}.scale")
        if self.dequantize is None:
            result = LinearWeight(weight.clone().to(self.device), scale.clone().to(self.device))
        else:
            block = (FP8_BLOCK, FP8_BLOCK)
            full = ftkernels.dequantize_fp8_reference(
                weight, scale, group=block, dtype=self.dequantize
            )
            kept = self._dense_room(*full.shape).copy_(full)
            result = LinearWeight(kept.to(self.device), None)
        self._advance(f"{name}.weight", f"{name}.scale")
        return result

    def _bank(self, prefix: str) -> ExpertBank:
        """All routed experts of one block; rows of w1 come before rows of w3."""
        config = self.config
        experts, inter, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        w13, w13_scale = self._expert_room(experts, 2 * inter, hidden)
        w2, w2_scale = self._expert_room(experts, hidden, inter)
        for expert in range(experts):
            for matrix, weight, scale, rows in (
                ("w1", w13, w13_scale, slice(0, inter)),
                ("w3", w13, w13_scale, slice(inter, 2 * inter)),
                ("w2", w2, w2_scale, slice(0, hidden)),
            ):
                name = expert_name(prefix, expert, matrix)
                into_scale = None if scale is None else scale[expert, rows]
                self._expert(name, weight[expert, rows], into_scale)
        return ExpertBank(w13, w13_scale, w2, w2_scale)

    def _dense_room(self, *shape: int, pin: bool = False) -> torch.Tensor:
        """Room for a dequantized matrix; on the host its columns are contiguous, which is what the
        product of a single row prefers."""
        if self.device.type == "cpu":
            turned = (*shape[:-2], shape[-1], shape[-2])
            return torch.empty(turned, dtype=self.dequantize).mT
        return torch.empty(shape, dtype=self.dequantize, pin_memory=pin)

    def _expert_room(
        self, experts: int, rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pin = self.device.type == "cuda"
        if self.dequantize is not None:
            return self._dense_room(experts, rows, columns, pin=pin), None
        packed = torch.empty((experts, rows, columns // 2), dtype=torch.uint8, pin_memory=pin)
        scales = torch.empty(
            (experts, rows, columns // FP4_GROUP), dtype=torch.uint8, pin_memory=pin
        )
        return packed, scales

    def _expert(self, name: str, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        packed, codes = self._view(f"{name}.weight"), self._scale(f"{name}.scale")
        if scale is None:
            full = ftkernels.dequantize_fp4_reference(
                packed, codes, group=FP4_GROUP, dtype=weight.dtype
            )
            weight.copy_(full)
        else:
            weight.copy_(packed)
            scale.copy_(codes)
        self._advance(f"{name}.weight", f"{name}.scale")

    def _scale(self, name: str) -> torch.Tensor:
        codes = self._view(name)
        if bool((codes == _NAN_SCALE).any()):
            raise ValueError(
                f"{self.index.entries[name].file}: tensor {name} holds the scale code 255 (NaN), "
                "expected 0 to 254"
            )
        return codes

    def _check_table(self, name: str, table: torch.Tensor) -> None:
        low, high = (int(value) for value in table.aminmax())
        if low < 0 or high >= self.config.n_routed_experts:
            raise ValueError(
                f"{self.index.entries[name].file}: tensor {name} holds expert ids {low} to {high}, "
                f"expected 0 to {self.config.n_routed_experts - 1}"
            )

    def _view(self, name: str) -> torch.Tensor:
        """The stored tensor as a view of its mapped file."""
        entry = self.index.entries[name]
        dtype = _TORCH_DTYPES[entry.dtype]
        raw = torch.frombuffer(
            self._map(entry), dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start
        )
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # files of other writers may not be aligned
        return raw.view(dtype).view(entry.shape)

    def _map(self, entry: TensorEntry) -> mmap.mmap:
        if entry.file not in self.maps:
            with entry.file.open("rb") as stream:
                # private and writable, because torch has no read-only tensors; nobody writes
                self.maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self.maps[entry.file]

    def _advance(self, *names: str) -> None:
        for name in names:
            entry = self.index.entries[name]
            self.read_bytes += entry.end - entry.start
            self._release(entry)
        if self.progress is not None:
            self.progress(names[0], self.read_bytes / self.total_bytes)

    def _release(self, entry: TensorEntry) -> None:
        """Unmap the pages just read, so that the process never looks twice its size; they stay in
        the page cache."""
        start = entry.start - entry.start % mmap.PAGESIZE
        self._map(entry).madvise(mmap.MADV_DONTNEED, start, entry.end - start)
