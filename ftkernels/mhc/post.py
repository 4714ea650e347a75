"""Hyper-connection output: ``out[k] = post[k]*y + sum_j comb[j, k]*streams[j]``.

Layout: the sum runs over the first index of ``comb``.
Numerics: fp32, one rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear.linear import wide
from ftkernels.mhc.mixing import appended, new_stream
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def hc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Mix a sublayer's output into the residual streams.

    Args:
        y: ``[T, C]``, bf16/fp16/fp32, rows may be strided.
        streams: ``[T, hc, C]``, bf16/fp16/fp32, last dimension contiguous.
        post: ``[T, hc]`` fp32.
        comb: ``[T, hc, hc]`` fp32.
        out: ``[T, hc, C]`` in ``streams.dtype``, may be ``streams``; allocated when omitted.

    Returns:
        ``out``; with ``T == 0`` nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or device outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    check_sublayer("hc_post", y, streams, post, comb)
    plain = backend.use_reference(streams)
    if plain and out is None:
        return mixed_plain(y, streams, post, comb).to(streams.dtype)
    out = output("hc_post", y, streams, post, comb, out)
    if streams.numel() == 0:
        return out
    if plain:
        return out.copy_(mixed_plain(y, streams, post, comb))
    num_tokens, hc, width = streams.shape
    cfg = config.lookup("hc_post", {"hc": hc, "C": width}, default_config)
    with backend.on_device(streams):
        _hc_post_kernel[(num_tokens, triton.cdiv(width, cfg.block_c))](
            y, y.stride(0), streams, streams.stride(0), streams.stride(1),
            post, post.stride(0), comb, comb.stride(0), comb.stride(1),
            out, out.stride(0), out.stride(1),
            width,
            HC=hc, BLOCK_C=cfg.block_c, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def check_sublayer(
    op: str, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> None:
    """Refuse a sublayer's output, streams or mixes outside the contract."""
    fp32 = (torch.float32,)
    check.tensor(op, "streams", streams, check.FLOATS, (None, None, None), "[T, hc, C]")
    num_tokens, hc, width = streams.shape
    check.tensor(op, "y", y, check.FLOATS, (num_tokens, width), "[T, C]", streams)
    check.tensor(op, "post", post, fp32, (num_tokens, hc), "[T, hc]", streams)
    check.tensor(op, "comb", comb, fp32, (num_tokens, hc, hc), "[T, hc, hc]", streams)


def output(
    op: str, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    out: torch.Tensor | None, inputs: tuple[torch.Tensor | None, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """The new streams' tensor: `out` after checking it, or a new one."""
    return check.output(
        op, out, streams.shape, like=streams, may_alias=True, inputs=(y, post, comb, *inputs)
    )


def hc_post_reference(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    check_sublayer("hc_post", y, streams, post, comb)
    out = output("hc_post", y, streams, post, comb, out)
    return out.copy_(mixed_plain(y, streams, post, comb))


def mixed_plain(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The formula in fp32 without checks."""
    spread = post[:, :, None] * wide(y)[:, None]
    return torch.baddbmm(spread, comb.transpose(1, 2), wide(streams))


@dataclass(frozen=True)
class PostConfig:
    block_c: int
    num_warps: int


def default_config(key: Case) -> PostConfig:
    """At most 512 channels of all streams per program."""
    return PostConfig(block_c=min(512, triton.next_power_of_2(key["C"])), num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[PostConfig]:
    for block_c in (256, 512, 1024):
        for num_warps in (1, 2, 4, 8):
            if block_c <= 2 * key["C"] and 128 * num_warps <= block_c <= 1024 * num_warps:
                yield PostConfig(block_c, num_warps)


@triton.jit
def _hc_post_kernel(
    y_ptr, stride_yt,  # [T, C]
    streams_ptr, stride_st, stride_sh,  # [T, hc, C]
    post_ptr, stride_pt,  # [T, hc]
    comb_ptr, stride_ct, stride_cj,  # [T, hc, hc]
    out_ptr, stride_ot, stride_oh,  # [T, hc, C]
    C,
    HC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    y = tl.load(y_ptr + pid_t * stride_yt + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    rows = ()
    row_ptrs = streams_ptr + pid_t * stride_st + offs_c
    for _ in tl.static_range(HC):
        rows = appended(rows, tl.load(row_ptrs, mask=mask_c, other=0.0).to(tl.float32))
        row_ptrs += stride_sh
    # out may be streams: no store before every thread has read
    tl.debug_barrier()
    out_ptrs = out_ptr + pid_t * stride_ot + offs_c
    for k in tl.static_range(HC):
        combs = ()
        comb_ptrs = comb_ptr + pid_t * stride_ct + k
        for _ in tl.static_range(HC):
            combs = appended(combs, tl.load(comb_ptrs))
            comb_ptrs += stride_cj
        out = new_stream(y, tl.load(post_ptr + pid_t * stride_pt + k), combs, rows, HC)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_c)
        out_ptrs += stride_oh


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    num_tokens, hc, width = case["T"], case["hc"], case["C"]
    y = randn(num_tokens, width, dtype=torch.bfloat16, device=device, seed=seed)
    streams = randn(num_tokens, hc, width, dtype=torch.bfloat16, device=device, seed=seed + 1)
    post = randn(num_tokens, hc, device=device, seed=seed + 2).abs()
    comb = randn(num_tokens, hc, hc, device=device, seed=seed + 3).softmax(-1)
    return (y, streams, post, comb), {}


SPEC = KernelSpec(
    op=hc_post, reference=hc_post_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 3, "hc": 4, "C": 100},
        {"name": "flash-t1", "T": 1, "hc": 4, "C": 4096},
        {"name": "flash-t3456", "T": 3456, "hc": 4, "C": 4096},
        {"name": "pro-t64", "T": 64, "hc": 4, "C": 7168},
    ),
    inputs=_inputs, tolerance=8e-3,
    bytes_moved=lambda case: 2 * case["T"] * case["C"] * (2 * case["hc"] + 1),
)  # fmt: skip
