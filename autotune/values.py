"""Whether an op gives what its reference gives."""

from __future__ import annotations

import torch

from ftkernels import KernelSpec
from ftkernels.spec import Case
from ftkernels.testing import assert_close, nan_poison

Tensors = list[torch.Tensor]


def disagreement(spec: KernelSpec, case: Case, *, device: str, seed: int = 0) -> str:
    """Where the op and its reference differ by more than the op's tolerance; empty when nowhere.

    Everything counts that a call returns or changes. The tolerance is relative to the row's
    largest value, with one rounding to the result's type on top; integers are equal.
    """
    expected = _outcome(spec, case, device, seed, reference=True)
    for mine, theirs in zip(_outcome(spec, case, device, seed), expected, strict=True):
        rounding = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
        allowed = spec.tolerance + rounding if spec.tolerance else 0.0
        try:
            assert_close(mine, theirs, row_tol=allowed if rounding else 0.0)
        except AssertionError as error:
            return str(error)
    return ""


def _outcome(
    spec: KernelSpec, case: Case, device: str, seed: int, *, reference: bool = False
) -> Tensors:
    with nan_poison():  # what a builder leaves unwritten is the same twice
        args, kwargs = spec.inputs(case, device=device, seed=seed)
    result = (spec.reference if reference else spec.op)(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves((result, args, kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]
