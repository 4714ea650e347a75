"""The static model against its own formulas in plain Python, on hand-written machine code.

Mutants run, each noticed: another rate of a pipe (8-bit products at the 16-bit rate, integer
multiplies as fast as fp32, special functions as fast as logic), a loop inside a loop counted
twice, passes one too many, unrolled passes counted again, spilled words free, waves without the
last one or without what is resident, a block that never waits, DRAM charged with what is asked for,
the terms of a launch added up, a wait that bounds where blocks hide it or that bounds nothing, the
largest loop's ceiling for the kernel's, refusals dropped, a ceiling of bytes that
nobody asks for.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from autotune import pipes, static
from autotune.passes import passes_of
from ftkernels.offline import Compiled
from ftkernels.spec import KernelSpec
from ftkernels.target import of_arch
from ftkernels.testing import sass
from ftkernels.testing.aot import Launch
from ftkernels.testing.report import Report
from ftkernels.work import Loop, Work, either, even_loop

CARD = of_arch(89)
BF16, FP8 = "HMMA.16816.F32.BF16", "QMMA.16832.F32.E4M3.E4M3"


def text(*parts: object) -> str:
    """Machine code: opcodes by number, and loops as lists of the same."""
    lines: list[str] = []

    def put(things):
        for thing in things:
            if isinstance(thing, list):
                label = f".L_x_{len(lines)}"
                lines.append(f"{label}:")
                put(thing)
                lines.append(f"        /*{len(lines):04x}*/               @P0 BRA `({label}) ;")
            else:
                opcode, number = thing
                for _ in range(number):
                    lines.append(f"        /*{len(lines):04x}*/                   {opcode} R1 ;")

    put(parts)
    return "\n".join([*lines, f"        /*{len(lines):04x}*/                   EXIT ;"])


def compiled(code: str, *, grid=(128, 1, 1), warps=4, stages=3, regs=64, shared=1024, spills=0):
    report = Report("k", 89, warps, stages, shared, regs, 0, 0.0)
    vars(report)["sass"], vars(report)["spill_bytes"] = code, spills
    return Compiled(Launch("k", grid, {}, report), None)


def spec(work=None, useful_bytes=0):
    def op():
        raise NotImplementedError

    return KernelSpec(
        op=op, reference=op, cases=(), inputs=lambda case: ((), {}),
        bytes_moved=lambda case: useful_bytes, work=lambda case, kernel, config: work,
    )  # fmt: skip


def figures(code: str, work=None, useful_bytes=0, **launch):
    (found,) = static.figures(spec(work, useful_bytes), {}, [compiled(code, **launch)])
    return found


# what an SM does in a clock, from the vendor's table of arithmetic throughput for capability 8.9
PER_CLOCK = {"FFMA": 128, "IADD3": 64, "LOP3.LUT": 64, "IMAD": 64, "MUFU.EX2": 16, "F2I": 16,
             "LDS": 32, "SHFL.IDX": 32, "LDL": 32, "STL": 32}  # fmt: skip
PIPES = {"FFMA": "fma", "IMAD": "fma", "IADD3": "alu", "LOP3.LUT": "alu", "MUFU.EX2": "special",
         "F2I": "special", "LDS": "memory", "SHFL.IDX": "memory", "LDL": "memory",
         "STL": "memory"}  # fmt: skip


@pytest.mark.parametrize("opcode", PER_CLOCK)
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_cycles_of_a_pipe(opcode, warps):
    counts = sass.regions(text((opcode, 10)))[1].counts
    found = pipes.cycles(counts, warps, CARD)
    assert found[PIPES[opcode]] == pytest.approx(10 * warps * 32 / PER_CLOCK[opcode])
    assert found["issue"] == pytest.approx(11 * warps / 4)  # the last instruction is the end
    assert sum(value for name, value in found.items() if name not in (PIPES[opcode], "issue")) == 0


@pytest.mark.parametrize(
    ("opcode", "bytes_"),
    [
        ("LDG.E.128", 16), ("LDG.E.64", 8), ("LDG.E.U8", 4), ("STS.128", 16),
        ("LDSM.16.M88.4", 16), ("LDSM.16.MT88.2", 8), ("LDSM.16.M88", 4),
    ],
)  # fmt: skip
def test_wide_accesses_take_longer(opcode, bytes_):
    counts = sass.regions(text((opcode, 3)))[1].counts
    assert pipes.cycles(counts, 4, CARD)["memory"] == 3 * 4 * bytes_ / 4


@pytest.mark.parametrize(
    ("opcode", "tflops"),
    [(BF16, 165.0), (FP8, 330.0), ("HMMA.1688.F32.TF32", 82.5)],
)
def test_matrix_instructions_reach_the_peak_and_no_more(opcode, tflops):
    """16x8x16 and so on: at the card's peak when all four sub-cores do nothing else."""
    rows, columns, depth = {"16816": (16, 8, 16), "16832": (16, 8, 32), "1688.": (16, 8, 8)}[
        opcode.split(".", 1)[1][:5]
    ]
    macs = 4 * 10 * rows * columns * depth
    found = figures(text([(opcode, 10)]), Work(128, (Loop(100, macs, macs),)))
    assert found.ceiling_tflops == pytest.approx(tflops)
    assert found.bound == "tensor"
    assert found.mma == opcode


def test_two_loops_weigh_by_their_passes():
    """Useful work over the cycles of what bounds each loop; the rest only in the block's."""
    code = text((("FFMA"), 50), [(BF16, 10)], [(BF16, 5), ("MUFU.EX2", 100)])
    macs = 4 * 2048
    work = Work(128, (Loop(8, 10 * macs, 10 * macs), Loop(24, 2.5 * macs, 5 * macs)))
    found = figures(code, work)
    tensor = 2048 / (165e12 / 2 / 128 / 2.52e9 / 4)  # cycles of an instruction on a sub-core
    first, second = 10 * tensor, 100 * 8
    assert second > 5 * tensor
    useful = 8 * 10 * macs + 24 * 2.5 * macs
    cycles = 8 * first + 24 * second
    rate = 2 * 128 * 2.52e9 / 1e12
    assert found.ceiling_tflops == pytest.approx(rate * useful / cycles)
    assert found.block_tflops == pytest.approx(rate * useful / (cycles + 51))
    slots = 4 * (8 * 11 + 24 * 106)
    assert found.issue_per_kmac == pytest.approx(1024 * slots / useful)
    assert found.issue_per_filled_kmac == pytest.approx(1024 * slots / (macs * (80 + 120)))
    assert [x.passes for x in found.loops] == [8, 24]
    assert [x.bound for x in found.loops] == ["tensor", "special"]
    assert found.bound == "special"


def test_an_inner_loop_counts_once():
    code = text([("IADD3", 7), [(BF16, 3)]])
    macs = 3 * 4 * 2048
    found = figures(code, Work(128, (Loop(6, macs, macs),)))
    outer, inner = found.loops
    assert (outer.passes, inner.passes) == (1, 6)
    assert (outer.slots, inner.slots) == (4 * 8, 4 * 4)
    assert outer.mma_macs == 0


def test_an_unrolled_loop_runs_less_often():
    """The source's tile is a quarter of what a pass of the machine code does."""
    tile = 4 * 2048
    found = figures(text([(BF16, 4)], [(BF16, 1)]), Work(128, (Loop(32, tile, tile),)))
    assert [x.passes for x in found.loops] == [0, 32]
    found = figures(text([(BF16, 4)]), Work(128, (Loop(32, tile, tile),)))
    assert [x.passes for x in found.loops] == [8]
    assert found.loops[0].useful_macs == 4 * tile
    assert found.issue_per_kmac == pytest.approx(1024 * 4 * 5 / (4 * tile))


def test_a_loop_that_is_gone_is_in_the_rest():
    tile = 4 * 2048
    found = figures(text((BF16, 6)), Work(128, (Loop(6, tile / 2, tile),)))
    assert found.loops == ()
    assert found.rest.useful_macs == 3 * tile
    assert found.ceiling_tflops == found.block_tflops
    assert found.issue_per_kmac == pytest.approx(1024 * 4 * 7 / (3 * tile))


def test_useful_work_beyond_the_instructions_is_refused():
    macs = 10 * 4 * 2048
    sentence = (
        r"^static model: useful work of k is 163840 multiply-adds a pass, expected at most the "
        r"81920 that its instructions do$"
    )
    with pytest.raises(ValueError, match=sentence):
        figures(text([(BF16, 10)]), Work(128, (Loop(4, 2 * macs, macs),)))
    with pytest.raises(ValueError, match="useful work of k is"):
        figures(text((BF16, 10)), Work(128, (Loop(1, macs + 1, 0),)))
    assert figures(text([(BF16, 10)]), Work(128, (Loop(4, macs, macs),))).us > 0


def test_products_without_an_account_are_refused():
    with pytest.raises(ValueError, match=r"^static model: work of k is None, expected its loops"):
        figures(text([(BF16, 1)]))
    assert figures(text([("FADD", 1)])).ceiling_tflops is None


def test_products_one_by_one():
    """A kernel without matrix instructions does its products by fused multiply-adds."""
    tile = 64 * 32 * 4
    found = figures(text([("FFMA", 64), ("IADD3", 9)]), Work(128, (Loop(16, tile, tile),)))
    assert found.mma is None
    assert found.loops[0].passes == 16
    assert found.issue_per_kmac == pytest.approx(1024 * 4 * 74 / tile)


def test_loops_without_products_move_the_useful_bytes():
    loop = [("LDG.E.128", 1), ("STG.E.64", 1)]
    per_pass = 4 * 32 * (16 + 8)
    found = figures(text(loop), useful_bytes=128 * per_pass * 10)
    assert found.loops[0].passes == pytest.approx(10)
    assert found.load_bytes == pytest.approx(128 * 10 * 4 * 32 * 16)
    assert found.wide_share == 1
    assert figures(text(loop), useful_bytes=1).loops[0].passes == 1


@pytest.mark.parametrize("products", [40, 10], ids=["busy", "waiting"])
def test_the_cost_is_its_largest_term(products):
    """Waves, DRAM and L2 in plain Python; 100 registers and 8 warps leave two blocks an SM."""
    code = text([("LDG.E.128", 4), (BF16, products)])
    macs, passes, blocks, useful = products * 8 * 2048, 50, 600, 10_000_000
    work = Work(blocks, (Loop(passes, macs, macs),))
    found = figures(code, work, useful, grid=(700, 1, 1), warps=8, regs=100, stages=1)
    assert found.blocks_per_sm == 2
    tensor = products * 2 * 2048 / (165e12 / 2 / 128 / 2.52e9 / 4)
    held = passes * tensor + 1 * 2
    waiting = passes * max(tensor, 2 * (products + 5), 600 * 2.52) + 2
    assert (2 * held < waiting) == (products == 10)
    full, left = divmod(blocks, 2 * 128)
    cycles = full * max(2 * held, waiting) + max(math.ceil(left / 128) * held, waiting)
    assert found.chip_us == pytest.approx(cycles / 2.52e3)
    assert found.dram_us == pytest.approx(useful / 1008e3)
    assert found.l2_us == pytest.approx(blocks * passes * 8 * 32 * 64 / 5000e3)
    assert found.us == max(found.chip_us, found.dram_us, found.l2_us)
    assert static.score(spec(work, useful), {}, [compiled(code)] * 2) > 0


def test_a_block_alone_issues_every_second_cycle():
    """One warp an SM: 101 instructions take 202 cycles, however idle the pipes are."""
    found = figures(text(("FADD", 100)), grid=(3, 1, 1), warps=1)
    assert found.chip_us == pytest.approx(202 / 2.52e3)


@pytest.mark.parametrize(
    ("blocks", "adds", "bound"),
    [(3, 100, "latency"), (3, 2000, "issue"), (128 * 24 * 3, 300, "special")],
    ids=["a load is what takes long", "so are instructions", "blocks hide each other's loads"],
)
def test_a_launch_without_products_is_bound_by_what_takes_most_of_it(blocks, adds, bound):
    """A load takes 1512 cycles, an instruction of a warp alone 2, one of 24 blocks' MUFU 2."""
    found = figures(text(("LDG.E.128", 1), ("MUFU.EX2", adds)), grid=(blocks, 1, 1), warps=1)
    assert found.bound == bound
    cycles = {"latency": 1512, "issue": 2 * (adds + 2), "special": 3 * 24 * 2 * adds}[bound]
    assert found.us == pytest.approx(cycles / 2.52e3)


def test_products_name_their_pipe_where_loads_take_longer():
    found = figures(text([("LDG.E.128", 1), (BF16, 1)]), Work(1, (Loop(9, 2048, 2048),)), warps=1)
    assert (found.bound, found.us) == ("tensor", found.chip_us)


@pytest.mark.parametrize(
    ("load", "stages", "under_way"),
    [("LDG.E.128", 4, 1), ("LDGSTS.E.128", 1, 1), ("LDGSTS.E.128", 2, 1), ("LDGSTS.E.128", 4, 3)],
)
def test_asynchronous_copies_of_later_stages_are_under_way(load, stages, under_way):
    code, macs = text([(load, 1), (BF16, 1)]), 2048
    found = figures(code, Work(1, (Loop(50, macs, macs),)), warps=1, stages=stages)
    assert found.chip_us == pytest.approx((50 * 600 * 2.52 / under_way + 2) / 2.52e3)


def test_more_is_never_cheaper():
    code = text([("LDG.E.128", 4), (BF16, 8)])

    def us(blocks=300, passes=20, useful=1_000_000, text_=code, **launch):
        work = Work(blocks, (Loop(passes, 8 * 4 * 2048, 0),))
        return static.score(spec(work, useful), {}, [compiled(text_, **launch)])

    base = us()
    assert us(blocks=3000) > us(blocks=1000) >= base
    assert us(passes=40) > base
    assert us(useful=10**9) > base
    assert us(stages=1) >= us(stages=3)
    assert us(regs=255) >= base
    slower = text([("LDG.E.128", 4), (BF16, 8), ("LDL", 900), ("STL", 900)])
    assert us(text_=slower) > base
    assert us() == base


def test_what_does_not_fit_costs_more_than_anything():
    code, work = text([(BF16, 1)]), Work(128, (Loop(1, 1, 0),))
    assert static.score(spec(work), {}, [compiled(code, shared=150_000)]) == math.inf


def test_even_an_empty_launch_costs_something():
    assert 0 < static.score(spec(), {}, [compiled(text(), grid=(1, 1, 1))]) < 1


def test_bytes_of_an_op_are_shared_out_by_what_launches_ask_for():
    small, large = text(("LDG.E.128", 1)), text(("LDG.E.128", 3))
    both = [compiled(small), compiled(large)]
    found = static.figures(spec(useful_bytes=8000), {}, both)
    assert [x.useful_bytes for x in found] == [2000, 6000]
    assert static.score(spec(useful_bytes=8000), {}, both) == sum(x.us for x in found)


def test_a_ceiling_counts_no_bytes_that_the_launch_does_not_ask_for():
    asked = 128 * 4 * 32 * (16 + 8)
    code = text(("LDG.E.128", 1), ("STG.E.64", 1))
    half, all_, more = (figures(code, useful_bytes=x * asked // 2) for x in (1, 2, 20))
    assert all_.ceiling_gb_per_s == pytest.approx(2 * half.ceiling_gb_per_s)
    assert more.ceiling_gb_per_s == all_.ceiling_gb_per_s


def test_two_kinds_of_block():
    first, second = Work(300, (Loop(4, 10, 16),)), Work(100, (Loop(8, 5, 8), Loop(1, 2)))
    both = either(first, second)
    assert both.blocks == 400
    assert [x.passes for x in both.loops] == [3, 2, 0.25]
    assert both.macs == first.macs + second.macs
    assert either(first, None) == first
    assert even_loop(1200, 10, 4, 32) == Loop(4, 30.0, 32)
    assert even_loop(0, 10, 0) == Loop(0, 0.0, 0)


def test_passes_need_no_compiler():
    regions, rest = sass.regions(text([(FP8, 2)], [(FP8, 2)]))
    found = passes_of("k", 4, regions, rest, Work(1, (Loop(3, 10), Loop(5, 20))), 0.0)
    assert [(x.count, x.macs) for x in found] == [(3, 10), (5, 20), (1.0, 0)]


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_peaks_of_every_card(arch):
    """Of one SM in one clock, from the card's own peak: a power of two of multiply-adds."""
    card = of_arch(arch)
    for tflops in (card.bf16_tflops, card.fp8_tflops):
        exact = math.log2(pipes.macs_per_cycle(tflops, card))
        assert abs(exact - round(exact)) < 0.01
    instruction = BF16 if arch != 90 else "HGMMA.64x128x16.F32.BF16"
    cycles = pipes.mma_cycles(instruction, card)
    rate = 4 * sass.mma_macs(instruction) / cycles
    assert pipes.tflops(rate, 1.0, card) == pytest.approx(card.bf16_tflops)


def test_figures_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        figures(text()).us = 1.0
