"""Join partial attention results over disjoint keys, and apply the sink once.

``out = sum_i exp(lse_i - m) partial_i / (sum_i exp(lse_i - m) + exp(sink - m))``, fp32, in split
order.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.spec import Case, Inputs, KernelSpec
from ftkernels.testing import randn


def merge_splits(
    partial: torch.Tensor, lse: torch.Tensor, *, sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Merge split results.

    Args:
        partial: ``[n, T, H, D]`` fp32, each normalized over its own keys.
        lse: ``[n, T, H]`` fp32 natural log; ``-inf`` marks an empty split, its partial is not read.
        sink: ``[H]`` fp32, a logit without a value.
        out: ``[T, H, D]`` of ``out_dtype``, with ``return_lse`` a pair with ``[T, H]`` fp32.

    Returns:
        ``out`` (and ``lse`` over the keys, without the sink); all splits empty: 0 and ``-inf``.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.
    """
    return merge_splits_reference(
        partial, lse, sink=sink, out_dtype=out_dtype, return_lse=return_lse, out=out
    )


def merge_splits_reference(
    partial: torch.Tensor, lse: torch.Tensor, *, sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition in plain torch."""
    op, fp32 = "merge_splits", (torch.float32,)
    check.tensor(op, "partial", partial, fp32, (None, None, None, None), "[n, T, H, D]")
    check.tensor(op, "lse", lse, fp32, tuple(partial.shape[:3]), "[n, T, H]", partial)
    size = (partial.shape[1], partial.shape[2], partial.shape[3])
    if sink is not None:
        check.tensor(op, "sink", sink, fp32, (size[1],), "[H]", partial)
    check.out_dtype(op, out_dtype)
    result, total = outputs(op, out, size, partial, out_dtype, return_lse, (lse, sink))
    if not result.numel():
        return (result, total) if return_lse and total is not None else result
    largest = lse.amax(dim=0) if lse.shape[0] else lse.new_full(size[:2], float("-inf"))
    joint = largest if sink is None else torch.maximum(largest, sink)
    joint = torch.where(joint.isinf(), torch.zeros_like(joint), joint)
    weights = torch.exp(lse - joint)
    keys, mixed = joint.new_zeros(size[:2]), joint.new_zeros(size)
    for split in range(lse.shape[0]):
        keys += weights[split]
        live = weights[split, :, :, None]
        mixed += torch.where(live > 0, partial[split] * live, 0.0)
    denominator = keys if sink is None else keys + torch.exp(sink - joint)
    result.copy_(mixed / torch.where(denominator > 0, denominator, 1.0)[:, :, None])
    if total is not None:
        total.copy_(torch.log(keys) + joint)
        return result, total
    return result


def outputs(
    op: str, out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    size: tuple[int, int, int], like: torch.Tensor, dtype: torch.dtype, return_lse: bool,
    inputs: tuple[torch.Tensor | None, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``(out, lse)`` after checking them, or new ones; ``lse`` is None unless asked for."""
    if not return_lse:
        check.require(
            not isinstance(out, tuple), f"{op}: out is a tuple, expected one tensor without lse"
        )
        assert not isinstance(out, tuple)
        return check.output(op, out, size, like=like, dtype=dtype, inputs=inputs), None
    check.require(
        out is None or (isinstance(out, tuple) and len(out) == 2),
        f"{op}: out is not a pair, expected (out, lse) with return_lse",
    )
    first, second = out if isinstance(out, tuple) else (None, None)
    result = check.output(op, first, size, like=like, dtype=dtype, inputs=inputs)
    lse = check.output(
        op, second, size[:2], like=like, dtype=torch.float32, name="lse", inputs=inputs
    )
    check.disjoint(op, ("out", result), ("lse", lse))
    return result, lse


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    size = (case["n"], case["T"], case["H"])
    partial = randn(*size, case["D"], device=device, seed=seed)
    lse = randn(*size, device=device, seed=seed + 1)
    return (partial, lse), {"sink": randn(case["H"], device=device, seed=seed + 2)}


SPEC = KernelSpec(
    op=merge_splits, reference=merge_splits_reference, kernel=False, inputs=_inputs, grows="T",
    tolerance=8e-3,
    cases=(
        {"name": "small", "n": 3, "T": 2, "H": 3, "D": 128},
        {"name": "flash-tp1", "n": 16, "T": 8, "H": 64, "D": 512},
    ),
    bytes_moved=lambda c: (4 * c["n"] + 2) * c["T"] * c["H"] * c["D"],
)  # fmt: skip
