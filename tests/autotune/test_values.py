"""What counts as an op's outcome, and by how much it may differ from the reference's.

Mutants tried: changed arguments left out, integers within the tolerance, no rounding on top.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autotune.values import disagreement
from tests.autotune.toy import TOY

CASE = {"T": 2, "I": 4}


def _off(by: float, dtype: torch.dtype = torch.float32) -> object:
    return lambda x: (2 * x + by).to(dtype)


def _spec(op: object, tolerance: float = 0.0, reference: object = None) -> object:
    return replace(TOY, op=op, tolerance=tolerance, reference=reference or TOY.reference)  # type: ignore[arg-type]


def test_equal_outcomes_agree():
    assert disagreement(TOY, CASE, device="cpu") == ""


def test_the_tolerance_is_the_rows_and_a_rounding_more():
    # the reference gives 2 everywhere
    assert disagreement(_spec(_off(0.019), 0.01), CASE, device="cpu") == ""
    assert "differ" in disagreement(_spec(_off(0.021), 0.01), CASE, device="cpu")
    assert "differ" in disagreement(_spec(_off(1e-6)), CASE, device="cpu")
    narrow = _spec(_off(0.0, torch.bfloat16), 0.01, _off(0.03, torch.bfloat16))
    assert disagreement(narrow, CASE, device="cpu") == ""


def test_integers_are_equal():
    off = _spec(_off(1, torch.int32), 0.9, _off(0, torch.int32))
    assert "differ" in disagreement(off, CASE, device="cpu")


def test_what_a_call_changes_counts():
    def changes(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        x += 1
        return y

    assert "differ" in disagreement(_spec(changes, 0.01), CASE, device="cpu")


def test_seeds_give_other_inputs():
    only_ones = _spec(lambda x: torch.full_like(x, 2.0))
    assert disagreement(only_ones, CASE, device="cpu", seed=0) == ""
    assert disagreement(only_ones, CASE, device="cpu", seed=1) != ""
