"""One row on its way into a pool: norm, rotation, round trip, and the bytes of both packed formats.

A row is an fp32 tile ``[BLOCK_D]`` that holds zeros from channel D on. A step that rounds rounds to
DTYPE, as the ops that do one step each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.quant.formats import (
    tl_absbits,
    tl_e2m1_encode,
    tl_e2m1_round,
    tl_e4m3_round,
    tl_group_code,
    tl_ue8m0_decode,
    tl_ue8m0_inverse,
)

# the pool formats of pools.py, in bytes of a row
VALUES = tl.constexpr(448)
DATA = tl.constexpr(576)
SCALES = tl.constexpr(8)
NIBBLES = tl.constexpr(64)
INDEX_SCALES = tl.constexpr(4)
KV_GROUP = tl.constexpr(64)
INDEX_GROUP = tl.constexpr(32)


@triton.jit
def _wide(n):
    return tl.full((), n, tl.int64)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def normed_row(x, weight_ptr, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm with a weight."""
    offs_d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    # products spelled as fma do not fuse into the sum
    scale = tl.rsqrt(tl.sum(tl.fma(x, x, 0.0), axis=0) / D + eps)
    return rounded(x * scale * weight, DTYPE)


@triton.jit
def rotated_row(
    x, cos_row, sin_row,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rotation of the last 2 * HALF channels; sums are spelled as fma, so that bits are fixed."""
    FIRST: tl.constexpr = D - 2 * HALF
    if FIRST % 2 == 0:
        pair = tl.arange(0, BLOCK_D // 2) - FIRST // 2
        turns = (pair >= 0) & (pair < HALF)
        cos = tl.load(cos_row + pair, mask=turns, other=1.0)
        sin = tl.load(sin_row + pair, mask=turns, other=0.0)
        even, odd = tl.split(tl.reshape(x, (BLOCK_D // 2, 2)))
        first = tl.where(turns, rounded(tl.fma(even, cos, -(odd * sin)), DTYPE), even)
        second = tl.where(turns, rounded(tl.fma(odd, cos, even * sin), DTYPE), odd)
        return tl.reshape(tl.join(first, second), (BLOCK_D,))
    else:
        place = tl.arange(0, BLOCK_D) - FIRST
        turns = (place >= 0) & (place < 2 * HALF)
        cos = tl.load(cos_row + place // 2, mask=turns, other=1.0)
        sin = tl.load(sin_row + place // 2, mask=turns, other=0.0)
        partner = tl.gather(x, tl.where(turns, FIRST + (place ^ 1), 0), axis=0)
        turned = tl.fma(x, cos, partner * tl.where(place % 2 == 0, -sin, sin))
        return tl.where(turns, rounded(turned, DTYPE), x)


@triton.jit
def turned_row(x, factor, BLOCK_D: tl.constexpr, LOG2_D: tl.constexpr, DTYPE: tl.constexpr):
    """Hadamard rotation of a row of BLOCK_D = 2^LOG2_D channels; ``factor`` is BLOCK_D**-0.5."""
    for _ in tl.static_range(LOG2_D):
        # pairs become [all sums, all differences]: after LOG2_D rounds every channel is in place
        even, odd = tl.split(tl.reshape(x, (BLOCK_D // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (1, 0)), (BLOCK_D,))
    return rounded(x * factor, DTYPE)


@triton.jit
def fp8_codes(x, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Groups of 64 of the first CHANNELS: scale codes ``[G]`` and values on the E4M3 grid."""
    GROUP: tl.constexpr = KV_GROUP if BLOCK_D > KV_GROUP else BLOCK_D
    offs_d = tl.reshape(tl.arange(0, BLOCK_D), (BLOCK_D // GROUP, GROUP))
    grouped = tl.reshape(x, (BLOCK_D // GROUP, GROUP))
    # channels past the rounded ones do not raise a group's scale; the floor is 1e-4, as bits
    absbits = tl.max(tl.where(offs_d < CHANNELS, tl_absbits(grouped), 0), axis=1)
    code = tl_group_code(absbits, 0x38D1B717, 1.0 / 448.0)
    return code, tl_e4m3_round(grouped * tl_ue8m0_inverse(code)[:, None])


@triton.jit
def fp8_round_trip(x, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    code, values = fp8_codes(x, CHANNELS, BLOCK_D)
    back = tl.reshape(values * tl_ue8m0_decode(code)[:, None], (BLOCK_D,))
    return tl.where(tl.arange(0, BLOCK_D) < CHANNELS, rounded(back, DTYPE), x)


@triton.jit
def fp4_codes(x, BLOCK_D: tl.constexpr):
    """Groups of 32: scale codes ``[G]`` and values on the E2M1 grid, ``[G, 32]``."""
    GROUP: tl.constexpr = INDEX_GROUP if BLOCK_D > INDEX_GROUP else BLOCK_D
    grouped = tl.reshape(x, (BLOCK_D // GROUP, GROUP))
    # the floor is 6 * 2^-126, as bits
    code = tl_group_code(tl.max(tl_absbits(grouped), axis=1), 0x01C00000, 1.0 / 6.0)
    return code, tl_e2m1_round(grouped * tl_ue8m0_inverse(code)[:, None])


@triton.jit
def fp4_round_trip(x, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    code, values = fp4_codes(x, BLOCK_D)
    return rounded(tl.reshape(values * tl_ue8m0_decode(code)[:, None], (BLOCK_D,)), DTYPE)


@triton.jit
def store_row(x, row_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row of a pool of floats."""
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(row_ptr + offs_d, x.to(row_ptr.dtype.element_ty), mask=offs_d < D)


@triton.jit
def store_packed_row(x, page_ptr, row, num_rows):
    """A row of 512 channels in a packed page of ``num_rows`` rows: 448 e4m3, 64 bf16; 8 scales."""
    offs_d = tl.arange(0, 512)
    code, values = fp8_codes(x, VALUES, 512)
    values = tl.reshape(values.to(tl.float8e4nv).to(tl.uint8, bitcast=True), (512,))
    data_ptr = page_ptr + row * DATA
    tl.store(data_ptr + offs_d, values, mask=offs_d < VALUES)
    tail_ptr = (data_ptr + VALUES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(tail_ptr + (offs_d - VALUES), x.to(tl.bfloat16), mask=offs_d >= VALUES)
    offs_g = tl.arange(0, 8)
    code = tl.where(offs_g < VALUES // KV_GROUP, code, 0)
    scale_ptr = page_ptr + _wide(num_rows) * DATA + row * SCALES
    tl.store(scale_ptr + offs_g, code.to(tl.uint8))


@triton.jit
def load_packed_row(page_ptr, row, num_rows, live):
    """What `store_packed_row` keeps of a row; zeros unless ``live``."""
    offs_d = tl.arange(0, 512)
    data_ptr = page_ptr + row * DATA
    in_values = offs_d < tl.where(live, VALUES, 0)
    in_tail = offs_d >= tl.where(live, VALUES, 512)
    values = tl.load(data_ptr + offs_d, mask=in_values, other=0).to(tl.float8e4nv, bitcast=True)
    scale_ptr = page_ptr + _wide(num_rows) * DATA + row * SCALES
    code = tl.load(scale_ptr + offs_d // KV_GROUP, mask=in_values, other=0).to(tl.int32)
    tail_ptr = (data_ptr + VALUES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tail = tl.load(tail_ptr + (offs_d - VALUES), mask=in_tail, other=0.0)
    unrotated = values.to(tl.float32) * tl_ue8m0_decode(code)
    return tl.where(offs_d < VALUES, unrotated, tail.to(tl.float32))


@triton.jit
def store_index_row(x, page_ptr, row, num_rows):
    """A row of 128 channels in a packed index page: 64 bytes of nibbles; 4 scales."""
    code, values = fp4_codes(x, 128)
    low, high = tl.split(tl.reshape(tl_e2m1_encode(values), (64, 2)))
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(page_ptr + row * NIBBLES + tl.arange(0, 64), packed)
    scale_ptr = page_ptr + _wide(num_rows) * NIBBLES + row * INDEX_SCALES
    tl.store(scale_ptr + tl.arange(0, 4), code.to(tl.uint8))
