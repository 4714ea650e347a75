"""Read machine code: the instructions of a kernel, its loops, and what a pass through one issues.

The text is what `nvdisasm -c` prints. Nothing here knows a card: figures are instructions, bytes
and multiply-adds, for `autotune.static` to turn into cycles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftkernels.testing.loops import find_loops

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$]+):")
_TARGET = re.compile(r"`\(([^)]+)\)")
_MMA = re.compile(r"(?:HMMA|QMMA|IMMA|HGMMA|QGMMA|OMMA)\b")
_MATH = re.compile(r"(?:FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2)\b")
_SHAPE = re.compile(r"[A-Z]+MMA\.(?:(64)x(\d+)x(\d+)|(16)(8)(\d+))\b")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_MACS = {"FFMA": 32, "FADD": 32, "FMUL": 32, "IMAD": 32, "IDP": 128,
         "HFMA2": 64, "HADD2": 64, "HMUL2": 64}  # fmt: skip
_SIGNIFICANT = 0.05  # share of a kernel's loaded bytes, or of the issue slots of its loops
WARP = 32


@dataclass(frozen=True)
class Instruction:
    """One instruction: the index of the one it may go to, and whether it never goes on."""

    opcode: str
    jump: int | None
    ends: bool

    @property
    def name(self) -> str:
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True)
class Counts:
    """What one warp issues in one pass.

    Args:
        opcodes: how often each stands there.
        mma_macs: multiply-adds of the matrix instructions.
        simd_macs: the most that the others can do.
        loads: global loads by bytes a lane, copies to shared memory among them.
        copies: those that go past the registers.
        store_bytes: global, of the whole warp.
    """

    opcodes: Counter[str]
    mma_macs: int
    simd_macs: int
    loads: Counter[int]
    copies: int
    store_bytes: int

    @property
    def slots(self) -> int:
        """Issue slots, one an instruction."""
        return self.opcodes.total()

    @property
    def load_bytes(self) -> int:
        """Global, of the whole warp, masked lanes counted."""
        return WARP * sum(width * number for width, number in self.loads.items())

    @property
    def mma(self) -> Counter[str]:
        """Matrix instructions by opcode."""
        return Counter({op: n for op, n in self.opcodes.items() if _MMA.match(op)})


@dataclass(frozen=True)
class Region:
    """A loop without the significant loops inside it, or what is left of the kernel.

    `why` says what makes a loop significant; empty for the rest of the kernel, which runs once.
    """

    counts: Counts
    why: tuple[str, ...]


def opcodes(sass: str) -> Counter[str]:
    """How often each opcode stands in the text of `nvdisasm -c`."""
    return Counter(match[2] for match in _INSTRUCTION.finditer(sass))


def mma_kind(sass: str) -> str | None:
    """The matrix instruction used most, `HMMA.16816.F32.BF16` for one; None without any."""
    kinds = Counter({op: n for op, n in opcodes(sass).items() if _MMA.match(op)})
    return kinds.most_common(1)[0][0] if kinds else None


def parse(sass: str) -> list[Instruction]:
    """The instructions of a kernel in order, without what fills its memory behind the end."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.search(line):
            found.append((match[2], match[3].strip(), match[1] or ""))
    return _without_filling([_instruction(op, text, guard, labels) for op, text, guard in found])


def _without_filling(code: list[Instruction]) -> list[Instruction]:
    """Less the trap and the NOPs behind the last exit: no warp comes there to issue them."""
    end = len(code)
    while end and (code[end - 1].name == "NOP" or _is_trap(code[end - 1], end - 1)):
        end -= 1
    entered = any(x.jump is not None and x.jump >= end for x in code[:end])
    return code[:end] if end and code[end - 1].ends and not entered else code


def _is_trap(x: Instruction, place: int) -> bool:
    return x.ends and x.jump == place


def _instruction(op: str, text: str, guard: str, labels: dict[str, int]) -> Instruction:
    name, target = op.split(".", 1)[0], _TARGET.search(text)
    # ptxas leaves some loops by CALL
    jumps = name in ("BRA", "JMP", "CALL") and target is not None
    ends = not guard and (name in ("EXIT", "RET") or (name == "BRA" and text.startswith("`")))
    return Instruction(op, labels.get(target[1]) if jumps and target else None, ends)


def hot_loop(sass: str) -> Counter[str]:
    """Opcodes of the loop with the most MMA, then the most float work, then the least code.

    A loop counts without the loops inside it; a kernel without a loop counts whole.
    """
    code = parse(sass)
    loops = find_loops(code)
    own = [body.difference(*(b for b in loops if b < body)) for body in loops]
    bodies = [body for body in own if body] or [frozenset(range(len(code)))]
    counts = [Counter(code[i].opcode for i in body) for body in bodies]
    return max(counts, key=lambda c: (_share(c, _MMA), _share(c, _MATH), -c.total()))


def regions(sass: str) -> tuple[tuple[Region, ...], Region]:
    """The significant loops in program order, and the rest.

    A loop is significant with matrix instructions in it, with over 5 % of the kernel's loaded
    bytes, or with over 5 % of the issue slots of all loops. An outer loop comes first and holds
    none of the significant loops inside it.
    """
    code = parse(sass)
    loops = find_loops(code)
    in_loops = len(frozenset[int]().union(*loops))
    all_bytes = count(code).load_bytes or 1
    big: list[tuple[frozenset[int], tuple[str, ...]]] = []
    for body in loops:
        counts = count(code[i] for i in sorted(body))
        shares = {"loads": counts.load_bytes / all_bytes, "slots": len(body) / in_loops}
        why = ["mma"] if counts.mma_macs else []
        why += [name for name, share in shares.items() if share > _SIGNIFICANT]
        if why:
            big.append((body, tuple(why)))
    own = [(body.difference(*(b for b, _ in big if b < body)), why) for body, why in big]
    rest = frozenset(range(len(code))).difference(*(body for body, _ in own))
    found = tuple(Region(_counted(code, body), why) for body, why in own if body)
    return found, Region(_counted(code, rest), ())


def _counted(code: Sequence[Instruction], body: frozenset[int]) -> Counts:
    return count(code[i] for i in sorted(body))


def count(body: Iterable[Instruction]) -> Counts:
    """Sums over one pass of one warp through `body`.

    Raises:
        ValueError: a matrix instruction of unknown shape, whose work would count as none.
    """
    ops, loads = Counter[str](), Counter[int]()
    mma = simd = copies = stores = 0
    for x in body:
        name = x.name
        ops[x.opcode] += 1
        simd += _MACS.get(name, 0)
        if _MMA.match(x.opcode):
            mma += mma_macs(x.opcode)
        elif name in ("LDG", "LDGSTS"):
            loads[lane_bytes(x.opcode)] += 1
            copies += name == "LDGSTS"
        elif name == "STG":
            stores += WARP * lane_bytes(x.opcode)
    return Counts(ops, mma, simd, loads, copies, stores)


def mma_macs(opcode: str) -> int:
    """Multiply-adds one warp does by one matrix instruction; a group of four warps does 64 rows.

    Raises:
        ValueError: the shape is unknown.
    """
    shape = _SHAPE.match(opcode)
    if shape is None:
        raise ValueError(f"mma_macs: opcode is {opcode!r}, expected a matrix instruction's shape")
    rows, columns, depth = (int(n) for n in shape.groups() if n is not None)
    return min(rows, 16) * columns * depth


def lane_bytes(opcode: str) -> int:
    """Bytes that one lane of a load or store moves."""
    return next((_WIDTHS[part] for part in opcode.split(".")[1:] if part in _WIDTHS), 4)


def _share(counts: Counter[str], pattern: re.Pattern[str]) -> int:
    return sum(n for op, n in counts.items() if pattern.match(op))
