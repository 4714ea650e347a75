"""Machine code as text: instructions, loops, what a pass issues.

Loops are compared with those of the independent reader in tests/tools on random programs.

Mutants run, each noticed: an inner loop counted in the outer one too, the head's own block no loop,
a cycle with two entries left out, an outer loop after the loops inside it, the trap behind the end
as a loop, predicated branches as ends, calls as no jumps, copies to shared memory as no loads, 16
bytes as 8, an unknown matrix instruction as no work, 64 rows for one warp, the filling behind the
end as slots, a trap that is jumped to as filling, a NOP that runs as filling.
"""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from pathlib import Path

import pytest

from ftkernels.testing import sass
from ftkernels.testing.loops import find_loops

TOOL = Path(__file__).parents[2] / "tools" / "sass_report.py"
NESTED = """
.text.k:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.U8 R2, [R4.64] ;
        /*0020*/                   FFMA R1, R2, R3, R4 ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R4], [R6.64] ;
        /*0040*/                   LDG.E.64 R8, [R6.64] ;
        /*0050*/                   QMMA.16832.F32.E4M3.E4M3 R8, R4, R6, R8 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   STG.E.128 [R4.64], R8 ;
        /*0080*/              @!P1 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("sass_report", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loops_without_the_loops_inside_them():
    (outer, inner), rest = sass.regions(NESTED)
    assert outer.counts.opcodes == {"LDG.E.U8": 1, "FFMA": 1, "STG.E.128": 1, "BRA": 1}
    assert inner.counts.opcodes == {
        "LDGSTS.E.BYPASS.128": 1, "LDG.E.64": 1, "QMMA.16832.F32.E4M3.E4M3": 1, "BRA": 1,
    }  # fmt: skip
    assert rest.counts.opcodes == {"IMAD.MOV.U32": 1, "EXIT": 1}
    assert outer.why == inner.why == ("mma", "loads", "slots")
    assert rest.why == ()


@pytest.mark.parametrize("end", ["EXIT", "RET.REL.NODEC R2 `(k)"])
def test_what_fills_the_memory_behind_the_end_is_no_code(end):
    nops = "\n".join(f"        /*{0x20 + 16 * i:04x}*/                   NOP;" for i in range(9))
    ending = f"        /*0000*/                   {end} ;\n"
    trap = ".L_x_2:\n        /*0010*/                   BRA `(.L_x_2);\n"
    for filling in (trap, nops, trap + nops):
        assert [x.name for x in sass.parse(ending + filling)] == [end.partition(".")[0]]
    # what runs, or what something goes to, is code
    jump = "        /*0000*/              @!P1 BRA `(.L_x_2) ;\n"
    assert len(sass.parse(jump + ending + trap + nops)) == 12
    guarded = ending.replace("                   " + end, "              @!P1 " + end)
    assert len(sass.parse(guarded + nops)) == 10
    assert len(sass.parse(nops)) == 9


def test_counts_by_hand():
    (outer, inner), rest = sass.regions(NESTED)
    assert inner.counts.mma_macs == 16 * 8 * 32
    assert inner.counts.mma == {"QMMA.16832.F32.E4M3.E4M3": 1}
    assert (inner.counts.loads, inner.counts.copies) == ({16: 1, 8: 1}, 1)
    assert inner.counts.load_bytes == 32 * 24
    assert inner.counts.slots == 4
    assert (outer.counts.loads, outer.counts.store_bytes) == ({1: 1}, 32 * 16)
    assert (outer.counts.mma_macs, outer.counts.simd_macs, outer.counts.copies) == (0, 32, 0)
    assert rest.counts.simd_macs == 32


def test_a_loop_of_little_is_not_significant():
    many = "\n".join(f"        /*{i:04x}*/                   FADD R1, R2, R3 ;" for i in range(200))
    text = f"""
.L_x_0:
{many}
        /*1000*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*1010*/                   IADD3 R1, R2, R3, R4 ;
        /*1020*/               @P0 BRA `(.L_x_1) ;
        /*1030*/                   EXIT ;
"""
    (only,), rest = sass.regions(text)
    assert only.counts.opcodes["FADD"] == 200
    assert only.why == ("slots",)
    assert rest.counts.opcodes == {"IADD3": 1, "BRA": 1, "EXIT": 1}


@pytest.mark.parametrize(
    ("opcode", "macs"),
    [
        ("HMMA.16816.F32.BF16", 2048), ("HMMA.1688.F32.TF32", 1024), ("HMMA.1684.F32.TF32", 512),
        ("QMMA.16832.F32.E4M3.E4M3", 4096), ("IMMA.16816.S8.S8", 2048),
        ("HGMMA.64x128x16.F32.BF16", 16 * 128 * 16), ("QGMMA.64x64x32.F32.E4M3.E4M3", 16 * 64 * 32),
    ],
)  # fmt: skip
def test_multiply_adds_of_a_matrix_instruction(opcode, macs):
    assert sass.mma_macs(opcode) == macs


def test_a_matrix_instruction_of_unknown_shape_is_refused():
    with pytest.raises(ValueError, match=r"opcode is 'HMMA\.NEW', expected a matrix instruction"):
        sass.regions(NESTED.replace("QMMA.16832.F32.E4M3.E4M3", "HMMA.NEW"))


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E.128.CONSTANT", 16), ("LDG.E.64", 8), ("LDG.E", 4), ("LDG.E.U16", 2),
        ("LDG.E.S8", 1), ("LDGSTS.E.BYPASS.LTC128B.128", 16), ("STS", 4),
    ],
)  # fmt: skip
def test_bytes_of_a_lane(opcode, width):
    assert sass.lane_bytes(opcode) == width


def test_an_empty_kernel_has_no_loop():
    regions, rest = sass.regions("")
    assert regions == ()
    assert rest.counts.slots == 0
    assert find_loops([]) == []


def _random_program(source: random.Random) -> list[sass.Instruction]:
    size = source.randint(3, 40)
    code = []
    for place in range(size):
        kind = source.random()
        jump = source.randrange(size) if kind < 0.35 else None
        # the other reader takes a jump onto itself for the cycle around it; compilers make none
        jump = None if jump == place else jump
        ends = (jump is not None and kind < 0.08) or (jump is None and kind > 0.97)
        code.append(sass.Instruction("BRA" if jump is not None else "NOP", jump, ends))
    return code


def _for_the_tool(tool, code):
    """The same program in the tool's form: addresses instead of places."""
    told = []
    for place, x in enumerate(code):
        text, op = "", "FADD"
        if x.jump is not None:
            op, text = "BRA", hex(16 * x.jump) if x.ends else f"P0, {hex(16 * x.jump)}"
        elif x.ends:
            op = "EXIT"
        told.append(tool.Ins(16 * place, op, text, None if x.ends else "P0"))
    return told


def test_loops_are_those_of_the_other_reader(tool):
    source, sizes = random.Random(7), Counter()
    for _ in range(400):
        code = _random_program(source)
        mine, theirs = find_loops(code), tool.loops(_for_the_tool(tool, code))
        assert sorted(map(sorted, mine)) == sorted(map(sorted, theirs)), code
        assert mine == sorted(mine, key=lambda body: (min(body), -len(body)))
        sizes[len(mine)] += 1
    assert len(sizes) > 5
    assert max(sizes) > 5
