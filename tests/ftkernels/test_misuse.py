"""Misuse of any op: outputs over inputs or over each other, broken tables, wrong element types."""

from __future__ import annotations

import inspect

import pytest
import torch

import ftkernels
from ftkernels.testing import nan_poison

SPECS = {spec.name: spec for spec in ftkernels.registry()}
WITH_OUT = [n for n, s in SPECS.items() if "out" in inspect.signature(s.op).parameters]


def call_of(name):
    """Arguments of a small call, by parameter name."""
    spec = SPECS[name]
    with nan_poison():
        args, kwargs = spec.inputs(spec.cases[0], device="cpu", seed=0)
    bound = inspect.signature(spec.op).bind(*args, **kwargs)
    return spec.op, dict(bound.arguments)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def over(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Memory of ``source`` in the form of ``like``, if it is large enough."""
    num_bytes = like.numel() * like.element_size()
    if not source.is_contiguous() or source.numel() * source.element_size() < num_bytes:
        return None
    flat = source.view(-1).view(torch.uint8)[:num_bytes]
    if flat.data_ptr() % like.element_size():
        return None
    return flat.view(like.dtype).view(like.shape)


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_over_an_input_is_refused(name):
    """Except where the contract allows ``out`` to be the first input itself."""
    op, arguments = call_of(name)
    results = as_tuple(op(**arguments))
    tried = 0
    for argument, value in list(arguments.items())[1:]:
        if not isinstance(value, torch.Tensor) or argument in ("residual", "streams"):
            continue
        for place, like in enumerate(results):
            out = over(value, like)
            if out is None or not out.numel():
                continue
            outs = [torch.empty_like(r) for r in results]
            outs[place] = out
            before = value.clone()
            given = outs[0] if len(outs) == 1 else tuple(outs)
            with pytest.raises(ValueError, match="overlapping"):
                op(**arguments, out=given)
            assert torch.equal(value.view(torch.uint8), before.view(torch.uint8))
            tried += 1
    if name in ("fp8_linear", "mla_prefill", "moe_fp4", "route_topk"):
        assert tried or name in ("mla_prefill", "route_topk")


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_rows_on_one_another_are_refused(name):
    op, arguments = call_of(name)
    results = as_tuple(op(**arguments))
    wide = [i for i, r in enumerate(results) if r.ndim > 1 and r.shape[0] > 1]
    for place in wide:
        outs = [torch.empty_like(r) for r in results]
        outs[place] = torch.empty_like(results[place])[:1].expand(results[place].shape)
        with pytest.raises(ValueError, match="do not overlap"):
            op(**arguments, out=outs[0] if len(outs) == 1 else tuple(outs))


@pytest.mark.parametrize("name", [n for n in WITH_OUT if "out_dtype" in
                                  inspect.signature(SPECS[n].op).parameters])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, True, "bf16"], ids=str)
def test_out_dtype_is_a_float_type(name, dtype):
    op, arguments = call_of(name)
    with pytest.raises(TypeError, match="out_dtype is"):
        op(**{**arguments, "out_dtype": dtype})


@pytest.mark.parametrize("name", ["store_kv", "mla_prefill", "mla_decode", "compress_kv"])
@pytest.mark.parametrize("fault", ["one column of sin", "fp64", "bf16", "meta", "too wide", "1-d"])
def test_broken_rope_tables_are_refused(name, fault):
    op, arguments = call_of(name)
    half = 32
    cos, sin = torch.ones(400, half), torch.zeros(400, half)
    if name == "store_kv":
        arguments["positions"] = torch.zeros(len(arguments["kv"]), dtype=torch.int64)
    if fault == "one column of sin":
        sin = sin[:, :1]
    elif fault == "fp64":
        cos, sin = cos.double(), sin.double()
    elif fault == "bf16":
        cos, sin = cos.bfloat16(), sin.bfloat16()
    elif fault == "meta":
        cos, sin = cos.to("meta"), sin.to("meta")
    elif fault == "too wide":
        cos, sin = torch.ones(400, 300), torch.zeros(400, 300)
    else:
        cos, sin = cos[0], sin[0]
    with pytest.raises((TypeError, ValueError), match=f"{name}: (cos|sin) is"):
        op(**{**arguments, "cos": cos, "sin": sin})


@pytest.mark.parametrize("name", ["store_kv", "fp8_linear"])
@pytest.mark.parametrize("weight", [2.0, torch.ones(1), torch.ones(3).double()], ids=str)
def test_broken_norm_weights_are_refused(name, weight):
    op, arguments = call_of(name)
    with pytest.raises((TypeError, ValueError), match=f"{name}: norm_weight is"):
        op(**{**arguments, "norm_weight": weight})


@pytest.mark.parametrize(
    ("name", "argument"),
    [("store_kv", "pool"), ("load_kv", "pool"), ("compress_kv", "pool"),
     ("index_select", "index_k"), ("mla_prefill", "window_kv"), ("mla_decode", "window_kv")],
)  # fmt: skip
def test_pages_without_rows_are_refused(name, argument):
    op, arguments = call_of(name)
    empty = arguments[argument][:, :0]
    with pytest.raises(ValueError, match=f"{argument} is .* expected pages of at least one row"):
        op(**{**arguments, argument: empty})


@pytest.mark.parametrize(
    "name", [n for n, s in SPECS.items() if "scratch" in inspect.signature(s.op).parameters]
)
@pytest.mark.parametrize("scratch", ["x", 3, torch.zeros(9)], ids=str)
def test_scratch_of_the_wrong_form_is_refused(name, scratch):
    op, arguments = call_of(name)
    with pytest.raises(TypeError, match=f"{name}: scratch is"):
        op(**{**arguments, "scratch": scratch})


@pytest.mark.parametrize("name", WITH_OUT)
def test_outputs_over_each_other_are_refused(name):
    op, arguments = call_of(name)
    results = as_tuple(op(**arguments))
    for place in range(1, len(results)):
        outs = [torch.empty_like(r) for r in results]
        for earlier in range(place):
            shared = torch.empty(1 << 20, dtype=torch.uint8)
            pair = [
                shared[: r.numel() * r.element_size()].view(r.dtype).view(r.shape)
                for r in (results[earlier], results[place])
            ]
            given = list(outs)
            given[earlier], given[place] = pair
            with pytest.raises(ValueError, match="overlapping"):
                op(**arguments, out=tuple(given))


@pytest.mark.parametrize("name", [n for n in WITH_OUT if n not in ("mla_prefill", "mla_decode")])
def test_out_of_the_wrong_arity_is_refused(name):
    op, arguments = call_of(name)
    results = as_tuple(op(**arguments))
    if len(results) > 1:
        with pytest.raises((TypeError, ValueError), match=f"{name}: out is .* expected"):
            op(**arguments, out=results[:1])
