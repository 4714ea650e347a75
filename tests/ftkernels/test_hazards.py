"""What must not pass unseen, whatever the op: NaN, shared memory, results that collide.

Mutants tried: a clamp that drops NaN, a scratch checked against its first tensors only, a result
refused for a stride of 0 alone, sizes of a scratch unchecked.
"""

from __future__ import annotations

import pytest
import torch

import ftkernels
from ftkernels.spec import COUNTER_BYTES
from ftkernels.testing import randn

NAN = float("nan")
SPECS = {spec.name: spec for spec in ftkernels.registry()}


def small(op, device):
    """Arguments of the op's first case."""
    args, kwargs = SPECS[op].inputs(SPECS[op].cases[0], device=device, seed=0)
    return list(args), dict(kwargs)


def experts(slots, n, k, device, scale=120):
    packed = torch.full((slots, n, k // 2), 0x22, dtype=torch.uint8, device=device)
    return packed, torch.full((slots, n, k // 32), scale, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("limit", [0.0, 10.0], ids=str)
def test_nan_goes_through_the_clamp(limit, device):
    gate_up = torch.ones(1, 8, device=device)
    gate_up[0, 0] = gate_up[0, 5] = NAN
    out = ftkernels.swiglu_clamp(gate_up, limit=limit)
    assert out.isnan().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("limit", [0.0, 10.0], ids=str)
@pytest.mark.parametrize("path", ["gemm", "gemv"])
def test_a_broken_activation_or_weight_shows_in_its_own_rows(path, limit, device):
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
    x[0, 0] = NAN
    (w13, s13), (w2, s2) = experts(2, 64, 64, device), experts(2, 64, 32, device)
    s13[1, 0, 0] = 255
    ids = torch.tensor([[0], [0], [1]], dtype=torch.int32, device=device)
    weights = torch.ones(3, 1, device=device)
    out = ftkernels.moe_fp4(x, w13, s13, w2, s2, weights, ids, swiglu_limit=limit, path=path)
    assert out.isnan().all(1).tolist() == [True, False, True]
    assert not out[1].isnan().any()


@pytest.mark.parametrize("path", ["gemm", "gemv"])
def test_nan_before_an_fp8_product(path, device):
    gate_up = torch.ones(2, 256, device=device)
    gate_up[0, 3] = NAN
    weight = randn(16, 128, device=device).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 127, dtype=torch.uint8, device=device)
    out = ftkernels.fp8_linear(gate_up, weight, scale, swiglu_limit=10.0, path=path)
    assert out.isnan().all(1).tolist() == [True, False]


def names(op, args, kwargs):
    """Tensors of a call: where they stand, and their names in messages."""
    import inspect

    parameters = list(inspect.signature(getattr(ftkernels, op)).parameters)
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield place, parameters[place]
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield name, name


SCRATCHED = (
    "moe_gemm_fp4", "moe_gemv_fp4", "moe_fp4", "gate_topk", "gate_hash", "hc_pre", "hc_post_pre",
    "hc_head", "mla_decode",
)  # fmt: skip


@pytest.mark.parametrize("op", SCRATCHED)
def test_scratch_meets_no_tensor_of_its_call(op, device):
    args, kwargs = small(op, device)
    found = list(names(op, args, kwargs))
    assert len(found) >= 3
    for place, name in found:
        value = args[place] if isinstance(place, int) else kwargs[place]
        size = value.numel() * value.element_size()
        scratch = torch.zeros(COUNTER_BYTES + (1 << 22) + size, dtype=torch.uint8, device=device)
        inside = scratch[COUNTER_BYTES : COUNTER_BYTES + size].view(value.dtype).view(value.shape)
        inside.copy_(value)
        changed = ([*args], {**kwargs})
        changed[0 if isinstance(place, int) else 1][place] = inside
        with pytest.raises(ValueError, match=f"{op}: scratch is overlapping {name} in memory"):
            getattr(ftkernels, op)(*changed[0], **changed[1], scratch=scratch)


@pytest.mark.parametrize("op", ["linear", "fp8_linear", "moe_gemv_fp4", "hc_head", "index_query"])
def test_rows_of_a_result_do_not_collide(op, device):
    args, kwargs = small(op, device)
    right = getattr(ftkernels, op)(*args, **kwargs)
    room = torch.zeros(2 * right.numel() + 64, dtype=right.dtype, device=device)
    out = room.as_strided(right.shape, (1,) * right.ndim)
    with pytest.raises(ValueError, match=f"{op}: out has strides .*, expected rows that do not"):
        getattr(ftkernels, op)(*args, **kwargs, out=out)


def test_nothing_is_combined_beside_routed_out(device):
    args, kwargs = small("moe_fp4", device)
    shared = kwargs.pop("shared")
    tokens, topk = args[-1].shape
    routed = torch.zeros(tokens, topk, shared.shape[1], dtype=shared.dtype, device=device)
    for name, value in (("shared", shared), ("out", torch.zeros_like(shared))):
        with pytest.raises(ValueError, match=f"moe_fp4: {name} is given with routed_out"):
            ftkernels.moe_fp4(*args, **kwargs, routed_out=routed, **{name: value})


@pytest.mark.parametrize("path", ["gemm", "gemv"])
def test_experts_without_hidden_channels_leave_the_shared_one(path, device):
    (w13, s13), (w2, s2) = experts(2, 0, 64, device), experts(2, 64, 0, device)
    shared = randn(3, 64, device=device)
    out = ftkernels.moe_fp4(
        randn(3, 64, device=device), w13, s13, w2, s2, torch.ones(3, 1, device=device),
        torch.zeros(3, 1, dtype=torch.int32, device=device), swiglu_limit=1.0, shared=shared,
        path=path,
    )  # fmt: skip
    assert torch.equal(out, shared)


@pytest.mark.parametrize("tokens", [1, 9])
def test_products_of_no_channels_are_zero(tokens, device):
    bf16 = torch.bfloat16
    out = (
        torch.full((tokens, 130), 3.0, dtype=bf16, device=device),
        torch.full((tokens, 40), 5.0, device=device),
    )
    ftkernels.mixed_linear(
        torch.empty(tokens, 0, dtype=bf16, device=device),
        torch.empty(130, 0, device=device).to(torch.float8_e4m3fn),
        torch.empty(2, 0, dtype=torch.uint8, device=device),
        torch.empty(40, 0, dtype=bf16, device=device), out=out,
    )  # fmt: skip
    assert not out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ({"T": 1}, ValueError, "sizes of linear are T, expected T, N, K"),
        ({"T": 1, "N": 2, "K": 3, "J": 4}, ValueError, "sizes of linear are T, N, K, J, expected"),
        ({"T": -1, "N": 2, "K": 3}, ValueError, "T is -1, expected an integer >= 0"),
        ({"T": 1.0, "N": 2, "K": 3}, TypeError, "T is 1.0, expected an integer >= 0"),
        ({"T": True, "N": 2, "K": 3}, TypeError, "T is True, expected an integer >= 0"),
    ],
)
def test_sizes_of_a_scratch(dims, error, text):
    with pytest.raises(error, match=f"scratch_bytes: {text}"):
        ftkernels.scratch_bytes("linear", **dims)


def test_a_bank_whose_matrices_do_not_belong_together(device):
    bank = ftkernels.ExpertBank(*experts(2, 64, 64, device), *experts(2, 64, 64, device))
    text = r"ExpertBank.pack: w2 is \(2, 64, 32\), expected \[E, C, I/2\] = \[2, 64, 16\]"
    with pytest.raises(ValueError, match=text):
        bank.pack()
