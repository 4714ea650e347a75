"""Every op's kernels compile for sm_89 within its shared memory; pinned Triton: without spills.

Other versions allocate registers otherwise: there a kernel may spill a few, and it says so.
"""

from __future__ import annotations

import pytest
import triton

from ftkernels import backend, config, target
from ftkernels.offline import compile_launches
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


def _check_configs(spec: KernelSpec, found: config.Found) -> None:
    """Whatever the tuner may store, and the default, has values that the store takes."""
    tried = list(spec.candidates(found.key, target.of_arch(89)))
    assert len(set(tried)) == len(tried)
    for record in (found.config, *tried):
        assert type(record) is type(found.config)
        for name, value in vars(record).items():
            assert config._legal(name, value, type(value)), f"{spec.name}: {record}"
