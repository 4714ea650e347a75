"""What one compiled kernel uses: registers, spills, shared memory, machine code."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ftkernels import target

WARP = 32
_REGISTER_CHUNK = 256  # registers are handed to a warp in chunks of this many
_BLOCK_OVERHEAD_BYTES = 1024  # shared memory that each resident block costs besides its own
_MMA = r"\b(?:HMMA|QMMA|IMMA|HGMMA|QGMMA|OMMA)\b"


@dataclass(frozen=True)
class Report:
    """One compiled kernel. Counts of instructions are static; `seconds` is the time to compile."""

    name: str
    arch: int
    num_warps: int
    num_stages: int
    shared: int  # bytes of shared memory of a block
    regs: int
    stack: int  # bytes of local memory of a thread
    seconds: float
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    ptx: str = field(default="", repr=False)
    cubin: bytes = field(default=b"", repr=False)

    @cached_property
    def sass(self) -> str:
        """Machine code, as `nvdisasm -c` prints it; 0.2 s for the first reader."""
        return _dump(self.cubin, "nvdisasm", "-c")

    @cached_property
    def spill_bytes(self) -> int:
        """Bytes spilled, stores and loads together, from `ptxas -v`."""
        if not self.stack:  # where all spills go
            return 0
        text = ptxas_v(self.ptx, self.arch)
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))

    @property
    def spill_loads(self) -> int:
        return self._count(r"\bLDL[. ]")

    @property
    def spill_stores(self) -> int:
        return self._count(r"\bSTL[. ]")

    @property
    def mma(self) -> int:
        return self._count(_MMA)

    @property
    def ld128(self) -> int:
        """Global loads of 16 bytes a lane."""
        return self._count(r"\bLDG\.E\.[\w.]*128\b")

    @property
    def ldg(self) -> int:
        """Global loads of any width."""
        return self._count(r"\bLDG\b")

    @property
    def cp_async(self) -> int:
        """Copies from global to shared memory past the registers."""
        return self._count(r"\bLDGSTS\b")

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that one SM holds at a time."""
        card = target.of_arch(self.arch)
        chunks = -(-max(self.regs, 1) * WARP // _REGISTER_CHUNK)
        return min(
            card.blocks_per_sm,
            card.registers_per_sm // (chunks * _REGISTER_CHUNK * self.num_warps),
            card.warps_per_sm // self.num_warps,
            card.shared_bytes_per_sm // (self.shared + _BLOCK_OVERHEAD_BYTES),
        )

    @property
    def fits(self) -> bool:
        """Whether the card gives a block that much shared memory; a launch fails otherwise."""
        return self.shared <= target.of_arch(self.arch).shared_bytes_per_block

    def check(self, max_spills: int = 0) -> Report:
        """Itself, for a test.

        Raises:
            AssertionError: too much shared memory, or over `max_spills` local loads and stores.
        """
        limit = target.of_arch(self.arch).shared_bytes_per_block
        assert self.fits, f"{self.name}: {self.shared} B shared > {limit} on sm_{self.arch}"
        spills = self.spill_loads + self.spill_stores
        assert spills <= max_spills, (
            f"{self.name}: {spills} local loads/stores in SASS ({self.stack} B stack), "
            f"{self.regs} regs"
        )
        return self

    def _count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))


def report_of(
    compiled: Any, arch: int, seconds: float, constexprs: Mapping[str, Any] | None = None
) -> Report:
    """Read off a kernel that Triton has compiled for `arch`."""
    cubin, meta = compiled.asm["cubin"], compiled.metadata
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _dump(cubin, "cuobjdump", "-res-usage"))
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no register count for {meta.name}")
    return Report(
        name=meta.name, arch=arch, num_warps=meta.num_warps, num_stages=meta.num_stages,
        shared=meta.shared, regs=int(usage[1]), stack=int(usage[2]), seconds=seconds,
        constexprs=dict(constexprs or {}), ptx=compiled.asm["ptx"], cubin=cubin,
    )  # fmt: skip


def jit_of(fn: Any) -> Any:
    """The JITFunction below `@triton.autotune` and `@triton.heuristics`."""
    while not isinstance(fn, JITFunction):
        fn = fn.fn
    return fn


def compile_for(
    fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any],
    num_warps: int = 4, num_stages: int = 2, arch: int = 89, unaligned: Collection[str] = (),
    **options: Any,
) -> Report:  # fmt: skip
    """Compile one kernel from a signature written by hand.

    Args:
        signature: Triton type of each run-time argument, `{"x": "*bf16", "n": "i32"}`.
        constexprs: values of the compile-time arguments.
        unaligned: pointers and integers without the divisible-by-16 hint a launch usually gives.
        options: further compile options of Triton.
    """
    fn = jit_of(fn)
    types, hints, values = {}, {}, {}
    for position, name in enumerate(fn.arg_names):
        if name in constexprs:
            types[name], values[name] = "constexpr", constexprs[name]
            continue
        types[name] = signature[name]
        wide = types[name].startswith("*") or types[name] in ("i32", "i64")
        if wide and name not in unaligned:
            hints[(position,)] = [["tt.divisibility", 16]]
    start = time.perf_counter()
    compiled = triton.compile(
        ASTSource(fn=fn, signature=types, constexprs=values, attrs=hints),
        target=GPUTarget("cuda", arch, WARP),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
    return report_of(compiled, arch, time.perf_counter() - start, constexprs)


@lru_cache(maxsize=64)
def ptxas_v(ptx: str, arch: int = 89) -> str:
    """What `ptxas -v` says: registers, and spilled bytes, independent of the machine code."""
    named = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)  # sm_90a where features need it
    gpu = named[1] if named else f"sm_{arch}"
    tool = "ptxas_blackwell" if arch >= 100 else "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_tool(tool), "-v", f"--gpu-name={gpu}", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _tool(name: str) -> str:
    tool = getattr(triton.knobs.nvidia, name)  # comes with the triton wheel
    return str(getattr(tool, "path", tool))


@lru_cache(maxsize=64)  # the cases of an op share kernels
def _dump(cubin: bytes, tool: str, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool(tool), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
