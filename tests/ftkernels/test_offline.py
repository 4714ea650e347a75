"""What an offline compile of an op says of each launch."""

from __future__ import annotations

import pytest

import ftkernels
from ftkernels import backend, offline
from ftkernels.norm.rms_norm import RmsNormConfig

SPECS = {spec.name: spec for spec in ftkernels.registry()}
KEYS = {
    "kernel", "registers", "spill_bytes", "shared_bytes", "fits", "warps_per_sm", "grid", "sass",
}  # fmt: skip
needs_compiler = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


@needs_compiler
@pytest.mark.parametrize("arch", [89, 90, 120])
def test_one_row_per_launch(arch):
    spec = SPECS["rms_norm"]
    case = {"T": 3, "D": 512, "weight": True, "residual": False}
    (row,) = ftkernels.compile_for(spec, case, arch=arch)
    assert set(row) == KEYS
    assert row["kernel"] == "_rms_norm_kernel"
    assert row["grid"] == (3, 1, 1)
    assert 0 < row["registers"] <= 255
    assert row["fits"]
    assert row["spill_bytes"] == 0
    assert row["warps_per_sm"] in range(1, 65)
    assert any(opcode.startswith("LDG") for opcode in row["sass"])


@needs_compiler
def test_a_config_is_pinned_for_the_compile():
    spec = SPECS["rms_norm"]
    case = {"T": 3, "D": 512, "weight": True, "residual": False}
    wide = RmsNormConfig(block_d=512, num_warps=8)
    (plain,) = offline.compile_launches(spec, case)
    (pinned,) = offline.compile_launches(spec, case, config=wide)
    assert plain.launch.config["num_warps"] == 1
    assert pinned.launch.config["num_warps"] == 8
    assert (plain.found.source, pinned.found.source) == ("default", "pinned")
    assert pinned.found.config is wide
    assert plain.found.key == {"D": 512}


@needs_compiler
def test_an_op_without_kernels_launches_nothing():
    assert ftkernels.compile_for(SPECS["pack_fp4"], SPECS["pack_fp4"].cases[1]) == []


@pytest.mark.skipif(not backend.interpreted(), reason="needs TRITON_INTERPRET=1")
def test_interpreted_processes_are_refused():
    with pytest.raises(RuntimeError, match="compile_for: TRITON_INTERPRET is on, expected a proc"):
        ftkernels.compile_for(SPECS["rms_norm"], SPECS["rms_norm"].cases[0])


def test_unknown_arch_is_refused():
    if backend.interpreted():
        pytest.skip("refused before for another reason")
    with pytest.raises(ValueError, match="arch is 75"):
        ftkernels.compile_for(SPECS["rms_norm"], SPECS["rms_norm"].cases[0], arch=75)
