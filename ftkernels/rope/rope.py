"""Rotary embedding of the last ``r`` channels, as interleaved pairs, by absolute position.

``x'[2i] = x[2i] cos a - x[2i+1] sin a`` and ``x'[2i+1] = x[2i] sin a + x[2i+1] cos a`` with
``a = position * freq_i``; the inverse rotates by ``-a``. Angles come from tables only.
Numerics: the frequency and its product with the position are each rounded to fp32, the tables hold
cosine and sine of that fp32 number; the rotation is fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn

Tables = tuple[torch.Tensor, torch.Tensor]

_YARN_FIELDS = ("factor", "original_max_positions", "beta_fast", "beta_slow")
_TABLE_CHUNK = 65536


def rope_tables(
    *,
    dim: int,
    max_positions: int,
    theta: float,
    yarn: Mapping[str, float] | None = None,
    device: torch.device | str | None = None,
) -> Tables:
    """Cosine and sine of every position's angles.

    Args:
        dim: rotated channels ``r``, even.
        max_positions: rows; the pair takes ``4 * r`` bytes a row.
        theta: base of the frequencies, ``theta^(-2i/r)``.
        yarn: ``factor``, ``original_max_positions``, ``beta_fast`` and ``beta_slow``: frequencies
            between the two betas' channels fade from the plain ones to those divided by ``factor``.
        device: of the tables, CPU when omitted.

    Returns:
        ``cos, sin``, each ``[max_positions, r/2]`` fp32.

    Raises:
        ValueError: a size, the base or a YaRN field is outside the contract.
    """
    op = "rope_tables"
    check.require(
        dim >= 2 and dim % 2 == 0, lambda: f"{op}: dim is {dim}, expected an even number >= 2"
    )
    check.require(
        max_positions >= 0, lambda: f"{op}: max_positions is {max_positions}, expected >= 0"
    )
    check.require(theta > 1, lambda: f"{op}: theta is {theta}, expected > 1")
    if yarn is not None:
        _check_yarn(op, yarn)
    freq = _frequencies(dim, theta, yarn).to(device)
    cos = torch.empty(max_positions, dim // 2, dtype=torch.float32, device=device)
    sin = torch.empty_like(cos)
    for start in range(0, max_positions, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, max_positions)
        positions = torch.arange(start, stop, dtype=torch.float32, device=device)
        # fp64 functions of the fp32 angle: full range reduction at any position
        angle = (positions[:, None] * freq).double()
        cos[start:stop] = angle.cos()
        sin[start:stop] = angle.sin()
    return cos, sin


def rope_tables_reference(
    *,
    dim: int,
    max_positions: int,
    theta: float,
    yarn: Mapping[str, float] | None = None,
    device: torch.device | str | None = None,
) -> Tables:
    """The op itself: tables are made once, in plain torch on every device."""
    return rope_tables(dim=dim, max_positions=max_positions, theta=theta, yarn=yarn, device=device)


def _check_yarn(op: str, yarn: Mapping[str, float]) -> None:
    check.require(
        sorted(yarn) == sorted(_YARN_FIELDS),
        lambda: f"{op}: yarn is {dict(yarn)}, expected the fields {', '.join(_YARN_FIELDS)}",
    )
    check.require(
        all(yarn[field] > 0 for field in _YARN_FIELDS),
        lambda: f"{op}: yarn is {dict(yarn)}, expected values > 0",
    )


def _frequencies(dim: int, theta: float, yarn: Mapping[str, float] | None) -> torch.Tensor:
    index = torch.arange(dim // 2, dtype=torch.float64)
    freq = theta ** (-2.0 * index / dim)
    if yarn is not None:

        def channel(turns: float) -> float:
            # the channel that makes `turns` turns over the original context
            wavelength = yarn["original_max_positions"] / (2.0 * math.pi * turns)
            return dim * math.log(wavelength) / (2.0 * math.log(theta))

        low = max(math.floor(channel(yarn["beta_fast"])), 0)
        high = min(math.ceil(channel(yarn["beta_slow"])), dim - 1)
        ramp = ((index - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
        freq = freq * (1.0 - ramp) + freq / yarn["factor"] * ramp
    return freq.float()


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *,
    inverse: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotate the last ``r = 2 * cos.shape[1]`` channels of each token.

    Args:
        x: ``[T, H, D]`` or ``[T, D]``, bf16/fp16/fp32, ``D >= r``, last dimension contiguous.
        positions: ``[T]`` int32 or int64, below ``max_positions`` (not checked).
        cos, sin: ``[max_positions, r/2]`` fp32, as ``rope_tables`` makes them.
        inverse: rotate back.
        out: as ``x``, may be ``x`` itself; allocated when omitted.

    Returns:
        ``out``; channels ahead of the last ``r`` are those of ``x``. Empty input launches nothing.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(x, positions, cos, sin, out)
    if out.numel() == 0 or cos.shape[1] == 0:
        return out if out.data_ptr() == x.data_ptr() else out.copy_(x)
    if backend.use_reference(x):
        return rotate(x, positions, cos, sin, inverse, out)
    heads, heads_out = (x, out) if x.ndim == 3 else (x.unsqueeze(1), out.unsqueeze(1))
    num_tokens, num_heads, width = heads.shape
    half = cos.shape[1]
    in_place = x.device.type != "meta" and out.data_ptr() == x.data_ptr()
    kept = 0 if in_place else width - 2 * half
    key = {"T": num_tokens, "H": num_heads, "D": width, "r": 2 * half}
    cfg = config.lookup("apply_rope", key, default_config, grows="T")
    with backend.on_device(x):
        _apply_rope_kernel[(num_tokens, triton.cdiv(num_heads, cfg.block_h))](
            heads, heads.stride(0), heads.stride(1),
            positions, positions.stride(0),
            cos, cos.stride(0),
            sin, sin.stride(0),
            heads_out, heads_out.stride(0), heads_out.stride(1),
            num_heads, width - 2 * half,
            KEPT=kept, KEPT_P2=triton.next_power_of_2(max(1, kept)),
            HALF=half, HALF_P2=triton.next_power_of_2(half),
            INVERSE=inverse, BLOCK_H=cfg.block_h, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "apply_rope"
    check.dtype(op, "x", x, check.FLOATS)
    if x.ndim not in (2, 3):
        raise ValueError(f"{op}: x is {tuple(x.shape)}, expected [T, H, D] or [T, D]")
    check.last_contiguous(op, "x", x)
    check.dtype(op, "positions", positions, check.INTS)
    check.shape(op, "positions", positions, (x.shape[0],), "[T]")
    check.device(op, "positions", positions, x)
    check.tensor(op, "cos", cos, (torch.float32,), (None, None), "[max_positions, r/2]", x)
    check.tensor(op, "sin", sin, (torch.float32,), cos.shape, "the shape of cos", x)
    check.require(
        x.shape[-1] >= 2 * cos.shape[1],
        lambda: f"{op}: x is {tuple(x.shape)}, expected at least r = {2 * cos.shape[1]} channels",
    )
    return check.output(op, out, x.shape, like=x, may_alias=True, inputs=(positions, cos, sin))


def apply_rope_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *,
    inverse: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(x, positions, cos, sin, out)
    return out if out.numel() == 0 else rotate(x, positions, cos, sin, inverse, out)


def _complex_view_exists(x: torch.Tensor, kept: int) -> bool:
    """Whether pairs from channel ``kept`` on start at even offsets, as complex numbers do."""
    odd = (x.storage_offset() + kept) % 2
    return not odd and ((x.is_contiguous() and x.shape[-1] % 2 == 0) or not _has_odd_stride(x))


def _has_odd_stride(x: torch.Tensor) -> bool:
    return any(stride % 2 for stride in x.stride()[:-1])


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    inverse: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The formula without checks, for references that rotate as a part of what they do."""
    # a pair of channels is a complex number, and turning it is one product
    turn = torch.complex(cos.index_select(0, positions), sin.index_select(0, positions))
    if inverse:
        turn = turn.conj().resolve_conj()
    if x.ndim == 3:
        turn = turn.unsqueeze(1)
    half = cos.shape[1]
    kept = x.shape[-1] - 2 * half
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    pairs = out[..., kept:].view(*out.shape[:-1], half, 2)
    if out.dtype == torch.float32 and _complex_view_exists(out, kept):
        torch.view_as_complex(pairs).mul_(turn)
        return out
    pairs32 = pairs.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    turned = torch.view_as_complex(pairs32) * turn
    pairs.copy_(torch.view_as_real(turned))
    return out


@dataclass(frozen=True)
class RopeConfig:
    block_h: int
    num_warps: int


def default_config(key: Case) -> RopeConfig:
    """Used when no tuned entry fits: heads of one token per program, about 2048 channels."""
    width = max(1, triton.next_power_of_2(key["D"]))
    block_h = max(1, min(triton.next_power_of_2(key["H"]), 2048 // width))
    return RopeConfig(block_h=block_h, num_warps=4 if block_h * width >= 1024 else 1)


def candidates(key: Case, target: Target) -> Iterable[RopeConfig]:
    for block_h in (1, 2, 4, 8, 16, 32, 64):
        for num_warps in (1, 2, 4, 8):
            size = block_h * key["D"]
            if block_h <= 2 * key["H"] and 128 * num_warps <= size <= 2048 * num_warps:
                yield RopeConfig(block_h, num_warps)


@triton.jit
def _apply_rope_kernel(
    x_ptr, stride_xt, stride_xh,  # [T, H, D]
    positions_ptr, stride_pt,  # [T]
    cos_ptr, stride_cp,  # [max_positions, HALF]
    sin_ptr, stride_sp,  # [max_positions, HALF]
    out_ptr, stride_ot, stride_oh,  # [T, H, D]
    num_heads, first,
    KEPT: tl.constexpr, KEPT_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = (offs_h < num_heads)[:, None]
    x_rows = x_ptr + pid_t * stride_xt + offs_h.to(tl.int64)[:, None] * stride_xh
    out_rows = out_ptr + pid_t * stride_ot + offs_h.to(tl.int64)[:, None] * stride_oh
    if KEPT > 0:
        offs_k = tl.arange(0, KEPT_P2)[None, :]
        mask_k = mask_h & (offs_k < KEPT)
        tl.store(out_rows + offs_k, tl.load(x_rows + offs_k, mask=mask_k, other=0.0), mask=mask_k)
    position = tl.load(positions_ptr + pid_t * stride_pt).to(tl.int64)
    offs_i = tl.arange(0, HALF_P2)
    cos = tl.load(cos_ptr + position * stride_cp + offs_i, mask=offs_i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * stride_sp + offs_i, mask=offs_i < HALF, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    offs_r = tl.arange(0, 2 * HALF_P2)[None, :]
    mask_r = mask_h & (offs_r < 2 * HALF)
    x = tl.load(x_rows + first + offs_r, mask=mask_r, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, HALF_P2, 2)))
    out = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    out = tl.reshape(out, (BLOCK_H, 2 * HALF_P2)).to(out_ptr.dtype.element_ty)
    tl.store(out_rows + first + offs_r, out, mask=mask_r)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = randn(case["T"], case["H"], case["D"], dtype=torch.bfloat16, device=device, seed=seed)
    cos, sin = rope_tables(dim=case["r"], max_positions=case["T"], theta=10000.0)
    positions = torch.arange(case["T"])
    tables = (cos.to(device), sin.to(device))
    return (x, positions.to(device), *tables), {"inverse": case["inverse"]}


def _table_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    sizes = {"dim": case["r"], "max_positions": case["P"], "theta": 160000.0}
    return (), {
        **sizes,
        "yarn": dict(zip(_YARN_FIELDS, (16, 65536, 32, 1), strict=True)),
        "device": device,
    }


def _case(name: str, T: int, H: int, D: int, r: int, inverse: bool = False) -> Case:
    return {"name": name, "T": T, "H": H, "D": D, "r": r, "inverse": inverse}


SPECS = (
    KernelSpec(
        op=apply_rope, reference=apply_rope_reference, default=default_config,
        candidates=candidates,
        cases=(
            _case("small", 3, 5, 36, 12),
            _case("small-inverse", 3, 5, 36, 12, inverse=True),
            _case("flash-t1", 1, 64, 512, 64),
            _case("flash-tp1", 3456, 64, 512, 64),
            _case("flash-tp8", 3456, 8, 512, 64),
            _case("flash-inverse", 3456, 64, 512, 64, inverse=True),
            _case("flash-kv", 3456, 1, 512, 64),
            _case("flash-index", 3456, 64, 128, 64),
        ),
        inputs=_inputs, tolerance=8e-3, grows="T",
        bytes_moved=lambda case: case["T"] * case["H"] * case["D"] * 4,
        flops=lambda case: case["T"] * case["H"] * case["r"] * 3,
    ),
    KernelSpec(
        op=rope_tables, reference=rope_tables_reference, kernel=False,
        cases=({"name": "small", "P": 300, "r": 64}, {"name": "flash", "P": 8192, "r": 64}),
        inputs=_table_inputs,
        bytes_moved=lambda case: case["P"] * case["r"] * 4,
        launches=lambda case: 0,
    ),
)  # fmt: skip
