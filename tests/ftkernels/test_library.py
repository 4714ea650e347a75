"""`torch.ops.ftkernels`: every op is there, and tracers see of it what it does.

Expectations are the ops' Python signatures, the plain functions' results and torch's own checks.

Mutants tried: `pool`, `residual` or `out` not marked as written, a fake of `embed` without the
repetition, of `index_select` in int64, of `load_kv` with the packed width, a default dropped from
the schemas, results that share storage or are strided, `return_lse=False` let through, `x_scale`
not passed on, `group` always a tuple, keyword-only arguments made positional.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import ftkernels
from ftkernels import backend
from ftkernels.library.results import RESULTS
from ftkernels.library.schema import overloads
from ftkernels.testing import count_launches, randn

ops = torch.ops.ftkernels
ROOT = Path(__file__).parents[2]
SPECS = {spec.name: spec for spec in ftkernels.registry()}
OVERLOADS = {
    f"{name}.{one.name or 'default'}": one for name in SPECS for one in overloads(SPECS[name].op)
}
CHECKED = [x for x in OVERLOADS if x.endswith(".default") or not backend.interpreted()]
WRITTEN = {
    "rms_norm": {"residual"}, "store_kv": {"pool"}, "load_carry": {"state"},
    "compress_kv": {"state", "pool", "carry_snapshots"}, "moe_fp4": {"routed_out"},
    "append_kv": {"window_kv", "state", "cmp_kv", "carry_snapshots"},
}  # fmt: skip
# interpreted kernels are slow, and what tracers see does not depend on sizes
LARGEST_BYTES = 1 << 16 if backend.interpreted() else 1 << 20


def _num_bytes(spec, case):
    tensors = tree_leaves(spec.inputs(case, device="meta", seed=0))
    return sum(math.prod(x.shape) * x.element_size() for x in tensors if torch.is_tensor(x))


SMALL = [
    pytest.param(spec, case, id=f"{spec.name}-{case.get('name', index)}")
    for spec in SPECS.values()
    for index, case in enumerate(spec.cases)
    if case is spec.cases[0] or _num_bytes(spec, case) < LARGEST_BYTES
]


def _inputs(spec, case):
    args, kwargs = spec.inputs(case, device="cpu", seed=0)
    kwargs.pop("quantize", None)  # no operator takes it
    if args and isinstance(args[0], tuple):
        args, kwargs = (args[0][0], *args[1:]), {**kwargs, "x_scale": args[0][1]}
    if spec.name == "rms_norm":
        kwargs = {**kwargs, "residual": randn(*args[0].shape, dtype=args[0].dtype, seed=9)}
    return args, kwargs


def _form(x):
    return x.shape, x.dtype, x.stride(), x.device


def _bits(x):
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _same(mine, theirs):
    mine, theirs = ([x for x in tree_leaves(t) if torch.is_tensor(x)] for t in (mine, theirs))
    assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in theirs]
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(mine, theirs, strict=True))


def _with_outputs(spec, args, kwargs, name):
    """Arguments of another overload than the default one, its outputs unwritten."""
    meta_args, meta_kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    results = getattr(ops, spec.name).default(*meta_args, **meta_kwargs)
    made = [torch.empty_like(x, device="cpu") for x in tree_leaves(results) if x is not None]
    if name == "routed":
        ids, x = args[6], args[0]
        dtype = kwargs.get("out_dtype") or x.dtype
        kwargs = {k: v for k, v in kwargs.items() if k != "shared"}  # nothing is combined
        return {**kwargs, "routed_out": torch.zeros(*ids.shape, x.shape[1], dtype=dtype)}
    if name.startswith("lse"):
        kwargs = {**kwargs, "return_lse": True}
        made.append(torch.empty(made[0].shape[:2], dtype=torch.float32))
    if name.endswith("out"):
        kwargs = {**kwargs, "out": made if len(made) > 1 else made[0]}
    return kwargs


@pytest.mark.parametrize("name", OVERLOADS)
def test_the_schema_is_the_python_signature(name):
    overload = OVERLOADS[name]
    op, which = name.split(".")
    schema = getattr(getattr(ops, op), which)._schema
    parameters = inspect.signature(overload.op).parameters
    names = [argument.name for argument in schema.arguments]
    extra = ["x_scale"] if op == "fp8_linear" else []
    left_out = {
        "default": {"out", "return_lse", "routed_out"}, "out": {"return_lse", "routed_out"},
        "lse": {"out"}, "lse_out": set(), "routed": {"out"},
    }[which]  # fmt: skip
    left_out |= {"quantize"}
    assert names == [n for n in parameters if n not in left_out] + extra
    for argument in schema.arguments:
        parameter = parameters.get(argument.name)
        if parameter is None:
            continue
        assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
        required = argument.name in ("out", "return_lse", "routed_out")
        assert argument.has_default_value() == (
            parameter.default is not parameter.empty and not required
        )
        if argument.has_default_value() and not isinstance(parameter.default, torch.dtype):
            assert argument.default_value in (parameter.default, [parameter.default])
        written = argument.name in {"out", "scratch", *WRITTEN.get(op, ())}
        assert (argument.alias_info is not None and argument.alias_info.is_write) == written
    assert len(schema.returns) == overload.num_results


def test_every_op_is_registered():
    assert RESULTS.keys() == SPECS.keys()
    for name in SPECS:
        assert isinstance(getattr(ops, name).default, torch._ops.OpOverload)


@pytest.mark.parametrize(("spec", "case"), SMALL)
def test_fake_results_have_the_form_of_real_ones(spec, case):
    args, kwargs = _inputs(spec, case)
    op, mode = getattr(ops, spec.name), FakeTensorMode()
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    with mode, count_launches() as launches:
        fake = op(*fake_args, **fake_kwargs)
    assert not launches
    real = op(*args, **kwargs)
    assert [_form(x) for x in tree_leaves(fake) if torch.is_tensor(x)] == [
        _form(x) for x in tree_leaves(real) if torch.is_tensor(x)
    ]
    meta_args, meta_kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    if meta_args:
        meta = op(*meta_args, **meta_kwargs)
        assert all(x.is_meta for x in tree_leaves(meta) if torch.is_tensor(x))


@pytest.mark.parametrize("name", OVERLOADS)
def test_operators_do_what_the_functions_do_and_write_what_they_say(name):
    overload, (op, which) = OVERLOADS[name], name.split(".")
    spec, operator = SPECS[op], getattr(getattr(ops, op), which)
    args, kwargs = _inputs(spec, spec.cases[0])
    kwargs = _with_outputs(spec, args, kwargs, which)
    bound = inspect.signature(overload.op).bind(*args, **kwargs).arguments
    before = {name: tree_map_only(torch.Tensor, torch.clone, x) for name, x in bound.items()}
    result = operator(*args, **kwargs)
    writable = {"out", "scratch", *WRITTEN.get(op, ())}
    for argument, value in bound.items():
        if argument not in writable:
            _same(before[argument], value)
    args, plain = _inputs(spec, spec.cases[0])
    plain = _with_outputs(spec, args, plain, which)
    if isinstance(plain.get("out"), list):
        plain["out"] = tuple(plain["out"])
    expected = overload.op(*args, **plain)
    if which in ("default", "lse"):
        _same(result, expected)
    else:
        assert result is None
        _same(kwargs.get("out", kwargs.get("routed_out")), expected)
    for argument in WRITTEN.get(op, ()):
        if argument in bound:
            again = inspect.signature(overload.op).bind(*args, **plain).arguments
            _same(bound[argument], again[argument])
            assert not torch.equal(_bits(bound[argument]), _bits(before[argument])), argument


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name):
    op, which = name.split(".")
    spec = SPECS[op]
    args, kwargs = _inputs(spec, spec.cases[0])
    kwargs = _with_outputs(spec, args, kwargs, which)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    # torch compares no fp8 values; the test above does
    if not any(x.dtype == torch.float8_e4m3fn for x in tensors):
        checks.append("test_schema")
    torch.library.opcheck(getattr(getattr(ops, op), which), args, kwargs, test_utils=checks)


def _half_layer(x, weight, residual, cos, sin, pool, slots, positions):
    """Several ops in a row, with every way of writing that schemas know."""
    normed = ops.rms_norm(x, weight, residual=residual)
    ops.rms_norm(normed, None, out=normed)
    codes, scale = ops.quantize_fp8(normed)
    back = ops.dequantize_fp8(codes, scale, group=128, dtype=torch.float32)
    pair = (torch.empty_like(codes), torch.empty_like(scale))
    ops.quantize_fp8(ops.hadamard(back), out=pair)
    ops.store_kv(
        back, pool, slots, round_trip=True, norm_weight=weight, positions=positions,
        cos=cos, sin=sin,
    )  # fmt: skip
    rows = ops.load_kv(pool, slots, kv_format="bf16", dtype=torch.float32)
    tables = (torch.arange(3, dtype=torch.int32)[:, None], torch.ones(3, dtype=torch.int32))
    mixed, lse = ops.mla_decode(
        rows[:, None], pool, *tables, softmax_scale=0.1, return_lse=True
    )  # fmt: skip
    return rows, mixed, lse, pair[0].float(), pair[1]


def _half_layer_inputs():
    cos, sin = ftkernels.rope_tables(dim=64, max_positions=8, theta=1e4)
    x, residual = randn(3, 128, seed=1), randn(3, 128, seed=2)
    slots, positions = torch.tensor([0, 2, 4]), torch.tensor([0, 0, 0])
    return [x, randn(128, seed=3), residual, cos, sin, torch.zeros(3, 2, 128), slots, positions]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_several_ops_compile_to_one_graph_with_the_same_bits(compiler, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_half_layer, fullgraph=True, backend=compiler, dynamic=dynamic)
    inputs, expected = _half_layer_inputs(), _half_layer_inputs()
    _same(compiled(*inputs), _half_layer(*expected))
    _same(inputs, expected)
    assert not torch.equal(inputs[5], torch.zeros(3, 2, 128))


@pytest.mark.parametrize(("rows", "kv_format"), [(2, "bf16"), (1, "fp8")], ids=str)
def test_functionalization_sees_stores_through_views(rows, kv_format):
    """A pool made inside the graph, its page stride kept: what is loaded is what was stored."""

    def store_and_load(kv, pool, slots):
        layer = pool[1:]
        ops.store_kv(kv, layer, slots, kv_format=kv_format)
        return ops.load_kv(layer, slots, kv_format=kv_format, dtype=torch.float32)

    torch._dynamo.reset()
    compiled = torch.compile(store_and_load, fullgraph=True, backend="aot_eager")
    pools = [ftkernels.empty_pool(5, rows, 512, kv_format=kv_format).zero_() for _ in range(2)]
    kv, slots = randn(3, 512, dtype=torch.bfloat16), torch.tensor([3, -1, 1])
    loaded = compiled(kv, pools[0], slots)
    _same(loaded, store_and_load(kv, pools[1], slots))
    _same(*pools)
    assert bool((loaded[0] != 0).any())
    assert bool((loaded[1] == 0).all())


def test_export_names_the_operators():
    class Block(torch.nn.Module):
        def forward(self, x, weight):
            return ops.hadamard(ops.rms_norm(x, weight))

    inputs = (randn(3, 128), randn(128, seed=1))
    program = torch.export.export(Block(), inputs)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["ftkernels.rms_norm.default", "ftkernels.hadamard.default"]
    _same(program.module()(*inputs), Block()(*inputs))


def test_codes_and_scales_of_fp8_linear_come_apart():
    x, weight = randn(3, 256), randn(128, 256, seed=1).to(torch.float8_e4m3fn)
    scale = torch.full((1, 2), 127, dtype=torch.uint8)
    codes, x_scale = ftkernels.quantize_fp8(x * 8)
    _same(
        ops.fp8_linear(codes, weight, scale, x_scale=x_scale),
        ftkernels.fp8_linear((codes, x_scale), weight, scale),
    )


@pytest.mark.parametrize("group", [128, [128], [128, 128]], ids=str)
def test_groups_are_a_number_or_a_list(group):
    codes = randn(128, 256).to(torch.float8_e4m3fn)
    pair = isinstance(group, list) and len(group) == 2
    scale = torch.full((1 if pair else 128, 2), 130, dtype=torch.uint8)
    expected = ftkernels.dequantize_fp8(codes, scale, group=(128, 128) if pair else 128)
    _same(ops.dequantize_fp8(codes, scale, group=group), expected)


def test_rope_tables_take_yarn():
    yarn = {"factor": 4.0, "original_max_positions": 16, "beta_fast": 32.0, "beta_slow": 1.0}
    sizes = {"dim": 64, "max_positions": 64, "theta": 1e4}
    _same(ops.rope_tables(**sizes, yarn=yarn), ftkernels.rope_tables(**sizes, yarn=yarn))


def test_refusals_are_the_functions_own():
    with pytest.raises(ValueError, match="rms_norm: eps is -1"):
        ops.rms_norm(torch.ones(2, 8), None, eps=-1.0)
    partial, lse = randn(2, 3, 1, 8), randn(2, 3, 1)
    with pytest.raises(ValueError, match="merge_splits: return_lse is False, expected True"):
        ops.merge_splits(partial, lse, return_lse=False)
    with pytest.raises(RuntimeError, match="expected at most 1 argument"):
        ops.hadamard.default(torch.ones(2, 8), scratch=None)


def test_importing_registers_cheaply_and_without_cuda():
    """30 ms on an idle core; the bound is for a machine that does four other things."""
    code = (
        "import torch, triton, ftkernels\n"
        "assert 'rms_norm' in dir(torch.ops.ftkernels) or torch.ops.ftkernels.rms_norm\n"
        "assert not torch.cuda.is_initialized()"
    )

    def cost_us():
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        line = next(x for x in done.stderr.splitlines() if x.endswith(" ftkernels.library"))
        return int(line.split("|")[1])

    assert any(cost_us() < 400_000 for _ in range(3))
