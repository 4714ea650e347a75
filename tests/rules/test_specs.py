"""No op without its reference, its registration, its words, its test and its cases.

Mutants tried: an op registered twice, a reference with another default, a docstring without Raises,
inputs that ignore `device`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import ftkernels
from ftkernels.spec import Case, KernelSpec
from ftkernels.testing import assert_close, nan_poison

TESTS = Path(__file__).parents[1] / "ftkernels"
OPS = (
    "quantize_fp8", "quantize_fp4", "dequantize_fp8", "dequantize_fp4", "quant_round_trip",
    "pack_fp4", "unpack_fp4", "hadamard", "rms_norm", "rope_tables", "apply_rope",
    "embed", "linear", "fp8_linear", "grouped_linear", "mixed_linear",
    "route_topk", "route_hash", "gate_topk", "gate_hash", "moe_align", "moe_gemm_fp4",
    "moe_gemv_fp4", "swiglu_clamp", "moe_combine", "moe_fp4", "count_missing",
    "store_kv", "load_kv", "compress_kv", "append_kv", "index_query", "index_select",
    "load_carry", "mla_prefill", "mla_decode", "merge_splits",
    "hc_pre", "hc_post", "hc_post_pre", "hc_head", "sample", "top_logprobs",
)  # fmt: skip
# ops whose kernels are written; the others run their reference on every device
KERNELS = {
    "quantize_fp8", "quantize_fp4", "dequantize_fp8", "dequantize_fp4", "quant_round_trip",
    "hadamard", "rms_norm", "apply_rope", "embed", "route_topk", "route_hash", "moe_align",
    "moe_gemm_fp4", "moe_gemv_fp4", "moe_fp4", "count_missing",
    "linear", "fp8_linear", "grouped_linear", "mixed_linear", "gate_topk", "gate_hash",
    "store_kv", "load_kv", "compress_kv", "append_kv", "index_query", "index_select",
    "load_carry", "mla_prefill", "mla_decode", "merge_splits", "swiglu_clamp", "moe_combine",
    "hc_pre", "hc_post", "hc_post_pre", "hc_head",
    "sample", "top_logprobs",
}  # fmt: skip
SPECS = {spec.name: spec for spec in ftkernels.registry()}
each_op = pytest.mark.parametrize("name", OPS)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_op
def test_op_and_reference_are_exported(name):
    for public in (name, f"{name}_reference"):
        assert callable(getattr(ftkernels, public, None)), f"ftkernels.{public} is missing"
        assert public in ftkernels.__all__


@each_op
def test_reference_has_the_signature_of_the_op(name):
    op = inspect.signature(getattr(ftkernels, name))
    reference = inspect.signature(getattr(ftkernels, f"{name}_reference"))
    kept = [p for p in op.parameters.values() if p.name != "scratch"]
    assert list(reference.parameters.values()) == kept
    assert reference.return_annotation == op.return_annotation
    for parameter in op.parameters.values():
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert parameter.annotation is not parameter.empty


@each_op
def test_op_is_registered_once(name):
    counts = Counter(spec.name for spec in ftkernels.registry())
    assert counts[name] == 1
    assert SPECS[name].op is getattr(ftkernels, name)
    assert SPECS[name].reference is getattr(ftkernels, f"{name}_reference")


def test_every_registered_op_is_exported():
    assert {name for name in SPECS if getattr(ftkernels, name, None) is None} == set()
    assert set(OPS) <= set(SPECS)


@each_op
def test_docstring_says_what_goes_in_comes_out_and_is_refused(name):
    op = getattr(ftkernels, name)
    text = inspect.getdoc(op) or ""
    sections = ["Args:", "Returns:", "Raises:"]
    if inspect.signature(op).return_annotation in (None, "None"):
        sections.remove("Returns:")
    for section in sections:
        assert f"\n{section}" in text, f"{name}: docstring without {section}"
    first = next(iter(inspect.signature(op).parameters))
    assert re.search(rf"\b{first}\b.*:", text), f"{name}: {first} is not described"


@each_op
def test_a_test_names_the_op(name):
    word = re.compile(rf"\b{name}\b")
    assert any(word.search(path.read_text()) for path in TESTS.rglob("test_*.py")), name


@each_spec
def test_cases_are_named_and_sized(spec):
    assert len(spec.cases) >= 2
    names = [case.get("name", index) for index, case in enumerate(spec.cases)]
    assert len(set(names)) == len(names)
    for case in spec.cases:
        assert spec.bytes_moved(case) > 0
        assert spec.flops(case) >= 0
        assert spec.launches(case) >= 0


@each_op
def test_kernels_are_marked(name):
    assert SPECS[name].kernel == (name in KERNELS)
    assert (SPECS[name].default is not None) == (name in KERNELS)


def _tensors(spec: KernelSpec, case: Case, device: str) -> list[torch.Tensor]:
    with nan_poison():  # what a builder leaves unwritten is the same twice
        args, kwargs = spec.inputs(case, device=device, seed=0)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _num_bytes(spec: KernelSpec, case: Case) -> int:
    return sum(math.prod(x.shape) * x.element_size() for x in _tensors(spec, case, "meta"))


@each_spec
def test_inputs_are_built_alike_on_cpu_and_meta(spec):
    for case in spec.cases:
        assert all(x.is_meta for x in _tensors(spec, case, "meta")), case
    smallest = min(spec.cases, key=lambda case: _num_bytes(spec, case))
    real, meta = (_tensors(spec, smallest, device) for device in ("cpu", "meta"))
    assert [(x.shape, x.dtype, x.stride()) for x in real] == [
        (x.shape, x.dtype, x.stride()) for x in meta
    ]
    assert all(x.device.type == "cpu" for x in real)
    for mine, again in zip(real, _tensors(spec, smallest, "cpu"), strict=True):
        assert_close(mine, again)


@each_spec
def test_the_op_takes_its_own_inputs(spec):
    """The smallest case runs, and changes and returns what the reference does."""
    smallest = min(spec.cases, key=lambda case: _num_bytes(spec, case))
    results = []
    for function in (spec.op, spec.reference):
        with nan_poison():
            args, kwargs = spec.inputs(smallest, device="cpu", seed=0)
        result = function(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves((result, args, kwargs))
        results.append([x for x in leaves if isinstance(x, torch.Tensor)])
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs, row_tol=spec.tolerance if mine.is_floating_point() else 0.0)
