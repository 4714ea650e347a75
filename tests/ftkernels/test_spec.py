"""The registry and what it says of an op; rules over all ops stand in tests/rules/test_specs.py."""

from __future__ import annotations

import dataclasses

import pytest

import ftkernels
from ftkernels import spec


def test_registry_is_one_tuple_of_ops():
    specs = ftkernels.registry()
    assert specs is ftkernels.registry()
    assert isinstance(specs, tuple)
    assert all(isinstance(x, ftkernels.KernelSpec) for x in specs)
    assert {"rms_norm", "moe_fp4", "mla_prefill", "sample"} <= {x.name for x in specs}


def test_a_spec_is_frozen_and_named_after_its_op():
    found = next(x for x in ftkernels.registry() if x.name == "rms_norm")
    assert found.op is ftkernels.rms_norm
    assert found.reference is ftkernels.rms_norm_reference
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.tolerance = 1.0  # type: ignore[misc]


def test_defaults_claim_nothing():
    bare = spec.KernelSpec(
        op=len, reference=len, cases=({"T": 1},), inputs=lambda case, *, device, seed: ((), {}),
        bytes_moved=lambda case: 8,
    )  # fmt: skip
    assert bare.flops({"T": 1}) == 0
    assert bare.launches({"T": 1}) == 1
    assert list(bare.candidates({"T": 1}, None)) == []  # type: ignore[arg-type]
    assert (bare.default, bare.scratch, bare.grows, bare.kernel) == (None, None, "", True)


def test_scratch_bytes_asks_the_spec(monkeypatch):
    with_scratch = spec.KernelSpec(
        op=len, reference=len, cases=(), inputs=lambda case, *, device, seed: ((), {}),
        bytes_moved=lambda case: 0, scratch=lambda *, T, splits: T * splits * 16,
    )  # fmt: skip
    monkeypatch.setattr(spec, "registry", lambda: (with_scratch,))
    assert spec.scratch_bytes("len", T=3, splits=2) == 96


def test_scratch_bytes_refuses_by_name():
    with pytest.raises(ValueError, match="scratch_bytes: op is 'no_such', expected the name of"):
        ftkernels.scratch_bytes("no_such", T=1)
    with pytest.raises(ValueError, match="op is 'rms_norm', expected an op that takes scratch"):
        ftkernels.scratch_bytes("rms_norm", T=1)
