"""Every op's kernels compile for sm_89 within its shared memory and without spills."""

from __future__ import annotations

import os

import pytest

import ftkernels.spec
from ftkernels.offline import compile_for

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="offline compiles need another process"
)

CASES = [
    pytest.param(spec, case, id=f"{spec.name}-{case.get('name', index)}")
    for spec in ftkernels.spec.registry()
    if spec.kernel
    for index, case in enumerate(spec.cases)
]


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_compiles(spec, case):
    rows = compile_for(spec, case, arch=89)
    assert len(rows) == spec.launches(case)
    for row in rows:
        assert row["shared_bytes"] <= 101376, row
        assert row["fits"]
        assert row["spill_bytes"] == 0, row
