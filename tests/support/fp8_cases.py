"""Block-scaled FP8 matrices and rows, and the fp64 numbers they stand for."""

from __future__ import annotations

import torch


def quantized(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """Section 11: the values a row has after FP8 activation quantization, in fp64."""
    parts = []
    for part in x.double().split(group, dim=-1):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(amax / 448))
        codes = (part / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        parts.append(codes.double() * scale)
    return torch.cat(parts, dim=-1)


def scales(codes: torch.Tensor) -> torch.Tensor:
    return 2.0 ** (codes.double() - 127)


def spread(codes: torch.Tensor, rows: int, k: int, block: int = 128) -> torch.Tensor:
    """Scales of ``[blocks of rows, blocks of 128 channels]`` for every element."""
    by_row = scales(codes).repeat_interleave(block, 0)[:rows]
    return by_row.repeat_interleave(128, 1)[:, :k]


def fp8_codes(*size: int, seed: int) -> torch.Tensor:
    """Any finite code is as likely as another."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(0, 127, size, generator=generator, dtype=torch.uint8)
    sign = torch.randint(0, 2, size, generator=generator, dtype=torch.uint8)
    return (low | (sign << 7)).view(torch.float8_e4m3fn)


def fp8_weight(
    n: int, k: int, *, seed: int = 3, low: int = 115, high: int = 130
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the fp64 matrix they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-n // 128), -(-k // 128))
    scale = torch.randint(low, high, blocks, generator=generator, dtype=torch.uint8)
    return codes, scale, codes.double() * spread(scale, n, k)


def assert_product(
    out: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, tolerance: float = 1e-6
) -> None:
    """``out`` is ``rows @ matrix.T`` within ``tolerance`` of ``sum |a||b|`` and a rounding."""
    out = out.cpu()
    expected, size = rows @ matrix.T, rows.abs() @ matrix.abs().T
    error = (out.double() - expected).abs()
    rounding = torch.finfo(out.dtype).eps / 2 * expected.abs()
    excess = error - rounding - tolerance * size
    assert (excess <= 0).all(), (
        f"off by {float((error / size.clamp_min(1e-300)).max()):.3g} of the sum of magnitudes at "
        f"{[int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]}"
    )
