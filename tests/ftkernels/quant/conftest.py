"""An oracle of both quantizers by exact arithmetic, from the specification alone."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import pytest
import torch

E4M3 = [
    (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
    for code in range(127)
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Oracle:
    """Nearest codes by the exact midpoint of two neighbours, scales by integer exponents."""

    def __init__(self) -> None:
        self.grids = {"fp8": E4M3, "fp4": E2M1}
        self.floors = {"fp8": float(torch.tensor(1e-4)), "fp4": 6.0 * 2.0**-126}

    def exponent(self, amax: float, fmt: str) -> int:
        """The least e with largest * 2^e >= max(amax, floor)."""
        wanted = Fraction(max(amax, self.floors[fmt]))
        largest = Fraction(self.grids[fmt][-1])
        e = math.frexp(float(wanted / largest))[1] - 2
        while largest * Fraction(2) ** e < wanted:
            e += 1
        return e

    def nearest(self, x: float, fmt: str) -> float:
        """The grid's value nearest to x, ties to the even code, saturating."""
        grid = self.grids[fmt]
        a = min(abs(x), grid[-1])
        high = bisect.bisect_left(grid, a)
        low = max(high - 1, 0)
        middle = (grid[low] + grid[high]) / 2  # exact: neighbours have few bits
        even = high if high % 2 == 0 else low
        best = high if a > middle else low if a < middle else even
        return math.copysign(grid[best], x)

    def quantize(self, x: torch.Tensor, fmt: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 code values [T, K] and UE8M0 codes [T, ceil(K/group)] of a finite matrix."""
        rows = x.double().tolist()
        values, codes = [], []
        for row in rows:
            value, code = [], []
            for start in range(0, len(row), group):
                part = row[start : start + group]
                e = self.exponent(max(abs(v) for v in part), fmt)
                code.append(e + 127)
                value += [self.nearest(math.ldexp(v, -e), fmt) for v in part]
            values.append(value)
            codes.append(code)
        return torch.tensor(values, dtype=torch.float64), torch.tensor(codes, dtype=torch.uint8)

    def round_trip(self, x: torch.Tensor, fmt: str, group: int) -> torch.Tensor:
        values, codes = self.quantize(x, fmt, group)
        scale = torch.exp2(codes.double() - 127).repeat_interleave(group, dim=1)
        return values * scale[:, : x.shape[1]]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
