"""Every op's kernels compile for sm_89 within its shared memory and without spills."""

from __future__ import annotations

import pytest

from ftkernels import backend
from ftkernels.offline import compile_launches
from ftkernels.spec import Case, KernelSpec, registry

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
SHARED_BYTES = 101376  # of a block on sm_89, by the vendor's table

CASES = [
    pytest.param(spec, case, id=f"{spec.name}-{case.get('name', index)}")
    for spec in registry()
    if spec.kernel
    for index, case in enumerate(spec.cases)
]


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_compiles(spec: KernelSpec, case: Case) -> None:
    compiled = compile_launches(spec, case, arch=89)
    assert len(compiled) == spec.launches(case)
    for report in (x.launch.report for x in compiled):
        assert report.fits
        assert report.shared <= SHARED_BYTES, report
        assert report.spill_bytes == 0, report
