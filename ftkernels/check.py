"""Uniform refusals: `<op>: <argument> is <value>, expected <what>`, built only on failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ftkernels.spec import COUNTER_BYTES

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
_LARGEST: float = torch.finfo(torch.float32).max
Shape = Sequence[int | None]


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise `ValueError` unless `condition`; a costly message is passed as a function."""
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


def dtype(op: str, name: str, x: object, dtypes: Sequence[torch.dtype]) -> None:
    """Raise `TypeError` unless `x` is a tensor of one of `dtypes`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")
    if x.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {name} is {str(x.dtype).removeprefix('torch.')}, expected {wanted}")


def shape(op: str, name: str, x: torch.Tensor, dims: Shape, text: str) -> None:
    """Raise `ValueError` unless `x` has these sizes.

    Args:
        dims: the sizes, None for any.
        text: the shape in words, `[T, K]`.
    """
    sizes = x.shape
    fits = len(sizes) == len(dims)
    if not fits or any(d is not None and d != s for d, s in zip(dims, sizes, strict=True)):
        known = ", ".join("?" if d is None else str(d) for d in dims)
        raise ValueError(f"{op}: {name} is {tuple(sizes)}, expected {text} = [{known}]")


def last_contiguous(op: str, name: str, x: torch.Tensor) -> None:
    """Raise `ValueError` unless the last dimension is contiguous; the others are free."""
    if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{op}: {name} is {tuple(x.shape)} with strides {x.stride()}, "
            "expected a contiguous last dimension"
        )


def device(op: str, name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    """Raise `ValueError` unless `x` is on the device of `like`."""
    if x.device != like.device:
        raise ValueError(f"{op}: {name} is on {x.device}, expected {like.device}")


def tensor(
    op: str, name: str, x: object, dtypes: Sequence[torch.dtype], dims: Shape, text: str,
    like: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """All of the above for one input."""
    if isinstance(x, torch.Tensor) and x.dtype in dtypes:
        # the common case in one pass, since a decode step makes hundreds of these
        sizes = x.shape
        fits = len(sizes) == len(dims) and (not sizes or x.stride(-1) == 1)
        if fits and (like is None or x.device == like.device):
            for wanted, size in zip(dims, sizes):  # noqa: B905
                if wanted is not None and wanted != size:
                    break
            else:
                return
    dtype(op, name, x, dtypes)
    assert isinstance(x, torch.Tensor)
    shape(op, name, x, dims, text)
    last_contiguous(op, name, x)
    if like is not None:
        device(op, name, x, like)


def matrix(
    op: str, name: str, x: object, dtypes: Sequence[torch.dtype], dims: Shape, text: str,
    like: torch.Tensor,
) -> None:  # fmt: skip
    """As `tensor` for a dense weight, of which either of the last two dimensions is contiguous."""
    if (
        isinstance(x, torch.Tensor) and x.ndim == len(dims) and x.stride(-2) == 1
        and x.dtype in dtypes and x.device == like.device
    ):  # fmt: skip
        for wanted, size in zip(dims, x.shape, strict=True):
            if wanted is not None and wanted != size:
                break
        else:
            return
    tensor(op, name, x, dtypes, dims, text, like)


def output(
    op: str, out: torch.Tensor | None, size: Sequence[int], *, like: torch.Tensor,
    dtype: torch.dtype | None = None, name: str = "out", may_alias: bool = False,
    inputs: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:  # fmt: skip
    """`out` after checking it, or a new tensor of `size` on the device of `like`.

    Args:
        dtype: element type, that of `like` when omitted.
        may_alias: whether `out` may be `like` itself; partial overlap is always refused.
        inputs: further tensors that `out` must not overlap.

    Raises:
        TypeError: `out` is not a tensor or has another dtype.
        ValueError: shape, stride or device differ, or `out` overlaps an input.
    """
    wanted = dtype or like.dtype
    if out is None:
        return torch.empty(size, dtype=wanted, device=like.device)
    tensor(op, name, out, (wanted,), size, "the result's shape", like)
    require(
        _is_disjoint(out),
        lambda: f"{op}: {name} has strides {out.stride()}, expected rows that do not overlap",
    )
    if out.is_meta:
        return out
    begin, end = _span(out)
    for source in (like, *inputs):
        if source is None or not _meets(source, begin, end):
            continue
        same = out.data_ptr() == source.data_ptr() and out.stride() == source.stride()
        require(
            may_alias and same and source is like,
            f"{op}: {name} is overlapping an input in memory, expected "
            + ("the input itself or memory of its own" if may_alias else "memory of its own"),
        )
    return out


def written(
    op: str, name: str, target: torch.Tensor, inputs: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Refuse a tensor that is changed in place and shares memory with an input, or with itself."""
    if not isinstance(target, torch.Tensor) or target.is_meta:
        return
    if not _is_disjoint(target):
        raise ValueError(
            f"{op}: {name} has strides {target.stride()}, expected memory of its own for each entry"
        )
    begin, end = _span(target) if target.numel() else (0, 0)
    for other, source in inputs:
        if not source.is_meta and _meets(source, begin, end):
            raise ValueError(
                f"{op}: {name} is overlapping {other} in memory, expected memory of its own"
            )


def _is_disjoint(x: torch.Tensor) -> bool:
    """Whether no two elements share memory: each stride goes past all that lies within it."""
    if x.is_contiguous():
        return True
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent = stride * (size - 1) + extent
    return True


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory spans of two tensors meet (meta tensors: never)."""
    if a.is_meta or a.device != b.device or not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _meets(x: torch.Tensor, begin: int, end: int) -> bool:
    """Whether the memory span of `x` meets `[begin, end)`; most often two addresses tell."""
    start = x.data_ptr()
    return start < end and begin < end and x.numel() > 0 and _span(x)[1] > begin


def _span(x: torch.Tensor) -> tuple[int, int]:
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.numel() * x.element_size()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def number(op: str, name: str, value: object, low: float | None = None) -> None:
    """Raise `TypeError` for what is no number, `ValueError` for one below `low` or past fp32."""
    if type(value) is float and abs(value) <= _LARGEST and (low is None or value >= low):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} is {value!r}, expected a number")
    if not abs(value) <= _LARGEST or (low is not None and value < low):
        bound = "a finite number" if low is None else f">= {low:g}"
        raise ValueError(f"{op}: {name} is {value}, expected {bound}")


def integer(op: str, name: str, value: object, low: int) -> None:
    """Raise `TypeError` for what is no integer, `ValueError` for one below `low`."""
    if type(value) is int and value >= low:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} is {value!r}, expected an integer >= {low}")
    raise ValueError(f"{op}: {name} is {value}, expected >= {low}")


def out_dtype(op: str, value: object, name: str = "out_dtype") -> None:
    """Refuse a result's element type that is none of the float types."""
    if value not in FLOATS:
        raise TypeError(f"{op}: {name} is {value!r}, expected bfloat16, float16, float32")


def parts(op: str, out: object, count: int) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a tuple ``out``, or as many times None."""
    if out is None:
        return (None,) * count
    if not isinstance(out, tuple | list) or len(out) != count:
        given = f"a tuple of {len(out)}" if isinstance(out, tuple | list) else type(out).__name__
        raise ValueError(f"{op}: out is {given}, expected {count} tensors")
    return tuple(out)


def disjoint(op: str, *outs: tuple[str, torch.Tensor]) -> None:
    """Refuse several outputs that share memory."""
    for i, (name, out) in enumerate(outs):
        for other, earlier in outs[:i]:
            require(
                not overlaps(out, earlier),
                f"{op}: {name} is overlapping {other} in memory, expected memory of its own",
            )


def rope(
    op: str, cos: torch.Tensor | None, sin: torch.Tensor | None, head_dim: int, like: torch.Tensor
) -> None:
    """Refuse rope tables that are partly given, differ, or are wider than a head."""
    require((cos is None) == (sin is None), f"{op}: cos and sin are partly given, expected both")
    if cos is None or sin is None:
        return
    tensor(op, "cos", cos, (torch.float32,), (None, None), "[max_positions, r/2]", like)
    tensor(op, "sin", sin, (torch.float32,), cos.shape, "[max_positions, r/2]", like)
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{op}: cos is {tuple(cos.shape)}, expected at most D/2 = {head_dim // 2} columns"
        )


def given_scratch(op: str, scratch: torch.Tensor | None, like: object) -> None:
    """Refuse a scratch of the wrong form where an op needs no bytes of it."""
    if scratch is not None and isinstance(like, torch.Tensor):
        _scratch(op, scratch, 0, like)


def scratch(
    op: str, scratch: torch.Tensor | None, num_bytes: int, like: torch.Tensor,
    others: Sequence[tuple[str, torch.Tensor | None]] = (),
) -> torch.Tensor:  # fmt: skip
    """`scratch` after checking it, or a new one of `num_bytes` with zeros where counters stand."""
    if scratch is None:
        made = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        made[:COUNTER_BYTES].zero_()
        return made
    _scratch(op, scratch, num_bytes, like)
    for name, other in others:
        require(
            other is None or not overlaps(scratch, other),
            f"{op}: scratch is overlapping {name} in memory, expected memory of its own",
        )
    return scratch


def _scratch(op: str, scratch: torch.Tensor, num_bytes: int, like: torch.Tensor) -> None:
    tensor(op, "scratch", scratch, (torch.uint8,), (None,), "[bytes]", like)
    require(
        scratch.numel() >= num_bytes,
        f"{op}: scratch is {scratch.numel()} bytes, expected at least {num_bytes}",
    )
    require(
        scratch.device.type == "meta" or scratch.data_ptr() % 16 == 0,
        f"{op}: scratch is not 16-byte aligned, expected a 16-byte aligned tensor",
    )
