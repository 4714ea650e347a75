"""Refusals: which error, which sentence, and that a sentence costs nothing until it is needed.

Mutants tried: strides unchecked for rows of one element, partial overlap allowed with may_alias,
devices uncompared, a message built for a passing check.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels import check

F32 = (torch.float32,)


def _must_not_run() -> str:
    raise AssertionError("the message of a passing check was built")


def _message(kind: type[Exception], call) -> str:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    return str(error.value)


def test_require_builds_its_message_on_failure_only():
    check.require(True, _must_not_run)
    check.require(True, "unused")
    assert _message(ValueError, lambda: check.require(False, "plain")) == "plain"
    assert _message(ValueError, lambda: check.require(False, lambda: "built")) == "built"


class _Unspoken(str):
    """Text that must not get into a message."""

    def __format__(self, spec: str) -> str:
        raise AssertionError("the message of a passing check was built")


def test_passing_checks_format_nothing():
    x, op, name = torch.zeros(2, 3), _Unspoken("op"), _Unspoken("x")
    check.dtype(op, name, x, F32)
    check.shape(op, name, x, (2, None), _Unspoken("[2, K]"))
    check.last_contiguous(op, name, x)
    check.device(op, name, x, x)
    check.tensor(op, name, x, F32, (None, 3), _Unspoken("[T, 3]"), x)
    check.require(True, _must_not_run)
    with pytest.raises(AssertionError, match="was built"):  # it would be noticed
        check.dtype(op, name, x.half(), F32)


def test_dtype():
    check.dtype("op", "x", torch.zeros(1), F32)
    assert _message(
        TypeError, lambda: check.dtype("op", "x", torch.zeros(1).half(), check.FLOATS[::2])
    ) == ("op: x is float16, expected bfloat16, float32")
    assert _message(TypeError, lambda: check.dtype("op", "x", [1.0], F32)) == (
        "op: x is list, expected a tensor"
    )


@pytest.mark.parametrize(
    ("size", "dims"), [((2, 3), (2, 4)), ((2, 3), (None, 4)), ((2,), (2, 3)), ((2, 3, 1), (2, 3))]
)
def test_shape(size, dims):
    known = ", ".join("?" if d is None else str(d) for d in dims)
    assert _message(
        ValueError, lambda: check.shape("op", "x", torch.zeros(size), dims, "[T, K]")
    ) == (f"op: x is {size}, expected [T, K] = [{known}]")


def test_last_dimension_must_be_contiguous_only_where_it_has_neighbours():
    for x in (torch.zeros(4, 6)[::2], torch.zeros(4, 6)[:, :3], torch.zeros(4, 1).expand(4, 1),
              torch.zeros(1, 4).t(), torch.zeros(()), torch.zeros(0, 3)):  # fmt: skip
        check.last_contiguous("op", "x", x)
    for x in (torch.zeros(4, 6).t(), torch.zeros(4, 6)[:, ::2], torch.zeros(4, 1).expand(4, 3)):
        message = _message(ValueError, lambda x=x: check.last_contiguous("op", "x", x))
        assert message == (
            f"op: x is {tuple(x.shape)} with strides {x.stride()}, "
            "expected a contiguous last dimension"
        )


def test_device():
    x, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert _message(ValueError, lambda: check.device("op", "x", x, elsewhere)) == (
        "op: x is on cpu, expected meta"
    )


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (None, TypeError, "op: x is NoneType, expected a tensor"),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, "op: x is int32, expected float32"),
        (torch.zeros(2, 4), ValueError, "op: x is (2, 4), expected [T, 3] = [?, 3]"),
        (torch.zeros(3, 2).t(), ValueError, "with strides (1, 2), expected a contiguous"),
        (torch.zeros(2, 3, device="meta"), ValueError, "op: x is on meta, expected cpu"),
    ],
)
def test_tensor_asks_all_of_it(x, kind, text):
    like = torch.zeros(1)
    message = _message(kind, lambda: check.tensor("op", "x", x, F32, (None, 3), "[T, 3]", like))
    assert text in message


def test_tensor_takes_views():
    base = torch.zeros(6, 8)
    check.tensor("op", "x", base[::2, 1:4], F32, (3, 3), "[T, 3]")
    check.tensor("op", "x", torch.zeros(3, 1)[:, :1], F32, (None, 1), "[T, 1]")
    check.tensor("op", "x", torch.zeros(()), F32, (), "[]")


def test_output_is_made_when_omitted():
    out = check.output("op", None, (2, 3), like=torch.zeros(1, device="meta"), dtype=torch.int32)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3), torch.int32, "meta")
    assert check.output("op", None, (2,), like=torch.zeros(1).half()).dtype == torch.float16


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        (torch.zeros(2, 4), ValueError, "op: out is (2, 4), expected the result's shape = [2, 3]"),
        (torch.zeros(2, 3).half(), TypeError, "op: out is float16, expected float32"),
        (3.0, TypeError, "op: out is float, expected a tensor"),
        (torch.zeros(2, 3, device="meta"), ValueError, "op: out is on meta, expected cpu"),
        (torch.zeros(3, 2).t(), ValueError, "expected a contiguous last dimension"),
    ],
)
def test_output_is_checked(out, kind, text):
    like = torch.zeros(5)
    assert text in _message(kind, lambda: check.output("op", out, (2, 3), like=like))


def test_output_may_not_overlap_its_inputs():
    x = torch.zeros(4, 3)
    own = "expected memory of its own"
    assert check.output("op", x, (4, 3), like=x, may_alias=True) is x
    assert own in _message(ValueError, lambda: check.output("op", x, (4, 3), like=x))
    both = "expected the input itself or memory of its own"
    for out in (x[1:], x[:3]):  # shifted, and the same start with another size
        call = lambda out=out: check.output("op", out, (3, 3), like=x[1:], may_alias=True)  # noqa: E731
        if out.data_ptr() == x[1:].data_ptr():
            assert call() is out
        else:
            assert both in _message(ValueError, call)
    other = torch.zeros(4, 3)
    assert both in _message(
        ValueError,
        lambda: check.output("op", other, (4, 3), like=x, may_alias=True, inputs=(None, other)),
    )


def test_overlaps():
    x = torch.zeros(10)
    assert check.overlaps(x[:5], x[4:])
    assert not check.overlaps(x[:5], x[5:])
    assert check.overlaps(x[::2], x[1::2])  # spans meet, though no element does
    assert not check.overlaps(x, torch.zeros(10))
    assert not check.overlaps(x[:0], x)
    assert not check.overlaps(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"))


def test_scratch():
    like = torch.zeros(1)
    made = check.scratch("op", None, 100, like)
    assert made.shape == (100,)
    assert made.dtype == torch.uint8
    assert not made.any()
    memory = torch.zeros(256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    assert check.scratch("op", memory, 100, like) is memory
    small = memory[:64]
    assert _message(ValueError, lambda: check.scratch("op", small, 100, like)) == (
        "op: scratch is 64 bytes, expected at least 100"
    )
    crooked = memory[1:]
    assert "16-byte aligned" in _message(
        ValueError, lambda: check.scratch("op", crooked, 100, like)
    )
    floats = torch.zeros(100)
    assert _message(TypeError, lambda: check.scratch("op", floats, 100, like)) == (
        "op: scratch is float32, expected uint8"
    )
