"""How often the loops of a launch run: what machine code does not say and a model of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Loop:
    """One loop of matrix products.

    Args:
        passes: of a block, the mean over the blocks that work.
        macs: useful multiply-adds of one pass of one block; padding is not useful.
        tile: multiply-adds that a pass issues, padding included. With it a loop that the compiler
            unrolled is recognized; 0 where the compiler cannot.
    """

    passes: float
    macs: float
    tile: int = 0


@dataclass(frozen=True)
class Work:
    """The loops of matrix products of one launch, in program order.

    Args:
        blocks: how many blocks work; the others of the grid leave at once.
    """

    blocks: float
    loops: tuple[Loop, ...]

    @property
    def macs(self) -> float:
        """Useful multiply-adds of the launch."""
        return self.blocks * sum(loop.passes * loop.macs for loop in self.loops)


def even_loop(macs: float, blocks: float, passes: float, tile: int = 0) -> Loop:
    """A loop whose blocks and passes share the launch's useful multiply-adds evenly."""
    return Loop(passes, macs / (blocks * passes) if macs else 0.0, tile)


def either(first: Work | None, second: Work | None) -> Work:
    """A launch with two kinds of block, each with its own loops."""
    parts = [work for work in (first, second) if work is not None]
    blocks = sum(work.blocks for work in parts)
    loops = [
        Loop(loop.passes * work.blocks / blocks, loop.macs, loop.tile)
        for work in parts
        for loop in work.loops
    ]
    return Work(blocks, tuple(loops))


def no_work(case: Mapping[str, Any], kernel: str, config: Mapping[str, Any]) -> Work | None:
    """No launch has matrix products."""
    return None
