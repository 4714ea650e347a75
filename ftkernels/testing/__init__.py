"""Help for tests of kernels, ours and other engines': comparison, poison, seeds, launch counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["assert_close", "count_launches", "nan_poison", "randn"]

_FAR = 1 << 40  # more units in the last place than any two numbers are apart


def randn(
    *size: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Seeded normal values of standard deviation `scale`; the same on every device."""
    if torch.device(device).type == "meta":
        return torch.empty(*size, dtype=dtype, device="meta")
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator) * scale).to(dtype).to(device)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0,
    max_ulp: int | None = None, row_tol: float | None = None,
) -> None:  # fmt: skip
    """Compare by value and say where and by how much two tensors differ.

    Args:
        rtol, atol: elementwise, as in `torch.allclose`.
        max_ulp: units in the last place of the tensors' dtype instead.
        row_tol: error relative to the largest finite magnitude of the expected row instead.

    Raises:
        AssertionError: shape or dtype differ, or a value is off. NaN equals NaN and an infinity its
            like; neither is ever close to a number.
    """
    shapes = tuple(actual.shape), tuple(expected.shape)
    assert shapes[0] == shapes[1], f"shape {shapes[0]}, expected {shapes[1]}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if not actual.numel():
        return
    a, e = actual.detach().cpu(), expected.detach().cpu()
    wide_a, wide_e = a.double(), e.double()
    same = (wide_a == wide_e) | (wide_a.isnan() & wide_e.isnan())
    finite = wide_a.isfinite() & wide_e.isfinite()
    error = (wide_a - wide_e).abs().masked_fill(~finite, float("inf")).masked_fill(same, 0.0)
    if max_ulp is not None:
        off = (_ordinal(a) - _ordinal(e)).abs().masked_fill(~finite, _FAR).masked_fill(same, 0)
        bad, limit = off > max_ulp, f"{max_ulp} ulp (largest: {int(off.max())})"
    elif row_tol is not None:
        scale = wide_e.abs().masked_fill(~wide_e.isfinite(), 0.0).amax(-1, keepdim=True)
        bad, limit = error > row_tol * scale.clamp_min(1e-30), f"{row_tol:g} of the row's maximum"
    else:
        bad, limit = error > atol + rtol * wide_e.abs(), f"rtol {rtol:g}, atol {atol:g}"
    bad = (bad | ~finite) & ~same
    if bad.any():
        raise AssertionError(_report(wide_a, wide_e, error, bad, limit))


def _report(
    a: torch.Tensor, e: torch.Tensor, error: torch.Tensor, bad: torch.Tensor, limit: str
) -> str:
    worst = error.masked_fill(~bad, -1).argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, a.shape))
    finite = error[error.isfinite()]
    rms = float(finite.square().mean().sqrt()) if finite.numel() else float("nan")
    return (
        f"{int(bad.sum())} of {a.numel()} values differ by more than {limit}; worst at {where}: "
        f"{a[where].item():.9g}, expected {e[where].item():.9g}; "
        f"largest error {error.max().item():.3g}, rms {rms:.3g}"
    )


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the float values, one apart for neighbouring numbers."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(ints).long()
    low = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, low - bits, bits)


class Launches(list[str]):
    """Names of the kernels launched, in order."""


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Lists every Triton kernel launched inside, compiled or interpreted."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    got = Launches()
    grid_call, jit_run = interpreter.GridExecutor.__call__, JITFunction.run

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        got.append(self.fn.__name__)
        return grid_call(self, *args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            got.append(self.fn.__name__)
        return jit_run(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", call),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield got


@contextlib.contextmanager
def nan_poison() -> Iterator[None]:
    """`torch.empty` and its relatives give NaN (integers: 0x5A bytes): unwritten output shows."""
    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like", "empty_strided"):
            poisoned = _poisoned(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, poisoned))
        poisoned = _poisoned(torch.Tensor.new_empty)
        stack.enter_context(mock.patch.object(torch.Tensor, "new_empty", poisoned))
        yield


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = original(*args, **kwargs)
        if x.device.type == "meta" or not x.numel():
            return x
        if x.is_floating_point() and x.element_size() > 1:
            return x.fill_(float("nan"))
        if x.dtype == torch.bool:
            return x.fill_(True)
        if x.element_size() == 1:
            x.view(torch.uint8).fill_(0x7F if x.is_floating_point() else 0x5A)
            return x
        return x.fill_(0x5A5A)

    return make
