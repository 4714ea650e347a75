"""Reads a validated checkpoint into tensors, each straight into its final place where it can.

FP8 and FP4 weights stay codes with uint8 UE8M0 scales, or are dequantized once; both are exact in
bf16 and fp32. The dense part comes first, then the routed experts, in the order of the files.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

import ftkernels
from ftkernels import ExpertBank
from ftkernels.moe.host_memory import HostMemory
from ftruntime.checkpoint.banks import BankBuilder, BankForm, check_scale
from ftruntime.checkpoint.files import ShardFiles
from ftruntime.checkpoint.index import CheckpointIndex, how_to_load, open_checkpoint
from ftruntime.checkpoint.jobs import Job, parallel, serial
from ftruntime.checkpoint.memory import (
    DEQUANTIZE_DTYPES,
    GIB,
    available_bytes,
    estimate,
    require_memory,
)
from ftruntime.checkpoint.names import (
    FP4_GROUP,
    FP8_BLOCK,
    TensorSpec,
    expected_tensors,
    expert_name,
    sharded_dim,
)
from ftruntime.model.config import ModelConfig

_logger = logging.getLogger(__name__)
# UE8M0 scales are codes everywhere: copied as numbers they would be off by orders of magnitude
_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "I8": torch.uint8, "I64": torch.int64,
}  # fmt: skip
_SHOWN_STEP: Final = 0.002
_LOADERS: Final = ("auto", "serial", "parallel")

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
        experts: this rank's slice of the routed experts, one bank a layer, on the host.
        host_memory: where the banks lie, page-locked when the device is CUDA; `release` after the
            last copy out of them.
    """

    tensors: dict[str, torch.Tensor]
    linears: dict[str, LinearWeight]
    experts: list[ExpertBank]
    host_memory: HostMemory = field(default_factory=lambda: HostMemory(pinned=False))

    def release(self) -> None:
        """Give page-locked memory back to the system; the banks are ordinary memory then."""
        self.host_memory.close()


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
        rank, ranks: whose share is read of the tensors that `sharded_dim` names, and of the routed
            experts: rows `[rank * I / ranks, ...)` of w1 and w3 and those columns of w2.
        pack: put FP4 experts into the kernels' order (`ftkernels.pack_fp4`); scales are folded
            where those of all layers fold.
        expert_load: "serial" places experts in file order; "parallel" by several threads; for
            "auto" see `how_to_load`.
        expert_prefetch: shards that the parallel loader reads ahead of placement, at least 1.
        threads: of the parallel loader; cores / ranks when None.
        extra_bytes: host memory that others will hold beside the weights.

    Raises:
        FileNotFoundError: as `open_checkpoint`.
        MemoryError: the experts cannot be mapped or page-locked.
        ValueError: as `open_checkpoint`; an argument outside its range; a scale that is NaN; a
            `tid2eid` entry that is no expert; a file cut short while it is read; host memory that
            does not suffice (nothing was read then).
    """
    device = torch.device(device)
    _check_integers(
        rank=rank, ranks=ranks, expert_prefetch=expert_prefetch, extra_bytes=extra_bytes,
        threads=1 if threads is None else threads,
    )  # fmt: skip
    _check_arguments(config, dequantize, rank, ranks, pack, expert_load, expert_prefetch, threads)
    index = open_checkpoint(directory, config)
    form = BankForm(config, dequantize, pack, device.type == "cpu", rank, ranks)
    if how_to_load(expert_load, len({x.file for x in index.entries.values()})) == "serial":
        threads = 0
    elif threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    needed = extra_bytes + estimate(
        config, dequantize, ranks=ranks, pack=pack, threads=max(1, threads)
    ).host_bytes(on_device=device.type != "cpu")
    available = available_bytes()
    _logger.info(
        "checkpoint memory needed=%.2fGiB available=%s experts=%.2fGiB stored=%.2fGiB "
        "dequantize=%s rank=%d/%d",
        needed / GIB, "unknown" if available is None else f"{available / GIB:.2f}GiB",
        form.num_bytes / GIB, index.num_bytes / GIB, dequantize, rank, ranks,
    )  # fmt: skip
    require_memory(needed, what=f"checkpoint {directory}", available=available)
    with ShardFiles(entry.file for entry in index.entries.values()) as files:
        loader = _Loader(index, files, form, device, progress, threads, expert_prefetch)
        return loader.load()


def _check_integers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            expected = "an integer >= 0"
            raise ValueError(f"load_weights: {name} is {value!r}, expected {expected}")


def _check_arguments(
    config: ModelConfig, dequantize: torch.dtype | None, rank: int, ranks: int, pack: bool,
    expert_load: str, expert_prefetch: int, threads: int | None,
) -> None:  # fmt: skip
    inter = config.moe_intermediate_size
    for good, name, value, expected in (
        (dequantize is None or dequantize in DEQUANTIZE_DTYPES, "dequantize", dequantize,
         "None, torch.bfloat16 or torch.float32"),
        (ranks >= 1 and inter % (ranks * FP4_GROUP) == 0, "ranks", ranks,
         f"slices of {inter} intermediate channels that are multiples of {FP4_GROUP}"),
        (0 <= rank < ranks, "rank", rank, f"0 to {ranks - 1}"),
        (isinstance(pack, bool), "pack", repr(pack), "True or False"),
        (not pack or dequantize is None, "pack", pack, "False for dequantized experts"),
        (expert_load in _LOADERS, "expert_load", repr(expert_load), "auto, serial or parallel"),
        (expert_prefetch >= 1, "expert_prefetch", expert_prefetch, "at least 1"),
        (threads is None or threads >= 1, "threads", threads, "None or at least 1"),
    ):  # fmt: skip
        if not good:
            raise ValueError(f"load_weights: {name} is {value}, expected {expected}")


@dataclass
class _Loader:
    index: CheckpointIndex
    files: ShardFiles
    form: BankForm
    device: torch.device
    progress: Progress | None
    threads: int  # 0 is the serial loader
    prefetch: int
    total_bytes: int = 1
    read_bytes: int = 0
    shown: float = 0.0
    start_s: float = field(default_factory=time.monotonic)

    def load(self) -> Weights:
        config = self.form.config
        expected = expected_tensors(config)
        dense = {n: s for n, s in expected.items() if ".ffn.experts." not in n}
        num_experts = config.num_hidden_layers * config.n_routed_experts
        self.total_bytes = sum(
            spec.num_bytes // (1 if self._reads_whole(name, spec) else self.form.ranks)
            for name, spec in dense.items()
        )
        self.total_bytes += num_experts * self.form.stored_bytes
        tensors: dict[str, torch.Tensor] = {}
        linears: dict[str, LinearWeight] = {}
        for name, spec in dense.items():
            if name.endswith(".scale"):
                continue
            if spec.dtype == "F8_E4M3":
                base = name.removesuffix(".weight")
                linears[base] = self._linear(base)
            else:
                tensors[name] = self._tensor(name)
            self._show()
        memory = HostMemory(pinned=self.device.type == "cuda")
        try:
            experts = self._experts(memory)
        except BaseException:
            memory.close()
            raise
        self._report()
        return Weights(tensors, linears, experts, memory)

    def _experts(self, memory: HostMemory) -> list[ExpertBank]:
        builder = BankBuilder(self.form, self.index, self.files, memory)
        placed: Counter[int] = Counter()
        for layer in self._run(self._jobs(builder)):
            if layer is None:
                continue
            placed[layer] += 1
            if placed[layer] == self.form.config.n_routed_experts:
                memory.pin(builder.rows[layer])
            self.read_bytes += self.form.stored_bytes
            self._show()
        for _ in self._run(builder.unfolding()):
            pass
        return builder.banks()

    def _run(self, jobs: Iterable[Job]) -> Iterator[int | None]:
        results = parallel(list(jobs), self.threads) if self.threads else serial(jobs)
        # threads have ended before an error goes on, so that nothing writes to what it frees
        with closing(results):
            yield from results

    def _jobs(self, builder: BankBuilder) -> Iterator[Job]:
        """An expert each, in file order, and before each shard the one to read ahead."""
        found = []
        for layer in range(self.form.config.num_hidden_layers):
            for expert in range(self.form.config.n_routed_experts):
                name = f"{expert_name(f'layers.{layer}', expert, 'w1')}.weight"
                entry = self.index.entries[name]
                found.append((entry.file, entry.start, layer, expert))
        found.sort()
        shards = list(dict.fromkeys(file for file, *_ in found))
        advised = 0 if self.threads else len(shards)
        for file, _, layer, expert in found:
            last = shards.index(file) + self.prefetch
            for shard in shards[advised : last + 1]:
                yield partial(self.files.read_ahead, shard)
                advised += 1
            yield partial(_place, builder, layer, expert)

    def _tensor(self, name: str) -> torch.Tensor:
        value = self._stored(name, sharded_dim(name))
        if name.endswith(".tid2eid"):
            self._check_table(name, value)
        widen = self.form.dequantize == torch.float32 and value.is_floating_point()
        return value.to(self.device, torch.float32 if widen else value.dtype)

    def _reads_whole(self, name: str, spec: TensorSpec) -> bool:
        """Replicated, the scales of a matrix, or a share that no blocks of scales make up."""
        dim = sharded_dim(name)
        if dim is None or name.endswith(".scale"):
            return True
        return spec.dtype == "F8_E4M3" and self._crosses_blocks(name, dim)

    def _linear(self, name: str) -> LinearWeight:
        dtype, dim = self.form.dequantize, sharded_dim(f"{name}.weight")
        # a share across the edge of a block of scales is taken of the dequantized matrix
        whole = dim is not None and self._crosses_blocks(f"{name}.weight", dim)
        if whole and dtype is None:
            shape = self.index.entries[f"{name}.weight"].shape
            raise ValueError(
                f"load_weights: ranks is {self.form.ranks}, expected shares of {name} "
                f"{list(shape)} within blocks of {FP8_BLOCK}, or dequantized weights"
            )
        weight = self._stored(f"{name}.weight", None if whole else dim)
        scale = self._stored(f"{name}.scale", None)
        if dim is not None and not whole:
            scale = self._scale_share(scale, self.index.entries[f"{name}.weight"].shape[dim], dim)
        check_scale(self.index.entries[f"{name}.scale"], scale)
        if dtype is None:
            return LinearWeight(weight.to(self.device), scale.to(self.device))
        block = (FP8_BLOCK, FP8_BLOCK)
        full = ftkernels.dequantize_fp8_reference(weight, scale, group=block, dtype=dtype)
        if whole and dim is not None:
            full = self._share(full, dim)
        if self.form.by_columns:
            full = full.mT.contiguous().mT
        return LinearWeight(full.to(self.device), None)

    def _check_table(self, name: str, table: torch.Tensor) -> None:
        low, high = (int(value) for value in table.aminmax())
        if low < 0 or high >= self.form.config.n_routed_experts:
            raise ValueError(
                f"{self.index.entries[name].file}: tensor {name} holds expert ids {low} to {high}, "
                f"expected 0 to {self.form.config.n_routed_experts - 1}"
            )

    def _crosses_blocks(self, name: str, dim: int) -> bool:
        share = self.index.entries[name].shape[dim] // self.form.ranks
        return self.form.ranks > 1 and bool(share % FP8_BLOCK and FP8_BLOCK % share)

    def _scale_share(self, scale: torch.Tensor, size: int, dim: int) -> torch.Tensor:
        """Scales of the blocks that this rank's share of `size` rows or columns lies in."""
        share = size // self.form.ranks
        first = self.form.rank * share
        last = -(-(first + share) // FP8_BLOCK)
        return scale.narrow(dim, first // FP8_BLOCK, last - first // FP8_BLOCK).contiguous()

    def _share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self.form.ranks, dim)[self.form.rank].contiguous()

    def _stored(self, name: str, dim: int | None) -> torch.Tensor:
        """A stored tensor, or this rank's share of it along `dim`."""
        entry, form = self.index.entries[name], self.form
        shape = list(entry.shape)
        if dim == 0:
            shape[0] //= form.ranks
        value = torch.empty(shape, dtype=_TORCH_DTYPES[entry.dtype])
        self.files.read(entry, value, skip=form.rank * value.nbytes if dim == 0 else 0)
        if dim is not None and dim > 0:
            value = self._share(value, dim)
        self.read_bytes += value.nbytes
        return value

    def _show(self) -> None:
        share = self.read_bytes / self.total_bytes
        if self.progress is None or (share - self.shown < _SHOWN_STEP and share < 1):
            return
        self.shown = share
        rate = self.read_bytes / max(time.monotonic() - self.start_s, 1e-9) / 1e9
        done, total = self.read_bytes / GIB, self.total_bytes / GIB
        self.progress(f"{done:.2f} of {total:.2f} GiB, {rate:.2f} GB/s", share)

    def _report(self) -> None:
        seconds = time.monotonic() - self.start_s
        _logger.info(
            "checkpoint loaded bytes=%.2fGiB seconds=%.1f rate=%.2fGB/s loader=%s threads=%d",
            self.read_bytes / GIB, seconds, self.read_bytes / max(seconds, 1e-9) / 1e9,
            "parallel" if self.threads else "serial", max(1, self.threads),
        )  # fmt: skip


def _place(builder: BankBuilder, layer: int, expert: int) -> int:
    builder.place(layer, expert)
    return layer
