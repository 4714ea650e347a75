"""Philox-4x32-10 and the Gumbel noise made from it, in torch and in Triton.

Mapping: ``u = (w + 0.5) / 2^32`` from the first output word ``w``, so ``u`` is never 0 or 1; the
noise is ``-log(-log(u))``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox_reference(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds; words are int64 tensors in ``[0, 2^32)`` of one rank that broadcast together."""
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    even = torch.stack([word.expand(shape) for word in counter[::2]])  # both halves in one call
    odd = torch.stack([word.expand(shape) for word in counter[1::2]])
    keys = torch.stack(key)
    one = (2,) + (1,) * len(shape)
    factors = torch.tensor([_M0, _M1], device=even.device).view(one)
    weyl = torch.tensor([_W0, _W1], device=even.device).view(one)
    for _ in range(10):
        # products wrap to int64 with the right bits; what stands above a word goes with the mask
        products = (even * factors).flip(0)
        even = ((products >> 32) ^ odd ^ keys) & _MASK
        odd = products
        keys = keys + weyl
    odd = odd & _MASK
    return even[0], odd[0], even[1], odd[1]


def gumbel_reference(seed: torch.Tensor, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """fp64 noise of key `seed` and counter ``(ids, position, 0, 0)``; the arguments broadcast."""
    seed, position = seed.long(), position.long() & _MASK
    zero = torch.zeros_like(position)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word = philox_reference((ids.long(), position, zero, zero), key)[0]
    return -torch.log(-torch.log((word.double() + 0.5) * 2.0**-32))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 tensors."""
    for _ in tl.static_range(10):
        # products of two words: low half by wrapping, high half by umulhi
        high0, high1 = tl.umulhi(c0, 0 * c0 + 0xD2511F53), tl.umulhi(c2, 0 * c2 + 0xCD9E8D57)
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(word):
    """``-log(-log(u))``, ``u = (word + 0.5) / 2^32``, in fp32."""
    # the upper half goes by 1 - u, which fp32 can tell from 0 down to 2^-33
    upper = word >= 0x80000000
    v = (tl.where(upper, word ^ 0xFFFFFFFF, word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * (0.2 + v * (1.0 / 6))))))
    one_minus = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(tl.where(upper, one_minus, -tl.log(v)))


@triton.jit
def gumbel_at(seed, ids, position):
    """Noise for an int64 seed, int32 ids and an integer position."""
    zero = (0 * ids).to(tl.uint32)
    k0, k1 = zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32)
    word, _, _, _ = philox(ids.to(tl.uint32), zero + position.to(tl.uint32), zero, zero, k0, k1)
    return gumbel(word)
