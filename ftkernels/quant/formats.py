"""Number formats E2M1, E4M3, UE8M0: decode and round helpers, torch and Triton, defined once.

UE8M0 is a byte ``b`` of value ``2^(b - 127)``; 255 is NaN, and 0 is ``2^-127``, an fp32 subnormal.
E4M3 ("fn") has bias 7, largest value 448, no infinities. E2M1 is a sign bit over three bits that
stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes fill a byte, the even element in the low nibble.
Group quantization picks the smallest power of two at or above ``max|x| / largest`` as scale; a
group that holds a NaN or an infinity gets scale code 255, so that it is NaN when read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class GroupFormat:
    """How groups are scaled: the largest value, and the floor under a group's magnitude."""

    largest: float
    floor: float


FP8 = GroupFormat(largest=448.0, floor=1e-4)
FP4 = GroupFormat(largest=6.0, floor=6.0 * 2.0**-126)
FORMATS = {"fp8": FP8, "fp4": FP4}

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


@cache
def _e2m1_table(device: torch.device) -> torch.Tensor:
    values = (*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES))
    return torch.tensor(values, dtype=torch.float32, device=device)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E2M1 codes 0..15, one a byte."""
    return _e2m1_table(codes.device)[codes.int()]


def e2m1_round(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value as fp32, ties to the even code, saturating; keeps sign and NaN."""
    x = x.clamp(-6.0, 6.0)
    magnitude = x.abs()
    # neighbours are 0.5 apart below 2, 1 apart below 4, then 2; torch rounds halves to even
    step = 0.5 + 0.5 * (magnitude >= 2.0) + (magnitude >= 4.0)
    return torch.round(x / step) * step


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of `e2m1_round(x)`; NaN becomes 0."""
    rounded = e2m1_round(x)
    magnitude = rounded.abs()
    code = torch.where(magnitude < 2.0, 2.0 * magnitude, magnitude.clamp_max(4.0) + 2.0)
    code = torch.where(magnitude > 5.0, 7.0, code) + 8.0 * rounded.signbit()
    return torch.where(rounded.isnan(), 0.0, code).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """`[..., n]` bytes to `[..., 2n]` codes, low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """`[..., 2n]` codes 0..15 to `[..., n]` bytes, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e4m3_round(x: torch.Tensor) -> torch.Tensor:
    """fp32 to `float8_e4m3fn`, nearest even, saturating at 448; NaN stays NaN."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def ue8m0_decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of UE8M0 codes: `2^(code - 127)`, 255 gives NaN."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, bits)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def ue8m0_encode(scale: torch.Tensor) -> torch.Tensor:
    """uint8 codes of what `group_scale` gives."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def group_scale(grouped: torch.Tensor, fmt: GroupFormat) -> torch.Tensor:
    """Scales of the groups in the last dimension of an fp32 tensor.

    Returns:
        `[..., 1]` fp32 powers of two; infinity (code 255) for a group with a NaN or an infinity.
    """
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min_(fmt.floor)
    bits = amax.mul_(1.0 / fmt.largest).view(torch.int32).clamp_max_(_EXPONENT)
    return bits.add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def into_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """`[..., K]` to fp32 `[..., ceil(K/group), group]`; a short last group is filled with zeros."""
    wide = x.float()
    tail = -wide.shape[-1] % group
    if tail:
        wide = torch.nn.functional.pad(wide, (0, tail))
    return wide.unflatten(-1, (-1, group))


@triton.jit
def tl_clamped_swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; NaN stays NaN."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    gate = tl.minimum(gate, limit, propagate_nan=ALL)
    up = tl.minimum(tl.maximum(up, -limit, propagate_nan=ALL), limit, propagate_nan=ALL)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def tl_group_code(absbits, FLOOR_BITS: tl.constexpr, INVERSE: tl.constexpr):
    """int32 UE8M0 codes from the bits of groups' largest magnitudes; NaN, infinity give 255."""
    # as integers NaN > infinity > every number, which a float maximum does not promise
    amax = tl.maximum(absbits, FLOOR_BITS).to(tl.float32, bitcast=True)
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x7F800000)
    return (bits + 0x007FFFFF) >> 23


@triton.jit
def tl_absbits(x):
    """Bits of the magnitude of fp32 `x`."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tl_ue8m0_decode(code):
    """fp32 value of int32 UE8M0 codes."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def tl_ue8m0_inverse(code):
    """fp32 `1 / scale` of int32 UE8M0 codes 1..253; 0 for 255, as under an infinite scale."""
    return tl.where(code == 255, 0, (254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tl_quantized_fp8(x, AXIS: tl.constexpr):
    """fp32 groups along AXIS on the E4M3 grid, and their scale codes, as ``quantize_fp8`` does."""
    # the floor of a group's magnitude, 1e-4, as bits
    code = tl_group_code(tl.max(tl_absbits(x), axis=AXIS), 0x38D1B717, 1.0 / 448.0)
    return tl_e4m3_round(x * tl.expand_dims(tl_ue8m0_inverse(code), AXIS)), code


@triton.jit
def tl_round_to_grid(x, LOWEST: tl.constexpr, FRACTION: tl.constexpr):
    """Nearest-even rounding of fp32 `x` to FRACTION mantissa bits.

    LOWEST is the exponent field below which the spacing stays the same (subnormals).

    Adding ``2^(e + 23 - FRACTION)`` to a magnitude leaves FRACTION bits, subtracting restores.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    magic = ((exponent + (23 - FRACTION)) << 23).to(tl.float32, bitcast=True)
    rounded = ((magnitude + magic) - magic).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(x != x, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def tl_e4m3_round(x):
    """fp32 on the E4M3 grid, saturating at 448; a cast to fp8 is then exact on every Triton."""
    clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return tl_round_to_grid(tl.where(x != x, x, clamped), 121, 3)


@triton.jit
def tl_e2m1_round(x):
    """fp32 on the E2M1 grid, ties to the even code, saturating at 6."""
    clamped = tl.minimum(tl.maximum(x, -6.0), 6.0)
    return tl_round_to_grid(tl.where(x != x, x, clamped), 127, 1)


@triton.jit
def tl_e2m1_encode(rounded):
    """int32 codes 0..15 of values on the E2M1 grid; NaN becomes 0."""
    bits = rounded.to(tl.int32, bitcast=True)
    high = (bits & 0x7FFFFFFF) >> 22
    code = tl.where(high >= 254, high - 252, tl.where(high == 252, 1, 0))
    return tl.where(rounded != rounded, 0, code | ((bits >> 28) & 8))


@triton.jit
def tl_e2m1_decode(code):
    """fp32 values of int32 E2M1 codes 0..15."""
    magnitude = code & 7
    bits = tl.where(
        magnitude < 2, magnitude * 0x3F000000, (((magnitude >> 1) + 126) << 23) | ((code & 1) << 22)
    )
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
