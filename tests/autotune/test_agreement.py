"""Figures agree with the independent reader in tests/tools on kernels of ours.

The same registers, spills and shared bytes of the same binary, and for every loop the same
instructions, multiply-adds and bytes; cycles differ by the rounding of the card's peaks. The other
reader counts the trap and the NOPs that fill the memory behind the last exit; no warp issues them,
so they are taken off its count of the code outside the loops.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from autotune import static
from ftkernels import backend, registry
from ftkernels.offline import compile_launches

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
TOOL = Path(__file__).parents[1] / "tools" / "sass_report.py"
SPECS = {spec.name: spec for spec in registry()}
PIPES = {"tensor": "tensor", "issue": "issue", "fma": "fma", "alu": "alu",
         "mufu_cvt": "special", "lsu_smem": "memory"}  # fmt: skip


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("sass_report", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("mla_prefill", "flash-tp8-csa"), ("moe_gemm_fp4", "flash-tp8-m64"),
        ("fp8_linear", "flash-tp1-latent-t8"), ("mla_decode", "flash-tp8-hca"),
        ("moe_gemv_fp4", "flash-tp8-t8"), ("index_select", "flash-c4096"),
        ("grouped_linear", "flash-tp8-t8"), ("append_kv", "flash-csa"),
        ("hc_post_pre", "flash-t8"), ("rms_norm", "flash-t3456"), ("count_missing", "flash-t1"),
    ],
)  # fmt: skip
def test_both_readers_agree(op, case, tool):
    spec = SPECS[op]
    (sizes,) = (c for c in spec.cases if c["name"] == case)
    launches = compile_launches(spec, sizes, arch=89)
    found = static.figures(spec, sizes, launches)
    for launch, figures in zip(launches, found, strict=True):
        assert_agree(tool, launch.launch.report, figures)


def without_filling(code):
    """Less the branches onto themselves and NOPs at the end."""
    kept = [place for place, x in enumerate(code) if x.op != "NOP" and x.text != hex(x.addr)]
    assert kept[-1] < len(code) - 1
    return code[: kept[-1] + 1]


def assert_agree(tool, report, figures):
    text, usage = tool.disassemble(report.cubin)
    use = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    code = tool.parse_sass(text)
    spilled = sum(tool.base(x) in ("LDL", "STL") for x in code)
    assert (figures.registers, figures.spill_bytes > 0) == (use["REG"], spilled > 0)
    assert figures.shared_bytes == report.shared
    occupancy = tool.occupancy(use["REG"], report.shared, report.num_warps)
    assert figures.blocks_per_sm == occupancy["blocks_per_sm"]
    big, rest, _ = tool.regions(without_filling(code))
    theirs = [tool.count(part, report.num_warps) for part in (*(own for own, _ in big), rest)]
    for mine, other in zip((*figures.loops, figures.rest), theirs, strict=True):
        assert mine.slots == other["issue_slots_per_block"]
        assert mine.mma_macs == other["mma_macs_issued"]
        assert mine.load_bytes == other["global_load_bytes"]
        assert mine.store_bytes == other["global_store_bytes"]
        for name, cycles in other["cycles"].items():
            assert mine.cycles[PIPES[name]] == pytest.approx(cycles, rel=2e-3)
