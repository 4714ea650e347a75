"""Every op's kernels compile for sm_89 within its shared memory; pinned Triton: without spills.

On the pinned version the model's own cases are held to the committed figures of
bench_kernels/contract.json and to the floors below, on the same compiles; the figures are a static
model of the machine code. Other versions allocate registers otherwise: there a kernel may spill a
few, and it says so.

Mutants run, each noticed: a floor compared the other way, a missed floor that is met since, half
the useful work, a case without committed figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import triton

from autotune import contract
from autotune.inspect import LaunchRow, launch_rows
from ftkernels import backend, config, target
from ftkernels.offline import Compiled, compile_launches
from ftkernels.spec import Case, KernelSpec, registry

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
PINNED = "3.7."
FEW_BYTES = 320  # of a thread, stores and loads together
SHARED_BYTES = 101376  # of a block on sm_89, by the vendor's table

SPECS = {spec.name: spec for spec in registry()}
CASES = [
    pytest.param(spec, case, id=f"{spec.name}-{case.get('name', index)}")
    for spec in registry()
    if spec.kernel
    for index, case in enumerate(spec.cases)
]


@dataclass(frozen=True)
class Floor:
    """What a kernel must reach: least TFLOP/s, most issue slots for 1024 multiply-adds.

    ``filled``: of all multiply-adds that are issued, for a case whose tiles are not full.
    """

    op: str
    cases: str
    tflops: float
    slots: float
    blocks_per_sm: int = 1
    filled: bool = False


ABOVE = 1.1  # issue slots were set on a later compiler
FLOORS = (
    Floor("mla_prefill", r"flash-tp8-(swa|hca)", 140, 6),
    Floor("mla_prefill", r"flash-tp8-csa", 135, 7, blocks_per_sm=2),
    Floor("mla_prefill", r"flash-tp1-(swa|hca|csa)", 160, 7),
    Floor("mla_prefill", r"flash-tp8-(hca|csa)-fp8", 90, 14),
    Floor("mla_prefill", r"flash-tp1-csa-fp8", 140, 13),
    Floor("mla_decode", r"flash-tp8-(swa|hca|csa)(-raw)?", 130, 8),
    Floor("moe_gemm_fp4", r"flash-tp\d(-w2)?-m64", 320, 2.5),
    Floor("moe_gemm_fp4", r"flash-tp\d(-w2)?-bytes-m64", 320, 3.5),
    Floor("moe_gemm_fp4", r"flash-tp\d(-w2)?-m32", 320, 3.2),
    Floor("moe_gemm_fp4", r"flash-tp\d(-w2)?-m16", 320, 5.2),
    Floor("moe_gemv_fp4", r"flash-tp\d(-w2)?-t1", 0, 76),
    Floor("moe_gemv_fp4", r"flash-tp\d(-w2)?-t8", 0, 10, filled=True),
    Floor("fp8_linear", r"flash-tp\d-(\w+-)?t3456", 325, 1.4),
    Floor("fp8_linear", r"flash-tp\d-(\w+-)?t1", 0, 80),
    Floor("fp8_linear", r"flash-tp\d-(\w+-)?t8", 0, 10),
    Floor("index_select", r"flash-c4096(-fp4)?", 320, 2.2),
)
# with the figure; what is met one day has no place here
MISSED = {
    # 27 to 53 compressed rows a query in tiles of 16: of 1024 rows it is 163 and 165
    ("mla_prefill", "flash-tp1-hca"): "158 of 160 TFLOP/s",
    ("mla_prefill", "flash-tp8-hca-fp8"): "87 of 90 TFLOP/s, 16.0 of 15.4 slots",
    # an eighth of a matrix is one tile a block: no loop is left, its prologue and finish count
    ("fp8_linear", "flash-tp8-t1"): "110 of 88 slots",
    ("fp8_linear", "flash-tp8-t8"): "14.5 of 11 slots",
    ("fp8_linear", "flash-tp8-wq_b-t1"): "104 of 88 slots",
    ("fp8_linear", "flash-tp8-wq_b-t8"): "30.7 of 11 slots",
    ("fp8_linear", "flash-tp8-wo_b-t1"): "90 of 88 slots",
    ("fp8_linear", "flash-tp8-wo_b-t8"): "21.1 of 11 slots",
    ("fp8_linear", "flash-tp8-w2-t1"): "94 of 88 slots",
    ("fp8_linear", "flash-tp8-w2-t8"): "41 of 11 slots",
}


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_compiles(spec: KernelSpec, case: Case) -> None:
    compiled = compile_launches(spec, case, arch=89)
    assert len(compiled) == spec.launches(case)
    for report in (x.launch.report for x in compiled):
        assert report.fits
        assert report.shared <= SHARED_BYTES, report
        if triton.__version__.startswith(PINNED):
            assert report.spill_bytes == 0, report
        elif report.spill_bytes:
            print(f"triton {triton.__version__} spills {report.spill_bytes} bytes: {report}")
            assert report.spill_bytes <= FEW_BYTES, report
    for found in (x.found for x in compiled):
        assert found is not None, f"{spec.name} launches without asking for its config"
        _check_configs(SPECS[found.op], found)  # of the op launched, which may be another one
    _check_work(spec, case, compiled)
    if triton.__version__.startswith(PINNED) and contract.is_held(case):
        _check_contract(spec, case, compiled)


def _check_configs(spec: KernelSpec, found: config.Found) -> None:
    """Whatever the tuner may store, and the default, has values that the store takes."""
    tried = list(spec.candidates(found.key, target.of_arch(89)))
    assert len(set(tried)) == len(tried)
    for record in (found.config, *tried):
        assert type(record) is type(found.config)
        for name, value in vars(record).items():
            assert config._legal(name, value, type(value)), f"{spec.name}: {record}"


def _check_work(spec: KernelSpec, case: Case, compiled: list[Compiled]) -> None:
    """The launches' useful multiply-adds are the op's."""
    works = [spec.work(case, x.launch.name, x.launch.config) for x in compiled]
    macs = sum(work.macs for work in works if work is not None)
    assert macs == 0 or macs == pytest.approx(spec.flops(case) / 2)


def _check_contract(spec: KernelSpec, case: Case, compiled: list[Compiled]) -> None:
    rows = launch_rows(spec, case, compiled)
    found = contract.changes(spec.name, case, rows, contract.read().of(spec.name, case))
    failing = [str(change) for change in found if change.fails]
    assert not failing, "\n".join(
        [*failing, contract.way_out(spec.name), contract.ignored([spec])]
    ).rstrip()
    told = (spec.name, case["name"])
    missed = [line for floor in FLOORS for line in misses(floor, spec.name, case, rows)]
    if told in MISSED:
        assert missed, f"{told} reaches its floor ({MISSED[told]} before), expected no entry"
    else:
        assert not missed, "\n".join(missed)


def misses(floor: Floor, op: str, case: Case, rows: list[LaunchRow]) -> list[str]:
    """What the launches with products do not reach, a line each."""
    lines: list[str] = []
    if op != floor.op or not re.fullmatch(floor.cases, case["name"]):
        return lines
    for x in (row.figures for row in rows if row.figures.mma):
        tflops = x.ceiling_tflops or 0.0
        slots = (x.issue_per_filled_kmac if floor.filled else x.issue_per_kmac) or 0.0
        at = f"{op} {case['name']} {x.kernel}"
        if tflops < floor.tflops:
            lines.append(f"{at}: ceiling_tflops is {tflops:.1f}, expected {floor.tflops}")
        if slots > floor.slots * ABOVE:
            most = f"{floor.slots * ABOVE:.2f}"
            lines.append(f"{at}: issue_per_kmac is {slots:.2f}, expected at most {most}")
        if x.blocks_per_sm < floor.blocks_per_sm:
            lines.append(f"{at}: blocks/SM is {x.blocks_per_sm}, expected {floor.blocks_per_sm}")
    return lines
