"""A static model of what a launch costs on a card, read off its machine code.

THIS IS A STATIC MODEL: nothing runs, and none of its microseconds is a time. A figure says how two
kernels that do the same work compare; a card must confirm it. The terms of one launch:

* on chip: for every loop the cycles of the pipe that one pass holds longest, times its passes;
  the blocks that work, dealt out to the SMs in waves of as many as fit, the last wave as it is.
  A wave is never shorter than one block alone, which issues an instruction of a warp every second
  cycle at best and waits for a load in every pass, divided by the stages that are under way.
* DRAM: the useful bytes of the op at the card's bandwidth, shared out to its launches by what they
  ask for.
* L2: every byte that loads and stores ask for, at its bandwidth.

A launch costs the largest of the three, a call the sum of its launches. Not seen: cache hits, bank
conflicts, uncoalesced access, barriers, the scheduler, starting a kernel. How often loops run and
what is useful comes from the op's `KernelSpec`; a loop that it does not describe counts once, or in
a launch without products as often as it takes to move the useful bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune import pipes
from autotune.passes import Pass, passes_of
from ftkernels.offline import Compiled
from ftkernels.spec import Case, KernelSpec
from ftkernels.target import Target, of_arch
from ftkernels.testing import sass
from ftkernels.work import Work

_ISSUE_GAP = 2.0  # cycles between two instructions of a warp that waits for itself
_LOAD_NS = 600.0  # of a load that misses every cache, rounded from published microbenchmarks
_KMAC = _KIB = 1024


@dataclass(frozen=True)
class LoopFigures:
    """One significant loop, or the rest of a kernel; figures of one pass of one block.

    Args:
        why: what makes the loop significant, empty for the rest.
        passes: of a block that works, the mean.
        useful_macs: useful multiply-adds; `mma_macs` those that matrix instructions issue.
        mma: matrix instructions of a warp by opcode.
        slots: issue slots of all warps.
        loads: global loads of a warp by bytes a lane; `copies` go straight to shared memory.
        cycles: of the SM, by pipe; `bound` is the pipe held longest.
    """

    why: tuple[str, ...]
    passes: float
    useful_macs: float
    mma_macs: int
    mma: Mapping[str, int]
    slots: int
    loads: Mapping[int, int]
    copies: int
    load_bytes: int
    store_bytes: int
    cycles: Mapping[str, float]
    bound: str

    @property
    def bound_cycles(self) -> float:
        return self.cycles[self.bound]

    @property
    def issue_per_kmac(self) -> float | None:
        """Issue slots for 1024 useful multiply-adds, None without any."""
        return _KMAC * self.slots / self.useful_macs if self.useful_macs else None


@dataclass(frozen=True)
class LaunchFigures:
    """What one launch uses, and its modelled cost.

    Args:
        grid: of the launch; `blocks` of it work.
        registers, spill_bytes: of a thread.
        shared_bytes: of a block; `fits` when the card gives a block that much.
        blocks_per_sm, warps_per_sm: that one SM holds at a time.
        mma: the matrix instruction that does most of the work, None without any.
        issue_per_kmac, ceiling_tflops: of the loops of products together, or of the whole block
            where none is left of them; None without products. `block_tflops` is of the whole block.
        issue_per_filled_kmac: the same slots for 1024 multiply-adds issued, useful or not.
        bound: the pipe that holds those loops; of a launch without products what its cost is,
            "latency" where most of it is waiting for loads.
        load_bytes, store_bytes: asked for by all blocks; `useful_bytes` is its share of the op's.
        wide_share: of the loaded bytes that come 16 bytes a lane.
        issue_per_kib: issue slots for 1024 useful bytes; `ceiling_gb_per_s` of useful bytes.
        chip_us, dram_us, l2_us: the terms of the cost, `us` the largest; no times.
        loops: the significant ones in program order; `rest` runs once a block.
    """

    kernel: str
    grid: tuple[int, int, int]
    blocks: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    fits: bool
    blocks_per_sm: int
    warps_per_sm: int
    mma: str | None
    issue_per_kmac: float | None
    issue_per_filled_kmac: float | None
    ceiling_tflops: float | None
    block_tflops: float | None
    bound: str
    load_bytes: float
    store_bytes: float
    useful_bytes: float
    wide_share: float
    issue_per_kib: float
    ceiling_gb_per_s: float
    chip_us: float
    dram_us: float
    l2_us: float
    us: float
    loops: tuple[LoopFigures, ...]
    rest: LoopFigures


def score(spec: KernelSpec, case: Case, launches: Sequence[Compiled]) -> float:
    """Modelled microseconds of one call; no time, see the module.

    Never 0; infinite when a launch needs more than the card gives a block. The more work, bytes,
    instructions or waves, the larger; the same for the same machine code.

    Args:
        launches: what `compile_launches(spec, case)` gave, for the card it was compiled for.

    Raises:
        ValueError: the op claims more useful work than the instructions do, or does not describe
            the loops of a launch with matrix products.
    """
    return sum(launch.us for launch in figures(spec, case, launches))


def figures(
    spec: KernelSpec, case: Case, launches: Sequence[Compiled]
) -> tuple[LaunchFigures, ...]:  # fmt: skip
    """The figures of every launch, in order; arguments and errors as for `score`."""
    parts = [_Launch.of(spec.work(case, x.launch.name, x.launch.config), x) for x in launches]
    useful, asked = float(spec.bytes_moved(case)), sum(part.asked_bytes for part in parts)
    return tuple(_figures(part, useful * part.asked_bytes / (asked or 1.0)) for part in parts)


@dataclass(frozen=True)
class _Launch:
    compiled: Compiled
    work: Work | None
    regions: tuple[sass.Region, ...]
    rest: sass.Region

    @classmethod
    def of(cls, work: Work | None, compiled: Compiled) -> _Launch:
        return cls(compiled, work, *sass.regions(compiled.launch.report.sass))

    @property
    def blocks(self) -> float:
        return math.prod(self.compiled.launch.grid) if self.work is None else self.work.blocks

    def passes(self, useful_bytes: float) -> list[Pass]:
        """Of every loop and the rest, when the launch has to move so many bytes."""
        launch, of_block = self.compiled.launch, useful_bytes / self.blocks
        warps = launch.report.num_warps
        return passes_of(launch.name, warps, self.regions, self.rest, self.work, of_block)

    @property
    def asked_bytes(self) -> float:
        """What loads and stores ask for when loops without an account run once."""
        moved = [p.count * (p.counts.load_bytes + p.counts.store_bytes) for p in self.passes(0.0)]
        return self.blocks * self.compiled.launch.report.num_warps * sum(moved)


def _figures(part: _Launch, useful: float) -> LaunchFigures:
    launch, report = part.compiled.launch, part.compiled.launch.report
    card, warps = of_arch(report.arch), report.num_warps
    passes, blocks = part.passes(useful), part.blocks
    *loops, rest = [_loop(p, warps, card) for p in passes]
    every = [*loops, rest]
    dot = [x for x in loops if x.useful_macs] or [x for x in every if x.useful_macs]
    loaded, stored = _total(every, "load_bytes"), _total(every, "store_bytes")
    chip, held_by = _chip(passes, every, blocks, report.num_stages, report.blocks_per_sm, card)
    terms = {
        "chip": chip / card.ghz * 1e-3,
        "dram": useful / card.memory_gb_per_s * 1e-3,
        "l2": blocks * (loaded + stored) / card.l2_gb_per_s * 1e-3,
    }
    dearest = max(terms, key=lambda name: terms[name])
    held = _total(every, "bound_cycles")
    # useful bytes may be those of a torch call beside the launch
    moved = min(useful / blocks, loaded + stored)
    return LaunchFigures(
        kernel=launch.name, grid=launch.grid, blocks=blocks, registers=report.regs,
        spill_bytes=report.spill_bytes, shared_bytes=report.shared, fits=report.fits,
        blocks_per_sm=report.blocks_per_sm, warps_per_sm=report.blocks_per_sm * warps,
        mma=_main_mma(every), issue_per_kmac=_per_kmac(dot, "useful_macs"),
        issue_per_filled_kmac=_per_kmac(dot, "mma_macs"),
        ceiling_tflops=_ceiling(dot, dot, card), block_tflops=_ceiling(dot, every, card),
        bound=_bound(dot) or (dearest if dearest != "chip" else held_by),
        load_bytes=blocks * loaded, store_bytes=blocks * stored, useful_bytes=useful,
        wide_share=_wide_share(every),
        issue_per_kib=_KIB * blocks * _total(every, "slots") / max(useful, 1.0),
        ceiling_gb_per_s=card.num_sms * card.ghz * moved / held,
        chip_us=terms["chip"], dram_us=terms["dram"], l2_us=terms["l2"], us=terms[dearest],
        loops=tuple(loops), rest=rest,
    )  # fmt: skip


def _loop(counted: Pass, warps: int, card: Target) -> LoopFigures:
    counts = counted.counts
    held = pipes.cycles(counts, warps, card)
    return LoopFigures(
        why=counted.why, passes=counted.count, useful_macs=counted.macs,
        mma_macs=counts.mma_macs * warps, mma=dict(counts.mma), slots=counts.slots * warps,
        loads=dict(sorted(counts.loads.items())), copies=counts.copies,
        load_bytes=counts.load_bytes * warps, store_bytes=counts.store_bytes * warps,
        cycles=held, bound=pipes.bound(held),
    )  # fmt: skip


def _chip(
    passes: Sequence[Pass], loops: Sequence[LoopFigures], blocks: float, stages: int,
    resident: int, card: Target,
) -> tuple[float, str]:  # fmt: skip
    """Cycles of waves of blocks, infinite when not even one block fits, and what holds them."""
    if resident == 0:
        return math.inf, str(_bound(loops))
    held = _total(loops, "bound_cycles")
    parts = [_alone(p, x, stages, card) for p, x in zip(passes, loops, strict=True)]
    alone = sum(cycles for _, cycles in parts)
    wave = resident * card.num_sms
    full, left = math.floor(blocks / wave), blocks % wave
    tail = max(math.ceil(left / card.num_sms) * held, alone) if left else 0.0
    side_by_side = resident if full else math.ceil(left / card.num_sms)
    held_by = _most(parts) if alone > side_by_side * held else _bound(loops)
    return full * max(resident * held, alone) + tail, str(held_by)


def _alone(
    counted: Pass, loop: LoopFigures, stages: int, card: Target
) -> tuple[str, float]:  # fmt: skip
    """What holds a block that has its SM to itself, and cycles of all passes."""
    wait = 0.0
    if counted.counts.loads:
        under_way = max(1, stages - 1) if counted.counts.copies else 1
        wait = _LOAD_NS * card.ghz / under_way * max(1.0, counted.unrolled)
    issued = _ISSUE_GAP * counted.counts.slots
    held = ((loop.bound, loop.bound_cycles), ("issue", issued), ("latency", wait))
    name, cycles = max(held, key=lambda pair: pair[1])
    return name, loop.passes * cycles


def _total(loops: Sequence[LoopFigures], name: str) -> float:
    return sum(x.passes * float(getattr(x, name)) for x in loops)


def _per_kmac(dot: Sequence[LoopFigures], macs: str) -> float | None:
    total = _total(dot, macs)
    return _KMAC * _total(dot, "slots") / total if total else None


def _ceiling(
    dot: Sequence[LoopFigures], held: Sequence[LoopFigures], card: Target
) -> float | None:  # fmt: skip
    if not dot:
        return None
    return pipes.tflops(_total(dot, "useful_macs"), _total(held, "bound_cycles"), card)


def _bound(loops: Sequence[LoopFigures]) -> str | None:
    return _most((x.bound, x.passes * x.bound_cycles) for x in loops)


def _main_mma(loops: Sequence[LoopFigures]) -> str | None:
    return _most(
        (opcode, x.passes * number * sass.mma_macs(opcode))
        for x in loops
        for opcode, number in x.mma.items()
    )


def _most(parts: Iterable[tuple[str, float]]) -> str | None:
    sums: dict[str, float] = {}
    for name, amount in parts:
        sums[name] = sums.get(name, 0.0) + amount
    return max(sums, key=lambda name: sums[name], default=None)


def _wide_share(loops: Sequence[LoopFigures]) -> float:
    loaded = wide = 0.0
    for x in loops:
        loaded += x.passes * sum(width * n for width, n in x.loads.items())
        wide += x.passes * 16 * x.loads.get(16, 0)
    return wide / loaded if loaded else 0.0
