"""Token embedding: a row of ``weight`` for each token, repeated ``hc`` times.

Ids outside ``[vocab_start, vocab_start + V)`` give zeros: vocabulary-parallel slices add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn


def embed(
    token_ids: torch.Tensor, weight: torch.Tensor, *, hc: int = 1, vocab_start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Look tokens up and repeat each row for every residual stream.

    Args:
        token_ids: ``[T]`` int32 or int64.
        weight: ``[V, C]``, bf16/fp16/fp32, last dimension contiguous: the rows of this slice.
        hc: copies of each row, ``>= 1``.
        vocab_start: id of the first row of ``weight``, ``>= 0``.
        out: ``[T, hc, C]`` in ``weight.dtype``, not overlapping an input; allocated when omitted.

    Returns:
        ``out``; with no element nothing is launched.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, device, hc or vocab_start outside the contract.

    Graph-safe when ``out`` is given: no allocation, no host sync.
    """
    out = _checked(token_ids, weight, hc, vocab_start, out)
    if out.numel() == 0:
        return out
    if backend.use_reference(weight):
        return _embed(token_ids, weight, vocab_start, out)
    num_tokens, _, width = out.shape
    key = {"T": num_tokens, "C": width, "hc": hc}
    cfg = config.lookup("embed", key, default_config, grows="T")
    with backend.on_device(weight):
        _embed_kernel[(num_tokens, triton.cdiv(width, cfg.block_c))](
            token_ids, token_ids.stride(0),
            weight, weight.stride(0),
            out, out.stride(0), out.stride(1),
            weight.shape[0], vocab_start, width,
            HC=hc, BLOCK_C=cfg.block_c, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _checked(
    token_ids: torch.Tensor, weight: torch.Tensor, hc: int, vocab_start: int,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    op = "embed"
    check.dtype(op, "token_ids", token_ids, check.INTS)
    check.shape(op, "token_ids", token_ids, (None,), "[T]")
    check.tensor(op, "weight", weight, check.FLOATS, (None, None), "[V, C]", token_ids)
    check.require(hc >= 1, lambda: f"{op}: hc is {hc}, expected >= 1")
    check.require(vocab_start >= 0, lambda: f"{op}: vocab_start is {vocab_start}, expected >= 0")
    size = (token_ids.shape[0], hc, weight.shape[1])
    return check.output(op, out, size, like=weight, inputs=(token_ids,))


def embed_reference(
    token_ids: torch.Tensor, weight: torch.Tensor, *, hc: int = 1, vocab_start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The definition in plain torch, sharing nothing with the kernel."""
    out = _checked(token_ids, weight, hc, vocab_start, out)
    return out if out.numel() == 0 else _embed(token_ids, weight, vocab_start, out)


def _embed(
    token_ids: torch.Tensor, weight: torch.Tensor, vocab_start: int, out: torch.Tensor
) -> torch.Tensor:
    if weight.shape[0] == 0:
        return out.zero_()
    row = token_ids.long() - vocab_start
    known = row.clamp(0, weight.shape[0] - 1)
    rows = weight.index_select(0, known).masked_fill_((row != known).unsqueeze(1), 0.0)
    return out.copy_(rows.unsqueeze(1))


@dataclass(frozen=True)
class EmbedConfig:
    block_c: int
    num_warps: int


def default_config(key: Case) -> EmbedConfig:
    """Used when no tuned entry fits: one token per program, at most 1024 channels."""
    return EmbedConfig(block_c=min(1024, triton.next_power_of_2(key["C"])), num_warps=4)


def candidates(key: Case, target: Target) -> Iterable[EmbedConfig]:
    for block_c in (512, 1024, 2048, 4096):
        for num_warps in (1, 2, 4, 8):
            if block_c <= 2 * key["C"] and 128 * num_warps <= block_c <= 1024 * num_warps:
                yield EmbedConfig(block_c, num_warps)


@triton.jit
def _embed_kernel(
    token_ids_ptr, stride_it,  # [T]
    weight_ptr, stride_wv,  # [V, C]
    out_ptr, stride_ot, stride_oh,  # [T, HC, C]
    V, vocab_start, C,
    HC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_t = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    row = tl.load(token_ids_ptr + pid_t * stride_it).to(tl.int64) - vocab_start
    value = tl.zeros((BLOCK_C,), dtype=out_ptr.dtype.element_ty)
    if (row >= 0) & (row < V):
        value = tl.load(weight_ptr + row * stride_wv + offs_c, mask=mask_c, other=0.0)
    for copy in tl.static_range(HC):
        tl.store(out_ptr + pid_t * stride_ot + copy * stride_oh + offs_c, value, mask=mask_c)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    weight = randn(case["V"], case["C"], dtype=torch.bfloat16, device=device, seed=seed)
    if device == "meta":
        token_ids = torch.empty(case["T"], dtype=torch.int32, device="meta")
    else:
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(0, case["V"], (case["T"],), generator=generator).int().to(device)
    return (token_ids, weight), {"hc": case["hc"]}


SPEC = KernelSpec(
    op=embed, reference=embed_reference, default=default_config, candidates=candidates,
    cases=(
        {"name": "small", "T": 5, "V": 11, "C": 100, "hc": 4},
        {"name": "flash-t1", "T": 1, "V": 129280, "C": 4096, "hc": 4},
        {"name": "flash-t3456", "T": 3456, "V": 129280, "C": 4096, "hc": 4},
        {"name": "flash-tp8", "T": 3456, "V": 16160, "C": 4096, "hc": 4},
    ),
    inputs=_inputs, grows="T",
    bytes_moved=lambda case: case["T"] * case["C"] * 2 * (1 + case["hc"]),
)  # fmt: skip
