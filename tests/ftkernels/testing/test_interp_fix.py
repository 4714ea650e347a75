"""The patched interpreter against torch: formats, arithmetic, reductions, poison and bounds.

Mutants tried: truncating casts to bf16, no saturation, ties away from zero, dot on bit patterns,
no poison, bounds off by one element, a comparison that keeps the operands' type (Triton 3.9).
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from ftkernels import backend
from ftkernels.testing import assert_close, interp_fix, randn

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="needs TRITON_INTERPRET=1")

BLOCK = 1024
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    a = tl.load(a_ptr + offs, mask=mask, other=0.0)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0)
    if OP == "add":
        out = a + b
    elif OP == "sub":
        out = a - b
    elif OP == "mul":
        out = a * b
    elif OP == "twice":
        out = a * 2.0
    elif OP == "neg":
        out = -a
    elif OP == "maximum":
        out = tl.maximum(a, b)
    elif OP == "minimum":
        out = tl.minimum(a, b)
    elif OP == "where":
        out = tl.where(a > b, a, b + a)
    elif OP == "full":
        out = tl.full((BLOCK,), 3.1415926, dtype=a_ptr.dtype.element_ty) + b
    tl.store(out_ptr + offs, out, mask=mask)


@triton.jit
def _compare_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    tl.store(out_ptr + offs, (a < b).to(tl.int32) + 2 * (a == b).to(tl.int32))


@triton.jit
def _scalar_mask_kernel(n_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs, n = tl.arange(0, BLOCK), tl.load(n_ptr)
    mask = (offs < n) & (n - 1 >= 2)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=-1.0))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _reduce_kernel(x_ptr, sum_ptr, max_ptr, arg_ptr, scan_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(sum_ptr, tl.sum(x, axis=0))
    tl.store(max_ptr, tl.max(x, axis=0))
    tl.store(arg_ptr, tl.argmax(x, axis=0))
    tl.store(scan_ptr + offs, tl.cumsum(x, axis=0))


@triton.jit
def _load_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))


@triton.jit
def _shifted_kernel(x_ptr, out_ptr, load_shift, store_shift, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs + store_shift, tl.load(x_ptr + offs + load_shift))


@triton.jit
def _table_kernel(table_ptr, out_ptr, BLOCK: tl.constexpr):
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _atomic_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + offs // 2, tl.load(x_ptr + offs))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _copy_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def _codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def _hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of an fp8 type, every midpoint of neighbours, and what lies just beside both."""
    values = _codes(dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, middles])
    near = [exact.nextafter(torch.tensor(side)) for side in (float("inf"), -float("inf"))]
    beyond = torch.tensor([1e-30, -1e-30, 465.0, -465.0, 1e5, -1e5, float("inf"), float("nan")])
    return torch.cat([exact, *near, beyond])


def _wide_range(num: int, seed: int = 0) -> torch.Tensor:
    scales = torch.logspace(-12, 6, num, base=10)
    return randn(num, seed=seed) * scales


@pytest.mark.parametrize("source", [FP32, FP16], ids=str)
def test_cast_to_bf16_rounds_to_nearest_even(source):
    ties = torch.arange(1, 400, dtype=torch.float32) * 2**-9 + 1.0  # 8 bits stay, the 9th is a tie
    x = torch.cat([_wide_range(3000), ties, -ties, torch.tensor([float("nan"), float("inf"), 0.0])])
    x = x.to(source)
    assert_close(_cast(x, BF16), x.to(BF16))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("target", [FP32, FP16], ids=str)
def test_cast_from_bf16_keeps_the_value(target):
    x = torch.cat([_wide_range(3000), torch.tensor([float("nan"), -float("inf")])]).to(BF16)
    assert_close(_cast(x, target), x.to(target))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("target", [FP32, BF16], ids=str)
def test_every_fp8_code_decodes_as_in_torch(dtype, target):
    assert_close(_cast(_codes(dtype), target), _codes(dtype).to(target))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, FP16, BF16], ids=str)
def test_cast_to_fp8_rounds_to_even_and_saturates(dtype, source):
    x = torch.cat([_hard_values(dtype), _wide_range(3000)]).to(source)
    bound = LARGEST[dtype]
    expected = x.float().clamp(-bound, bound).to(dtype).float()
    assert_close(_cast(x, dtype).float(), expected)


def test_fp8_ties_and_overflow_by_hand():
    x = torch.tensor([17.0, 19.0, -17.0, 448.0, 463.0, 1e6, -float("inf"), 1.97])
    expected = torch.tensor([16.0, 20.0, -16.0, 448.0, 448.0, 448.0, -448.0, 2.0])
    assert_close(_cast(x, E4M3).float(), expected)


ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "twice": lambda a, b: a * 2.0,
    "neg": lambda a, b: -a,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a, b + a),
    "full": lambda a, b: torch.full_like(a, 3.1415926) + b,
}


@pytest.mark.parametrize("op", ARITHMETIC)
def test_bf16_arithmetic(op):
    a, b = randn(1000, seed=1, scale=3.0).to(BF16), randn(1000, seed=2, scale=3.0).to(BF16)
    out = torch.empty(1000, dtype=BF16)
    _arithmetic_kernel[(1,)](a, b, out, 1000, OP=op, BLOCK=BLOCK)
    assert_close(out, ARITHMETIC[op](a, b))


def test_bf16_comparisons():
    a, b = randn(BLOCK, seed=1).to(BF16), randn(BLOCK, seed=2).to(BF16)
    b[::7] = a[::7]
    out = torch.empty(BLOCK, dtype=torch.int32)
    _compare_kernel[(1,)](a, b, out, BLOCK=BLOCK)
    assert_close(out, (a < b).int() + 2 * (a == b).int())


@pytest.mark.parametrize("n", [0, 2, 3, 16])
def test_a_mask_of_a_block_and_a_scalar(n):
    x, out = randn(16), torch.full((16,), float("nan"))
    _scalar_mask_kernel[(1,)](torch.tensor([n], dtype=torch.int32), x, out, BLOCK=16)
    live = torch.arange(16) < (n if n > 2 else 0)
    assert torch.equal(out, torch.where(live, x, -1.0))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_number_wins_over_nan(dtype):
    nan = float("nan")
    a = torch.tensor([nan, 1.0, nan, -2.0], dtype=dtype)
    b = torch.tensor([3.0, nan, nan, -1.0], dtype=dtype)
    for op, expected in (("maximum", [3.0, 1.0, nan, -1.0]), ("minimum", [3.0, 1.0, nan, -2.0])):
        out = torch.empty(4, dtype=dtype)
        _arithmetic_kernel[(1,)](a, b, out, 4, OP=op, BLOCK=4)
        assert_close(out, torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, E5M2], ids=str)
def test_dot(dtype):
    a, b = randn(16, 64, seed=1).to(dtype), randn(64, 32, seed=2).to(dtype)
    out = torch.empty(16, 32)
    _dot_kernel[(1,)](a, b, out, M=16, K=64, N=32)
    assert_close(out, (a.double() @ b.double()).float(), row_tol=1e-6)


def test_bf16_reductions():
    x = randn(256, seed=3).to(BF16)
    total, top, scan = torch.empty(1).to(BF16), torch.empty(1).to(BF16), torch.empty(256).to(BF16)
    where = torch.empty(1, dtype=torch.int32)
    _reduce_kernel[(1,)](x, total, top, where, scan, BLOCK=256)
    assert_close(total, x.double().sum().to(BF16)[None], max_ulp=1)
    assert_close(top, x.max()[None])
    assert where.item() == x.float().argmax().item()
    assert_close(scan, x.double().cumsum(0).to(BF16), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, E4M3, E5M2], ids=str)
def test_lanes_masked_off_without_other_are_nan(dtype):
    x, out = torch.ones(8).to(dtype), torch.zeros(8).to(dtype)
    _load_kernel[(1,)](x, out, 5, BLOCK=8)
    assert out.float().isnan().tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_lanes_masked_off_without_other_are_0x5a(dtype):
    x, out = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    _load_kernel[(1,)](x, out, 5, BLOCK=8)
    assert out.tolist() == [1] * 5 + [0x5A] * 3


@pytest.mark.parametrize("dtype", [FP32, BF16, E4M3], ids=str)
def test_access_outside_every_tensor_raises(dtype):
    x, out = torch.ones(8).to(dtype), torch.zeros(8).to(dtype)
    _shifted_kernel[(1,)](x, out, 0, 0, BLOCK=8)
    assert_close(out, x)
    for shifts, what in (((1 << 40, 0), "load: 8 of 8"), ((0, 1 << 40), "store: 8 of 8")):
        with pytest.raises(InterpreterError, match=f"IndexError.*{what}"):
            _shifted_kernel[(1,)](x, out, *shifts, BLOCK=8)


def test_one_element_past_the_end_raises():
    memory = torch.zeros(4096)  # far larger than any rounding of an allocation
    x = memory[:]
    with pytest.raises(InterpreterError, match="load: 1 of 4096"):
        _shifted_kernel[(1,)](x, x, 1, 0, BLOCK=4096)


def test_pointer_tables_need_allow():
    x, out = randn(8), torch.zeros(8)
    table = torch.tensor([x.data_ptr()])
    with pytest.raises(InterpreterError, match="outside every tensor argument"):
        _table_kernel[(1,)](table, out, BLOCK=8)
    interp_fix.allow(x)
    _table_kernel[(1,)](table, out, BLOCK=8)
    assert_close(out, x)


def test_bf16_atomic_add():
    x = randn(8, seed=5).to(BF16)
    out = torch.zeros(4, dtype=BF16)
    _atomic_kernel[(1,)](x, out, BLOCK=8)
    assert_close(out, x[0::2] + x[1::2])


def test_a_second_apply_changes_nothing():
    before = dict(vars(triton.runtime.interpreter.InterpreterBuilder))
    interp_fix.apply(check_bounds=False, poison=False)
    assert dict(vars(triton.runtime.interpreter.InterpreterBuilder)) == before
