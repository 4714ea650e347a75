"""Philox-4x32-10 and the Gumbel noise made from it, in torch and in Triton.

Mapping: ``u = (w + 0.5) / 2^32`` from the first output word ``w``, so ``u`` is never 0 or 1; the noise is
``-log(-log(u))``.
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
    """Ten rounds; words are int64 tensors in ``[0, 2^32)`` that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # a product wraps to int64 with the right bits; masking makes the shifted half unsigned
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def gumbel_reference(seed: torch.Tensor, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Noise in fp64 for key `seed` and counter ``(ids, position, 0, 0)``; the arguments broadcast."""
    seed, position = seed.long(), position.long() & _MASK
    zero = torch.zeros_like(position)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word = philox_reference((ids.long(), position, zero, zero), key)[0]
    return -torch.log(-torch.log((word.double() + 0.5) * 2.0**-32))
