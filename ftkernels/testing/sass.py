"""Read machine code: the instructions of a kernel and the loop that its work is in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_MMA = re.compile(r"(?:HMMA|QMMA|IMMA|HGMMA|QGMMA|OMMA)\b")
_MATH = re.compile(r"(?:FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2)\b")


@dataclass(frozen=True)
class _Instruction:
    opcode: str
    jump: int | None  # index of the instruction it may jump to


def opcodes(sass: str) -> Counter[str]:
    """How often each opcode stands in the text of `nvdisasm -c`."""
    return Counter(match[1] for match in _INSTRUCTION.finditer(sass))


def hot_loop(sass: str) -> Counter[str]:
    """Opcodes of the loop with the most MMA, then the most float work, then the least code.

    A loop counts without the loops inside it; a kernel without a loop counts whole.
    """
    code = _parse(sass)
    spans = [
        (x.jump, i + 1) for i, x in enumerate(code) if x.jump is not None and x.jump < i
    ]  # a jump onto itself is the trap behind the last instruction
    bodies = [_own(span, spans) for span in spans] or [list(range(len(code)))]
    counts = [Counter(code[i].opcode for i in body) for body in bodies]
    return max(counts, key=lambda c: (_share(c, _MMA), _share(c, _MATH), -c.total()))


def mma_kind(sass: str) -> str | None:
    """The matrix instruction used most, `HMMA.16816.F32.BF16` for one; None without any."""
    kinds = Counter({op: n for op, n in opcodes(sass).items() if _MMA.match(op)})
    return kinds.most_common(1)[0][0] if kinds else None


def _parse(sass: str) -> list[_Instruction]:
    labels: dict[str, int] = {}
    found: list[tuple[str, str | None]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.search(line):
            target = _TARGET.search(match[2]) if match[1].startswith("BRA") else None
            found.append((match[1], target[1] if target else None))
    return [_Instruction(op, None if name is None else labels.get(name)) for op, name in found]


def _own(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> list[int]:
    inner = [s for s in spans if s != span and span[0] <= s[0] and s[1] <= span[1]]
    return [i for i in range(*span) if not any(a <= i < b for a, b in inner)]


def _share(counts: Counter[str], pattern: re.Pattern[str]) -> int:
    return sum(n for op, n in counts.items() if pattern.match(op))
