"""How often each loop of the machine code runs: the op's own account, matched to what it became."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftkernels.testing.sass import WARP, Counts, Region
from ftkernels.work import Loop, Work

_SLACK = 1e-6  # of a rounding


@dataclass(frozen=True)
class Pass:
    """One loop, or the rest of a kernel, and how often a block runs it.

    Args:
        count: passes of a block.
        macs: useful multiply-adds of one.
        unrolled: passes of the source's loops that stand here one after another.
    """

    counts: Counts
    why: tuple[str, ...]
    count: float
    macs: float = 0.0
    unrolled: float = 0.0


def passes_of(
    kernel: str, num_warps: int, regions: Sequence[Region], rest: Region, work: Work | None,
    useful_bytes: float,
) -> list[Pass]:  # fmt: skip
    """Every loop in program order, then the rest.

    Args:
        work: what the op says of its loops of products; None for a launch without.
        useful_bytes: of a block, for the loops of such a launch.

    Raises:
        ValueError: more useful work than instructions do it, or products without an account.
    """
    if work is None:
        if any(region.counts.mma_macs for region in (*regions, rest)):
            raise ValueError(f"static model: work of {kernel} is None, expected its loops: it has "
                             "matrix products")  # fmt: skip
        count = _by_bytes(num_warps, regions, rest, useful_bytes)
        moved = [Pass(r.counts, r.why, count if _moves(r) else 1.0) for r in regions]
        return [*moved, Pass(rest.counts, (), 1.0)]
    issued = _issued(num_warps, regions, rest)
    pairs = _matched(issued, work.loops)
    found = [
        _pass(region, macs, work.loops[pairs[index]] if index in pairs else None)
        for index, (region, macs) in enumerate(zip(regions, issued, strict=True))
    ]
    left = [loop for index, loop in enumerate(work.loops) if index not in pairs.values()]
    macs = sum(loop.passes * loop.macs for loop in left)
    found.append(Pass(rest.counts, (), 1.0, macs, sum(loop.passes for loop in left)))
    for one in found:
        _check(kernel, num_warps, one)
    return found


def _pass(region: Region, issued: int, loop: Loop | None) -> Pass:
    if loop is None:
        # a second copy of an unrolled loop, for the passes left over, counts for none
        return Pass(region.counts, region.why, 0.0 if issued else 1.0)
    count = loop.passes * loop.tile / issued if loop.tile else loop.passes
    return Pass(region.counts, region.why, count, loop.macs * loop.passes / count if count else 0.0)


def _matched(issued: Sequence[int], loops: Sequence[Loop]) -> dict[int, int]:
    """Which loop of the source each of the machine code is: in order, else by its tile."""
    dot = [index for index, macs in enumerate(issued) if macs]
    if len(dot) == len(loops):
        return dict(zip(dot, range(len(loops)), strict=True))
    pairs: dict[int, int] = {}
    for same in (True, False):
        for index in dot:
            for number, loop in enumerate(loops):
                tile = loop.tile or issued[index]
                fits = issued[index] == tile if same else issued[index] % tile == 0
                if fits and index not in pairs and number not in pairs.values():
                    pairs[index] = number
    return pairs


def _issued(num_warps: int, regions: Sequence[Region], rest: Region) -> list[int]:
    """Multiply-adds of a pass of each loop that has products.

    A kernel without a matrix instruction does them one by one, each fused.
    """
    if any(region.counts.mma_macs for region in (*regions, rest)):
        return [region.counts.mma_macs * num_warps for region in regions]
    fused = [sum(n for op, n in r.counts.opcodes.items() if op.startswith("FFMA")) for r in regions]
    return [number * WARP * num_warps for number in fused]


def _check(kernel: str, num_warps: int, one: Pass) -> None:
    most = (one.counts.mma_macs or one.counts.simd_macs) * num_warps
    if one.macs > most * (1 + _SLACK):
        raise ValueError(
            f"static model: useful work of {kernel} is {one.macs:.6g} multiply-adds a pass, "
            f"expected at most the {most} that its instructions do"
        )


def _moves(region: Region) -> bool:
    return bool(region.counts.loads or region.counts.store_bytes)


def _by_bytes(
    num_warps: int, regions: Sequence[Region], rest: Region, useful_bytes: float
) -> float:  # fmt: skip
    """Passes of loops that together move what is useful, each as often as the others."""

    def moved(region: Region) -> int:
        return num_warps * (region.counts.load_bytes + region.counts.store_bytes)

    most = max((moved(region) for region in regions), default=0)
    return max(1.0, (useful_bytes - moved(rest)) / most) if most else 1.0
