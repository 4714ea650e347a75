"""Loops of a control flow graph: natural ones, and cycles that are entered in several places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Step(Protocol):
    """One instruction: where it may jump to, and whether it never goes on to the next."""

    @property
    def jump(self) -> int | None: ...
    @property
    def ends(self) -> bool: ...


def find_loops(code: Sequence[Step]) -> list[frozenset[int]]:
    """Every loop as the indices of its instructions, an outer one before those inside it.

    What the first instruction does not lead to, the trap behind a kernel's end, is no loop.
    """
    if not code:
        return []
    heads = _heads(code)
    blocks = [range(a, b) for a, b in zip(heads, [*heads[1:], len(code)], strict=True)]
    place = {block[0]: number for number, block in enumerate(blocks)}
    after = [_successors(code[block[-1]], block[-1], place) for block in blocks]
    before: list[set[int]] = [set() for _ in blocks]
    for number, targets in enumerate(after):
        for target in targets:
            before[target].add(number)
    found = set()
    for body in _cycles(after, before):
        found.add(frozenset(i for number in body for i in blocks[number]))
    return sorted(found, key=lambda body: (min(body), -len(body)))


def _heads(code: Sequence[Step]) -> list[int]:
    """Where basic blocks begin."""
    heads = {0}
    for i, step in enumerate(code):
        if step.jump is not None:
            heads.add(step.jump)
        if step.jump is not None or step.ends:
            heads.add(i + 1)
    return sorted(h for h in heads if h < len(code))


def _successors(step: Step, index: int, place: dict[int, int]) -> set[int]:
    targets = set() if step.jump is None else {place[step.jump]}
    return targets if step.ends or index + 1 not in place else targets | {place[index + 1]}


def _cycles(after: Sequence[set[int]], before: Sequence[set[int]]) -> Iterable[set[int]]:
    """Loops as numbers of blocks."""
    live = _reached(after, [0])
    for head in range(len(after)):
        if before[head] & live <= {head - 1}:
            continue
        elsewhere = _reached(after, [0], {head}) - {head}  # what can run without the head
        reached = _reached(after, [head]) & live
        back = before[head] & reached
        if back - elsewhere:  # the head always runs before these jumps to it
            yield _reached(before, back - elsewhere, {head}) & reached | {head}
        if any(b >= head for b in back & elsewhere):  # entered elsewhere too: the whole cycle
            yield _reached(before, [head]) & reached


def _reached(
    edges: Sequence[set[int]], start: Iterable[int], stop: Collection[int] = ()
) -> set[int]:  # fmt: skip
    """Blocks on the way from `start`, those of `stop` included and not passed."""
    seen, todo = set(stop), list(start)
    while todo:
        block = todo.pop()
        if block not in seen:
            seen.add(block)
            todo += edges[block]
    return seen
