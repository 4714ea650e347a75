"""Both expert loaders on a synthetic bank: rate, and peak host memory as a ratio to the bank.

Experts have the shape of DeepSeek-V4-Flash, everything else is small. Every run is a process of its
own; "cold" drops the files from the page cache first, as far as the system allows. Each first fills
and drops a block of the bank's size, since a virtual machine may take long to back fresh memory:
that rate is shown beside. What counts are the ratios: the rates depend on disk, memory and what
else the machine does. Run it as
``make bench-load`` or ``python -m tests.benchmarks.load_ratio``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ftkernels.moe.host_memory import HostMemory
from ftruntime.checkpoint.loader import load_weights
from ftruntime.checkpoint.memory import estimate
from ftruntime.checkpoint.names import TensorSpec, expected_tensors
from ftruntime.demo.presets import demo_config
from ftruntime.model.config import ModelConfig

HIDDEN, INTER = 4096, 2048
EXPERT_BYTES = 3 * HIDDEN * INTER * 17 // 32
SHARD_BYTES = 1 << 30


def write(directory: Path, bank_bytes: int) -> None:
    """A checkpoint whose experts take about `bank_bytes`; values are noise, scales fold."""
    shape = demo_config("tiny")
    layers = ModelConfig.from_dict(shape).num_hidden_layers
    experts = max(8, round(bank_bytes / EXPERT_BYTES / layers))
    shape |= {
        "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "n_routed_experts": experts,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(shape), "utf-8")
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in expected_tensors(ModelConfig.from_dict(shape)).items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    weight_map = {}
    noise = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8).numpy().tobytes()
    scales = torch.randint(115, 126, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
    for number, specs in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        weight_map |= dict.fromkeys(specs, file)
        _write_shard(directory / file, specs, noise, scales)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), "utf-8")


def _write_shard(file: Path, specs: dict[str, TensorSpec], noise: bytes, scales: bytes) -> None:
    header, end = {}, 0
    for name, spec in specs.items():
        offsets = [end, end + spec.num_bytes]
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for spec in specs.values():
            source = scales if spec.dtype == "F8_E8M0" else noise
            source = bytes(len(source)) if spec.dtype == "I64" else source
            for start in range(0, spec.num_bytes, len(source)):
                stream.write(source[: min(len(source), spec.num_bytes - start)])
        stream.flush()
        os.fsync(stream.fileno())


def load(directory: Path, loader: str, pack: bool, threads: int | None) -> None:
    """The measured process: prints seconds, bytes and peaks."""
    config = ModelConfig.from_dir(directory)
    fill_s = _fill(estimate(config, None).expert_bytes)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak starts anew
    before = _status("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    weights = load_weights(
        directory, config, dequantize=None, expert_load=loader, pack=pack, threads=threads
    )
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    bank = weights.host_memory.num_bytes
    needed = estimate(
        config, None, pack=pack, threads=1 if loader == "serial" else threads or _cores()
    ).host_bytes(on_device=False)
    print(json.dumps({
        "loader": loader, "packed": pack, "GB_per_s": round(bank / seconds / 1e9, 2),
        "GB_per_cpu_s": round(bank / cpu_s / 1e9, 2),
        "fresh_memory_GB_per_s": round(bank / fill_s / 1e9, 2),
        "peak_to_bank": round(_status("VmHWM") / bank, 3),
        "peak_less_start_to_bank": round((_status("VmHWM") - before) / bank, 3),
        "estimate_to_bank": round(needed / bank, 3), "seconds": seconds,
    }))  # fmt: skip


def _fill(num_bytes: int) -> float:
    """Seconds to write to that much fresh memory, which is given back."""
    start = time.perf_counter()
    HostMemory(pinned=False).empty(1, num_bytes).fill_(1)
    return time.perf_counter() - start


def _status(field: str) -> int:
    """A size of this process, in bytes."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _drop_pages(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(directory: Path, args: argparse.Namespace, pages: str, pack: bool) -> dict[str, object]:
    rows = {}
    for loader in ("serial", "parallel"):
        if pages == "cold":
            _drop_pages(directory)
        command = [sys.executable, "-m", "tests.benchmarks.load_ratio", "--child", loader]
        command += ["--directory", str(directory), *(["--pack"] if pack else [])]
        command += ["--threads", str(args.threads)] if args.threads else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows[loader] = json.loads(done.stdout)
        print(f"{pages} {rows[loader]}", file=sys.stderr)
    ratio = rows["serial"].pop("seconds") / rows["parallel"].pop("seconds")
    return {"pages": pages, "parallel_to_serial_rate": round(ratio, 2), "rows": [*rows.values()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=6.0, help="size of the bank, 1e9 bytes")
    parser.add_argument("--threads", type=int, help="of the parallel loader (default: cores)")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--pack", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        load(args.directory, args.child, args.pack, args.threads)
        return
    with tempfile.TemporaryDirectory() as root:
        write(Path(root), round(args.gb * 1e9))
        runs = [
            measure(Path(root), args, pages, pack)
            for pack in (False, True)
            for pages in ("cold", "warm")
        ]
    print(json.dumps({"torch": torch.__version__, "cores": _cores(), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
